"""Where group records go, and what comes back of them."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest

from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import Group
from broker.groups.offsets.offset_records import (
    OffsetKey,
    committed_offset,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)
from broker.groups.offsets.offsets_store import (
    LoadedPartition,
    OffsetsLoader,
    group_of,
    group_record_sliced,
)
from broker.topics.internal_topic import KeyedLog, LogRecord, add_batches, partition_of
from broker.topics.producer_ids import Producer
from storage.errors import CorruptBatchError, LogDirectoryError
from storage.format.batch import ControlType, Record, build_batch, marker_record
from storage.slices import run_at_once
from tests.support.clocks.loop_meter import LoopMeter

TRANSACTIONAL = 0x10
CONTROL = 0x20


# What Java 17 says of hashCode and Kafka 4.3.0's Utils.abs; the fifth hash is the smallest int.
@pytest.mark.parametrize(
    ("group_id", "partition"),
    [
        ("", 0),
        ("g", 3),
        ("my-group", 12),
        ("console-consumer-12345", 6),
        ("polygenelubricants", 0),
        ("grün", 49),
        ("😀", 49),
    ],
)
def test_a_group_lives_where_kafka_puts_it(group_id: str, partition: int) -> None:
    assert partition_of(group_id, 50) == partition


@pytest.mark.parametrize("length", [0, 1, 4_095, 4_096, 4_097, 8_192, 32_767])
def test_a_group_id_of_any_length_has_the_hash_of_java(length: int) -> None:
    random = Random(length)
    group_id = "".join(random.choice("ax-\u00e9\uffff\U0001f600\ud800") for _ in range(length))
    units = group_id.encode("utf-16-be", "surrogatepass")
    code = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        code = (31 * code + 256 * high + low) % 2**32
    signed = code - 2**32 if code >= 2**31 else code
    assert partition_of(group_id, 10_007) == abs(signed) % 10_007


def test_the_longest_group_id_is_hashed_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = LoopMeter()
    with meter.measuring(monkeypatch):
        partition_of("mine-" + "x" * 32_762, 50)
    assert 0 < meter.lines < 200


def commit(group: str, topic: str, index: int, offset: int) -> LogRecord:
    key = encode_offset_key(OffsetKey(group, topic, index))
    return key, encode_offset_value(committed_offset(offset, 0, "", 1))


def tombstone(group: str, topic: str, index: int) -> LogRecord:
    return encode_offset_key(OffsetKey(group, topic, index)), None


class Log:
    """Batches one behind the other, as a partition would give them out."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bytes]] = []
        self.end = 0

    def add(self, *records: LogRecord, producer_id: int = -1, codec: int = 0) -> None:
        built = [Record(self.end + i, 1, k, v) for i, (k, v) in enumerate(records)]
        attributes = TRANSACTIONAL if producer_id >= 0 else 0
        self._add(built, producer_id, attributes, codec)

    def end_transaction(self, producer_id: int, kind: ControlType) -> None:
        marker = marker_record(kind, 0, 1)._replace(offset=self.end)
        self._add([marker], producer_id, TRANSACTIONAL | CONTROL, 0)

    def _add(self, records: list[Record], producer_id: int, attributes: int, codec: int) -> None:
        batch = build_batch(
            records,
            base_offset=self.end,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            attributes=attributes,
            codec=codec,
        )
        self.batches.append((self.end, self.end + len(records), bytes(batch)))
        self.end += len(records)

    def read(self, offset: int) -> bytes:
        for _, next_offset, data in self.batches:
            if next_offset > offset:
                return data
        return b""

    def load(self) -> LoadedPartition:
        return load(self.read, self.end)


def load(read: Callable[[int], bytes], end: int) -> LoadedPartition:
    loader, offset = OffsetsLoader(), 0
    while offset < end and (data := read(offset)):
        offset = add_batches(loader, data, offset)
    return loader.finish()


def test_the_last_commit_of_a_partition_counts() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 1), commit("g", "t", 1, 5))
    log.add(commit("g", "t", 0, 2), codec=4)
    loaded = log.load()
    assert {k: v[0] for k, v in loaded.offsets["g"].items()} == {("t", 0): 2, ("t", 1): 5}
    assert loaded.records == 3


def test_a_tombstone_deletes_and_a_later_commit_brings_back() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 1), commit("h", "t", 0, 1))
    log.add(tombstone("g", "t", 0), tombstone("h", "t", 0), tombstone("h", "t", 7))
    log.add(commit("h", "t", 0, 9))
    loaded = log.load()
    assert "g" not in loaded.offsets
    assert loaded.offsets["h"]["t", 0][0] == 9


def test_a_compacted_log_gives_the_same_as_the_whole() -> None:
    whole, compacted = Log(), Log()
    for offset in range(20):
        whole.add(commit("g", "t", offset % 3, offset))
    whole.add(tombstone("g", "t", 1))
    for index, offset in ((0, 18), (2, 17)):
        compacted.add(commit("g", "t", index, offset))
    compacted.add(tombstone("g", "t", 1))
    assert whole.load().offsets == compacted.load().offsets


def stable_group(generation: int = 3) -> Group:
    member = Member("m", "i", "c", "/h", 10_000, 60_000, (("range", b"sub"),))
    members, assignments = Members.of([member]), {"m": b"assigned"}
    return Group("g", generation, "consumer", "range", "m", members, assignments, since_ms=77)


def test_a_group_comes_back_with_its_members() -> None:
    log = Log()
    log.add(run_at_once(group_record_sliced(stable_group(2))))
    log.add(run_at_once(group_record_sliced(stable_group(3))))
    assert log.load().groups == {"g": stable_group(3)}


def test_a_deleted_group_does_not_come_back() -> None:
    log = Log()
    log.add(run_at_once(group_record_sliced(stable_group())))
    log.add((encode_group_key("g"), None))
    assert log.load().groups == {}


def test_a_leader_that_is_no_member_is_replaced_by_one_that_is() -> None:
    record = run_at_once(
        group_record_sliced(Group("g", 1, "consumer", "range", "ghost", stable_group().members))
    )
    log = Log()
    log.add(record)
    assert log.load().groups["g"].leader == "m"
    assert group_of("g", _decoded(record)).leader == "m"


def _decoded(record: LogRecord):  # type: ignore[no-untyped-def]
    from broker.groups.offsets.offset_records import decode_group_value

    assert record[1] is not None
    return decode_group_value(record[1])


def test_offsets_of_a_transaction_count_from_its_commit_on() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 1))
    log.add(commit("g", "t", 0, 2), commit("h", "t", 0, 2), producer_id=7)
    log.end_transaction(7, ControlType.COMMIT)
    loaded = log.load()
    assert loaded.offsets["g"]["t", 0][0] == 2
    assert loaded.offsets["h"]["t", 0][0] == 2


def test_offsets_of_an_aborted_transaction_never_count() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 1))
    log.add(commit("g", "t", 0, 2), producer_id=7)
    log.end_transaction(7, ControlType.ABORT)
    log.end_transaction(7, ControlType.COMMIT)
    assert log.load().offsets["g"]["t", 0][0] == 1


def test_offsets_of_an_open_transaction_do_not_count_and_are_counted() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 2), producer_id=7)
    loaded = log.load()
    assert loaded.offsets == {}
    assert loaded.undecided_offsets == 1


def test_a_commit_behind_a_transactions_offset_wins_though_the_marker_comes_later() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 2), producer_id=7)
    log.add(commit("g", "t", 0, 3))
    log.end_transaction(7, ControlType.COMMIT)
    assert log.load().offsets["g"]["t", 0][0] == 3


def test_a_tombstone_between_a_transactions_offset_and_its_marker_wins() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 2), producer_id=7)
    log.add(tombstone("g", "t", 0))
    log.end_transaction(7, ControlType.COMMIT)
    assert log.load().offsets == {}


def test_a_tombstone_takes_no_longer_if_there_are_many_open_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, loader = Log(), OffsetsLoader()
    for producer_id in range(1_000):
        log.add(commit("g", "t", 0, 2), producer_id=producer_id)
    log.add(tombstone("g", "t", 0))
    *commits, (_, _, deletion) = log.batches
    for offset, _, data in commits:
        add_batches(loader, data, offset)
    meter = LoopMeter()
    with meter.measuring(monkeypatch):
        add_batches(loader, deletion, len(commits))
    assert 0 < meter.lines < 1_000
    assert loader.finish().transactional == {}


def test_what_is_not_understood_is_skipped_and_counted() -> None:
    log = Log()
    log.add((b"\x00\x63rest", b"a newer kind of group"))
    log.add((encode_offset_key(OffsetKey("g", "t", 0)), b"\x00\x63newer value"))
    log.add((b"\x00", b""), (encode_group_key("g"), b"\x00\x03cut"))
    log.add(commit("g", "t", 0, 5))
    loaded = log.load()
    assert loaded.unknown_records == 2
    assert loaded.invalid_records == 2
    assert loaded.offsets["g"]["t", 0][0] == 5


def test_a_record_without_a_key_is_invalid() -> None:
    log = Log()
    log._add([Record(0, 1, None, b"v")], -1, 0, 0)
    assert log.load().invalid_records == 1


def test_a_flipped_bit_is_an_error_not_another_offset() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 5))
    base, next_offset, data = log.batches[0]
    broken = bytearray(data)
    broken[-8] ^= 1
    log.batches[0] = (base, next_offset, bytes(broken))
    with pytest.raises(CorruptBatchError):
        log.load()


def test_a_batch_cut_short_is_an_error_not_the_end() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 5))
    data = log.batches[0][2]
    with pytest.raises(CorruptBatchError):
        load(lambda _: data[:-1], 1)


def test_offsets_that_compaction_emptied_end_the_load() -> None:
    log = Log()
    log.add(commit("g", "t", 0, 5))
    assert load(log.read, log.end + 10).offsets["g"]["t", 0][0] == 5


def test_many_batches_may_come_in_one_read() -> None:
    log = Log()
    for offset in range(5):
        log.add(commit("g", "t", 0, offset))
    data = b"".join(batch for _, _, batch in log.batches)
    loaded = load(lambda _: data, 5)
    assert loaded.offsets["g"]["t", 0][0] == 4


async def test_records_go_to_the_partition_of_their_group() -> None:
    seen: list[tuple[int, Sequence[LogRecord]]] = []

    async def append(
        partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> None:
        seen.append((partition, records))

    store = KeyedLog(50, append)
    await store.append("my-group", [(b"k", b"v")])
    assert seen == [(12, [(b"k", b"v")])]


async def test_an_append_that_fails_at_once_fails_in_its_future() -> None:
    def append(
        partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> "asyncio.Future[None]":
        raise LogDirectoryError("/d", "gone")

    future = KeyedLog(1, append).append("g", [(b"k", None)])
    with pytest.raises(LogDirectoryError):
        await future
