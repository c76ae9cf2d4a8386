"""What authorisation costs: requests a second with 1,000 ACLs, and without authorisation.

    python -m bench.broker.authorization [--rounds 1000] [--requests 200]

Produce and fetch frames of 100-byte records pass the dispatcher of a broker in this process, with
and without authorisation in turns, and without sockets: the same cost is a smaller share of a
request that comes from a network. Rates are per second of processor time of the loop's thread.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import cast

from bench.report import markdown_table, median_ratio
from broker.app import Broker
from broker.event_loop.loop_turns import ROUND_SECONDS, TurnQueue
from broker.handlers.routes import make_dispatcher
from broker.handlers.security.acl_changes import AclChanges
from broker.network.connection import Connection
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, PatternType, Permission, ResourceType
from broker.security.authorizer import Authorizer
from broker.security.principal import Principal
from protocol.api import ApiKey
from protocol.codec import encode_request
from protocol.messages import Message
from storage.directory.security_entries import AclEntry
from storage.env import RealEnv
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.protocol.raw_client import fetch_request, produce_request
from tests.support.storage.logs import batch_of

ACLS = 1_000
TOPIC = "orders"
AUTHORIZATION = {"enabled": True, "super_users": ["User:root"]}


def acls() -> list[AclEntry]:
    """Return entries of many users, topics and prefixes; the client's are among them."""
    entries = []
    for number in range(ACLS - 2):
        is_prefix = number % 4 == 0
        pattern = PatternType.PREFIXED if is_prefix else PatternType.LITERAL
        operation = (Operation.READ, Operation.WRITE)[number % 2]
        entries.append(_entry(f"team-{number % 50}-{number}", f"user-{number}", operation, pattern))
    return [*entries, *(_entry(TOPIC, "bench", op) for op in (Operation.READ, Operation.WRITE))]


def _entry(
    topic: str, user: str, operation: Operation, pattern: PatternType = PatternType.LITERAL
) -> AclEntry:
    kind, principal = ResourceType.TOPIC, f"User:{user}"
    return AclEntry(kind, pattern, topic, principal, "*", operation, Permission.ALLOW)


def client(broker: Broker) -> Callable[[memoryview], object]:
    """Return a function that passes a frame of the client to the broker."""
    context = RequestContext(
        broker._services,
        client_host="10.1.2.3",
        reached_at=broker.addresses[0],
        listener=broker.settings.listeners[0],
        mute=lambda _seconds: None,
        principal=Principal("bench"),
    )
    turns = TurnQueue(ROUND_SECONDS)
    connection = cast(
        Connection, SimpleNamespace(context=context, gate=None, find_task_turns=lambda: turns)
    )
    dispatcher = make_dispatcher(broker._services)
    return lambda frame: dispatcher.handle(connection, frame)


def rate(ask: Callable[[memoryview], object], frame: bytes, requests: int) -> float:
    """Return requests per second of processor time."""
    frames = [memoryview(bytearray(frame)) for _ in range(requests)]
    started = time.thread_time()
    for each in frames:
        ask(each)
    return requests / (time.thread_time() - started)


def frame_of(key: ApiKey, version: int, body: Message) -> bytes:
    return encode_request(key, version, 1, "bench", body)[4:]


async def run(rounds: int, requests: int) -> None:
    frames = {
        "produce": frame_of(ApiKey.PRODUCE, 9, produce_request(TOPIC, bytes(batch_of(b"x" * 100)))),
        "fetch": frame_of(ApiKey.FETCH, 12, fetch_request(TOPIC, max_bytes=200)),
    }
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        broker = Broker(broker_settings(folder, authorization=AUTHORIZATION), RealEnv())
        await broker.start()
        stack.push_async_callback(broker.stop)
        await broker.metadata_service.create(TOPIC, 1, {})
        services = broker._services
        assert not any(await AclChanges(broker.metadata_writer, services.authorizer).add(acls()))
        authorizers = {"without": Authorizer(), f"{ACLS:,} ACLs": services.authorizer}
        ask, rows = client(broker), []
        for kind, frame in frames.items():
            rates: dict[str, list[float]] = {name: [] for name in authorizers}
            for number in range(rounds):
                for name in list(authorizers) if number % 2 else reversed(authorizers):
                    services.authorizer = authorizers[name]
                    rates[name].append(rate(ask, frame, requests))
                await asyncio.sleep(0)
            without, with_acls = rates.values()
            rows.append(
                [
                    kind,
                    f"{statistics.median(without):,.0f}",
                    f"{statistics.median(with_acls):,.0f}",
                    f"{median_ratio(with_acls, without):.3f}",
                ]
            )
        print(markdown_table(["", *(f"{name}, requests/s" for name in authorizers), "ratio"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    asyncio.run(run(options.rounds, options.requests))


if __name__ == "__main__":
    main()
