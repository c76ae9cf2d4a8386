"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions, DescribeLogDirs."""

import asyncio
import heapq
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from broker.groups.offsets_store import OFFSETS_TOPIC
from broker.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.topics.partition import Partition
from broker.topics.topics import Topic, TopicError
from broker.views.views import ViewPartition, ViewTopic
from protocol.api import ApiRange
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    ApiVersionsResponseRange,
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
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from storage.errors import StorageError

NO_ID: Final = bytes(16)
SOFTWARE_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
BROKER_ENDPOINT: Final = 1
PARTITIONS_PER_ANSWER_MAX: Final = 2000  # Kafka's max.request.partition.size.limit
# All operations on a topic or cluster, as there are no permissions. The bits are the codes of
# Kafka's AclOperation.
TOPIC_OPERATIONS: Final = sum(1 << code for code in (3, 4, 5, 6, 7, 8, 10, 11))
CLUSTER_OPERATIONS: Final = sum(1 << code for code in (5, 7, 8, 9, 10, 11, 12))


class ClusterHandlers:
    """The handler of ApiVersions; `ranges` are the supported versions."""

    def __init__(self, ranges: tuple[ApiRange, ...]) -> None:
        self._api_keys = [
            ApiVersionsResponseRange(api_key=key, min_version=low, max_version=high)
            for key, low, high in ranges
        ]

    def api_versions(
        self, context: RequestContext, header: RequestHeader, body: ApiVersionsRequest
    ) -> ApiVersionsResponse:
        """List every API and version; record the client's software (KIP-511)."""
        if header.api_version >= 3:
            software = (body.client_software_name, body.client_software_version)
            if not all(SOFTWARE_NAME.fullmatch(text) for text in software):
                return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
            context.client_software = software
        return ApiVersionsResponse(api_keys=self._api_keys, finalized_features_epoch=0)


async def metadata(
    context: RequestContext, header: RequestHeader, body: MetadataRequest
) -> MetadataResponse:
    """Describe topics by name or id; create missing ones if the request and settings allow it."""
    services = context.services
    version = header.api_version
    wants_all = body.topics is None or (version == 0 and not body.topics)
    may_create = body.allow_auto_topic_creation if version >= 4 else True
    topics, turns = [], Turns()
    if wants_all:
        every: list[Topic | ViewTopic] = [*services.topics, *services.views]
        for existing in every:
            await turns.take()
            topics.append(await _metadata_topic(services.node_id, existing, turns))
    else:
        assert body.topics is not None
        # Describe each topic once, even if it is named often: it may have thousands of partitions.
        # An id overrides the name, as in `_look_up`.
        distinct = {
            (topic.topic_id, topic.name if topic.topic_id == NO_ID else None): topic
            async for topic in turns.over(body.topics)
        }
        for requested in distinct.values():
            await turns.take()
            topics.append(await _look_up(context, requested, turns, create=may_create))
    if body.include_topic_authorized_operations:
        for topic in topics:
            if topic.error_code == ErrorCode.NONE:
                topic.topic_authorized_operations = TOPIC_OPERATIONS
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
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    return response


async def _look_up(
    context: RequestContext,
    requested: MetadataRequestTopic,
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
        return await _metadata_topic(services.node_id, existing, turns)
    name = requested.name or ""
    topic = services.topic(name)
    if topic is None:
        try:
            services.metadata_service.check_name(name)
            if not (create and services.settings.auto_create_topics):
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                return MetadataResponseTopic(error_code=code, name=name)
            if name == OFFSETS_TOPIC:
                code = await context.wait_offsets_topic()
                topic = services.topics.get(name)
                if topic is None:
                    return MetadataResponseTopic(error_code=code, name=name)
            else:
                topic = await services.metadata_service.ensure(name)
        except TopicError as error:
            return MetadataResponseTopic(error_code=error.code, name=name)
        except StorageError as error:
            return MetadataResponseTopic(error_code=code_of(error), name=name)
    return await _metadata_topic(services.node_id, topic, turns)


async def _metadata_topic(
    node_id: int, topic: Topic | ViewTopic, turns: Turns
) -> MetadataResponseTopic:
    here = [node_id]
    served: Iterable[tuple[int, Partition | ViewPartition]] = topic.partitions.items()
    described = MetadataResponseTopic(
        name=topic.name, topic_id=topic.topic_id, is_internal=topic.is_internal
    )
    offline = sorted(topic.offline)
    for index, partition in sorted(served):
        await turns.take()
        described.partitions.append(
            MetadataResponsePartition(
                partition_index=index,
                leader_id=node_id,
                leader_epoch=partition.log.leader_epoch,
                replica_nodes=here,
                isr_nodes=here,
            )
        )
    for index in offline:
        await turns.take()
        described.partitions.append(
            MetadataResponsePartition(
                error_code=ErrorCode.LEADER_NOT_AVAILABLE,
                partition_index=index,
                leader_id=-1,
                replica_nodes=here,
                offline_replicas=here,
            )
        )
    return described


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
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    return response


async def describe_topic_partitions(
    context: RequestContext, _header: RequestHeader, body: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """Describe topics page by page (KIP-966), in the order of names, from the cursor on."""
    services = context.services
    turns = Turns()
    names = list({topic.name async for topic in turns.over(body.topics)})
    if not names:
        names = [topic.name for topic in (*services.topics, *services.views)]
    first_index = 0
    if body.cursor is not None:
        names = [name async for name in turns.over(names) if name >= body.cursor.topic_name]
        if body.cursor.topic_name in names:
            first_index = max(body.cursor.partition_index, 0)
    heapq.heapify(names)  # a page needs the first of them only
    remaining = max(1, min(body.response_partition_limit, PARTITIONS_PER_ANSWER_MAX))
    response = DescribeTopicPartitionsResponse(next_cursor=None)
    while names:
        await turns.take()
        name = heapq.heappop(names)
        topic = services.topic(name)
        if topic is None:
            response.topics.append(_unknown_topic(name))
            continue
        described = await _described_topic(services.node_id, topic, turns)
        partitions = [p for p in described.partitions if p.partition_index >= first_index]
        first_index = 0
        described.partitions = partitions[:remaining]
        response.topics.append(described)
        if len(partitions) > remaining:
            response.next_cursor = DescribeTopicPartitionsResponseCursor(
                topic_name=name, partition_index=partitions[remaining].partition_index
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


def _unknown_topic(name: str) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name
    )


async def _described_topic(
    node_id: int, topic: Topic | ViewTopic, turns: Turns
) -> DescribeTopicPartitionsResponseTopic:
    """Return the row of Metadata with empty lists of eligible leaders (null makes clients fail)."""
    metadata_response_topic = await _metadata_topic(node_id, topic, turns)
    described = DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        topic_authorized_operations=TOPIC_OPERATIONS,
    )
    for partition in sorted(metadata_response_topic.partitions, key=lambda p: p.partition_index):
        await turns.take()
        described.partitions.append(
            DescribeTopicPartitionsResponsePartition(
                error_code=partition.error_code,
                partition_index=partition.partition_index,
                leader_id=partition.leader_id,
                leader_epoch=partition.leader_epoch,
                replica_nodes=partition.replica_nodes,
                isr_nodes=partition.isr_nodes,
                eligible_leader_replicas=[],
                last_known_elr=[],
                offline_replicas=partition.offline_replicas,
            )
        )
    return described


async def describe_log_dirs(
    context: RequestContext, _header: RequestHeader, body: DescribeLogDirsRequest
) -> DescribeLogDirsResponse:
    """Return the disk use of partitions, by data directory."""
    services, turns = context.services, Turns()
    requested: set[tuple[str, int]] | None = None
    if body.topics is not None:
        requested = set()
        for topic in body.topics:
            await turns.take()
            for index in topic.partitions:
                await turns.take()
                requested.add((topic.topic, index))
    by_directory: dict[str, dict[str, list[Partition]]] = defaultdict(lambda: defaultdict(list))
    for partition in services.topics.partitions():
        await turns.take()
        if requested is None or partition.partition in requested:
            home = os.path.dirname(partition.log.directory)
            by_directory[home][partition.partition.topic].append(partition)
    results = []
    for directory in services.manager.directories:
        if not directory.is_online:
            results.append(
                DescribeLogDirsResponseDirectory(
                    error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=directory.path
                )
            )
            continue
        total = await asyncio.to_thread(services.env.total_bytes, directory.path)
        free = await asyncio.to_thread(services.env.free_bytes, directory.path)
        topics = []
        for name, partitions in by_directory[directory.path].items():
            topics.append(await _log_dir_topic(name, partitions, turns))
        results.append(
            DescribeLogDirsResponseDirectory(
                log_dir=directory.path,
                topics=topics,
                total_bytes=total,
                usable_bytes=free,
            )
        )
    return DescribeLogDirsResponse(results=results)


async def _log_dir_topic(
    name: str, partitions: list[Partition], turns: Turns
) -> DescribeLogDirsResponseTopic:
    described = DescribeLogDirsResponseTopic(name=name)
    for partition in partitions:
        await turns.take()
        described.partitions.append(
            DescribeLogDirsResponsePartition(
                partition_index=partition.partition.partition,
                partition_size=partition.log.size_bytes,
            )
        )
    return described
