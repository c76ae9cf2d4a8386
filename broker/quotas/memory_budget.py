"""How many bytes of memory all groups may use for one purpose, such as their members or offsets.

The partitions of open transactions have such a budget, too: a transactional id is a group here.

Rules. Only the clients know how large the metadata of a member or an offset has to be, and it
outlives their connections: that of a member lasts for its session timeout, that of an offset for a
week.
- One more entry may use only a fraction of the free bytes. As the budget fills up, large metadata
  is refused first, and the small metadata of ordinary consumers still fits.
- The groups of one principal have at most as many bytes as are free: one gets half of the budget,
  the next one half of the rest. The first principal that uses a group since the start owns it.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Final

PARTS: Final = 64  # one request may use this fraction of the free bytes: 1/64


def memory_of_text(text: str) -> int:
    """Return how many bytes of memory a text takes at most, beside those of an empty one."""
    return len(text) if text.isascii() else 4 * len(text)


class MemoryBudget:
    """The bytes of each group."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, Hashable] = {}
        self._owned_bytes: Counter[Hashable] = Counter()  # by owner

    def admits(self, group_id: str, more_bytes: int, client: Hashable | None = None) -> bool:
        """Return whether a group may have so many bytes more than before.

        `client` is the principal that asks, and owns the group if nobody else does. None is without
        a limit of its own.
        """
        free_bytes = self.limit_bytes - self.used_bytes
        owner = self._owners.get(group_id, client)
        if more_bytes <= 0:
            return True
        if owner is not None and self._owned_bytes[owner] + more_bytes > free_bytes:
            return False
        return more_bytes * PARTS <= free_bytes

    def owner(self, group_id: str) -> Hashable | None:
        """Return the principal that owns a group; None if it counts for no principal."""
        return self._owners.get(group_id)

    def own(self, group_id: str, client: Hashable | None) -> None:
        """Let a principal own a group, unless another one does."""
        if client is not None and group_id not in self._owners:
            self._owners[group_id] = client
            self._add(client, self._sizes.get(group_id, 0))

    def note(self, group_id: str, size_bytes: int) -> None:
        """Note the present size of a group."""
        more_bytes = size_bytes - self._sizes.pop(group_id, 0)
        self.used_bytes += more_bytes
        if size_bytes:
            self._sizes[group_id] = size_bytes
        if group_id in self._owners:
            self._add(self._owners[group_id], more_bytes)

    def remove(self, group_id: str) -> None:
        """Note that a group is gone."""
        self.note(group_id, 0)
        self._owners.pop(group_id, None)

    def _add(self, owner: Hashable, more_bytes: int) -> None:
        self._owned_bytes[owner] += more_bytes
        if not self._owned_bytes[owner]:
            del self._owned_bytes[owner]
