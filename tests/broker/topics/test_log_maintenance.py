"""The timers' rounds, and their end."""

import asyncio

from broker.counters import BrokerStats
from broker.topics.log_maintenance import ClockWatch, Housekeeping, Periods
from storage.manager.log_manager import LogManager
from tests.support.storage.logs import HOME, SMALL
from tests.support.storage.memory_env import MemoryEnv
from tests.support.virtual_loop import run_virtually


def test_a_stop_waits_for_the_round_under_way_and_does_not_cancel_it() -> None:
    """Its thread would write the metadata beside whoever closes the logs, under the same name."""
    env = MemoryEnv(1)
    manager = LogManager(env, [HOME])
    manager.open(lambda topic: SMALL)
    reported: list[str] = []

    async def note_time() -> None:
        reported.append("begun")
        await asyncio.sleep(5)
        reported.append("ended")

    async def main() -> None:
        housekeeping = Housekeeping(
            env,
            manager,
            list,
            fail_directory=lambda error: None,
            periods=Periods(retention=300, checkpoint=2),
            producer_expiration_ms=86_400_000,
            clock=ClockWatch(env.wall_ms(), env.monotonic() * 1000),
            note_time=note_time,
            damage_gone=lambda where: None,
            broker_stats=BrokerStats(),
        )
        housekeeping.start()
        await asyncio.sleep(3)
        await housekeeping.stop()
        reported.append("stopped")

    run_virtually(main())
    assert reported == ["begun", "ended", "stopped"]
