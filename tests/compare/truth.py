"""What became of every record that was written, by the script alone: neither cleaner is asked."""

from dataclasses import dataclass, field

from storage.format.batch import (
    BatchHeader,
    ControlType,
    Record,
    control_type,
    decode_records,
    read_header,
)
from tests.compare.script import Case


@dataclass
class Written:
    """One appended record. `producer_id` is -1 outside transactions."""

    record: Record
    producer_id: int
    is_committed: bool | None  # None: its transaction is open


@dataclass
class ClockReading:
    """What had happened up to one look."""

    written: dict[int, Written] = field(default_factory=dict)  # by offset
    last_committed: dict[bytes, int] = field(default_factory=dict)  # offset of each key's last one
    epochs: dict[int, int] = field(default_factory=dict)  # of each producer's last batch or marker
    was_unclean: bool = False  # the log was opened without an orderly stop before
    was_reopened: bool = False  # in whatever way
    forgotten: frozenset[int] = (
        frozenset()
    )  # producers, by Kafka at an earlier stop of an empty log

    def is_superseded(self, offset: int) -> bool:
        """Whether a later committed record has the key of the one at `offset`."""
        key = self.written[offset].record.key
        return key is not None and self.last_committed.get(key, -1) > offset

    def open_since(self, producer_id: int) -> int:
        """The first offset of the producer's open transaction; -1 if there is none."""
        return min(
            (
                offset
                for offset, written in self.written.items()
                if written.producer_id == producer_id and written.is_committed is None
            ),
            default=-1,
        )

    def hidden_since(self, start: int) -> int | None:
        """Where an open transaction began below `start`, of a producer that Kafka has forgotten."""
        result = (self.open_since(producer_id) for producer_id in self.forgotten)
        return min((first for first in result if 0 <= first < start), default=None)


def moments_of(case: Case) -> list[ClockReading]:
    """One for each `dump`, in order."""
    written: dict[int, Written] = {}
    epochs: dict[int, int] = {}
    was_unclean = was_reopened = False
    moments = []
    for operation in case.operations:
        if operation.name == "append":
            assert isinstance(operation.values[1], bytes)
            header = read_header(operation.values[1])
            epochs[header.producer_id] = header.producer_epoch
            _append(written, operation.values[1], header)
        elif operation.name == "reopen":
            was_reopened = True
            was_unclean = was_unclean or operation.values[0] == "unclean"
        elif operation.name == "dump":
            moment = _moment(written)
            moment.was_unclean, moment.was_reopened = was_unclean, was_reopened
            moment.epochs = dict(epochs)
            moments.append(moment)
    return moments


def _append(written: dict[int, Written], batch: bytes, header: BatchHeader) -> None:
    records = decode_records(batch, header)
    if header.is_control:
        is_commit = control_type(records[0]) == ControlType.COMMIT
        for item in written.values():
            if item.is_committed is None and item.producer_id == header.producer_id:
                item.is_committed = is_commit
        return
    for record in records:
        if header.is_transactional:
            written[record.offset] = Written(record, header.producer_id, None)
        else:
            written[record.offset] = Written(record, -1, True)


def _moment(written: dict[int, Written]) -> ClockReading:
    copies = {at: Written(written.record, written.producer_id, written.is_committed)
              for at, written in written.items()}  # fmt: skip
    last: dict[bytes, int] = {}
    for offset, copy in copies.items():
        if copy.is_committed and copy.record.key is not None:
            last[copy.record.key] = offset
    return ClockReading(copies, last)
