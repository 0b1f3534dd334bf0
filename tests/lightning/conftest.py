"""The fixture behind ``checks.on_ranks``."""

import pytest

from tests.lightning.checks import Results

_TIMEOUT_S = 150.0
"""For all the tests that share one set of ranks; below the limit of a single test, which the first of them has."""


@pytest.fixture(scope="session")
def rank_results(request: pytest.FixtureRequest) -> Results:
    return Results(request.session.items, _TIMEOUT_S)
