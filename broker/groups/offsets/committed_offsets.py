"""The committed offsets of one group, whatever protocol its members speak."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.quotas.memory_budget import memory_of_text

# The offsets of a transaction, each with the number of its append.
PendingOffsets: TypeAlias = dict[TopicIndex, tuple[int, CommittedOffset]]

# Memory of one offset with its key, in addition to its metadata.
OFFSET_BYTES = 500


def size_of(values: Collection[CommittedOffset]) -> int:
    """Return about how many bytes of memory offsets take."""
    texts = sum(memory_of_text(metadata) for _, _, metadata, _, _ in values if metadata)
    return OFFSET_BYTES * len(values) + texts


@dataclass(slots=True)
class CommittedOffsets:
    """The offsets of a group: acknowledged, being appended, or committed in open transactions.

    Of two commits of one partition, the later in the log wins. `begin` numbers the appends in the
    order of the log, because their ends may be noted in another order. An offset of a transaction
    takes effect when the transaction commits. A deletion covers all offsets before it.

    The time of an operation must not grow with the number of producers: a client may have a hundred
    thousand transactional ids. So an offset of a transaction that a later one replaces, or a
    deletion, stays in memory until the transaction ends; only its number is dropped.
    """

    acknowledged: dict[TopicIndex, CommittedOffset] = field(default_factory=dict)
    size_bytes: int = field(init=False)  # of all of them, also of those in flight
    in_flight: Counter[TopicIndex] = field(default_factory=Counter)
    # By producer id. They are added when the append begins, because the marker may be appended
    # before the append is acknowledged.
    transactional: dict[int, PendingOffsets] = field(default_factory=dict)
    # The numbers of the offsets of transactions that nothing has replaced yet, in their order.
    _unstable: dict[TopicIndex, list[int]] = field(default_factory=dict)
    _appends: int = 0
    # The number of the append whose offset took effect while an earlier append was under way.
    _overtaken: dict[TopicIndex, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measure the offsets that were loaded."""
        self.size_bytes = size_of(self.acknowledged.values())

    def __bool__(self) -> bool:
        return bool(self.acknowledged or self.in_flight or self._unstable)

    def size_of_acknowledged(self, keys: Iterable[TopicIndex]) -> int:
        """Return the bytes of those offsets among these keys that are acknowledged."""
        return size_of(tuple(filter(None, map(self.acknowledged.get, keys))))

    def written(self) -> set[TopicIndex]:
        """Return the keys of all offsets in the log, acknowledged or not yet."""
        return self.acknowledged.keys() | self.in_flight.keys() | self._unstable.keys()

    def is_written(self, key: TopicIndex) -> bool:
        """Return whether an offset of a partition is in the log, acknowledged or not yet."""
        return key in self.acknowledged or self.is_changing(key)

    def is_changing(self, key: TopicIndex) -> bool:
        """Return whether an offset is being appended, or waits for the end of its transaction."""
        return key in self.in_flight or key in self._unstable

    def begin(self, offsets: Mapping[TopicIndex, CommittedOffset]) -> int:
        """Note that offsets are being appended; return the number of the append."""
        self.size_bytes += size_of(offsets.values())
        for key in offsets:
            self.in_flight[key] += 1
        self._appends += 1
        return self._appends

    def end(
        self, append: int, offsets: Mapping[TopicIndex, CommittedOffset], *, is_appended: bool
    ) -> None:
        """Note the end of an append; its offsets count if it succeeded."""
        self.size_bytes -= size_of(offsets.values()) + self.size_of_acknowledged(offsets)
        for key, value in offsets.items():
            if is_appended and self._overtaken.get(key, 0) < append:
                self.acknowledged[key] = value
            if is_appended:
                self._drop_before(key, append)
            self._landed(key)
        self.size_bytes += self.size_of_acknowledged(offsets)

    def forget(self, append: int, keys: Iterable[TopicIndex]) -> None:
        """Drop offsets whose tombstones are in the log."""
        keys = dict.fromkeys(keys)
        self.size_bytes -= self.size_of_acknowledged(keys)
        for key in keys:
            self.acknowledged.pop(key, None)
            self._drop_before(key, append)

    def add_transactional(
        self, producer_id: int, offsets: Mapping[TopicIndex, CommittedOffset]
    ) -> int:
        """Add offsets of an open transaction, being appended; return the number of the append."""
        self._appends += 1
        for key, value in offsets.items():
            self._add(producer_id, key, self._appends, value)
        return self._appends

    def load_transactional(
        self, producer_id: int, key: TopicIndex, record_offset: int, value: CommittedOffset
    ) -> None:
        """Add an offset of an open transaction from the log, before any append."""
        self._add(producer_id, key, record_offset, value)
        self._appends = max(self._appends, record_offset)

    def _add(self, producer_id: int, key: TopicIndex, append: int, value: CommittedOffset) -> None:
        pending = self.transactional.setdefault(producer_id, {})
        if key in pending:
            self._remove(key, *pending[key])
        pending[key] = append, value
        insort(self._unstable.setdefault(key, []), append)
        self.size_bytes += size_of((value,))

    def remove_transactional(
        self, producer_id: int, append: int, keys: Iterable[TopicIndex]
    ) -> None:
        """Remove the offsets of an append that failed."""
        pending = self.transactional.get(producer_id, {})
        for key in keys:
            if key in pending and pending[key][0] == append:
                self._remove(key, *pending.pop(key))
        if not pending:
            self.transactional.pop(producer_id, None)

    def end_transaction(
        self, producer_id: int, *, commit: bool, at_once: int
    ) -> Generator[None, None, int]:
        """Apply or drop the offsets of a transaction; return how many took effect.

        In slices of `at_once` offsets; those of later slices are unstable until then. The producer
        may begin its next transaction meanwhile.
        """
        return self._end(self.transactional.pop(producer_id, {}), commit=commit, at_once=at_once)

    def _end(
        self, pending: PendingOffsets, *, commit: bool, at_once: int
    ) -> Generator[None, None, int]:
        ended = 0
        while pending:
            for _ in range(min(at_once, len(pending))):
                key, (append, value) = pending.popitem()
                if self._remove(key, append, value) and commit:
                    self._apply(key, append, value)
                    ended += 1
            if pending:
                yield
        return ended

    def _apply(self, key: TopicIndex, append: int, value: CommittedOffset) -> None:
        self.size_bytes += size_of((value,)) - self.size_of_acknowledged((key,))
        self.acknowledged[key] = value
        if key in self.in_flight:
            self._overtaken[key] = append
        self._drop_before(key, append)

    def is_unstable(self, key: TopicIndex) -> bool:
        """Return whether an open transaction has committed an offset of a partition."""
        return key in self._unstable

    def _landed(self, key: TopicIndex) -> None:
        self.in_flight[key] -= 1
        if not self.in_flight[key]:
            del self.in_flight[key]
            self._overtaken.pop(key, None)

    def _drop_before(self, key: TopicIndex, append: int) -> None:
        """Drop what open transactions have committed of a partition before an append."""
        numbers = self._unstable.get(key)
        if numbers is not None:
            del numbers[: bisect_left(numbers, append)]
            if not numbers:
                del self._unstable[key]

    def _remove(self, key: TopicIndex, append: int, value: CommittedOffset) -> bool:
        """Remove an offset of a transaction; return whether nothing had replaced it."""
        self.size_bytes -= size_of((value,))
        numbers = self._unstable.get(key, [])
        index = bisect_left(numbers, append)
        if numbers[index : index + 1] != [append]:
            return False
        del numbers[index]
        if not numbers:
            del self._unstable[key]
        return True
