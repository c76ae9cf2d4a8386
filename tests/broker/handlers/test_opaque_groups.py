"""Groups of a protocol type that only their members understand, through a socket."""

import asyncio
from typing import Any

from broker.app import Broker
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.broker.broker_in_memory import broker_in_memory, kafka_request
from tests.support.storage.memory_env import MemoryEnv

GROUP = "schema-registry"
# Schema Registry's JSON, as its leader election writes it: the version, the address, eligibility.
IDENTITY = b'{"version":1,"host":"%b","port":8081,"master_eligibility":true,"scheme":"http"}'


async def join(broker: Broker, host: bytes, member_id: str = "") -> Any:
    """Join as Schema Registry does: type `sr`, one protocol `v0`, versions of JoinGroup below 4."""
    body = m.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=300_000,
        member_id=member_id,
        protocol_type="sr",
        protocols=[m.JoinGroupRequestProtocol(name="v0", metadata=IDENTITY % host)],
    )
    return await kafka_request(broker, ApiKey.JOIN_GROUP, body, 3)


async def sync(broker: Broker, joined: Any, assignments: dict[str, bytes]) -> Any:
    body = m.SyncGroupRequest(
        group_id=GROUP,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=[
            m.SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
            for member_id, assignment in assignments.items()
        ],
    )
    return await kafka_request(broker, ApiKey.SYNC_GROUP, body, 2)


async def state(broker: Broker) -> str:
    listed = await kafka_request(broker, ApiKey.LIST_GROUPS, m.ListGroupsRequest(), 4)
    return next(group.group_state for group in listed.groups)


async def test_registries_elect_a_leader_with_metadata_that_the_broker_passes_on_unread() -> None:
    groups = {"offsets_partitions": 1, "initial_rebalance_delay_ms": 0}
    async with broker_in_memory(MemoryEnv(seed=5), groups=groups) as broker:
        finding = m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP])
        while (
            (await kafka_request(broker, ApiKey.FIND_COORDINATOR, finding))
            .coordinators[0]
            .error_code
        ):
            pass  # the broker creates the topic
        alone = await join(broker, b"first")
        assert (alone.error_code, alone.leader) == (ErrorCode.NONE, alone.member_id)
        await sync(broker, alone, {alone.member_id: b"{}"})
        joining = asyncio.create_task(join(broker, b"second"))
        while await state(broker) != "PreparingRebalance":
            pass  # the leader alone would form a generation without the second member
        first, second = await join(broker, b"first", alone.member_id), await joining
        assert [answer.error_code for answer in (first, second)] == [ErrorCode.NONE] * 2
        assert first.protocol_name == second.protocol_name == "v0"
        assert {row.member_id: row.metadata for row in first.members} == {
            first.member_id: IDENTITY % b"first",
            second.member_id: IDENTITY % b"second",
        }
        assert (first.leader, second.leader) == (first.member_id,) * 2
        assert second.members == []
        decided = b'{"error":0,"master":"%b","master_identity":%b}' % (
            first.member_id.encode(),
            IDENTITY % b"first",
        )
        assignments = dict.fromkeys((first.member_id, second.member_id), decided)
        results = await asyncio.gather(sync(broker, second, {}), sync(broker, first, assignments))
        assert [(row.error_code, row.assignment) for row in results] == [(0, decided)] * 2
        listed = await kafka_request(broker, ApiKey.LIST_GROUPS, m.ListGroupsRequest(), 4)
        assert [(g.group_id, g.protocol_type, g.group_state) for g in listed.groups] == [
            (GROUP, "sr", "Stable")
        ]
        consumer = m.JoinGroupRequest(
            group_id=GROUP, session_timeout_ms=10_000, rebalance_timeout_ms=10_000, member_id="",
            protocol_type="consumer",
            protocols=[m.JoinGroupRequestProtocol(name="range", metadata=b"")],
        )  # fmt: skip
        refused = await kafka_request(broker, ApiKey.JOIN_GROUP, consumer, 3)
        assert refused.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
