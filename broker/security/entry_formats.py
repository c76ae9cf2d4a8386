"""How many users have salted passwords of each format: what an unknown user's entry looks like.

Rules. Users are counted when they change, not when somebody logs in with an unknown name: to count
20,000 entries takes 40 ms. A change costs what the changed users cost, and a look at all of them.
"""

import itertools
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from broker.security.scram import ITERATIONS, SALT_BYTES
from storage.directory.security_entries import ScramEntry, ScramUsers

Entries = Mapping[str, ScramEntry]  # of one user, by mechanism

# Salts of Kafka's Java code are numbers in base 36 (UserScramCredentialUpsertion).
_JAVA_SALT: Final = re.compile(rb"[0-9a-z]{20,26}")


class EntryFormat(NamedTuple):
    """The properties of an entry that a client can see, without the bits of the salt."""

    iterations: int
    salt_bytes: int | None  # None: a number in base 36

    @classmethod
    def of(cls, entry: ScramEntry) -> "EntryFormat":
        """Return the format of an entry."""
        is_number = _JAVA_SALT.fullmatch(entry.salt) is not None
        return cls(entry.iterations, None if is_number else len(entry.salt))

    @property
    def order(self) -> tuple[int, int]:
        """Return the place among all formats."""
        return self.iterations, -1 if self.salt_bytes is None else self.salt_bytes


USUAL_FORMAT: Final = EntryFormat(ITERATIONS, SALT_BYTES)


class EntryFormats:
    """The formats of the entries of all users, of several sources."""

    def __init__(self) -> None:
        self._users = defaultdict[str, dict[str, Entries]](dict)  # by source, as they are counted
        self._counters = defaultdict[str, Counter[EntryFormat]](Counter)
        # By mechanism: the formats in order, with the cumulative numbers of their users.
        self._tables: dict[str, tuple[list[EntryFormat], list[int]]] = {}

    def count(self, source: str, users: ScramUsers) -> Iterator[None]:
        """Count the users of a source instead of its former ones; yield after each change.

        Between two steps, another call may count newer users.
        """
        counted = self._users[source]
        for user in counted.keys() - users.keys():
            self._replace(counted, user, {})
            yield
        for user, entries in users.items():
            if counted.get(user) is not entries:
                self._replace(counted, user, entries)
                yield

    def _replace(self, counted: dict[str, Entries], user: str, entries: Entries) -> None:
        self._tables.clear()
        for mechanism, entry in counted.pop(user, {}).items():
            counter, entry_format = self._counters[mechanism], EntryFormat.of(entry)
            counter[entry_format] -= 1
            if not counter[entry_format]:
                del counter[entry_format]
        for mechanism, entry in entries.items():
            self._counters[mechanism][EntryFormat.of(entry)] += 1
        if entries:
            counted[user] = entries

    def most_used(self) -> str | None:
        """Return the mechanism with the most entries; None if there is none."""
        totals = {mechanism: counter.total() for mechanism, counter in self._counters.items()}
        return max(filter(totals.get, totals), key=totals.__getitem__, default=None)

    def draw(self, mechanism: str, bits: int) -> EntryFormat:
        """Return the format for 64 random bits; one that many users have is more likely."""
        if not self._counters[mechanism]:
            return USUAL_FORMAT
        if mechanism not in self._tables:
            counter = self._counters[mechanism]
            formats = sorted(counter, key=lambda each: each.order)
            numbers = list(itertools.accumulate(counter[each] for each in formats))
            self._tables[mechanism] = formats, numbers
        formats, numbers = self._tables[mechanism]
        return formats[bisect(numbers, bits * numbers[-1] >> 64)]
