"""The fixture behind ``checks.on_ranks``, for this folder."""

from tests.lightning.checks import rank_results

__all__ = ["rank_results"]
