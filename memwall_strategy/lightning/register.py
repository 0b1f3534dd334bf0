"""Registers ``"memwall"`` by hand, for processes in which torch does not (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).

``memwall_strategy.lightning`` calls this when it is imported. It is the registration of ``engine/autoload.py``, only
that a failure is raised here: who imports memwall wants it to work, who imports torch need not know it.
"""

from __future__ import annotations

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.autoload import NAME, imported, install, register_in


def register() -> None:
    """Make ``strategy="memwall"`` known to every Lightning that is imported now or later.

    Raises:
        MemwallError: a Lightning that is imported already does not take the strategy.
    """
    install()
    for name, module in imported():
        try:
            register_in(module, name)
        except (AttributeError, TypeError, ValueError) as error:
            raise MemwallError(
                f"strategy={NAME!r} could not be registered with {name}: {error}. Install lightning>=2.6,<3, or pass "
                "the strategy itself: Trainer(strategy=memwall_strategy.MemwallStrategy())."
            ) from error
