"""Handlers of committed offsets: OffsetCommit, OffsetFetch, OffsetDelete.

The handlers check which topics exist; the coordinator decides everything else.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

from broker.event_loop.loop_turns import Turns
from broker.groups.classic.model import UNKNOWN_WAITER, CommitRequested
from broker.groups.group_log import chunks_of, offset_chunks
from broker.groups.offsets.offset_records import CommittedOffset, committed_offset
from broker.groups.offsets.offsets_store import TopicIndex
from broker.handlers.groups.offsets_to_commit import OffsetsToCommit
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestGroupTopic,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponseGroupPartition,
    OffsetFetchResponseGroupTopic,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)

TIMESTAMP_MAX = 2**63 - 1
FIRST_EPOCH_VERSION = 9  # of OffsetCommit: members of consumer groups have epochs (KIP-848)
FIRST_TOPIC_ID_VERSION = 10  # of OffsetCommit and OffsetFetch (KIP-848)
NO_ID = bytes(16)
NOTHING_COMMITTED = committed_offset(-1)

RequestedPartitions = list[tuple[str, list[int]]]
Row = TypeVar("Row", OffsetFetchResponsePartition, OffsetFetchResponseGroupPartition)


async def offset_commit(
    context: RequestContext, header: RequestHeader, body: OffsetCommitRequest
) -> OffsetCommitResponse:
    """Answer OffsetCommit 2-10, once the offsets are in the log. Version 10 uses topic ids."""
    now_ms = context.wall_ms()
    retention_ms = body.retention_time_ms  # versions 2-4; -1: the broker's setting
    expire_timestamp_ms = min(now_ms + retention_ms, TIMESTAMP_MAX) if retention_ms >= 0 else -1
    turns = Turns()
    by_id = header.api_version >= FIRST_TOPIC_ID_VERSION
    may_commit = context.may_group(Operation.READ, body.group_id)
    refusal = ErrorCode.NONE if may_commit else ErrorCode.GROUP_AUTHORIZATION_FAILED
    requested = OffsetsToCommit(context, refusal, expire_timestamp_ms, now_ms)
    for topic in body.topics:
        await turns.take()
        name = context.topic_name(topic.topic_id) if by_id else topic.name
        if name is None and may_commit:
            continue
        topic.name = name or ""
        await requested.add(topic, turns)
    errors, offsets = requested.errors, requested.offsets
    request = CommitRequested(
        UNKNOWN_WAITER,
        body.member_id,
        body.group_instance_id,
        body.generation_id_or_member_epoch,
        knows_epochs=header.api_version >= FIRST_EPOCH_VERSION,
    )
    error = ErrorCode.NONE
    # Each chunk has its own result, because the group may change meanwhile.
    for chunk in offset_chunks(offsets):
        if error is ErrorCode.NONE and requested.concern_group:
            error = await context.coordinator.offsets.commit(
                body.group_id, request, chunk, context.creator
            )
        if error is not ErrorCode.NONE:
            requested.refuse(chunk, error)
        await turns.take()
    topics = []
    for topic in body.topics:
        rows = []
        for partition in topic.partitions:
            await turns.take()
            index = partition.partition_index
            code = errors.get((topic.name, index), ErrorCode.UNKNOWN_TOPIC_ID)
            rows.append(OffsetCommitResponsePartition(partition_index=index, error_code=code))
        await turns.take()
        topics.append(
            OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=rows)
        )
    return OffsetCommitResponse(topics=topics)


async def offset_fetch(
    context: RequestContext, header: RequestHeader, body: OffsetFetchRequest
) -> OffsetFetchResponse:
    """Answer OffsetFetch 1-10. Null topics (version 2 and later) request all committed offsets.

    Version 10 uses topic ids. A deleted topic has no id, so null topics omit it. With
    `require_stable`, a partition whose offset an open transaction has committed gets
    UNSTABLE_OFFSET_COMMIT (KIP-447).
    """
    version, turns = header.api_version, Turns()
    if version >= 8:
        groups = []
        # Answer each group once, even if it is named often: it may have many offsets.
        distinct = {group.group_id: group async for group in turns.over(body.groups)}
        for group in distinct.values():
            stable = body.require_stable
            groups.append(await _fetched(context, group, version, turns, stable=stable))
            await turns.take()
        return OffsetFetchResponse(groups=groups)
    requested = None
    if body.topics is not None:
        requested = [(t.name, t.partition_indexes) async for t in turns.over(body.topics)]
    error, offsets = context.coordinator.offsets.fetch(body.group_id)
    if not context.may_group(Operation.DESCRIBE, body.group_id):
        error, offsets = ErrorCode.GROUP_AUTHORIZATION_FAILED, {}
    if error is not ErrorCode.NONE and version >= 2:
        return OffsetFetchResponse(error_code=error)
    response = OffsetFetchResponse()
    for topic, partitions in await _select(context, offsets, requested, turns):
        row_error = error or _topic_error(context, topic)
        rows = await _rows(OffsetFetchResponsePartition, partitions, row_error, turns)
        if body.require_stable and row_error is ErrorCode.NONE:
            await _show_stable(context, body.group_id, topic, rows, turns)
        await turns.take()
        response.topics.append(OffsetFetchResponseTopic(name=topic, partitions=rows))
    return response


def _topic_error(context: RequestContext, topic: str) -> ErrorCode:
    if context.may_topic(Operation.DESCRIBE, topic):
        return ErrorCode.NONE
    return ErrorCode.TOPIC_AUTHORIZATION_FAILED


async def _fetched(
    context: RequestContext,
    group: OffsetFetchRequestGroup,
    version: int,
    turns: Turns,
    *,
    stable: bool,
) -> OffsetFetchResponseGroup:
    if not context.may_group(Operation.DESCRIBE, group.group_id):
        return OffsetFetchResponseGroup(
            group_id=group.group_id, error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED
        )
    error = context.coordinator.offsets.fetch_error(
        group.group_id, group.member_id, group.member_epoch
    )
    if error is not ErrorCode.NONE:
        return OffsetFetchResponseGroup(group_id=group.group_id, error_code=error)
    if version >= FIRST_TOPIC_ID_VERSION:
        return await _group_by_id(context, group, turns, stable=stable)
    requested = await _requested_partitions(group.topics, turns)
    return await _fetched_group(context, group.group_id, requested, turns, stable=stable)


async def _fetched_group(
    context: RequestContext,
    group_id: str,
    requested: RequestedPartitions | None,
    turns: Turns,
    *,
    stable: bool,
) -> OffsetFetchResponseGroup:
    error, offsets = context.coordinator.offsets.fetch(group_id)
    if error is not ErrorCode.NONE:
        return OffsetFetchResponseGroup(group_id=group_id, error_code=error)
    group = OffsetFetchResponseGroup(group_id=group_id)
    for topic, partitions in await _select(context, offsets, requested, turns):
        error = _topic_error(context, topic)
        rows = await _rows(OffsetFetchResponseGroupPartition, partitions, error, turns)
        if stable and error is ErrorCode.NONE:
            await _show_stable(context, group_id, topic, rows, turns)
        await turns.take()
        group.topics.append(OffsetFetchResponseGroupTopic(name=topic, partitions=rows))
    return group


async def _requested_partitions(
    topics: list[OffsetFetchRequestGroupTopic] | None, turns: Turns
) -> RequestedPartitions | None:
    if topics is None:
        return None
    return [(topic.name, topic.partition_indexes) async for topic in turns.over(topics)]


async def _group_by_id(
    context: RequestContext, group: OffsetFetchRequestGroup, turns: Turns, *, stable: bool
) -> OffsetFetchResponseGroup:
    """Return the answer for a group in version 10, with an error for each unknown topic id."""
    topics = group.topics
    for topic in topics or ():
        await turns.take()
        topic.name = context.topic_name(topic.topic_id) or ""
    named = None
    if topics is not None:
        named = [topic async for topic in turns.over(topics) if topic.name]
    requested = await _requested_partitions(named, turns)
    response = await _fetched_group(context, group.group_id, requested, turns, stable=stable)
    if response.error_code:
        return response
    for row in response.topics:
        await turns.take()
        row.topic_id = context.topic_id(row.name) or NO_ID
    if topics is None:
        response.topics = [row for row in response.topics if row.topic_id != NO_ID]
        return response
    rows = iter(response.topics)
    response.topics = [
        next(rows) if topic.name else await _unknown_id(topic, turns) for topic in topics
    ]
    return response


async def _unknown_id(
    topic: OffsetFetchRequestGroupTopic, turns: Turns
) -> OffsetFetchResponseGroupTopic:
    rows = await _rows(
        OffsetFetchResponseGroupPartition,
        ((index, NOTHING_COMMITTED) for index in topic.partition_indexes),
        ErrorCode.UNKNOWN_TOPIC_ID,
        turns,
    )
    return OffsetFetchResponseGroupTopic(topic_id=topic.topic_id, partitions=rows)


async def _rows(
    kind: type[Row], offsets: Iterable[tuple[int, CommittedOffset]], error: ErrorCode, turns: Turns
) -> list[Row]:
    """Return a row of the response for each partition's offset; with an error, without it."""
    rows = []
    for index, value in offsets:
        await turns.take()
        offset, leader_epoch, metadata, _, _ = NOTHING_COMMITTED if error else value
        rows.append(
            kind(
                partition_index=index,
                committed_offset=offset,
                committed_leader_epoch=leader_epoch,
                metadata=metadata,
                error_code=error,
            )
        )
    return rows


async def _show_stable(
    context: RequestContext, group_id: str, topic: str, rows: Sequence[Row], turns: Turns
) -> None:
    """Replace offsets that an open transaction may change by UNSTABLE_OFFSET_COMMIT.

    Read the others again: a transaction may have ended since the row was made.
    """
    for row in rows:
        await turns.take()
        error, value = context.coordinator.offsets.fetch_stable(
            group_id, (topic, row.partition_index)
        )
        offset, leader_epoch, metadata, _, _ = value or NOTHING_COMMITTED
        row.error_code = error
        row.committed_offset, row.committed_leader_epoch = offset, leader_epoch
        row.metadata = metadata


async def _select(
    context: RequestContext,
    offsets: Mapping[TopicIndex, CommittedOffset],
    requested: RequestedPartitions | None,
    turns: Turns,
) -> list[tuple[str, list[tuple[int, CommittedOffset]]]]:
    """Return the requested offsets by topic, -1 without a commit.

    Return each partition once, even if it is named often: an offset may have much metadata.
    If None is given, return all offsets of topics that the client may describe.
    """
    chosen: dict[str, list[tuple[int, CommittedOffset]]] = {}
    if requested is None:
        for (topic, index), value in tuple(offsets.items()):  # commits go on meanwhile
            await turns.take()
            chosen.setdefault(topic, []).append((index, value))
        for topic, values in tuple(chosen.items()):
            await turns.take()
            values.sort(key=itemgetter(0))
            if not context.may_topic(Operation.DESCRIBE, topic, is_filter=True):
                del chosen[topic]
        return sorted(chosen.items(), key=itemgetter(0))
    rows = []
    selected: set[TopicIndex] = set()
    for topic, indexes in requested:
        values = []
        for index in indexes:
            await turns.take()
            if (topic, index) not in selected:
                selected.add((topic, index))
                values.append((index, offsets.get((topic, index), NOTHING_COMMITTED)))
        await turns.take()
        rows.append((topic, values))
    return rows


async def offset_delete(
    context: RequestContext, header: RequestHeader, body: OffsetDeleteRequest
) -> OffsetDeleteResponse:
    """Answer OffsetDelete 0, once the tombstones are in the log."""
    if not context.may_group(Operation.DELETE, body.group_id):
        return OffsetDeleteResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    if not body.group_id:
        return OffsetDeleteResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    existing: dict[TopicIndex, None] = {}
    errors: dict[TopicIndex, ErrorCode] = {}
    turns = Turns()
    for topic in body.topics:
        await turns.take()
        may_read = context.may_topic(Operation.READ, topic.name)
        count = context.partition_count(topic.name)
        for partition in topic.partitions:
            await turns.take()
            key = (topic.name, partition.partition_index)
            if not may_read:
                errors[key] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            elif count is None or not 0 <= partition.partition_index < count:
                errors[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                existing[key] = None
    for some in chunks_of(list(existing)):
        error, deleted = await context.coordinator.deletion.delete_offsets(body.group_id, some)
        if error is not ErrorCode.NONE:
            return OffsetDeleteResponse(error_code=error)
        errors.update(deleted)
        await turns.take()
    topics = []
    for topic in body.topics:
        rows = []
        for partition in topic.partitions:
            await turns.take()
            index = partition.partition_index
            code = errors[topic.name, index]
            rows.append(OffsetDeleteResponsePartition(partition_index=index, error_code=code))
        await turns.take()
        topics.append(OffsetDeleteResponseTopic(name=topic.name, partitions=rows))
    return OffsetDeleteResponse(topics=topics)
