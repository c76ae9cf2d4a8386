"""/api/v1/groups/{group}: describe and delete a group, reset its offsets (openapi/).

The handlers of the Kafka protocol do the work, so permissions and the audit log are theirs. Lag
counts offsets, as Kafka's tools do.

Rules
- The leader of a classic group writes the assignments, so they may name anything. Only partitions
  that exist, of topics that the sender may describe, are shown. So a description tells nothing that
  ListOffsets refuses, and takes no longer than the number of partitions justifies.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns, run_in_turns
from broker.groups.classic.subscription import InvalidMetadataError, decode_assignment_sliced
from broker.http.api.json_shapes import Json
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
from broker.http.api.kafka.positions import Position, parse_position
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    body_value,
    json_object,
    json_response,
    query_parameters,
    rows_response,
)
from broker.http.audited import note_no_change
from broker.http.authentication import Allows
from broker.security.acls import Operation, ResourceType
from broker.topics.topics import Topics
from config.topics.names import RESERVED_SUFFIX
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode

GROUP: Final = "/api/v1/groups/{group}"
OFFSETS: Final = f"{GROUP}/offsets"
ADMINISTRATIVE: Final = (("GET", GROUP), ("DELETE", GROUP), ("POST", OFFSETS))
MEMBERS_MAX: Final = 1000  # listed of a group
EARLIEST: Final = -2  # timestamps of ListOffsets
LATEST: Final = -1
GROUP_KEY: Final = 0  # a key type of FindCoordinator


_Partitions = Mapping[str, Sequence[int]]  # by topic


@dataclass(frozen=True, slots=True)
class _Description:
    """A group of either protocol."""

    type: str
    state: str
    protocol: str
    members: Sequence[Any]  # of the response
    assignments: Sequence[Callable[[], Awaitable[_Partitions]]]  # of each member


class GroupChanges:
    """Handlers of the requests that describe and change one group."""

    def __init__(self, handlers: KafkaHandlers, topics: Topics, allows: Allows) -> None:
        self._handlers = handlers
        self._topics = topics
        self._permissions = Permissions(allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(GROUP, self._describe)
        yield web.delete(GROUP, self._delete)
        yield web.post(OFFSETS, self._reset)

    async def _describe(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        client, group_id = KafkaClient(self._handlers, request), request.match_info["group"]
        group = await _description(client, group_id)
        committed = await _committed(client, group_id, None)
        owners: dict[tuple[str, int], str] = {}
        members, turns = list[Json](), Turns()
        pairs = zip(group.members, group.assignments, strict=True)
        async for member, assignment in turns.over(pairs):
            assigned = await self._shown(request, await assignment(), turns)
            async for topic, indexes in turns.over(assigned.items()):
                owners |= dict.fromkeys(((topic, index) for index in indexes), member.member_id)
            if len(members) < MEMBERS_MAX:
                members.append(_member_json(member, assigned))
        named = defaultdict[str, set[int]](set)
        async for topic, index in turns.over((*committed, *owners)):
            named[topic].add(index)
        rows = (
            self._offset_json(partition, committed.get(partition), owners.get(partition))
            for topic in sorted(named)
            for partition in ((topic, index) for index in sorted(named[topic]))
        )
        extra = {
            "group": group_id,
            "type": group.type,
            "state": group.state,
            "protocol": group.protocol,
            "members": members,
            "members_left_out": len(group.members) - len(members),
        }
        return await rows_response("offsets", rows, extra)

    async def _shown(
        self, request: web.Request, assigned: _Partitions, turns: Turns
    ) -> _Partitions:
        """Return the partitions that exist, of topics that the sender may describe."""
        shown = {}
        async for name, indexes in turns.over(assigned.items()):
            topic = self._topics.get(name) or self._topics.get(name.removesuffix(RESERVED_SUFFIX))
            if topic is not None and self._permissions.has(
                request, Operation.DESCRIBE, ResourceType.TOPIC, name
            ):
                count = topic.partition_count
                shown[name] = sorted({index for index in indexes if 0 <= index < count})
        return shown

    def _offset_json(
        self, partition: tuple[str, int], committed: int | None, member: str | None
    ) -> Json:
        end = self._topics.readable_end(*partition)
        return {
            "topic": partition[0],
            "partition": partition[1],
            "committed_offset": committed,
            "end_offset": end,
            "lag": None if end is None or committed is None else max(0, end - committed),
            "member_id": member,
        }

    async def _delete(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        await json_object(request, ())
        group_id, key = request.match_info["group"], ApiKey.DELETE_GROUPS
        client = KafkaClient(self._handlers, request)
        answer = await client.call(key, m.DeleteGroupsRequest(groups_names=[group_id]))
        client.check(key, answer.results[0].error_code)
        return json_response({"group": group_id, "deleted": True})

    async def _reset(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        body = await json_object(request, ("topic", "partition", "to", "dry_run"))
        topic, only = body_value(body, "topic", str, ""), body_value(body, "partition", int, -1)
        target = body.get("to")
        if not topic or target is None:
            raise ApiError(400, "expected topic and to: earliest, latest, an offset or a time")
        if "partition" in body and only < 0:
            raise ApiError(400, "partition: expected a number from 0 on")
        position = parse_position(str(target), "to")
        dry_run = body_value(body, "dry_run", bool, default=False)
        client, group_id = KafkaClient(self._handlers, request), request.match_info["group"]
        indexes = [only] if only >= 0 else self._indexes(topic)
        after = await _resolve(client, topic, indexes, position)
        before = await _committed(client, group_id, {topic: indexes})
        if dry_run:
            note_no_change(request)
        else:
            await _commit(client, group_id, topic, after)
        rows = (
            {"partition": index, "before": before.get((topic, index)), "after": after[index]}
            for index in indexes
        )
        extra = {"group": group_id, "topic": topic, "dry_run": dry_run}
        return await rows_response("partitions", rows, extra)

    def _indexes(self, name: str) -> list[int]:
        """Return the partitions of a topic or its view; the first if there is no such topic."""
        topic = self._topics.get(name) or self._topics.get(name.removesuffix(RESERVED_SUFFIX))
        return [0] if topic is None else list(range(topic.partition_count))


async def _description(client: KafkaClient, group_id: str) -> _Description:
    """Return a group of either protocol. Raises ApiError."""
    key = ApiKey.DESCRIBE_GROUPS
    answer = await client.call(key, m.DescribeGroupsRequest(groups=[group_id]))
    (group,) = answer.groups
    if group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
        return await _consumer_description(client, group_id)
    client.check(key, group.error_code, group.error_message)
    assignments = [partial(_assignment, member.member_assignment) for member in group.members]
    return _Description(
        "classic", group.group_state, group.protocol_data, group.members, assignments
    )


async def _consumer_description(client: KafkaClient, group_id: str) -> _Description:
    key = ApiKey.CONSUMER_GROUP_DESCRIBE
    answer = await client.call(key, m.ConsumerGroupDescribeRequest(group_ids=[group_id]))
    (group,) = answer.groups
    client.check(key, group.error_code, group.error_message)
    assignments = [partial(_partitions_of, member.assignment) for member in group.members]
    return _Description(
        "consumer", group.group_state, group.assignor_name, group.members, assignments
    )


async def _partitions_of(assignment: Any) -> _Partitions:
    return {row.topic_name: row.partitions for row in assignment.topic_partitions}


async def _assignment(data: bytes) -> _Partitions:
    """Return the partitions in the assignment of a classic member, if it is that of a consumer."""
    try:
        return (await run_in_turns(decode_assignment_sliced(data))).partitions
    except InvalidMetadataError:
        return {}


def _member_json(member: Any, assigned: _Partitions) -> Json:
    is_classic = isinstance(member, m.DescribeGroupsResponseMember)
    return {
        "member_id": member.member_id,
        "instance_id": member.group_instance_id if is_classic else member.instance_id,
        "client_id": member.client_id,
        "host": member.client_host.removeprefix("/"),
        "partitions": sum(map(len, assigned.values())),
        "topics": sorted(assigned),
    }


async def _committed(
    client: KafkaClient, group_id: str, wanted: Mapping[str, Sequence[int]] | None
) -> dict[tuple[str, int], int]:
    """Return committed offsets, of all topics that the sender may describe without `wanted`."""
    topics = None
    if wanted is not None:
        topics = [
            m.OffsetFetchRequestGroupTopic(name=name, partition_indexes=list(indexes))
            for name, indexes in wanted.items()
        ]
    group = m.OffsetFetchRequestGroup(group_id=group_id, member_epoch=-1, topics=topics)
    key = ApiKey.OFFSET_FETCH
    answer = await client.call(key, m.OffsetFetchRequest(groups=[group]))
    (result,) = answer.groups
    client.check(key, result.error_code)
    committed, turns = {}, Turns()
    async for topic in turns.over(result.topics):
        async for row in turns.over(topic.partitions):
            client.check(key, row.error_code)
            if row.committed_offset >= 0:
                committed[topic.name, row.partition_index] = row.committed_offset
    return committed


async def _resolve(
    client: KafkaClient, topic: str, indexes: Sequence[int], position: Position
) -> dict[int, int]:
    """Return the offset of a position in each partition. Raises ApiError."""
    starts = await _offsets_at(client, topic, indexes, EARLIEST)
    ends = await _offsets_at(client, topic, indexes, LATEST)
    at_time: dict[int, int] = {}
    if position.at_ms is not None:
        at_time = await _offsets_at(client, topic, indexes, position.at_ms)
    return {
        index: position.within(starts[index], ends[index], at_time.get(index)) for index in indexes
    }


async def _offsets_at(
    client: KafkaClient, topic: str, indexes: Sequence[int], timestamp: int
) -> dict[int, int]:
    """Return the offset of each partition for a timestamp of ListOffsets, unless there is none."""
    partitions = [
        m.ListOffsetsRequestPartition(
            partition_index=index, current_leader_epoch=-1, timestamp=timestamp
        )
        for index in indexes
    ]
    key = ApiKey.LIST_OFFSETS
    request = m.ListOffsetsRequest(
        replica_id=-1, topics=[m.ListOffsetsRequestTopic(name=topic, partitions=partitions)]
    )
    answer = await client.call(key, request)
    offsets = {}
    for row in answer.topics[0].partitions:
        client.check(key, row.error_code)
        if row.offset >= 0:
            offsets[row.partition_index] = row.offset
    return offsets


async def _commit(
    client: KafkaClient, group_id: str, topic: str, offsets: Mapping[int, int]
) -> None:
    """Commit offsets for a group without members. Raises ApiError."""
    key = ApiKey.FIND_COORDINATOR  # it creates the topic of the offsets if there is none
    find = m.FindCoordinatorRequest(key_type=GROUP_KEY, coordinator_keys=[group_id])
    answer = await client.call(key, find)
    client.check(key, answer.coordinators[0].error_code, answer.coordinators[0].error_message)
    rows = [
        m.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset, committed_leader_epoch=-1
        )
        for index, offset in offsets.items()
    ]
    key = ApiKey.OFFSET_COMMIT
    request = m.OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=-1,
        retention_time_ms=-1,
        topics=[m.OffsetCommitRequestTopic(name=topic, partitions=rows)],
    )
    answer = await client.call(key, request)
    for row in answer.topics[0].partitions:
        client.check(key, row.error_code)
