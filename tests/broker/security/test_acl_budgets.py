"""The cost of decisions and of changes with as many access control lists as there may be.

The tests count lines of Python and turns of the event loop, not seconds.
"""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.event_loop.loop_turns import FREED_AT_ONCE
from broker.handlers.security.acl_changes import ACLS_MAX, AclChanges
from broker.security import authorizer as authorizer_module
from broker.security.acls import (
    AclFilter,
    AclIndex,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from broker.security.authorizer import Authorizer
from broker.security.principal import Principal
from config.settings import AuthorizationSettings
from protocol import messages as m
from protocol.api import ApiKey
from protocol.codec import decode_response
from storage.directory.security_entries import AclEntry
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.memory_env import MemoryEnv

CLOCK_RATE = 10  # a turn ends after 4,000 lines
LINES_PER_TURN_MAX = 16_000  # a slice of a response has 13,000; a look at every entry 20,000
LINES_PER_DECISION_MAX = 1_000  # most of them parse the address
FILTERS = 500
LINES_PER_FILTER_MAX = 40
LINES_PER_ENTRY_MAX = 10
DELETED = 8_000  # two lines each, and more
UNLISTED = Principal("unlisted")


def entry(number: int, principal: str = "User:owner") -> AclEntry:
    return AclEntry(
        ResourceType.TOPIC,
        PatternType.PREFIXED if number % 2 else PatternType.LITERAL,
        f"topic-{number:05d}",
        principal,
        "*" if number % 3 else f"10.0.{number % 250}.1",
        Operation.WRITE,
        Permission.ALLOW,
    )


@pytest.mark.parametrize("principal", ["User:owner", "User:*"])
def test_a_decision_does_not_look_at_entries_of_others(
    principal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`User:*` with the hosts of others, too."""
    entries = [entry(number, principal) for number in range(ACLS_MAX)]
    if principal == "User:*":
        entries = [e for e in entries if e.host != "*"]
    index, meter = AclIndex(entries), LoopMeter()
    with meter.measuring(monkeypatch):
        assert not index.decide_some(UNLISTED, "10.9.9.9", Operation.WRITE, ResourceType.TOPIC)
        index.decide(UNLISTED, "10.9.9.9", Operation.WRITE, ResourceType.TOPIC, "topic-00003")
    assert meter.lines < LINES_PER_DECISION_MAX


def test_a_decision_does_not_look_at_hosts_of_others_of_the_same_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        AclEntry(2, 3, "*", "User:*", f"10.{n >> 8}.{n & 255}.1", Operation.WRITE, Permission.DENY)
        for n in range(ACLS_MAX)
    ]
    index, meter = AclIndex(entries), LoopMeter()
    with meter.measuring(monkeypatch):
        index.decide(UNLISTED, "10.250.9.9", Operation.WRITE, ResourceType.TOPIC, "orders")
    assert meter.lines < LINES_PER_DECISION_MAX


def test_invented_names_do_not_displace_decisions_about_some_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The costly decision is made once; the names of a client fill another place."""
    monkeypatch.setattr(authorizer_module, "DECISIONS_MAX", 10)
    made: list[Principal] = []

    class CountingIndex(AclIndex):
        def decide_some(
            self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType
        ) -> bool:
            made.append(principal)
            return super().decide_some(principal, host, operation, resource_type)

    authorizer = Authorizer(AuthorizationSettings(enabled=True, super_users=("User:root",)))
    authorizer.use(CountingIndex([entry(1)]))
    for number in range(50):
        authorizer.allows(UNLISTED, "h", Operation.READ, ResourceType.TOPIC, f"invented-{number}")
        assert not authorizer.allows_some(UNLISTED, "h", Operation.WRITE, ResourceType.TOPIC)
    assert len(made) == 1
    authorizer.use(CountingIndex([entry(2, "User:*")]))
    assert authorizer.allows_some(UNLISTED, "h", Operation.WRITE, ResourceType.TOPIC)


async def test_a_change_frees_the_decisions_about_many_names_in_turns() -> None:
    authorizer = Authorizer(
        AuthorizationSettings(enabled=True, super_users=("User:root",)), [entry(1)]
    )
    for number in range(FREED_AT_ONCE * 3):
        authorizer.allows(UNLISTED, "h", Operation.READ, ResourceType.TOPIC, f"invented-{number}")
    replaced = authorizer._decisions
    authorizer.use(AclIndex([entry(2)]))
    assert len(replaced) == FREED_AT_ONCE * 3
    async with asyncio.timeout(30):
        while replaced:  # noqa: ASYNC110 - freeing has no event
            await asyncio.sleep(0)


@pytest.fixture
async def full_broker() -> AsyncIterator[Broker]:
    """A broker with all but one of the entries that there may be."""
    settings = {"enabled": True, "super_users": ["User:root"]}
    async with broker_in_memory(MemoryEnv(seed=11), authorization=settings) as broker:
        changes = AclChanges(broker._services.metadata_writer, broker._services.authorizer)
        others = [entry(number) for number in range(DELETED, ACLS_MAX - 1)]
        await changes.add([entry(number, "User:gone") for number in range(DELETED)] + others)
        yield broker


async def test_a_change_takes_turns_however_many_entries_there_are(
    full_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, meter = PrincipalClient(full_broker, "root"), LoopMeter(CLOCK_RATE)
    created = m.CreateAclsRequest(
        creations=[
            m.CreateAclsRequestCreation(
                resource_type=ResourceType.TOPIC,
                resource_pattern_type=PatternType.LITERAL,
                resource_name="orders",
                principal="User:ann",
                host="*",
                operation=Operation.READ,
                permission_type=Permission.ALLOW,
            )
        ]
    )
    selected = {
        "resource_type_filter": ResourceType.TOPIC,
        "pattern_type_filter": PatternType.ANY,
        "host_filter": None,
        "operation": Operation.ANY,
        "permission_type": Permission.ANY,
    }

    async def measured(key: ApiKey, body: m.Message) -> Any:
        with meter.measuring(monkeypatch):
            answer = await root.exchange(key, 3, body)
        assert meter.longest_turn < LINES_PER_TURN_MAX
        return decode_response(key, 3, answer)[1]

    async def delete(principal: str, name: str | None) -> int:
        row = m.DeleteAclsRequestFilter(
            principal_filter=principal, resource_name_filter=name, **selected
        )
        body = m.DeleteAclsRequest(filters=[row])
        return len((await measured(ApiKey.DELETE_ACLS, body)).filter_results[0].matching_acls)

    assert (await measured(ApiKey.CREATE_ACLS, created)).results[0].error_code == 0
    assert await delete("User:ann", "orders") == 1
    with capture_logs():  # a line for each
        assert await delete("User:gone", None) == DELETED


@pytest.mark.parametrize("attribute", ["principal", "resource_name"])
async def test_filters_that_name_something_look_at_its_entries_only(
    full_broker: Broker, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    services, meter = full_broker._services, LoopMeter(CLOCK_RATE)
    changes = AclChanges(services.metadata_writer, services.authorizer)
    filters = [AclFilter(**{attribute: f"User:{number}"}) for number in range(FILTERS)]
    with meter.measuring(monkeypatch):
        assert not any(await changes.remove(filters))
    assert meter.lines < FILTERS * LINES_PER_FILTER_MAX + ACLS_MAX * LINES_PER_ENTRY_MAX


async def test_filters_select_what_earlier_filters_of_the_request_have_left() -> None:
    seed = 7
    print("seed", seed)
    rng = Random(seed)
    entries = [
        entry(rng.randrange(20), f"User:u{rng.randrange(3)}") for _ in range(rng.randrange(60))
    ]
    settings = {"enabled": True, "super_users": ["User:root"]}
    async with broker_in_memory(MemoryEnv(seed=12), authorization=settings) as broker:
        changes = AclChanges(broker._services.metadata_writer, broker._services.authorizer)
        for _ in range(10):
            await changes.add(entries)
            left = list(broker._services.authorizer.entries)
            filters = [
                AclFilter(
                    pattern_type=rng.choice([PatternType.ANY, PatternType.MATCH, 3, 4]),
                    resource_name=rng.choice([None, f"topic-{rng.randrange(20):05d}"]),
                    principal=rng.choice([None, f"User:u{rng.randrange(3)}"]),
                    host=rng.choice([None, "*"]),
                )
                for _ in range(rng.randrange(5))
            ]
            for selection, removed in zip(filters, await changes.remove(filters), strict=True):
                assert removed == [each for each in left if selection.matches(each)]
                left = [each for each in left if each not in removed]
            assert list(broker._services.authorizer.entries) == left
