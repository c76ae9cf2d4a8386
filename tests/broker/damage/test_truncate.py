"""`varve log truncate`: what it removes, what it refuses, and what a restart finds."""

import asyncio
import errno
from collections.abc import Generator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.topics.end_transaction import append_marker
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from cleaner.job import RangeDigest
from config import exit_codes
from storage.directory.log_directory import LogDirectory
from storage.errors import LogDirectoryError, TruncatedLogError
from storage.format.batch import TRANSACTIONAL, ControlType, Record, build_batch, read_header
from storage.manager.offset_checkpoints import CheckpointTask
from storage.model import TopicPartition
from storage.segments.batch_scan import LAST_OFFSET_DELTA_POSITION
from tests.support.broker.administration import api, cli
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.logs import batch_of, offsets_in, value_at
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

DELETE = {"keys": {"cleanup.policy": "delete"}}
COMPACT = {"keys": {"cleanup.policy": "compact"}}
PATH = "log/partitions/orders/0/truncate"


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=21)


def filled(broker: Broker, batches: int = 6) -> Partition:
    """Two closed segments and an active one, two records in each."""
    partition = broker.topics.partition(TopicPartition("orders", 0))
    assert partition is not None
    for offset in range(batches):
        batch = batch_of(value_at(offset))
        partition.append(memoryview(batch), read_header(batch), 0)
        if offset % 2 and offset < batches - 1:
            partition.log.roll(0)
    return partition


@pytest.mark.parametrize("policy", [DELETE, COMPACT], ids=["delete", "compact"])
@pytest.mark.parametrize("end", [0, 1, 2, 5])
async def test_a_truncation_removes_all_from_the_offset_on_and_holds_over_a_kill(
    env: MemoryEnv, policy: dict[str, dict[str, str]], end: int
) -> None:
    async with broker_in_memory(env, topics={"orders": policy}) as broker:
        partition = filled(broker)
        partition.log.flush()
        broker.manager.table.checkpoint()
        generation = partition.log.generation
        with capture_logs() as lines:
            status, answer = await api(broker, "POST", f"{PATH}?to={end}", {"force": True})
        assert (status, answer["acknowledged"]) == (200, 6 - end)
        assert offsets_in(partition.log) == list(range(end))
        assert partition.log.generation != generation
        (audited,) = [x for x in lines if x["event"] == "log truncated by an operator"]
        assert (audited["end_offset"], audited["former_end_offset"]) == (end, 6)
    async with broker_in_memory(env.kill(), topics={"orders": policy}) as broker:
        partition = broker.topics.partition(TopicPartition("orders", 0))
        assert partition is not None
        assert offsets_in(partition.log) == list(range(end))
        assert partition.log.log_end_offset == end, "offsets are assigned again"


async def test_nothing_known_of_removed_records_is_taken_for_those_written_in_their_place(
    env: MemoryEnv,
) -> None:
    partition_name = TopicPartition("orders", 0)
    killed = env
    with suppress(SimulatedCrash):
        async with broker_in_memory(env, topics={"orders": COMPACT}) as broker:
            partition = filled(broker)
            digests = (RangeDigest(0, 4, 4, "0" * 32),)
            broker.pool.store_digests(partition_name, 4, digests)
            assert await broker.pool.state_store.saved(partition_name)
            assert (await api(broker, "POST", f"{PATH}?to=2", {"force": True}))[0] == 200
            filled(broker)
            partition.log.flush()
            killed = env.kill()
    async with broker_in_memory(killed, topics={"orders": COMPACT}) as broker:
        assert broker.pool.state_of(partition_name).digests == ()


async def test_the_cleaner_state_has_no_first_dirty_offset_behind_a_truncation(
    env: MemoryEnv,
) -> None:
    """A clean by another broker shows in a checkpoint above it."""
    where = TopicPartition("orders", 0)
    async with broker_in_memory(env, topics={"orders": COMPACT}) as broker:
        filled(broker)
        broker.pool.state_store.note_checkpoint(where, 4)
        assert (await api(broker, "POST", f"{PATH}?to=2", {"force": True}))[0] == 200
        assert broker.pool.state_of(where).first_dirty_offset == 2


async def test_a_truncation_needs_no_other_data_directory(env: MemoryEnv) -> None:
    async with broker_in_memory(env, "/disk1", "/disk2", topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        assert partition.log.directory == "/disk1/orders-0"
        env.fail_on(lambda op, path: op == "pwrite" and path.startswith("/disk2"), errno.ENOSPC)
        assert (await api(broker, "POST", f"{PATH}?to=2", {"force": True}))[0] == 200
        assert offsets_in(partition.log) == [0, 1]


async def test_acknowledged_records_are_named_and_need_force(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        code, text = await cli(broker, "log", "truncate", "orders", "0", "--to", "4")
        assert code == exit_codes.FAILED
        assert "offsets 4 to 5 of orders-0, of which 2 are acknowledged" in text
        assert offsets_in(partition.log) == [0, 1, 2, 3, 4, 5]
        code, text = await cli(broker, "log", "truncate", "orders", "0", "--to", "4", "--force")
        assert (code, "removed offsets 4 to 5, of which 2 were acknowledged" in text) == (0, True)
        assert offsets_in(partition.log) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("", 400, "to is missing"),
        ("?to=x", 400, "to"),
        ("?to=6", 409, "there is nothing to remove"),
        ("?to=1", 409, "starts at offset 2"),
    ],
)
async def test_an_impossible_truncation_is_refused(
    env: MemoryEnv, query: str, status: int, reason: str
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        partition.log.delete_records(2)
        answered, answer = await api(broker, "POST", PATH + query, {"force": True})
        assert (answered, reason in answer["detail"]) == (status, True)
        assert offsets_in(partition.log)[-1] == 5


async def test_no_part_of_a_transaction_is_removed(env: MemoryEnv) -> None:
    """Without its marker, the next marker of the producer would decide about its records."""
    producer = Producer(7, 0)
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker, 2)
        for sequence in range(3):  # at 2, 3 and 4
            batch = build_batch(
                [Record(0, 0, b"k", b"v")],
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=sequence,
                attributes=TRANSACTIONAL,
            )
            partition.append(memoryview(batch), read_header(batch), 0, in_transaction=True)
        for _ in range(2):  # open, and then ended by a marker at 5
            for end in (3, 4, 5):
                if end == partition.log.log_end_offset:
                    continue
                status, answer = await api(broker, "POST", f"{PATH}?to={end}", {"force": True})
                assert status == 409
                assert "transaction of producer 7 begins at offset 2" in answer["detail"]
            if partition.log.log_end_offset == 5:
                await append_marker(partition, producer, ControlType.COMMIT, 0)
        partition.append(memoryview(batch_of(value_at(6))), read_header(batch_of(value_at(6))), 0)
        assert offsets_in(partition.log) == [0, 1, 2, 3, 4, 5, 6]
        for end in (6, 2):
            status, _ = await api(broker, "POST", f"{PATH}?to={end}", {"force": True})
            assert status == 200
            assert partition.log.producers.open_transaction() is None
            assert partition.log.log_end_offset == end


async def test_force_is_not_asked_for_where_it_is_not_enough(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        batch = batch_of(*(value_at(offset) for offset in range(6, 10)))
        partition.append(memoryview(batch), read_header(batch), 0)
        for end, reason in ((7, "inside a batch of offsets 6 to 9"), (6, "use `--force`")):
            status, answer = await api(broker, "POST", f"{PATH}?to={end}")
            assert (status, reason in answer["detail"]) == (409, True)


async def test_lost_values_of_a_compacted_topic_are_named(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": COMPACT}) as broker:
        filled(broker)
        status, answer = await api(broker, "POST", f"{PATH}?to=4")
        assert status == 409
        assert "has an older value again, even if it was deleted" in answer["detail"]


@pytest.mark.parametrize("policy", [DELETE, COMPACT], ids=["delete", "compact"])
async def test_no_record_below_the_offset_is_removed_with_its_batch(
    env: MemoryEnv, policy: dict[str, dict[str, str]]
) -> None:
    async with broker_in_memory(env, topics={"orders": policy}) as broker:
        partition = filled(broker)
        batch = batch_of(*(value_at(offset) for offset in range(6, 10)))
        partition.append(memoryview(batch), read_header(batch), 0)
        filled(broker, 1)  # at 10
        for end in (7, 9):
            status, answer = await api(broker, "POST", f"{PATH}?to={end}", {"force": True})
            assert status == 409
            assert (
                f"Truncate to offset 6, which also removes offsets 6 to {end - 1}, or to "
                in (answer["detail"])
            )
            assert "offset 10, which keeps the batch" in answer["detail"]
            assert offsets_in(partition.log) == list(range(11))
        for end in (10, 6):
            status, answer = await api(broker, "POST", f"{PATH}?to={end}", {"force": True})
            assert (status, answer["end_offset"]) == (200, end)
            assert offsets_in(partition.log) == list(range(end))


async def test_a_damaged_batch_that_claims_to_have_the_offset_is_in_the_way_of_no_truncation(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker, 4)
        file = env.open(partition.log.segments[0].path, write=True)
        delta_at = LAST_OFFSET_DELTA_POSITION + 3
        file.pwrite(b"\x7f", delta_at)  # the batch at 0 seems to end far behind the log
        status, answer = await api(broker, "POST", f"{PATH}?to=1", {"force": True})
        assert (status, answer.get("end_offset")) == (200, 1), answer


async def test_a_log_that_starts_in_a_batch_is_truncated_to_its_start(env: MemoryEnv) -> None:
    """What the batch has below the start is removed already."""
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        batch = batch_of(*(value_at(offset) for offset in range(6, 10)))
        partition.append(memoryview(batch), read_header(batch), 0)
        partition.log.delete_records(8)
        status, answer = await api(broker, "POST", f"{PATH}?to=9", {"force": True})
        assert (status, "Truncate to offset 8" in answer["detail"]) == (409, True)
        status, answer = await api(broker, "POST", f"{PATH}?to=8", {"force": True})
        assert (status, answer["end_offset"]) == (200, 8)
        assert (offsets_in(partition.log), partition.log.log_start_offset) == ([], 8)


async def test_an_internal_topic_is_refused(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={}) as broker:
        await broker.coordinators.offsets_topic.ensure()
        path = "log/partitions/__consumer_offsets/0/truncate?to=0"
        status, answer = await api(broker, "POST", path, {"force": True})
        assert (status, "internal" in answer["detail"]) == (409, True)


async def test_a_view_that_has_removed_offsets_is_refused(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        broker.views.stage(partition.partition, 4)
        status, answer = await api(broker, "POST", f"{PATH}?to=3", {"force": True})
        assert (status, "compacted view" in answer["detail"]) == (409, True)
        status, _ = await api(broker, "POST", f"{PATH}?to=4", {"force": True})
        assert status == 200


async def test_a_truncation_waits_for_the_end_of_a_repair(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        partition.log.flush()
        partition.log.swap.pin([2])  # as a skip of damage does while it replaces the segment
        status, answer = await api(broker, "POST", f"{PATH}?to=1", {"force": True})
        assert (status, "is being repaired" in answer["detail"]) == (409, True)
        partition.log.swap.unpin([2])
        assert offsets_in(partition.log)[-1] == 5
        assert (await api(broker, "POST", f"{PATH}?to=1", {"force": True}))[0] == 200


async def test_no_flush_raises_the_recovery_point_during_a_truncation(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint would write it, and a start would not verify what is appended below it."""
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition, capture = filled(broker), broker.manager.table.checkpoint_slices
        flushes_wait = []

        def note_and_capture(
            only: LogDirectory | None = None,
        ) -> Generator[None, None, CheckpointTask]:
            flushes_wait.append(partition.flushing.locked())
            return capture(only)

        monkeypatch.setattr(broker.manager.table, "checkpoint_slices", note_and_capture)
        assert (await api(broker, "POST", f"{PATH}?to=2", {"force": True}))[0] == 200
        assert flushes_wait == [True]
        assert not partition.flushing.locked()


async def test_a_producer_that_waits_for_a_flush_gets_an_error(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        waiting = partition.wait_flushed(1_000)
        await api(broker, "POST", f"{PATH}?to=4", {"force": True})
        with pytest.raises(TruncatedLogError, match="orders-0 to offset 4"):
            await asyncio.wait_for(waiting, 5)


async def test_a_periodic_flush_that_waits_for_a_truncation_does_not_fail(env: MemoryEnv) -> None:
    """Otherwise the round ends, and the logs after this one wait for the next."""
    async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
        partition = filled(broker)
        async with partition.flushing:  # as the truncation has it
            flush = asyncio.create_task(broker.checkpoint_writer.flush_to(partition, 6))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not flush.done()
            partition.fail_waiters(TruncatedLogError(partition.partition, 4))
            assert not await flush


async def test_after_a_fault_at_any_step_no_record_below_the_offset_is_lost() -> None:
    """The log ends at the offset, or has records that were there before."""
    for step in range(100):
        env = MemoryEnv(seed=step)
        async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
            filled(broker)
        env = env.kill()
        status = await truncate_with_fault(env, step)
        async with broker_in_memory(env.kill(), topics={"orders": DELETE}) as broker:
            partition = broker.topics.partition(TopicPartition("orders", 0))
            assert partition is not None, f"step {step}"
            offsets = offsets_in(partition.log)
            assert offsets[:3] == [0, 1, 2], f"step {step}"
            if status == 200:
                assert offsets == [0, 1, 2], f"step {step}"
                assert step > 5
                return
    raise AssertionError("the truncation never came to its end")


async def truncate_with_fault(env: MemoryEnv, step: int) -> int:
    """Truncate orders-0 to 3 on a disk that fails from an operation on; return the status."""
    status = 0
    with suppress(LogDirectoryError):  # the disk fails when the broker stops, too
        async with broker_in_memory(env, topics={"orders": DELETE}) as broker:
            began = len(env.history)
            fault = env.fail_on(lambda _op, _path: len(env.history) - began >= step, errno.EIO)
            try:
                status, _ = await api(broker, "POST", f"{PATH}?to=3", {"force": True})
            finally:
                if status == 200:
                    fault.remove()
    return status
