"""Which administrative changes the audit log records: one event for each row of a request.

Rows of partitions have one event for each topic and result: a client may repeat them ten thousand
times in a request, and they need not change anything. Those of a commit have one for each result,
and a limited rate: a client may commit the same offsets all the time. A row that was denied is not
here: the denial has an event of its own (broker/security/audit.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.groups.classic.model import Live
from broker.groups.consumer.model import ConsumerGroup
from broker.handlers.configs import RESOURCE_NAMES
from broker.handlers.dispatch import Handler
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, PatternType, Permission, ResourceType
from broker.security.audit import log_change, mask, shorten
from protocol.api import ApiKey
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import Message


class Change(NamedTuple):
    """One change that a client requested, with its result."""

    resource: str
    error_code: int
    details: dict[str, object]


# Request and response -> changes. None: another task may run, although there is no change.
Describe = Callable[[Any, Any], Iterable[Change | None]]
SETTINGS_MAX: Final = 100  # of one resource in an event
PARTITIONS_MAX: Final = 100  # with their offsets, in an event
# How the reason begins that Java's administration client sends with the removal of a member.
REMOVED_BY_ADMIN: Final = "member was removed by an admin"
DENIALS: Final = frozenset(
    (
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )
)


def audited(key: ApiKey, handler: Handler) -> Handler:
    """Return a handler that also writes the changes of a request to the audit log."""
    describe = _DESCRIBED.get(key)
    if describe is None:
        return handler

    is_change = _IS_CHANGE.get(key, _changes_something)

    async def handle(context: RequestContext, header: RequestHeader, body: Any) -> Message:
        answer = handler(context, header, body)
        response = answer if isinstance(answer, Message) else await answer
        if is_change(context, body):
            await yield_to_loop()  # the handler may have used its turn up
            async for change in Turns().over(describe(body, response)):
                if change is not None and change.error_code not in DENIALS:
                    log_change(
                        context.principal,
                        context.client_host,
                        key.name,
                        ErrorCode(change.error_code).name,
                        {"resource": shorten(change.resource), **change.details},
                        is_limited=key is ApiKey.OFFSET_COMMIT,
                    )
        return response

    return handle


def _topics(_request: Any, response: Any) -> Iterator[Change]:
    for row in response.topics:
        partitions = {"partitions": row.num_partitions} if row.num_partitions > 0 else {}
        yield Change(row.name, row.error_code, partitions)


def _deleted_topics(_request: Any, response: Any) -> Iterator[Change]:
    for row in response.responses:
        yield Change(row.name or row.topic_id.hex(), row.error_code, {})


def _partitions(request: Any, response: Any) -> Iterator[Change]:
    counts = {row.name: row.count for row in request.topics}
    for row in response.results:
        yield Change(row.name, row.error_code, {"partitions": counts.get(row.name)})


class _TopicResult(NamedTuple):
    """The partitions of a topic for which a request had the same result."""

    topic: str
    error_code: int
    values: dict[int, Any]  # by partition, of the first ones
    partitions: int


def _by_topic(
    topics: Iterable[tuple[str, Iterable[tuple[int, int, Any]]]],
) -> Iterator[_TopicResult | None]:
    """Collect rows: partition, error code, value. None: another task may run."""
    results: dict[tuple[str, int], dict[int, Any]] = {}
    for name, rows in topics:
        yield None
        for index, error_code, value in rows:
            yield None
            results.setdefault((name, error_code), {})[index] = value
    for (name, error_code), values in results.items():
        first = dict(islice(values.items(), PARTITIONS_MAX))
        yield _TopicResult(name, error_code, first, len(values))


def _deleted_records(_request: Any, response: Any) -> Iterator[Change | None]:
    topics = (
        (
            topic.name,
            ((row.partition_index, row.error_code, row.low_watermark) for row in topic.partitions),
        )
        for topic in response.topics
    )
    for result in _by_topic(topics):
        yield result and Change(
            result.topic,
            result.error_code,
            {"log_start_offsets": result.values, "partitions": result.partitions},
        )


def _configs(request: Any, response: Any) -> Iterator[Change]:
    for resource, row in zip(request.resources, response.responses, strict=True):
        settings = {
            shorten(config.name): mask(config.name, config.value)
            for config in resource.configs[:SETTINGS_MAX]
        }
        name = resource.resource_name or "(default)"
        kind = RESOURCE_NAMES.get(resource.resource_type, str(resource.resource_type))
        yield Change(name, row.error_code, {"resource_type": kind, "settings": settings})


def _created_acls(request: Any, response: Any) -> Iterator[Change]:
    for acl, row in zip(request.creations, response.results, strict=True):
        yield Change(
            acl.resource_name,
            row.error_code,
            _acl(acl, acl.resource_pattern_type),
        )


def _deleted_acls(_request: Any, response: Any) -> Iterator[Change | None]:
    for result in response.filter_results:
        yield None
        if result.error_code:
            yield Change("(filter)", result.error_code, {})
        for acl in result.matching_acls:
            yield Change(acl.resource_name, acl.error_code, _acl(acl, acl.pattern_type))


def _acl(acl: Any, pattern_type: int) -> dict[str, object]:
    return {
        "resource_type": _name(ResourceType, acl.resource_type),
        "pattern_type": _name(PatternType, pattern_type),
        "acl_principal": shorten(acl.principal),
        "acl_host": shorten(acl.host),
        "operation": _name(Operation, acl.operation),
        "permission": _name(Permission, acl.permission_type),
    }


def _name(codes: Any, code: int) -> str:
    return next((str(member.name) for member in codes if member == code), str(code))


def _deleted_groups(_request: Any, response: Any) -> Iterator[Change]:
    for row in response.results:
        yield Change(row.group_id, row.error_code, {})


def _deleted_offsets(request: Any, response: Any) -> Iterator[Change | None]:
    if response.error_code:
        yield Change(request.group_id, response.error_code, {})
    topics = (
        (topic.name, ((row.partition_index, row.error_code, None) for row in topic.partitions))
        for topic in response.topics
    )
    for result in _by_topic(topics):
        yield result and Change(
            request.group_id,
            result.error_code,
            {
                "topic": shorten(result.topic),
                "first_partitions": list(result.values),
                "partitions": result.partitions,
            },
        )


def _removed_members(request: Any, response: Any) -> Iterator[Change]:
    if response.error_code:
        yield Change(request.group_id, response.error_code, {})
    for row in response.members:
        member = row.group_instance_id or row.member_id
        yield Change(request.group_id, row.error_code, {"member": shorten(member)})


def _reset_offsets(request: Any, response: Any) -> Iterator[Change | None]:
    topics = (
        (
            done.name,
            (
                (row.partition_index, result.error_code, row.committed_offset)
                for row, result in zip(topic.partitions, done.partitions, strict=True)
            ),
        )
        for topic, done in zip(request.topics, response.topics, strict=True)
    )
    offsets: dict[int, dict[str, dict[int, int]]] = {}  # of the first ones, by error code and topic
    partitions = Counter[int]()  # by error code
    for result in _by_topic(topics):
        yield None
        if result is not None:
            code, room = result.error_code, PARTITIONS_MAX - partitions[result.error_code]
            if room > 0:
                first = dict(islice(result.values.items(), room))
                offsets.setdefault(code, {})[shorten(result.topic)] = first
            partitions[code] += result.partitions
    for code, count in partitions.items():
        yield Change(request.group_id, code, {"offsets": offsets[code], "partitions": count})


def _changes_something(_context: RequestContext, request: Any) -> bool:
    return not getattr(request, "validate_only", False)


def _removes_others(_context: RequestContext, request: Any) -> bool:
    """Return whether an administrator removes members; a member leaves alone, by its own id."""
    return len(request.members) > 1 or any(
        not member.member_id or (member.reason or "").startswith(REMOVED_BY_ADMIN)
        for member in request.members
    )


def _resets_offsets(context: RequestContext, request: Any) -> bool:
    """Return whether a client commits offsets of a group that has had members, without being one.

    A group that never had members belongs to a consumer that chooses its partitions itself: its
    commits are ordinary ones.
    """
    if request.member_id or request.generation_id_or_member_epoch >= 0:
        return False
    _, group = context.coordinator.describe(request.group_id)
    if isinstance(group, Live):
        return bool(group.group.protocol_type)
    return isinstance(group, ConsumerGroup)


def _quotas(request: Any, response: Any) -> Iterator[Change]:
    for entry, row in zip(request.entries, response.entries, strict=False):
        entity = ",".join(f"{part.entity_type}={part.entity_name}" for part in row.entity)
        values = {
            shorten(op.key): None if op.remove else op.value for op in entry.ops[:SETTINGS_MAX]
        }
        yield Change(entity, row.error_code, {"quotas": values})


def _users(request: Any, response: Any) -> Iterator[Change]:
    deleted = {row.name for row in request.deletions}
    for row in response.results:
        yield Change(row.user, row.error_code, {"is_deletion": row.user in deleted})


def _features(request: Any, response: Any) -> Iterator[Change]:
    for row in request.feature_updates:
        yield Change(row.feature, response.error_code, {"level": row.max_version_level})


def _moves(request: Any, response: Any) -> Iterator[Change | None]:
    directories: dict[tuple[str, int], str] = {}
    for directory in request.dirs:
        yield None
        for topic in directory.topics:
            yield None
            for index in topic.partitions:
                yield None
                directories[topic.name, index] = directory.path
    for topic in response.results:
        yield None
        for row in topic.partitions:
            index = row.partition_index
            details: dict[str, object] = {"directory": directories.get((topic.topic_name, index))}
            yield Change(f"{topic.topic_name}-{index}", row.error_code, details)


def _markers(request: Any, response: Any) -> Iterator[Change | None]:
    for marker, result in zip(request.markers, response.markers, strict=True):
        yield None
        for topic in result.topics:
            yield None
            for row in topic.partitions:
                details = {
                    "producer_id": marker.producer_id,
                    "is_commit": marker.transaction_result,
                }
                yield Change(f"{topic.name}-{row.partition_index}", row.error_code, details)


_DESCRIBED: Final[dict[ApiKey, Describe]] = {
    ApiKey.CREATE_TOPICS: _topics,
    ApiKey.DELETE_TOPICS: _deleted_topics,
    ApiKey.CREATE_PARTITIONS: _partitions,
    ApiKey.DELETE_RECORDS: _deleted_records,
    ApiKey.ALTER_CONFIGS: _configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _configs,
    ApiKey.CREATE_ACLS: _created_acls,
    ApiKey.DELETE_ACLS: _deleted_acls,
    ApiKey.DELETE_GROUPS: _deleted_groups,
    ApiKey.OFFSET_DELETE: _deleted_offsets,
    ApiKey.LEAVE_GROUP: _removed_members,
    ApiKey.OFFSET_COMMIT: _reset_offsets,
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _users,
    ApiKey.UPDATE_FEATURES: _features,
    ApiKey.ALTER_REPLICA_LOG_DIRS: _moves,
    ApiKey.WRITE_TXN_MARKERS: _markers,
}
# Which requests of an API are changes by an administrator.
_IS_CHANGE: Final[dict[ApiKey, Callable[[RequestContext, Any], bool]]] = {
    ApiKey.LEAVE_GROUP: _removes_others,
    ApiKey.OFFSET_COMMIT: _resets_offsets,
}
