"""CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from broker.event_loop.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from broker.security.principal import Principal
from broker.topics.metadata_service import NewTopic
from broker.topics.partition import Partition
from broker.topics.topics import Topic, TopicError
from broker.views.views import ViewTopic
from config.topics.keys import InvalidTopicConfigError, TopicConfig, describe, parse_value
from config.topics.names import INTERNAL_TOPICS
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.limits import SETTINGS_PER_RESOURCE_MAX, STRING_BYTES_MAX
from protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsRequestAssignment,
    CreatePartitionsRequestTopic,
    CreatePartitionsResponse,
    CreatePartitionsResponseTopic,
    CreateTopicsRequest,
    CreateTopicsRequestAssignment,
    CreateTopicsRequestTopic,
    CreateTopicsResponse,
    CreateTopicsResponseConfig,
    CreateTopicsResponseTopic,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsResponsePartition,
    DeleteRecordsResponseTopic,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicsResponseTopic,
)
from storage.errors import StorageError
from storage.model import TopicPartition

NO_ID: Final = bytes(16)
# Room for lists of throttled replicas, each as long as a string may be: an older version may have
# stored such lists, and a client subtracts others from them. Four take 6 ms.
SETTING_CHARACTERS_PER_RESOURCE_MAX: Final = 4 * STRING_BYTES_MAX
# Of the dynamic settings of a topic, as JSON. The broker writes those of all topics at each change
# of one. All settings at their longest take 1,700 bytes, apart from one free text and the two lists
# of throttled replicas; the lists have no effect.
TOPIC_SETTINGS_BYTES_MAX: Final = 4_096
DENIED: Final = "Authorization failed."
TWICE: Final = "the request names this topic twice"
ENGINE: Final = "varve.cleaner.engine"
HIGH_WATERMARK: Final = -1  # as the offset of DeleteRecords
REPLICATION_FACTORS: Final = (1, -1)  # one node; -1 is "the default" (KIP-464)
# The first versions whose clients know THROTTLING_QUOTA_EXCEEDED.
FIRST_STRICT_CREATE: Final = 6
FIRST_STRICT_DELETE: Final = 5
FIRST_STRICT_PARTITIONS: Final = 3


class MutationQuota:
    """The changes of topics in one request, against controller_mutation_rate (KIP-599).

    Newer clients get THROTTLING_QUOTA_EXCEEDED for changes above the quota. For older clients the
    broker makes all changes, and throttles the client afterwards.
    """

    def __init__(self, context: RequestContext, *, is_strict: bool) -> None:
        self._context = context
        self._is_strict = is_strict
        self._is_exceeded = False

    def charge(self, partitions: int) -> None:
        """Count partitions that are about to be created or deleted. Raises TopicError."""
        quotas, meters = self._context.services.quotas, self._context.meters
        if meters is None:
            return
        if self._is_strict and quotas.is_mutation_exceeded(meters):
            self._is_exceeded = True
            raise TopicError(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED, "The throttling quota has been exceeded."
            )
        quotas.charge_mutation(meters, partitions)

    def throttle(self) -> int:
        """Throttle the client; return the throttle time of the response."""
        meters = self._context.meters
        if meters is None or (self._is_strict and not self._is_exceeded):
            return 0
        return self._context.throttle(self._context.services.quotas.check_mutation(meters))


async def create_topics(
    context: RequestContext, header: RequestHeader, body: CreateTopicsRequest
) -> CreateTopicsResponse:
    """Create each topic, or return why not; answers when the topics are durable."""
    services, turns = context.services, Turns()
    results: list[CreateTopicsResponseTopic] = []
    checked: list[tuple[CreateTopicsResponseTopic, NewTopic]] = []
    quota = MutationQuota(context, is_strict=header.api_version >= FIRST_STRICT_CREATE)
    seen = Counter([topic.name async for topic in turns.over(body.topics)])
    requested = {topic.name: topic async for topic in turns.over(body.topics)}
    may_create_all = context.may_cluster(Operation.CREATE, is_filter=True)
    for request in requested.values():
        await turns.take()
        result = CreateTopicsResponseTopic(name=request.name)
        results.append(result)
        try:
            if not may_create_all and not context.may_topic(Operation.CREATE, request.name):
                raise TopicError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, DENIED)
            if seen[request.name] > 1:
                raise TopicError(ErrorCode.INVALID_REQUEST, TWICE)
            creator = None if may_create_all else context.creator
            new_topic = await _new_topic(context, request, creator, turns)
            if body.validate_only:
                _fill_created(
                    context, result, _validated(context, new_topic, quota), new_topic.partitions
                )
            else:
                checked.append((result, new_topic))
        except TopicError as error:
            _fill_failed(result, error)
    created = await services.metadata_service.create_all(
        [new_topic for _, new_topic in checked], quota.charge, client=context.client
    )
    for (result, new_topic), topic in zip(checked, created, strict=True):
        await turns.take()
        if isinstance(topic, Topic):
            _fill_created(context, result, topic, new_topic.partitions)
        else:
            _fill_failed(result, topic)
    return CreateTopicsResponse(throttle_time_ms=quota.throttle(), topics=results)


async def _new_topic(
    context: RequestContext,
    request: CreateTopicsRequestTopic,
    creator: Principal | None,
    turns: Turns,
) -> NewTopic:
    """Return the topic that a row of the request describes. Raises TopicError."""
    _refuse_internal(request.name)
    # First, as in Kafka: programs that create their topics at each start ignore this error only.
    context.services.metadata_service.check_is_new(request.name)
    dynamic = {}
    check_size(request.configs)
    for config in request.configs:
        if config.value is None:
            raise TopicError(ErrorCode.INVALID_CONFIG, f"{config.name} has no value")
        dynamic[config.name] = parse_setting(config.name, config.value)
    check_topic_settings(context, {}, dynamic)
    count = await _partition_count(context, request, turns)
    return NewTopic(request.name, count, dynamic, creator=creator)


def _validated(context: RequestContext, new_topic: NewTopic, quota: MutationQuota) -> Topic:
    """Return the topic as it would be created. Raises TopicError."""
    name, dynamic = new_topic.name, new_topic.dynamic
    config = context.services.metadata_service.check_new(new_topic)
    quota.charge(new_topic.partitions)
    layers = context.services.effective_settings.layers(name, dynamic, taken_over=False)
    return Topic(name, NO_ID, layers, config)


def _fill_created(
    context: RequestContext, result: CreateTopicsResponseTopic, topic: Topic, partitions: int
) -> None:
    result.topic_id = topic.topic_id
    if not context.may_topic(Operation.DESCRIBE_CONFIGS, topic.name, is_filter=True):
        result.topic_config_error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return
    result.num_partitions, result.replication_factor = partitions, 1
    result.configs = [
        CreateTopicsResponseConfig(
            name=entry.name,
            value=entry.value,
            read_only=entry.read_only,
            config_source=entry.source,
        )
        for entry in describe(topic.layers)
    ]


def _fill_failed(result: CreateTopicsResponseTopic, error: TopicError | StorageError) -> None:
    result.error_code, result.error_message = _code(error), str(error)


async def _partition_count(
    context: RequestContext, request: CreateTopicsRequestTopic, turns: Turns
) -> int:
    """Return the number of partitions, which a manual assignment to this node may give."""
    if not request.assignments:
        if request.replication_factor not in REPLICATION_FACTORS:
            raise TopicError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"replication factor {request.replication_factor}: this broker is a single node",
            )
        if request.num_partitions == -1:
            return context.services.settings.partitions(request.name)
        if request.num_partitions < 1:
            raise TopicError(ErrorCode.INVALID_PARTITIONS, "a topic has at least one partition")
        return request.num_partitions
    if request.num_partitions != -1 or request.replication_factor != -1:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            "give either assignments or numbers of partitions and replicas",
        )
    await _check_nodes(context, request.assignments, turns)
    count = len(request.assignments)
    indexes = {row.partition_index async for row in turns.over(request.assignments)}
    if len(indexes) < count or min(indexes) != 0 or max(indexes) != count - 1:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "the partitions of a new topic are numbered from 0, each once",
        )
    return count


async def _check_nodes(
    context: RequestContext,
    assignments: Iterable[CreateTopicsRequestAssignment | CreatePartitionsRequestAssignment],
    turns: Turns,
) -> None:
    """Refuse assignments to other nodes. Raises TopicError."""
    this_node = [context.services.node_id]
    async for assignment in turns.over(assignments):
        if assignment.broker_ids != this_node:
            raise TopicError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"partitions can be on node {this_node[0]} only",
            )


async def delete_topics(
    context: RequestContext, header: RequestHeader, body: DeleteTopicsRequest
) -> DeleteTopicsResponse:
    """Delete each topic by name or id; answers when the topics are deleted."""
    rows: Iterator[tuple[str | None, bytes]]  # one at a time, in turns
    if header.api_version < 6:
        rows = ((name, NO_ID) for name in body.topic_names)
    else:
        rows = ((topic.name, topic.topic_id) for topic in body.topics)
    services, turns = context.services, Turns()
    requested = Counter([row async for row in turns.over(rows)])
    quota = MutationQuota(context, is_strict=header.api_version >= FIRST_STRICT_DELETE)
    responses: list[DeleteTopicsResponseTopic] = []
    named: list[tuple[DeleteTopicsResponseTopic, Topic]] = []
    for (name, topic_id), count in requested.items():
        await turns.take()
        topic = _topic_to_delete(context, name, topic_id, is_twice=count > 1)
        if isinstance(topic, Topic):
            response = DeleteTopicsResponseTopic(name=topic.name, topic_id=topic.topic_id)
            named.append((response, topic))
            responses.append(response)
        else:
            responses.append(topic)
    counts = Counter([topic.topic_id async for _, topic in turns.over(named)])
    deletable: list[tuple[DeleteTopicsResponseTopic, Topic]] = []
    async for response, topic in turns.over(named):
        if counts[topic.topic_id] > 1:  # as Kafka: neither row deletes it
            response.error_code, response.error_message = ErrorCode.INVALID_REQUEST, TWICE
        else:
            deletable.append((response, topic))
    deleted = await services.metadata_service.delete_all(
        [topic for _, topic in deletable], quota.charge, client=context.client
    )
    for (response, _), result in zip(deletable, deleted, strict=True):
        await turns.take()
        if isinstance(result, Exception):
            response.error_code, response.error_message = _code(result), str(result)
    return DeleteTopicsResponse(throttle_time_ms=quota.throttle(), responses=responses)


def _topic_to_delete(
    context: RequestContext, name: str | None, topic_id: bytes, *, is_twice: bool
) -> Topic | DeleteTopicsResponseTopic:
    """Return the topic that a row of the request names, or why it cannot be deleted."""
    services = context.services
    if is_twice or (name is None) == (topic_id == NO_ID):
        return DeleteTopicsResponseTopic(
            name=name,
            topic_id=topic_id,
            error_code=ErrorCode.INVALID_REQUEST,
            error_message=TWICE if is_twice else "give either the name or the id of the topic",
        )
    if not context.may_cluster(Operation.DELETE, is_filter=True):
        named = name if name is not None else context.topic_name(topic_id)
        if named is not None and not context.may_topic(Operation.DELETE, named):
            may_describe = context.may_topic(Operation.DESCRIBE, named, is_filter=True)
            if may_describe and services.topic(named) is None:
                return _unknown_topic(name, topic_id)
            return DeleteTopicsResponseTopic(
                name=named if name is not None or may_describe else None,
                topic_id=topic_id,
                error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                error_message=DENIED,
            )
    topic = services.topics.get(name) if name is not None else services.topics.by_id(topic_id)
    view = services.views.get(name) if name is not None else services.views.by_id(topic_id)
    if topic is None and view is not None:
        return DeleteTopicsResponseTopic(
            name=view.name,
            topic_id=view.topic_id,
            error_code=ErrorCode.INVALID_REQUEST,
            error_message=f"{_view_text(view)}. Delete that topic, or set varve.view=none on it",
        )
    if topic is None:
        return _unknown_topic(name, topic_id)
    try:
        if not services.settings.delete_topics:
            raise TopicError(
                ErrorCode.TOPIC_DELETION_DISABLED, "delete_topics is false in the settings file"
            )
        _refuse_internal(topic.name)
    except TopicError as error:
        return DeleteTopicsResponseTopic(
            name=topic.name, topic_id=topic_id, error_code=_code(error), error_message=str(error)
        )
    return topic


def _unknown_topic(name: str | None, topic_id: bytes) -> DeleteTopicsResponseTopic:
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if name else ErrorCode.UNKNOWN_TOPIC_ID
    return DeleteTopicsResponseTopic(
        name=name, topic_id=topic_id, error_code=code, error_message="there is no such topic"
    )


async def create_partitions(
    context: RequestContext, header: RequestHeader, body: CreatePartitionsRequest
) -> CreatePartitionsResponse:
    """Add partitions to topics; the response has a row for each topic."""
    results, turns = [], Turns()
    may_alter_all = context.may_cluster(Operation.ALTER, is_filter=True)
    creator = None if may_alter_all else context.creator
    quota = MutationQuota(context, is_strict=header.api_version >= FIRST_STRICT_PARTITIONS)
    seen = Counter([topic.name async for topic in turns.over(body.topics)])
    requested = {topic.name: topic async for topic in turns.over(body.topics)}
    for request in requested.values():
        await turns.take()
        result = CreatePartitionsResponseTopic(name=request.name)
        try:
            if not context.may_topic(Operation.ALTER, request.name):
                raise TopicError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, DENIED)
            if seen[request.name] > 1:
                raise TopicError(ErrorCode.INVALID_REQUEST, TWICE)
            _refuse_internal(request.name)
            refuse_view(context, request.name)
            metadata_service = context.services.metadata_service
            topic = metadata_service.check_growth(request.name, request.count, creator)
            added = request.count - topic.partition_count
            await _check_assignment(context, request, added, turns)
            quota.charge(added)
            if not body.validate_only:
                await metadata_service.add_partitions(
                    request.name, request.count, client=context.client, creator=creator
                )
        except (TopicError, StorageError) as error:
            result.error_code, result.error_message = _code(error), str(error)
        results.append(result)
    return CreatePartitionsResponse(throttle_time_ms=quota.throttle(), results=results)


async def _check_assignment(
    context: RequestContext, request: CreatePartitionsRequestTopic, added: int, turns: Turns
) -> None:
    """Refuse an assignment of other partitions, or to other nodes. Raises TopicError."""
    if request.assignments is None:
        return
    if len(request.assignments) != added:
        raise TopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"{len(request.assignments)} assignments for {added} more partitions",
        )
    await _check_nodes(context, request.assignments, turns)


async def delete_records(
    context: RequestContext, _header: RequestHeader, body: DeleteRecordsRequest
) -> DeleteRecordsResponse:
    """Raise log start offsets; the next retention round removes the segments below.

    They are durable before the answer: no crash brings records back that a client deleted.
    """
    topics, turns = [], Turns()
    raised: dict[Partition, list[DeleteRecordsResponsePartition]] = {}
    for topic in body.topics:
        partitions = []
        may_delete = context.may_topic(Operation.DELETE, topic.name)
        for partition in topic.partitions:
            await turns.take()
            if not may_delete:
                denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                partitions.append(
                    DeleteRecordsResponsePartition(
                        partition_index=partition.partition_index,
                        low_watermark=-1,
                        error_code=denied,
                    )
                )
                continue
            topic_partition = TopicPartition(topic.name, partition.partition_index)
            partition_or_error = context.services.topics.find(*topic_partition)
            row = _delete_before(context, topic_partition, partition_or_error, partition.offset)
            if row.error_code == ErrorCode.NONE and isinstance(partition_or_error, Partition):
                raised.setdefault(partition_or_error, []).append(row)
            partitions.append(row)
        await turns.take()
        topics.append(DeleteRecordsResponseTopic(name=topic.name, partitions=partitions))
    for failed in await context.services.checkpoint_writer.make_durable(raised):
        for row in raised[failed]:
            row.low_watermark, row.error_code = -1, ErrorCode.KAFKA_STORAGE_ERROR
    return DeleteRecordsResponse(topics=topics)


def _delete_before(
    context: RequestContext,
    partition: TopicPartition,
    partition_or_error: Partition | ErrorCode,
    offset: int,
) -> DeleteRecordsResponsePartition:
    result = DeleteRecordsResponsePartition(partition_index=partition.partition, low_watermark=-1)
    if context.services.views.get(partition.topic) is not None:
        result.error_code = ErrorCode.POLICY_VIOLATION  # as for any topic without policy "delete"
    elif isinstance(partition_or_error, ErrorCode):
        result.error_code = partition_or_error
    elif not _may_delete_records(partition_or_error.log.config):
        result.error_code = ErrorCode.POLICY_VIOLATION
    else:
        log = partition_or_error.log
        before = log.high_watermark if offset == HIGH_WATERMARK else offset
        if before < 0 or before > log.high_watermark:
            result.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
        else:
            try:
                if before > log.log_start_offset:
                    partition_or_error.change(partial(log.delete_records, before))
                    partition_or_error.wake()
                result.low_watermark = log.log_start_offset
            except StorageError as error:
                result.error_code = code_of(error)
    return result


def _may_delete_records(config: TopicConfig) -> bool:
    """Return whether clients may: not from a compacted topic, unless it also deletes (KIP-107).

    They may if the policy is empty, as in Kafka since 4.2.
    """
    return config.deletes or not config.compacts


def _refuse_internal(name: str) -> None:
    """Refuse internal topics: their number of partitions decides where a group is stored."""
    if name in INTERNAL_TOPICS:
        raise TopicError(ErrorCode.INVALID_REQUEST, f"{name} is internal: clients cannot change it")


def refuse_view(context: RequestContext, name: str) -> None:
    """Refuse to change a compacted view. Raises TopicError.

    The code is INVALID_REQUEST, as for internal topics: clients do not retry it, and it does not
    suggest a problem with ACLs.
    """
    view = context.services.views.get(name)
    if view is not None:
        raise TopicError(
            ErrorCode.INVALID_REQUEST, f"{_view_text(view)}. Change that topic instead"
        )


def _view_text(view: ViewTopic) -> str:
    return f"{view.name} is the compacted view of topic {view.base.name}, and is read only"


class Setting(Protocol):
    """A row of a request that sets a value."""

    @property
    def value(self) -> str | None:
        """Return the new value."""
        ...


def check_size(settings: Sequence[Setting]) -> None:
    """Refuse more settings of one resource than a turn may parse. Raises TopicError."""
    if len(settings) > SETTINGS_PER_RESOURCE_MAX:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            f"{len(settings)} settings of one resource, "
            f"at most {SETTINGS_PER_RESOURCE_MAX} are allowed",
        )
    characters = sum(len(setting.value or "") for setting in settings)
    if characters > SETTING_CHARACTERS_PER_RESOURCE_MAX:
        raise TopicError(
            ErrorCode.INVALID_REQUEST,
            f"the settings of one resource have {characters} characters, "
            f"at most {SETTING_CHARACTERS_PER_RESOURCE_MAX} are allowed",
        )


def check_topic_settings(
    context: RequestContext, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Refuse dynamic settings of a topic that its owner may not set. Raises TopicError."""
    _check_engine(context, before, after)
    size_bytes = _settings_bytes(after)
    # Settings of an older version may exceed the limit. A change may not lengthen them.
    if size_bytes > max(TOPIC_SETTINGS_BYTES_MAX, _settings_bytes(before)):
        longest = max(after, key=lambda name: len(after[name]))
        raise TopicError(
            ErrorCode.INVALID_CONFIG,
            f"the settings of the topic would take {size_bytes} bytes, at most "
            f"{TOPIC_SETTINGS_BYTES_MAX} are allowed: shorten {longest}",
        )


def _settings_bytes(dynamic: Mapping[str, str]) -> int:
    """Return the bytes that dynamic settings take in the metadata."""
    return len(json.dumps(dict(dynamic)))


def _check_engine(
    context: RequestContext, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Refuse `varve.cleaner.engine=spark` to clients that may not configure the cluster.

    Spark jobs run one at a time, and take memory and CPU of the broker's machine or of others. The
    error is that of Kafka's AlterConfigPolicy, which limits what an owner may set. Raises
    TopicError.
    """
    is_new = after.get(ENGINE) == "spark" and before.get(ENGINE) != "spark"
    if is_new and not context.may_cluster(Operation.ALTER_CONFIGS):
        raise TopicError(
            ErrorCode.POLICY_VIOLATION, f"{ENGINE}=spark needs ALTER_CONFIGS on the cluster"
        )


def parse_setting(key: str, value: str) -> str:
    """Return the canonical form of a topic setting from a client. Raises TopicError."""
    try:
        return parse_value(key, value)
    except InvalidTopicConfigError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from error


def _code(error: TopicError | StorageError) -> ErrorCode:
    return error.code if isinstance(error, TopicError) else code_of(error)
