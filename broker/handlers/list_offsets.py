"""Handlers of ListOffsets and OffsetForLeaderEpoch: offsets by timestamp and by leader epoch."""

from collections import Counter, defaultdict
from functools import partial
from typing import Final

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns
from broker.event_loop.unpack_threads import may_be_large, measured
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from broker.topics.partition import Partition
from broker.views.view_partition import ViewPartition
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsResponse,
    ListOffsetsResponsePartition,
    ListOffsetsResponseTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochRequestPartition,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderEpochResponsePartition,
    OffsetForLeaderEpochResponseTopic,
)
from storage.errors import StorageError
from storage.log.log_reader import LogReader
from storage.model import TimestampOffset, TopicPartition
from storage.segments.index_load import IndexLoad
from storage.segments.timestamp_lookup import HeaderScan, Search, TimestampScan
from storage.view.view_log import CompactedViewLog

# Special timestamps (KIP-79, KIP-734, KIP-405, KIP-1005).
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
# The first version of ListOffsets that knows a special timestamp.
SINCE_VERSION: Final = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
READ_COMMITTED: Final = 1


def find_partition(
    context: RequestContext, partition: TopicPartition, current_leader_epoch: int = -1
) -> Partition | ViewPartition | ErrorCode:
    """Return a readable partition, or the error (leader epochs: KIP-320)."""
    partition_or_error = context.services.readable(*partition)
    if isinstance(partition_or_error, ErrorCode):
        return partition_or_error
    return epoch_error(partition_or_error, current_leader_epoch) or partition_or_error


def epoch_error(
    partition: Partition | ViewPartition, current_leader_epoch: int
) -> ErrorCode | None:
    """Return the error for a leader epoch that is older or newer than the partition's."""
    if current_leader_epoch in (-1, partition.log.leader_epoch):
        return None
    if current_leader_epoch < partition.log.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    return ErrorCode.UNKNOWN_LEADER_EPOCH


def _reader_of(partition: Partition | ViewPartition) -> LogReader | CompactedViewLog:
    return partition.log if isinstance(partition, ViewPartition) else partition.log.reader


class ListOffsetsHandler:
    """The handler of ListOffsets."""

    def __init__(self) -> None:
        # One thread of a data directory reads headers at a time: it competes with the loop for the
        # interpreter.
        self._scanning: defaultdict[str, FairSlots] = defaultdict(partial(FairSlots, 1))
        # Batches of a data directory that are in memory. Two, because one client gets half.
        self._decoding: defaultdict[str, FairSlots] = defaultdict(partial(FairSlots, 2))

    async def list_offsets(
        self, context: RequestContext, header: RequestHeader, body: ListOffsetsRequest
    ) -> ListOffsetsResponse:
        """Return offsets by timestamp, and the first and last offsets of logs."""
        topics, turns = [], Turns()
        named: Counter[tuple[str, int]] = Counter()
        for topic in body.topics:
            await turns.take()
            for partition in topic.partitions:
                await turns.take()
                named[topic.name, partition.partition_index] += 1
        for topic in body.topics:
            partitions = []
            may_describe = context.may_topic(Operation.DESCRIBE, topic.name)
            for partition in topic.partitions:
                await turns.take()
                index = partition.partition_index
                error = ErrorCode.NONE
                if not may_describe:
                    error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                elif named[topic.name, index] > 1:  # as Kafka: each could cost a search
                    error = ErrorCode.INVALID_REQUEST
                if error is not ErrorCode.NONE:
                    partitions.append(
                        ListOffsetsResponsePartition(partition_index=index, error_code=error)
                    )
                    continue
                partitions.append(
                    await self._list_offset(
                        context, header.api_version, body.isolation_level, topic.name, partition
                    )
                )
            await turns.take()
            topics.append(ListOffsetsResponseTopic(name=topic.name, partitions=partitions))
        return ListOffsetsResponse(topics=topics)

    async def _list_offset(
        self,
        context: RequestContext,
        version: int,
        isolation_level: int,
        topic: str,
        partition: ListOffsetsRequestPartition,
    ) -> ListOffsetsResponsePartition:
        result = ListOffsetsResponsePartition(partition_index=partition.partition_index)
        if partition.timestamp < 0 and version < SINCE_VERSION.get(partition.timestamp, 1 << 15):
            result.error_code = ErrorCode.UNSUPPORTED_VERSION
            return result
        topic_partition = TopicPartition(topic, partition.partition_index)
        partition_or_error = find_partition(
            context, topic_partition, partition.current_leader_epoch
        )
        if isinstance(partition_or_error, ErrorCode):
            result.error_code = partition_or_error
            return result
        try:
            await self._fill(
                result,
                partition_or_error,
                partition.timestamp,
                committed=isolation_level == READ_COMMITTED,
                context=context,
            )
        except StorageError as error:
            result.error_code = code_of(error)
        except OSError:
            result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
        return result

    async def _fill(
        self,
        result: ListOffsetsResponsePartition,
        partition: Partition | ViewPartition,
        timestamp: int,
        *,
        committed: bool,
        context: RequestContext,
    ) -> None:
        log, reader = partition.log, _reader_of(partition)
        end = log.last_stable_offset if committed else log.high_watermark
        if timestamp == LATEST:
            result.offset, result.leader_epoch = end, log.leader_epoch
        elif timestamp in (EARLIEST, EARLIEST_LOCAL):
            result.offset = log.log_start_offset
            result.leader_epoch = reader.epoch_of(log.log_start_offset)
        elif timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
            return  # there is no tiered storage: -1
        else:
            if timestamp == MAX_TIMESTAMP:
                search = reader.search_max_timestamp()
            else:
                search = reader.search_timestamp(timestamp)
            match = await self._run_search(context, search, log.directory)
            if match is not None and match.offset < end:
                result.timestamp = match.timestamp_ms
                result.offset = match.offset
                result.leader_epoch = match.leader_epoch

    async def _run_search(
        self, context: RequestContext, search: Search, folder: str
    ) -> TimestampOffset | None:
        """Run a search in a partition folder; threads do what takes long."""
        threads = context.services.directory_threads
        directory = threads.directory_of(folder)
        try:
            step = next(search)
            while True:
                match = None
                if isinstance(step, IndexLoad):
                    await threads.run(directory, step.run)
                elif isinstance(step, HeaderScan):
                    await self._scan_headers(context, step, directory)
                else:
                    match = await self._scan_batch(context, step, directory)
                step = search.send(match)
        except StopIteration as stop:
            result: TimestampOffset | None = stop.value
            return result

    async def _scan_headers(
        self, context: RequestContext, scan: HeaderScan, directory: str
    ) -> None:
        services = context.services
        spent: list[int] = []
        async with self._scanning[directory].slot(context.client):
            try:
                await services.directory_threads.run(directory, partial(measured, scan.run, spent))
            finally:
                services.quotas.charge_thread(context.meters, sum(spent))

    async def _scan_batch(
        self, context: RequestContext, scan: TimestampScan, directory: str
    ) -> TimestampOffset | None:
        services = context.services
        async with self._decoding[directory].slot(context.client):
            batch = await services.directory_threads.run(directory, scan.read)
            return await services.unpack_threads.run(
                context.client,
                partial(scan.find, batch),
                partial(services.quotas.charge_thread, context.meters),
                is_large=may_be_large(batch.buffer, batch.header, scan.limit_bytes),
            )


async def offset_for_leader_epoch(
    context: RequestContext, _header: RequestHeader, body: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    """Return the end offset of a leader epoch (KIP-320); consumers use it to detect truncation."""
    topics, turns = [], Turns()
    is_broker = context.may_cluster(Operation.CLUSTER_ACTION, is_filter=True)
    for topic in body.topics:
        partitions = []
        may_describe = is_broker or context.may_topic(Operation.DESCRIBE, topic.topic)
        for partition in topic.partitions:
            await turns.take()
            if may_describe:
                partitions.append(_epoch_end(context, topic.topic, partition))
            else:
                denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                partitions.append(
                    OffsetForLeaderEpochResponsePartition(
                        partition=partition.partition, error_code=denied
                    )
                )
        await turns.take()
        topics.append(OffsetForLeaderEpochResponseTopic(topic=topic.topic, partitions=partitions))
    return OffsetForLeaderEpochResponse(topics=topics)


def _epoch_end(
    context: RequestContext, topic: str, partition: OffsetForLeaderEpochRequestPartition
) -> OffsetForLeaderEpochResponsePartition:
    result = OffsetForLeaderEpochResponsePartition(partition=partition.partition)
    topic_partition = TopicPartition(topic, partition.partition)
    partition_or_error = find_partition(context, topic_partition, partition.current_leader_epoch)
    if isinstance(partition_or_error, ErrorCode):
        result.error_code = partition_or_error
    else:
        reader = _reader_of(partition_or_error)
        result.leader_epoch, result.end_offset = reader.end_offset_for_epoch(partition.leader_epoch)
    return result
