"""Log files that somebody else has cut: readers get what is left."""

from pathlib import Path

import pytest

from broker.app import Broker
from protocol.errors import ErrorCode
from storage.env import RealEnv
from storage.format.filenames import LOG, file_name
from storage.view.manifest import VIEW_FOLDER
from tests.broker.damage.test_damage import BATCH_BYTES, DELETE, clients, fetch, filled
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.views.view_broker import ANY_TIME, ON, VIEW, WHERE, produce
from tests.support.broker.views.view_worker import thread_worker
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.protocol.raw_client import RawClient

__all__ = ["clients"]  # a fixture

CUTS = {
    "in a batch": (3 * BATCH_BYTES + 10, [0, 1, 2], 3),
    "in the last batch": (6 * BATCH_BYTES - 1, [0, 1, 2, 3, 4], 5),
    "between two batches": (2 * BATCH_BYTES, [0, 1], 2),
    "everything": (0, [], 0),
}


@pytest.mark.parametrize(("file_bytes", "left", "damaged"), CUTS.values(), ids=CUTS)
async def test_a_cut_file_closes_one_connection_and_then_serves_its_whole_batches(
    tmp_path: Path, clients: list[RawClient], file_bytes: int, left: list[int], damaged: int
) -> None:
    broker = Broker(broker_settings(str(tmp_path), topics={"orders": DELETE}), RealEnv())
    await broker.start()
    try:
        log = filled(broker).log
        with (tmp_path / "orders-0" / file_name(0, LOG)).open("r+b") as file:
            file.truncate(file_bytes)
        with pytest.raises((EOFError, OSError)):
            await fetch(broker, clients, 0)
        await until(lambda: log.damage.ranges)
        whole = (ErrorCode.NONE, left) if left else (ErrorCode.CORRUPT_MESSAGE, [])
        assert await fetch(broker, clients, 0) == whole
        assert await fetch(broker, clients, damaged) == (ErrorCode.CORRUPT_MESSAGE, [])
        (damage,) = log.damage.ranges
        assert (damage.first_offset, damage.next_offset) == (damaged, 6)
    finally:
        await broker.stop()


async def test_a_cut_file_of_a_view_closes_one_connection_and_then_serves_its_whole_batches(
    tmp_path: Path, clients: list[RawClient]
) -> None:
    env = RealEnv()
    topics = {"orders": {"keys": {**ON, **ANY_TIME}}}
    settings = broker_settings(str(tmp_path), topics=topics)
    broker = Broker(settings, env, view_worker=thread_worker(env))
    await broker.start()
    try:
        await produce(broker, *((b"%d" % number, b"1") for number in range(6)))
        await broker.view_scheduler.compact(WHERE)
        (path,) = (tmp_path / "orders-0").glob(f"{VIEW_FOLDER}/*/{file_name(0, LOG)}")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2 + 10)
        with pytest.raises((EOFError, OSError)):
            await fetch(broker, clients, 0, VIEW.topic)
        view = broker.views.partition(WHERE)
        assert view is not None
        assert view.log.ledger is not None
        assert view.log.ledger.segments is not None
        (segment,) = view.log.ledger.segments
        await until(lambda: segment.damages)
        assert await fetch(broker, clients, 0, VIEW.topic) == (ErrorCode.NONE, [0, 1, 2])
        assert await fetch(broker, clients, 3, VIEW.topic) == (ErrorCode.CORRUPT_MESSAGE, [])
    finally:
        await broker.stop()
