"""Producer ids of a broker that starts again."""

from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv


async def test_no_id_is_given_out_again_when_the_metadata_was_lost() -> None:
    """A producer may not have written yet, so that no log knows its id."""
    env, taken = MemoryEnv(seed=1), []
    for _ in range(3):
        async with broker_in_memory(env, "/disk1") as broker:
            taken += [await broker.producer_ids.take() for _ in range(2)]
        env.unlink("/disk1/varve.metadata")
        env.advance_ms(1_000)
    assert taken == sorted(set(taken))
