"""How many of a limited number of entries each principal may create.

Rule. A principal may create an entry as long as it owns fewer entries than are free. So one
principal gets at most half of all entries, the next one half of the rest, and there is always room
for another. Entries from before the start of the broker count for no principal.
"""

from collections import Counter
from collections.abc import Hashable


class Shares:
    """The principals that created the present entries."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._creators: dict[Hashable, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()

    def admits(self, creator: Hashable | None, entries: int, added: int = 1) -> bool:
        """Return whether there may be so many more entries; None is a creator without a share."""
        left = self.limit - entries - added
        return left >= 0 and (creator is None or self._counts[creator] + added - 1 <= left)

    def creator(self, name: Hashable) -> Hashable | None:
        """Return the principal that created an entry; None if it counts for no principal."""
        return self._creators.get(name)

    def add(self, name: Hashable, creator: Hashable | None) -> None:
        """Note that a principal created an entry."""
        if creator is not None:
            self._creators[name] = creator
            self._counts[creator] += 1

    def remove(self, name: Hashable) -> None:
        """Note that an entry is gone."""
        creator = self._creators.pop(name, None)
        if creator is not None:
            self._counts[creator] -= 1
            if not self._counts[creator]:
                del self._counts[creator]
