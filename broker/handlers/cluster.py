"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions, DescribeLogDirs."""

import heapq
import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Final

from broker.event_loop.loop_turns import Turns
from broker.features import FEATURES, levels
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.handlers.topics import MutationQuota
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from broker.topics.effective_settings import INTERNAL_SETTINGS
from broker.topics.partition import Partition
from broker.topics.partition_rows import PartitionEpochs
from broker.topics.topics import Topic, TopicError
from broker.views.view_partition import ViewPartition
from broker.views.views import ViewTopic
from config.topics.names import InvalidTopicNameError, check_legal_name
from protocol.api import ApiRange
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    ApiVersionsResponseFinalizedFeature,
    ApiVersionsResponseRange,
    ApiVersionsResponseSupportedFeature,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeClusterResponseBroker,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResponseDirectory,
    DescribeLogDirsResponsePartition,
    DescribeLogDirsResponseTopic,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponseCursor,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponseTopic,
)
from storage.errors import StorageError
from storage.manager.replica_copy import ReplicaCopy

NO_ID: Final = bytes(16)
FIRST_TOPIC_ID_VERSION: Final = 12  # of Metadata; 10 and 11 have the field, and Kafka refuses it
SOFTWARE_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
BROKER_ENDPOINT: Final = 1
PARTITIONS_PER_TURN: Final = 256  # 30 us
PARTITIONS_PER_ANSWER_MAX: Final = 2000  # Kafka's max.request.partition.size.limit


class ClusterHandlers:
    """The handler of ApiVersions; `ranges` are the supported versions."""

    def __init__(self, ranges: tuple[ApiRange, ...]) -> None:
        self._api_keys = [
            ApiVersionsResponseRange(api_key=key, min_version=low, max_version=high)
            for key, low, high in ranges
        ]
        self._supported = {
            lowest: [
                ApiVersionsResponseSupportedFeature(
                    name=name,
                    min_version=max(lowest, feature.lowest),
                    max_version=feature.highest,
                )
                for name, feature in FEATURES.items()
            ]
            for lowest in (0, 1)
        }

    def api_versions(
        self, context: RequestContext, header: RequestHeader, body: ApiVersionsRequest
    ) -> ApiVersionsResponse:
        """List every API and version; check the client's software (KIP-511)."""
        if header.api_version >= 3:
            software = (body.client_software_name, body.client_software_version)
            if not all(SOFTWARE_NAME.fullmatch(text) for text in software):
                return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
        # Java clients before 3.9 fail on a minimum of 0 and request version 3 (KAFKA-17011).
        lowest = 1 if header.api_version == 3 else 0
        metadata = context.services.manager.metadata
        return ApiVersionsResponse(
            api_keys=self._api_keys,
            supported_features=self._supported[lowest],
            finalized_features_epoch=metadata.epoch,
            finalized_features=[
                ApiVersionsResponseFinalizedFeature(
                    name=name, min_version_level=level, max_version_level=level
                )
                for name, level in levels(metadata.features).items()
                if level  # a feature at level 0 is not in effect
            ],
        )


async def metadata(
    context: RequestContext, header: RequestHeader, body: MetadataRequest
) -> MetadataResponse:
    """Describe topics by name or id; create missing ones if the request and settings allow it.

    A topic that the client may not describe is left out of the list of all topics.
    """
    services = context.services
    version = header.api_version
    wants_all = body.topics is None or (version == 0 and not body.topics)
    may_create = body.allow_auto_topic_creation if version >= 4 else True
    topics, turns = [], Turns()
    if wants_all:
        every: list[Topic | ViewTopic] = [*services.topics, *services.views]
        for existing in every:
            await turns.take()
            if context.may_topic(Operation.DESCRIBE, existing.name, is_filter=True):
                topics.append(await _metadata_topic(services.node_id, existing, version, turns))
    else:
        assert body.topics is not None
        # Describe each topic once, even if it is named often: it may have thousands of partitions.
        # An id overrides the name, as in `_look_up`.
        distinct = {
            (topic.topic_id, topic.name if topic.topic_id == NO_ID else None): topic
            async for topic in turns.over(body.topics)
        }
        are_valid = version >= FIRST_TOPIC_ID_VERSION or all(
            [id_ == NO_ID and name is not None async for id_, name in turns.over(distinct)]
        )
        for requested in distinct.values():
            await turns.take()
            if are_valid:
                row = await _look_up(context, requested, version, turns, create=may_create)
            else:
                row = MetadataResponseTopic(
                    error_code=ErrorCode.INVALID_REQUEST,
                    name=requested.name or "",
                    topic_id=requested.topic_id,
                )
            topics.append(row)
    if body.include_topic_authorized_operations:
        for topic in topics:
            await turns.take()
            if topic.name and topic.error_code != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                topic.topic_authorized_operations = context.topic_operations(topic.name)
    response = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=services.node_id, host=context.address.host, port=context.address.port
            )
        ],
        cluster_id=services.cluster_id,
        controller_id=services.node_id,
        topics=topics,
    )
    if body.include_cluster_authorized_operations:
        response.cluster_authorized_operations = context.cluster_operations()
    return response


async def _look_up(
    context: RequestContext,
    requested: MetadataRequestTopic,
    version: int,
    turns: Turns,
    *,
    create: bool,
) -> MetadataResponseTopic:
    services = context.services
    topic_id = requested.topic_id
    if topic_id != NO_ID:  # as in Kafka, the id overrides the name, which Java leaves empty
        existing = services.topics.by_id(topic_id) or services.views.by_id(topic_id)
        if existing is None:
            return MetadataResponseTopic(
                error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id
            )
        if not context.may_topic(Operation.DESCRIBE, existing.name):
            return MetadataResponseTopic(
                error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=None, topic_id=topic_id
            )
        return await _metadata_topic(services.node_id, existing, version, turns)
    name = requested.name or ""
    denied = MetadataResponseTopic(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=name)
    if not context.may_topic(Operation.DESCRIBE, name):
        return denied
    topic = services.topic(name)
    if topic is None:
        create = create and services.settings.auto_create_topics
        if create and not _may_create(context, name):
            return denied
        try:
            services.metadata_service.check_name(name)
            if not create:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                return MetadataResponseTopic(error_code=code, name=name)
            if name in INTERNAL_SETTINGS:
                is_offsets = name == OFFSETS_TOPIC
                code = await (
                    context.wait_offsets_topic() if is_offsets else context.wait_transaction_topic()
                )
                topic = services.topics.get(name)
                if topic is None:
                    return MetadataResponseTopic(error_code=code, name=name)
            else:
                if services.metadata_writer.pauses.pause_of(context.client):
                    raise TopicError(
                        ErrorCode.THROTTLING_QUOTA_EXCEEDED, "its client makes too many changes"
                    )
                MutationQuota(context, is_strict=True).charge(services.settings.partitions(name))
                topic = await services.metadata_service.ensure(
                    name,
                    client=context.client,
                    creator=None if _may_create_all(context) else context.creator,
                )
        except TopicError as error:
            code = error.code
            if code is ErrorCode.THROTTLING_QUOTA_EXCEEDED:  # clients do not expect it here
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return MetadataResponseTopic(error_code=code, name=name)
        except StorageError as error:
            return MetadataResponseTopic(error_code=code_of(error), name=name)
    return await _metadata_topic(services.node_id, topic, version, turns)


def _may_create(context: RequestContext, topic: str) -> bool:
    return _may_create_all(context) or context.may_topic(Operation.CREATE, topic)


def _may_create_all(context: RequestContext) -> bool:
    return context.may_cluster(Operation.CREATE, is_filter=True)


async def _metadata_topic(
    node_id: int, topic: Topic | ViewTopic, version: int, turns: Turns
) -> MetadataResponseTopic:
    state = await _partition_epochs(topic, turns)
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=await topic.rows.get(state, node_id, version, turns),
    )


async def _partition_epochs(topic: Topic | ViewTopic, turns: Turns) -> PartitionEpochs:
    state: list[tuple[int, int | None]] = [(index, None) for index in topic.offline]
    for number, (index, partition) in enumerate(tuple(topic.partitions.items())):
        if number % PARTITIONS_PER_TURN == 0:
            await turns.take()
        state.append((index, partition.log.leader_epoch))
    state.sort(key=itemgetter(0))
    return state


def describe_cluster(
    context: RequestContext, _header: RequestHeader, body: DescribeClusterRequest
) -> DescribeClusterResponse:
    """Describe the cluster, which is this node."""
    services = context.services
    if body.endpoint_type != BROKER_ENDPOINT:
        return DescribeClusterResponse(
            error_code=ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="only brokers can be described",
            cluster_id=services.cluster_id,
        )
    response = DescribeClusterResponse(
        cluster_id=services.cluster_id,
        controller_id=services.node_id,
        brokers=[
            DescribeClusterResponseBroker(
                broker_id=services.node_id, host=context.address.host, port=context.address.port
            )
        ],
    )
    if body.include_cluster_authorized_operations:
        response.cluster_authorized_operations = context.cluster_operations()
    return response


async def _heap_of(names: Iterable[str], turns: Turns) -> list[str]:
    """Return a heap. To make one at once of 50,000 names in any order takes 9 ms."""
    heap: list[str] = []
    async for name in turns.over(names):
        heapq.heappush(heap, name)
    return heap


async def describe_topic_partitions(
    context: RequestContext, _header: RequestHeader, body: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """Describe topics page by page (KIP-966), in the order of names, from the cursor on."""
    services = context.services
    turns = Turns()
    requested = {topic.name: None async for topic in turns.over(body.topics)}
    names = list(requested)
    if not requested:
        topics = (*services.topics, *services.views)
        names = [
            topic.name
            async for topic in turns.over(topics)
            if context.may_topic(Operation.DESCRIBE, topic.name, is_filter=True)
        ]
    cursor = body.cursor
    if cursor is not None:
        is_outside = bool(requested) and cursor.topic_name not in requested
        if cursor.partition_index < 0 or is_outside:
            return await _refuse_cursor(requested, turns)
        names = [name async for name in turns.over(names) if name >= cursor.topic_name]
    names = await _heap_of(names, turns)  # only the first page of topics is needed
    remaining = max(1, min(body.response_partition_limit, PARTITIONS_PER_ANSWER_MAX))
    response = DescribeTopicPartitionsResponse(next_cursor=None)
    while names:
        await turns.take()
        name = heapq.heappop(names)
        if not context.may_topic(Operation.DESCRIBE, name):
            denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            response.topics.append(_undescribed_topic(name, denied))
            continue
        operations = context.topic_operations(name)
        topic = services.topic(name)
        if topic is None:
            unknown = _undescribed_topic(name, _unknown_code(name))
            unknown.topic_authorized_operations = operations
            response.topics.append(unknown)
            continue
        described = DescribeTopicPartitionsResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id,
            is_internal=topic.is_internal,
            topic_authorized_operations=operations,
        )
        response.topics.append(described)
        partitions = await _partition_epochs(topic, turns)
        if cursor is not None and name == cursor.topic_name:
            first = bisect_left(partitions, cursor.partition_index, key=itemgetter(0))
            partitions = partitions[first:]
        async for index, epoch in turns.over(partitions[:remaining]):
            described.partitions.append(_described_partition(services.node_id, index, epoch))
        if len(partitions) > remaining:
            response.next_cursor = DescribeTopicPartitionsResponseCursor(
                topic_name=name, partition_index=partitions[remaining][0]
            )
            break
        remaining -= len(partitions)
        if remaining == 0:
            if names:
                response.next_cursor = DescribeTopicPartitionsResponseCursor(
                    topic_name=names[0], partition_index=0
                )
            break
    return response


async def _refuse_cursor(requested: Iterable[str], turns: Turns) -> DescribeTopicPartitionsResponse:
    """Return the response to an invalid cursor: the error for each requested topic, as Kafka."""
    response = DescribeTopicPartitionsResponse(next_cursor=None)
    async for name in turns.over(requested):
        response.topics.append(_undescribed_topic(name, ErrorCode.INVALID_REQUEST))
    return response


def _unknown_code(name: str) -> ErrorCode:
    """Return the error for a topic that does not exist, or cannot."""
    try:
        check_legal_name(name)
    except InvalidTopicNameError:
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _undescribed_topic(name: str, error: ErrorCode) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(error_code=error, name=name)


def _described_partition(
    node_id: int, index: int, epoch: int | None
) -> DescribeTopicPartitionsResponsePartition:
    """Return a row with empty lists of eligible leaders (null makes clients fail)."""
    this_node = [node_id]
    if epoch is None:
        return DescribeTopicPartitionsResponsePartition(
            error_code=ErrorCode.LEADER_NOT_AVAILABLE,
            partition_index=index,
            leader_id=-1,
            replica_nodes=this_node,
            eligible_leader_replicas=[],
            last_known_elr=[],
            offline_replicas=this_node,
        )
    return DescribeTopicPartitionsResponsePartition(
        partition_index=index,
        leader_id=node_id,
        leader_epoch=epoch,
        replica_nodes=this_node,
        isr_nodes=this_node,
        eligible_leader_replicas=[],
        last_known_elr=[],
    )


async def describe_log_dirs(
    context: RequestContext, _header: RequestHeader, body: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    """Return the disk use of partitions, by data directory."""
    services, turns = context.services, Turns()
    if not context.may_cluster(Operation.DESCRIBE):
        return DescribeLogDirsResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    requested: set[tuple[str, int]] | None = None
    if body.topics is not None:
        requested = set()
        for topic in body.topics:
            await turns.take()
            for index in topic.partitions:
                await turns.take()
                requested.add((topic.topic, index))
    views = chain.from_iterable(map(services.views.partitions_of, services.views))
    by_directory: dict[str, dict[str, list[DescribeLogDirsResponsePartition]]]
    by_directory = defaultdict(lambda: defaultdict(list))
    replicas: Iterable[Partition | ViewPartition] = chain(services.topics.partitions(), views)
    for partition in replicas:
        await turns.take()
        if requested is None or partition.partition in requested:
            path = os.path.dirname(partition.log.directory)
            replica = DescribeLogDirsResponsePartition(
                partition_index=partition.partition.partition,
                partition_size=_size_of(partition),
            )
            by_directory[path][partition.partition.topic].append(replica)
    results = []
    for directory in services.manager.table.directories:
        if not directory.is_online:
            results.append(
                DescribeLogDirsResponseDirectory(
                    error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=directory.path
                )
            )
            continue
        path, run = directory.path, services.directory_threads.run
        total = await run(path, partial(services.env.total_bytes, path))
        free = await run(path, partial(services.env.free_bytes, path))
        topics = [
            DescribeLogDirsResponseTopic(name=name, partitions=rows)
            for name, rows in by_directory[path].items()
        ]
        topics += [
            _moving_replica(copy)
            for copy in services.moves.copies_in(directory.path)
            if requested is None or copy.source.partition in requested
        ]
        results.append(
            DescribeLogDirsResponseDirectory(
                log_dir=directory.path,
                topics=topics,
                total_bytes=total,
                usable_bytes=free,
            )
        )
    return DescribeLogDirsResponse(results=results)


def _size_of(partition: Partition | ViewPartition) -> int:
    """Return the bytes of a log, or of the files of a view."""
    if isinstance(partition, ViewPartition):
        return partition.log.size_bytes
    return partition.log.segments.size_bytes


def _moving_replica(copy: ReplicaCopy) -> DescribeLogDirsResponseTopic:
    """Describe a replica that is being moved to a directory (Kafka's future replica)."""
    partition = DescribeLogDirsResponsePartition(
        partition_index=copy.source.partition.partition,
        partition_size=copy.size_bytes,
        offset_lag=copy.lag,
        is_future_key=True,
    )
    return DescribeLogDirsResponseTopic(name=copy.source.partition.topic, partitions=[partition])
