"""How many bytes of metadata the members of all groups may have in memory.

Rules. Nobody but the clients knows how large the metadata of a member has to be, and a member stays
for its session timeout, up to half an hour, without a connection. A member may have a part of the
free bytes only: so large metadata is refused first, and the small metadata of ordinary consumers
still fits when clients have used most of the budget.
"""

from typing import Final

PARTS: Final = 64  # a member may have one of so many parts of the free bytes


class MetadataBudget:
    """The bytes of metadata of each group."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._sizes: dict[str, int] = {}

    def admits(self, more_bytes: int) -> bool:
        """Return whether a member may have so many bytes more than before."""
        free_bytes = self.limit_bytes - self.used_bytes
        return more_bytes <= 0 or more_bytes * PARTS <= free_bytes

    def note(self, group_id: str, size_bytes: int) -> None:
        """Note the present size of a group; 0 for one that is gone."""
        self.used_bytes += size_bytes - self._sizes.pop(group_id, 0)
        if size_bytes:
            self._sizes[group_id] = size_bytes
