"""The whole broker in this process, over an in-memory disk: real sockets, faults on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from broker.app import Broker
from broker.damage.log_repair import LogRepair
from config.settings import Settings
from protocol.api import ApiKey
from tests.support.protocol.raw_client import RawClient
from tests.support.protocol.requests import advertised_range
from tests.support.storage.memory_env import MemoryEnv

# Of each internal topic. To make the 50 partitions of __consumer_offsets that are the default takes
# longer than all else that a broker does until it serves.
INTERNAL_PARTITIONS = 4


def broker_settings(*directories: str, **settings: Any) -> Settings:
    """Free ports, and no worker processes: those would look for the files on the real disk."""
    groups = {"offsets_partitions": INTERNAL_PARTITIONS, **settings.pop("groups", {})}
    transactions = {"state_partitions": INTERNAL_PARTITIONS, **settings.pop("transactions", {})}
    return Settings.model_validate(
        {
            "listeners": ["127.0.0.1:0"],
            "http": "127.0.0.1:0",
            "log_dirs": list(directories or ["/disk1"]),
            "cleaner": {"enabled": False},
            "groups": groups,
            "transactions": transactions,
            **settings,
        }
    )


def log_repair_of(env: MemoryEnv, broker: Broker) -> LogRepair:
    """Another LogRepair beside that of the broker's HTTP API."""
    return LogRepair(
        env,
        broker.manager.table,
        broker.cleaning,
        broker.directory_threads,
        pause=broker.pool.control.paused,
        write_checkpoints=broker.checkpoint_writer.write,
        forget_records=broker.pool.state_store.forget_records,
        view_horizon=broker.views.horizon_of,
        erasure_end=broker.erasures.end_in,
    )


@asynccontextmanager
async def broker_in_memory(
    env: MemoryEnv, *directories: str, token: bytes | None = None, **settings: Any
) -> AsyncIterator[Broker]:
    """A broker that serves clients for the length of a block."""
    broker = Broker(broker_settings(*directories, **settings), env, token=token)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


def client_of(broker: Broker) -> RawClient:
    """A connection to the first listener."""
    return RawClient(broker.addresses[0].port)


async def kafka_request(broker: Broker, key: ApiKey, body: Any, version: int | None = None) -> Any:
    """Send one request, of the newest version by default, and return the response."""

    def exchange() -> Any:
        with client_of(broker) as client:
            newest = advertised_range(key).max_version
            return client.request(key, newest if version is None else version, body)

    return await asyncio.to_thread(exchange)
