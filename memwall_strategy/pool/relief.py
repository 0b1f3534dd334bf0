"""What makes room on the device when a step needs more than the budget, and gives the room back later.

Reliefs are asked in the order of their list, the cheapest first, and give back in the opposite order. A decision takes
effect between two steps, on all ranks alike: sizes that differ between ranks are agreed on before a relief is asked.
"""

from __future__ import annotations

from typing import Protocol


class Relief(Protocol):
    """One way to make room.

    Attributes:
        name: as events and errors name it.
        remedy: what a user can do beyond it, a sentence for the error when nothing is left.
    """

    name: str
    remedy: str

    def relieve(self, missing_bytes: int) -> int:
        """Free device memory from the next step on; return the bytes that this frees, 0 where nothing is left to free.

        Args:
            missing_bytes: what is missing on the rank that is shortest; more may be freed where steps are coarse.
        """
        ...

    def restore(self, room_bytes: int) -> int:
        """Take back up to ``room_bytes`` of what was freed, from the next step on; return the bytes taken."""
        ...
