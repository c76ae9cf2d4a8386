"""Handlers of committed offsets: OffsetCommit, OffsetFetch, OffsetDelete.

What they need of the broker is broker/handlers/groups.py's GroupContext. Which topics exist is
asked here, everything else is for the coordinator to say.
"""

from collections.abc import Iterable, Mapping

from broker.groups.model import CommitRequested
from broker.groups.offset_records import CommittedOffset
from broker.groups.offsets_store import TopicIndex
from broker.handlers.groups import UNKNOWN_WAITER, GroupContext
from broker.protocol.codec import RequestHeader
from broker.protocol.errors import ErrorCode
from broker.protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponseGroupPartition,
    OffsetFetchResponseGroupTopic,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)

TIMESTAMP_MAX = 2**63 - 1
NOTHING_COMMITTED = CommittedOffset(-1)

Wanted = list[tuple[str, list[int]]]


async def handle_offset_commit(
    context: GroupContext, header: RequestHeader, body: OffsetCommitRequest
) -> OffsetCommitResponse:
    """OffsetCommit 2-9; ends when the offsets are in the log."""
    now_ms = context.wall_ms()
    keeps_ms = body.retention_time_ms  # versions 2-4; -1 leaves it to the broker
    expire_timestamp_ms = min(now_ms + keeps_ms, TIMESTAMP_MAX) if keeps_ms >= 0 else -1
    errors: dict[TopicIndex, ErrorCode] = {}
    offsets: dict[TopicIndex, CommittedOffset] = {}
    for topic in body.topics:
        count = context.partition_count(topic.name)
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            errors[key] = _partition_error(context, partition, count)
            if errors[key] is ErrorCode.NONE:
                offsets[key] = CommittedOffset(
                    partition.committed_offset,
                    partition.committed_leader_epoch,
                    partition.committed_metadata or "",
                    now_ms,
                    expire_timestamp_ms,
                )
    request = CommitRequested(
        UNKNOWN_WAITER,
        body.member_id,
        body.group_instance_id,
        body.generation_id_or_member_epoch,
    )
    error = await context.coordinator.commit(body.group_id, request, offsets)
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetCommitResponsePartition(
                        partition_index=p.partition_index,
                        error_code=errors[topic.name, p.partition_index] or error,
                    )
                    for p in topic.partitions
                ],
            )
            for topic in body.topics
        ]
    )


def _partition_error(
    context: GroupContext, partition: OffsetCommitRequestPartition, count: int | None
) -> ErrorCode:
    if count is None or not 0 <= partition.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    limit = context.coordinator.settings.offset_metadata_max_bytes
    if len(partition.committed_metadata or "") > limit:
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE


def handle_offset_fetch(
    context: GroupContext, header: RequestHeader, body: OffsetFetchRequest
) -> OffsetFetchResponse:
    """OffsetFetch 1-9; null topics (version 2 and later) ask for all that is committed.

    `require_stable` is always fulfilled: without transactions no offset is ever undecided.
    """
    version = header.api_version
    if version >= 8:
        groups = []
        # Once each, however often it is named: a short name may stand for many offsets.
        for group in {group.group_id: group for group in body.groups}.values():
            wanted = None
            if group.topics is not None:
                wanted = [(t.name, t.partition_indexes) for t in group.topics]
            groups.append(_fetched_group(context, group.group_id, wanted))
        return OffsetFetchResponse(groups=groups)
    wanted = None
    if body.topics is not None:
        wanted = [(t.name, t.partition_indexes) for t in body.topics]
    error, offsets = context.coordinator.offsets(body.group_id)
    if error is not ErrorCode.NONE and version >= 2:
        return OffsetFetchResponse(error_code=error)
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponseTopic(
                name=topic,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=index,
                        committed_offset=value.offset,
                        committed_leader_epoch=value.leader_epoch,
                        metadata=value.metadata,
                        error_code=error,
                    )
                    for index, value in partitions
                ],
            )
            for topic, partitions in _select(offsets, wanted)
        ]
    )


def _fetched_group(
    context: GroupContext, group_id: str, wanted: Wanted | None
) -> OffsetFetchResponseGroup:
    error, offsets = context.coordinator.offsets(group_id)
    if error is not ErrorCode.NONE:
        return OffsetFetchResponseGroup(group_id=group_id, error_code=error)
    return OffsetFetchResponseGroup(
        group_id=group_id,
        topics=[
            OffsetFetchResponseGroupTopic(
                name=topic,
                partitions=[
                    OffsetFetchResponseGroupPartition(
                        partition_index=index,
                        committed_offset=value.offset,
                        committed_leader_epoch=value.leader_epoch,
                        metadata=value.metadata,
                    )
                    for index, value in partitions
                ],
            )
            for topic, partitions in _select(offsets, wanted)
        ],
    )


def _select(
    offsets: Mapping[TopicIndex, CommittedOffset], wanted: Wanted | None
) -> Iterable[tuple[str, list[tuple[int, CommittedOffset]]]]:
    """What was asked for, by topic; -1 where nothing was committed. None asks for all there is."""
    if wanted is None:
        everything: dict[str, list[tuple[int, CommittedOffset]]] = {}
        for (topic, index), value in sorted(offsets.items(), key=lambda item: item[0]):
            everything.setdefault(topic, []).append((index, value))
        return everything.items()
    return [
        (topic, [(index, offsets.get((topic, index), NOTHING_COMMITTED)) for index in indexes])
        for topic, indexes in wanted
    ]


async def handle_offset_delete(
    context: GroupContext, header: RequestHeader, body: OffsetDeleteRequest
) -> OffsetDeleteResponse:
    """OffsetDelete 0; ends when the tombstones are in the log."""
    known: list[TopicIndex] = []
    errors: dict[TopicIndex, ErrorCode] = {}
    for topic in body.topics:
        count = context.partition_count(topic.name)
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            if count is None or not 0 <= partition.partition_index < count:
                errors[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                known.append(key)
    error, deleted = await context.coordinator.delete_offsets(body.group_id, known)
    if error is not ErrorCode.NONE:
        return OffsetDeleteResponse(error_code=error)
    errors.update(deleted)
    return OffsetDeleteResponse(
        topics=[
            OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetDeleteResponsePartition(
                        partition_index=p.partition_index,
                        error_code=errors[topic.name, p.partition_index],
                    )
                    for p in topic.partitions
                ],
            )
            for topic in body.topics
        ]
    )
