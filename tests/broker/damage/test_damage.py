"""Damaged batches over the wire and the HTTP API: reports, blocked readers, repair."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from admin.command import fail, show_progress
from broker.app import Broker
from broker.damage.damaged_reads import LOG_INTERVAL_SECONDS
from broker.groups.classic.model import UNKNOWN_WAITER, CommitRequested
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.end_transaction import append_marker
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from config import exit_codes
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    DeleteRecordsRequest,
    DeleteRecordsRequestPartition,
    DeleteRecordsRequestTopic,
    DeleteRecordsResponse,
    FetchRequest,
    FetchRequestPartition,
    FetchRequestTopic,
    FetchResponse,
)
from storage.format.batch import (
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    read_header,
    walk_headers,
)
from storage.format.compression import ZSTD
from storage.format.filenames import CLEAN_SHUTDOWN, LOG, file_name
from tests.support.broker.administration import api, cli
from tests.support.broker.broker_in_memory import broker_in_memory, log_repair_of
from tests.support.broker.http_users import OWNERS, RuleAuthorizer, owner_rule, sasl_users, send
from tests.support.protocol.raw_client import FETCH_VERSION, RawClient
from tests.support.storage.logs import batch_of, offsets_in, value_at
from tests.support.storage.memory_env import MemoryEnv

BATCH_BYTES = len(batch_of(value_at(0)))
FIRST = f"/disk1/orders-0/{file_name(0, LOG)}"
DELETE = {"keys": {"cleanup.policy": "delete"}}
COMPACT = {"keys": {"cleanup.policy": "compact"}}


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=12)


@pytest.fixture
def clients() -> Iterator[list[RawClient]]:
    made: list[RawClient] = []
    yield made
    for client in made:
        client.socket.close()


def filled(broker: Broker, batches: int = 6) -> Partition:
    """A closed segment of single-record batches, and an empty active one."""
    topic = broker.topics.get("orders")
    assert topic is not None
    partition = topic.partitions[0]
    for offset in range(batches):
        batch = batch_of(value_at(offset))
        partition.append(memoryview(batch), read_header(batch), 0)
    partition.log.roll(0)
    return partition


def flip(env: MemoryEnv, position: int) -> None:
    file = env.open(FIRST, write=True)
    file.pwrite(bytes([file.pread(1, position)[0] ^ 0x15]), position)


async def fetch(
    broker: Broker, clients: list[RawClient], offset: int, topic: str = "orders"
) -> tuple[ErrorCode, list[int]]:
    client = RawClient(broker.addresses[0].port)
    clients.append(client)
    fetch_request_partition = FetchRequestPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=1 << 20
    )
    body = FetchRequest(
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 20,
        session_id=0,
        session_epoch=-1,
        topics=[FetchRequestTopic(topic=topic, partitions=[fetch_request_partition])],
    )
    answer = await asyncio.to_thread(client.request, ApiKey.FETCH, FETCH_VERSION, body)
    assert isinstance(answer, FetchResponse)
    (partition,) = answer.responses[0].partitions
    data = bytes(partition.records or b"")
    return ErrorCode(partition.error_code), [header.base_offset for _, header in walk_headers(data)]


# --- readers --------------------------------------------------------------------------------------


async def test_only_the_damaged_batch_is_answered_with_corrupt_message(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 9)  # its length: the batches after it have to be found
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "no batch")
        assert await fetch(broker, clients, 0) == (ErrorCode.NONE, [0, 1])
        assert await fetch(broker, clients, 2) == (ErrorCode.CORRUPT_MESSAGE, [])
        assert await fetch(broker, clients, 3) == (ErrorCode.NONE, [3, 4, 5])


async def test_a_blocked_reader_is_logged_once_a_minute_and_counted_each_time(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        with capture_logs() as lines:
            for _ in range(3):
                await fetch(broker, clients, 2)
            env.advance_ms(int(LOG_INTERVAL_SECONDS * 1000) + 1)
            await fetch(broker, clients, 2)
        reported = [line for line in lines if line["event"] == "damaged batch blocks a reader"]
        assert len(reported) == 2
        assert reported[0]["fetch_offset"] == 2
        assert reported[0]["remedy"] == "varve log skip orders 0 --offset 2"
        assert broker.stats.damaged_fetches == {"orders": 4}


async def test_a_reader_in_the_gap_below_a_damaged_segment_is_shown_with_the_way_past_it(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    """Compaction removed the end of the segment before; the next batch on the way is damaged."""
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        log = partition.log
        batch = batch_of(value_at(6))
        partition.append(memoryview(batch), read_header(batch), 0)
        log.roll(0)
    env.open(FIRST, write=True).truncate(4 * BATCH_BYTES)
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        log = topic.partitions[0].log
        second = FIRST.replace(file_name(0, LOG), file_name(6, LOG))
        file = env.open(second, write=True)
        file.pwrite(b"\xff", 70)
        log.damage.mark(second, 0, "bad CRC")
        with capture_logs() as lines:
            assert await fetch(broker, clients, 4) == (ErrorCode.CORRUPT_MESSAGE, [])
        (line,) = [line for line in lines if line["event"] == "damaged batch blocks a reader"]
        assert (line["fetch_offset"], line["first_offset"], line["next_offset"]) == (4, 6, 7)
        assert line["remedy"] == "varve log skip orders 0 --offset 6"
        _, results = await api(broker, "GET", "cleaner/partitions/orders/0")
        (damage,) = results["damage"]
        assert [client["offset"] for client in damage["blocked_clients"]] == [4]


async def test_explain_and_status_show_damage_first_and_who_is_blocked(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE, "users": COMPACT}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        await fetch(broker, clients, 2)
        _, results = await api(broker, "GET", "cleaner/partitions/orders/0")
        (damage,) = results["damage"]
        assert (damage["first_offset"], damage["next_offset"]) == (2, 3)
        (blocked,) = damage["blocked_clients"]
        assert blocked["offset"] == 2
        assert any("Blocked at offsets 2 to 2: client" in text for text in results["sentences"])
        code, text = await cli(broker, "cleaner", "status")
        assert code == exit_codes.DONE
        rows = text.splitlines()
        first = rows[next(i for i, row in enumerate(rows) if row.startswith("PARTITION")) + 1]
        assert first.startswith("orders-0")
        assert "DAMAGED: offsets 2-2 cannot be read" in first


async def test_explain_names_the_groups_that_committed_a_damaged_offset(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        await broker.coordinators.offsets_topic.ensure()
        for group, offset in (("billing", 2), ("audit", 3)):
            request = CommitRequested(UNKNOWN_WAITER, "", None, -1)
            committed = {("orders", 0): committed_offset(offset)}
            done = await broker.coordinators.groups.offsets.commit(group, request, committed)
            assert done is ErrorCode.NONE
        _, results = await api(broker, "GET", "cleaner/partitions/orders/0")
        assert results["damage"][0]["blocked_groups"] == [{"group": "billing", "offset": 2}]
        assert results["sentences"][-1] == (
            "Blocked at offsets 2 to 2: group billing (committed offset 2)."
        )


async def test_records_past_damage_can_be_deleted(env: MemoryEnv, clients: list[RawClient]) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 9)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "no batch")
        client = RawClient(broker.addresses[0].port)
        clients.append(client)
        rows = [DeleteRecordsRequestPartition(partition_index=0, offset=3)]
        body = DeleteRecordsRequest(
            topics=[DeleteRecordsRequestTopic(name="orders", partitions=rows)], timeout_ms=1000
        )
        answer = await asyncio.to_thread(client.request, ApiKey.DELETE_RECORDS, 2, body)
        assert isinstance(answer, DeleteRecordsResponse)
        (done,) = answer.topics[0].partitions
        assert (done.error_code, done.low_watermark) == (0, 3)
        assert await fetch(broker, clients, 3) == (ErrorCode.NONE, [3, 4, 5])


# --- varve log ------------------------------------------------------------------------------------


async def test_clients_that_verify_logs_take_turns(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition, done = filled(broker), list[str]()
        repair = log_repair_of(env, broker)

        async def verify(client: str) -> None:
            await repair.verify(partition, None, None, client)
            done.append(client)

        await asyncio.gather(*map(verify, ("ada", "ada", "ada", "bob")))
    assert done == ["ada", "bob", "ada", "ada"]


async def test_verify_names_every_damaged_range_and_ends_with_its_own_code(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        filled(broker)
        assert (await cli(broker, "log", "verify", "orders-0"))[0] == exit_codes.DONE
        assert (await cli(broker, "log", "verify", "orders"))[0] == exit_codes.DONE
        assert (await cli(broker, "log", "skip", "orders", "--offset", "0"))[0] == exit_codes.USAGE
        flip(env, BATCH_BYTES + 70)
        flip(env, 4 * BATCH_BYTES + 16)
        with capture_logs() as lines:
            code, text = await cli(broker, "log", "verify", "orders", "0")
        assert code == exit_codes.UNVERIFIED
        assert text.splitlines()[0].startswith("orders-0 has 2 damaged ranges, offsets 0 to 5: 4 ")
        assert ["offsets 1 to 1" in text, "offsets 4 to 4" in text] == [True, True]
        assert [line["event"] for line in lines].count("damage found") == 2
        _, text = await cli(broker, "log", "verify", "orders", "0", "--from-offset", "2")
        assert "orders-0 has 1 damaged range, offsets 2 to 5: 3 whole batches" in text
        for offset, code_there in ((1, "CORRUPT_MESSAGE"), (2, "NONE"), (4, "CORRUPT_MESSAGE")):
            assert (await fetch(broker, clients, offset))[0].name == code_there


@pytest.mark.parametrize("damaged", [0, 2])
async def test_damage_in_front_of_a_batch_that_claims_its_offset_can_be_verified_and_skipped(
    env: MemoryEnv, damaged: int
) -> None:
    """No checksum covers the offset of a batch."""
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        flip(env, damaged * BATCH_BYTES + 70)
        file = env.open(FIRST, write=True)
        file.pwrite(damaged.to_bytes(8, "big"), (damaged + 1) * BATCH_BYTES)
        repair = log_repair_of(env, broker)
        async with asyncio.timeout(20):
            verified = await repair.verify(partition, None, None)
        assert verified.next_offset == 6
        (damage,) = partition.log.damage.ranges
        assert (damage.first_offset, damage.next_offset) == (damaged, damaged + 1)
        await repair.skip(partition, damaged)
        verified = await repair.verify(partition, None, None)
        assert (verified.batches, verified.damage) == (5, [])


async def test_a_verification_passes_over_two_ranges_with_a_gap_of_offsets_between(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        segment = partition.log.segments[0]
        for index, offsets in ((1, (1, 1)), (2, (4, 5))):
            flip(env, index * BATCH_BYTES + 70)
            damage = segment.note_damage(index * BATCH_BYTES, "bad")
            first, following = offsets
            segment.add_damage(damage._replace(first_offset=first, next_offset=following))
        async with asyncio.timeout(20):
            verified = await log_repair_of(env, broker).verify(partition, None, None)
        assert verified.next_offset == 6
        assert [damage.first_offset for damage in verified.damage] == [1, 4]


@pytest.mark.parametrize("policy", [DELETE, COMPACT], ids=["delete", "compact"])
async def test_a_skip_lets_readers_go_on_and_holds_over_restarts(
    env: MemoryEnv, clients: list[RawClient], policy: dict[str, dict[str, str]]
) -> None:
    async with broker_in_memory(env, topics={"orders": policy}) as broker:
        opened = filled(broker).log
        damaged = env.read_file(FIRST)[2 * BATCH_BYTES : 3 * BATCH_BYTES]
        flip(env, 2 * BATCH_BYTES + 70)
        flip(env, 4 * BATCH_BYTES + 70)
        for index in (2, 4):
            opened.damage.mark(FIRST, index * BATCH_BYTES, "bad CRC")
        code, text = await cli(broker, "log", "skip", "orders", "0", "--offset", "2")
        assert code == exit_codes.FAILED
        assert "this removes offsets 2 to 2" in text
        assert "--yes" in text
        assert (await fetch(broker, clients, 2))[0] is ErrorCode.CORRUPT_MESSAGE
        with capture_logs() as lines:
            code, text = await cli(broker, "log", "skip", "orders", "0", "--offset", "2", "--yes")
        assert code == exit_codes.DONE, text
        (reported,) = [line for line in lines if line["event"] == "damage skipped by an operator"]
        assert (reported["first_offset"], reported["next_offset"]) == (2, 3)
        retained = env.read_file(reported["kept_as"])
        assert len(retained) == len(damaged)
        assert retained != damaged
        assert await fetch(broker, clients, 2) == (ErrorCode.NONE, [3])
        assert await fetch(broker, clients, 4) == (ErrorCode.CORRUPT_MESSAGE, [])
        status, results = await api(broker, "POST", "log/partitions/orders/0/skip?offset=2")
        assert (status, "no damage is known" in results["detail"]) == (409, True)
        await api(broker, "POST", "log/partitions/orders/0/skip?offset=4")
        _, text = await cli(broker, "log", "verify", "orders", "0")
        assert "has no damage" in text
    async with broker_in_memory(env.kill(), topics={"orders": policy}) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        assert offsets_in(topic.partitions[0].log) == [0, 1, 3, 5]


async def test_a_skip_of_neighbours_that_were_found_one_after_the_other_cuts_only_them(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        opened = filled(broker).log
        for rotten in ((2, 3), (1,)):  # the range that is found first is a part of the second one
            for index in rotten:
                flip(env, index * BATCH_BYTES + 70)
            opened.damage.mark(FIRST, rotten[0] * BATCH_BYTES, "bad CRC")
        await api(broker, "POST", "log/partitions/orders/0/skip?offset=1")
        assert opened.damage.ranges == ()
        assert await fetch(broker, clients, 0) == (ErrorCode.NONE, [0, 4, 5])


async def test_a_skip_at_the_position_of_an_earlier_one_keeps_the_bytes_of_both(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        opened = filled(broker).log
        retained = []
        for offset in (2, 3):  # the second batch moves to the position of the first
            flip(env, 2 * BATCH_BYTES + 70)
            opened.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
            cut = env.read_file(FIRST)[2 * BATCH_BYTES : 3 * BATCH_BYTES]
            path = f"log/partitions/orders/0/skip?offset={offset}"
            _, answer = await api(broker, "POST", path)
            retained.append((answer["kept_as"], cut))
        for kept_as, cut in retained:
            assert env.read_file(kept_as) == cut


async def test_an_intact_batch_that_cannot_be_cleaned_is_skipped_on_request(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        opened = filled(broker).log
        opened.damage.mark(FIRST, 2 * BATCH_BYTES, "malformed record")
        assert await fetch(broker, clients, 2) == (ErrorCode.NONE, [2, 3, 4, 5])
        _, text = await cli(broker, "log", "skip", "orders", "0", "--offset", "2")
        assert "this removes offsets 2 to 2" in text
        code, text = await cli(broker, "log", "skip", "orders", "0", "--offset", "2", "--yes")
        assert code == exit_codes.DONE, text
        assert opened.damage.uncleanable == ()
        assert offsets_in(opened) == [0, 1, 3, 4, 5]


async def test_a_range_that_is_whole_by_now_is_not_skipped(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        opened = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        opened.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        flip(env, 2 * BATCH_BYTES + 70)  # somebody put the byte right
        status, results = await api(broker, "POST", "log/partitions/orders/0/skip?offset=2")
        assert (status, "has changed since it was found" in results["detail"]) == (409, True)
        assert offsets_in(opened) == [0, 1, 2, 3, 4, 5], "and it is served again"


async def test_damage_in_the_active_segment_can_be_skipped(
    env: MemoryEnv, clients: list[RawClient]
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        partition = topic.partitions[0]
        for offset in range(3):
            batch = batch_of(value_at(offset))
            partition.append(memoryview(batch), read_header(batch), 0)
        flip(env, BATCH_BYTES + 70)
        partition.log.damage.mark(FIRST, BATCH_BYTES, "bad CRC")
        status, _ = await api(broker, "POST", "log/partitions/orders/0/skip?offset=1")
        assert status == 200
        assert offsets_in(partition.log) == [0, 2]


async def test_a_skip_of_the_whole_first_segment_does_not_raise_the_log_start(
    env: MemoryEnv, clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        filled(broker, 1)
        opened = filled(broker, 3).log
        flip(env, 70)
        opened.damage.mark(FIRST, 0, "bad CRC")
        status, _ = await api(broker, "POST", "log/partitions/orders/0/skip?offset=0")
        assert (status, opened.segments.first_base_offset) == (200, 1)
        monkeypatch.setattr(broker.manager, "close", lambda **_: None)
    async with broker_in_memory(env.kill(), topics={"orders": DELETE}) as broker:
        assert await fetch(broker, clients, 0) == (ErrorCode.NONE, [1, 2, 3])


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (ControlType.COMMIT, (2, []), (2, [])),
        (ControlType.ABORT, (2, [(7, 0)]), (0, [])),
    ],
    ids=["committed", "aborted"],
)
async def test_a_transaction_whose_abort_marker_was_skipped_is_open_after_a_restart(
    env: MemoryEnv,
    kind: ControlType,
    before: tuple[int, list[tuple[int, int]]],
    after: tuple[int, list[tuple[int, int]]],
) -> None:
    """No reader of committed records gets its records: before that they are known as aborted."""
    batch = build_batch(
        [Record(0, 0, b"k", b"v")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )

    def outcome(broker: Broker) -> tuple[int, list[tuple[int, int]]]:
        topic = broker.topics.get("orders")
        assert topic is not None
        log = topic.partitions[0].log
        entries = log.reader.aborted_transactions(0, log.log_end_offset)
        return log.last_stable_offset, [(each.producer_id, each.first_offset) for each in entries]

    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        partition = topic.partitions[0]
        partition.append(memoryview(batch), read_header(batch), 0, in_transaction=True)
        await append_marker(partition, Producer(7, 0), kind, now_ms=0)
        flip(env, len(batch) + 70)
        partition.log.damage.mark(FIRST, len(batch), "bad CRC")
        status, _ = await api(broker, "POST", "log/partitions/orders/0/skip?offset=1")
        assert status == 200
        assert offsets_in(partition.log) == [0]
        assert outcome(broker) == before
    for clean in (True, False):
        if not clean:
            env.unlink(f"/disk1/{CLEAN_SHUTDOWN}")
        async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
            assert outcome(broker) == after


async def test_a_segment_of_which_nothing_is_whole_goes_as_a_whole(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        opened = filled(broker, 1).log
        flip(env, 70)
        opened.damage.mark(FIRST, 0, "bad CRC")
        status, results = await api(broker, "POST", "log/partitions/orders/0/skip?offset=0")
        assert status == 200, results
        assert offsets_in(opened) == []
        assert opened.log_start_offset == 0
        assert not env.exists(FIRST)


async def test_damage_has_the_same_fields_in_the_log_and_in_the_api(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        filled(broker)
        flip(env, 2 * BATCH_BYTES + 70)
        with capture_logs() as lines:
            await cli(broker, "log", "verify", "orders", "0")
            _, listed = await api(broker, "GET", "log/partitions/orders/0/damage")
            _, skipped = await api(broker, "POST", "log/partitions/orders/0/skip?offset=2")
        (damage,) = listed["damage"]
        fields = {key: damage[key] for key in damage if not key.startswith("blocked_")}
        assert fields["next_offset"] == 3
        for event in ("damage found", "damage skipped by an operator"):
            (line,) = [line for line in lines if line["event"] == event]
            assert fields.items() <= line.items()
        assert fields.items() <= skipped.items()


async def test_groups_that_could_not_be_loaded_are_served_after_the_damage_was_skipped(
    env: MemoryEnv,
) -> None:
    groups = {"offsets_partitions": 1}
    async with broker_in_memory(env, groups=groups) as broker:
        await broker.coordinators.offsets_topic.ensure()
        for offset in (1, 2, 3):
            request = CommitRequested(UNKNOWN_WAITER, "", None, -1)
            for group in ("billing", "audit"):
                await broker.coordinators.groups.offsets.commit(
                    group, request, {("orders", 0): committed_offset(offset, metadata=group)}
                )
    path = f"/disk1/__consumer_offsets-0/{file_name(0, LOG)}"
    positions = [position for position, _ in walk_headers(env.read_file(path))]
    file = env.open(path, write=True)
    file.pwrite(bytes([file.pread(1, positions[4] + 70)[0] ^ 0x15]), positions[4] + 70)
    async with broker_in_memory(env, groups=groups) as broker:

        def committed() -> dict[str, int]:
            offsets = {
                g: broker.coordinators.groups.offsets.fetch(g)[1] for g in ("billing", "audit")
            }
            return {g: of.get(("orders", 0), committed_offset(-1))[0] for g, of in offsets.items()}

        await asyncio.gather(*broker.coordinators.offsets_topic._tasks)
        assert (
            broker.coordinators.groups.availability("billing")
            is ErrorCode.COORDINATOR_NOT_AVAILABLE
        )
        reason = broker.readiness.not_ready_because() or ""
        assert reason.startswith("partition __consumer_offsets-0 is not served: ")
        code, text = await cli(broker, "log", "verify", "__consumer_offsets", "0")
        assert (code, "1 damaged range" in text) == (exit_codes.UNVERIFIED, True)
        code, text = await cli(
            broker, "log", "skip", "__consumer_offsets", "0", "--offset", "4", "--yes"
        )
        assert code == 0, text
        await asyncio.gather(*broker.coordinators.offsets_topic._tasks)
        assert broker.coordinators.groups.availability("billing") is ErrorCode.NONE
        assert broker.readiness.not_ready_because() is None
        assert committed() == {"billing": 2, "audit": 3}  # the third commit of billing is lost


async def test_names_that_clients_chose_have_no_effect_on_the_terminal_of_an_operator(
    env: MemoryEnv,
) -> None:
    name = "bill\x1b[2J\u202e\ning"
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        await broker.coordinators.offsets_topic.ensure()
        request = CommitRequested(UNKNOWN_WAITER, "", None, -1)
        await broker.coordinators.groups.offsets.commit(
            name, request, {("orders", 0): committed_offset(2)}
        )
        code, text = await cli(broker, "cleaner", "explain", "orders", "0")
    assert code == 0
    assert "group bill\\x1b[2J\\u202e\\ning (committed offset 2)" in text
    assert name not in text


def test_messages_and_progress_have_no_effect_on_the_terminal_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_progress("a\x1b[2Jb")
    with pytest.raises(SystemExit):
        fail("two\nlines\x1b[2J")
    assert capsys.readouterr().err == "\ra\\x1b[2Jbvarve: two\nlines\\x1b[2J\n"


# --- what is never accepted -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_a_batch_that_the_cleaner_could_not_unpack_is_refused_on_every_topic(
    env: MemoryEnv, clients: list[RawClient], policy: str
) -> None:
    keys = {"cleanup.policy": policy, "varve.decompressed.batch.bytes": "1MiB"}
    async with broker_in_memory(env, topics={"orders": {"keys": keys}}) as broker:
        client = RawClient(broker.addresses[0].port)
        clients.append(client)
        for size_bytes, expected in (
            (100_000, ErrorCode.NONE),
            (2 << 20, ErrorCode.INVALID_RECORD),
        ):
            batch = bytes(batch_of(bytes(size_bytes), codec=ZSTD, timestamp=env.wall_ms()))
            done = await asyncio.to_thread(client.produce, "orders", batch)
            assert done.error_code == expected, size_bytes
        assert broker.stats.rejects.decompression_limit == 1


async def test_an_owner_of_a_topic_sees_only_groups_that_it_may_describe(
    env: MemoryEnv, tmp_path: Path
) -> None:
    sasl = sasl_users(tmp_path, OWNERS)
    async with broker_in_memory(
        env, topics={"orders": DELETE}, http_users=True, sasl=sasl
    ) as broker:
        log = filled(broker).log
        flip(env, 2 * BATCH_BYTES + 70)
        log.damage.mark(FIRST, 2 * BATCH_BYTES, "bad CRC")
        await broker.coordinators.offsets_topic.ensure()
        for group in ("readers", "secret"):
            request = CommitRequested(UNKNOWN_WAITER, "", None, -1)
            committed = {("orders", 0): committed_offset(2)}
            await broker.coordinators.groups.offsets.commit(group, request, committed)
        broker._services.authorizer = RuleAuthorizer(owner_rule)
        for user, groups in (("owner", ["readers"]), ("viewer", ["readers", "secret"])):
            for path in ("cleaner/partitions/orders/0", "log/partitions/orders/0/damage"):
                _, answer = await send(broker, "GET", f"/api/v1/{path}", user)
                blocked = answer["damage"][0]["blocked_groups"]
                assert [row["group"] for row in blocked] == groups
                assert ("secret" in str(answer)) is ("secret" in groups)
