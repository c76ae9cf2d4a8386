"""The committed offsets of one group, whatever protocol its members speak."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.quotas.memory_budget import memory_of_text

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
    thousand transactional ids.
    """

    acknowledged: dict[TopicIndex, CommittedOffset] = field(default_factory=dict)
    size_bytes: int = field(init=False)  # of all of them, also of those in flight
    in_flight: Counter[TopicIndex] = field(default_factory=Counter)
    # By producer id; each offset with the number of its append. They are added when the append
    # begins, because the marker may be appended before the append is acknowledged.
    transactional: dict[int, dict[TopicIndex, tuple[int, CommittedOffset]]] = field(
        default_factory=dict
    )
    # The producers whose open transactions have an offset of a partition, by number of the append.
    _producers: dict[TopicIndex, dict[int, None]] = field(default_factory=dict)
    _appends: int = 0
    # The number of the append whose offset took effect while an earlier append was under way.
    _overtaken: dict[TopicIndex, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measure the offsets that were loaded."""
        self.size_bytes = size_of(self.acknowledged.values())

    def __bool__(self) -> bool:
        return bool(self.acknowledged or self.in_flight or self.transactional)

    def size_of_acknowledged(self, keys: Iterable[TopicIndex]) -> int:
        """Return the bytes of those offsets among these keys that are acknowledged."""
        return size_of(tuple(filter(None, map(self.acknowledged.get, keys))))

    def written(self) -> set[TopicIndex]:
        """Return the keys of all offsets in the log, acknowledged or not yet."""
        return self.acknowledged.keys() | self.in_flight.keys() | self.unstable()

    def unstable(self) -> set[TopicIndex]:
        """Return the keys of all offsets that open transactions have committed."""
        return set(self._producers)

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
            self._landed(key)
        self.size_bytes += self.size_of_acknowledged(offsets)
        if is_appended:
            self._drop_transactional(offsets, append)

    def forget(self, append: int, keys: Iterable[TopicIndex]) -> None:
        """Drop offsets whose tombstones are in the log."""
        keys = dict.fromkeys(keys)
        self.size_bytes -= self.size_of_acknowledged(keys)
        for key in keys:
            self.acknowledged.pop(key, None)
        self._drop_transactional(keys, append)

    def add_transactional(
        self, producer_id: int, offsets: Mapping[TopicIndex, CommittedOffset]
    ) -> int:
        """Add offsets of an open transaction, being appended; return the number of the append."""
        self._appends += 1
        pending = self.transactional.setdefault(producer_id, {})
        replaced = [pending[key][1] for key in offsets if key in pending]
        self.size_bytes += size_of(offsets.values()) - size_of(replaced)
        for key, value in offsets.items():
            pending[key] = self._appends, value
            producers = self._producers.setdefault(key, {})
            producers.pop(producer_id, None)
            producers[producer_id] = None
        return self._appends

    def remove_transactional(self, producer_id: int, append: int) -> None:
        """Remove the offsets of an append that failed."""
        pending = self.transactional.get(producer_id, {})
        for key in [key for key, (number, _) in pending.items() if number == append]:
            self._remove(producer_id, key)

    def end_transaction(self, producer_id: int, *, commit: bool) -> int:
        """Apply or drop the offsets of a transaction; return how many took effect."""
        pending = dict(self.transactional.get(producer_id, {}))
        for key in pending:
            self._remove(producer_id, key)
        if not commit:
            return 0
        self.size_bytes -= self.size_of_acknowledged(pending)
        for key, (append, value) in pending.items():
            self.acknowledged[key] = value
            if key in self.in_flight:
                self._overtaken[key] = append
            self._drop_transactional((key,), append)
        self.size_bytes += self.size_of_acknowledged(pending)
        return len(pending)

    def is_unstable(self, key: TopicIndex) -> bool:
        """Return whether an open transaction has committed an offset of a partition."""
        return key in self._producers

    def _landed(self, key: TopicIndex) -> None:
        self.in_flight[key] -= 1
        if not self.in_flight[key]:
            del self.in_flight[key]
            self._overtaken.pop(key, None)

    def _drop_transactional(self, keys: Iterable[TopicIndex], append: int) -> None:
        """Drop offsets of open transactions that precede an append of the same partitions."""
        for key in keys:
            while key in self._producers:
                producer_id = next(iter(self._producers[key]))
                if self.transactional[producer_id][key][0] >= append:
                    break
                self._remove(producer_id, key)

    def _remove(self, producer_id: int, key: TopicIndex) -> None:
        """Remove an offset of an open transaction."""
        pending, producers = self.transactional[producer_id], self._producers[key]
        self.size_bytes -= size_of((pending.pop(key)[1],))
        if not pending:
            del self.transactional[producer_id]
        del producers[producer_id]
        if not producers:
            del self._producers[key]
