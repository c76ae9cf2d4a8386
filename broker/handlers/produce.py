"""Produce: checks batches, appends them, acknowledges them.

The common request, with one partition and nothing to wait for, is answered without a coroutine. A
request waits for an fsync (`varve.flush.on.ack`) or for a thread that unpacks compressed records: a
few kilobytes may unpack to the topic's limit. The frame stays valid meanwhile, because the
connection is muted. A request of many partitions is decoded in slices, and its batches are appended
in turns.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, NamedTuple

from broker.loop_turns import Turns, run_in_turns
from broker.network.connection import CloseConnectionError, Response
from broker.network.request_context import RequestContext, Services
from broker.topics.partition import OfflinePartitionError, Partition
from broker.topics.topics import TopicError
from broker.views.views import READ_ONLY, ViewPartition
from config.topic_keys import TopicConfig
from config.topic_names import INTERNAL_TOPICS
from protocol.api import ApiKey
from protocol.codec import RequestHeader, read_header
from protocol.errors import ErrorCode, SlicesNeededError, code_of
from protocol.produce_codec import (
    PartitionRecords,
    ProducedPartition,
    ProduceRequest,
    TopicRef,
    decode_produce,
    decode_produce_sliced,
    encode_produce_response_sliced,
    encode_produced,
)
from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    InvalidProducerEpochError,
    InvalidRecordError,
    OutOfOrderSequenceError,
    StorageError,
    UnsupportedMagicError,
)
from storage.format.batch import BatchHeader
from storage.format.batch import read_header as read_batch_header
from storage.format.recompression import needs_recompression, recompress
from storage.format.validation import (
    check_produced,
    check_records,
    check_size,
    needs_record_check,
    needs_size_check,
)
from storage.model import AppendInfo

LEGAL_ACKS: Final = (-1, 0, 1)  # all, none, leader; on one node, all is the leader


def produce(
    context: RequestContext, _version: int, frame: memoryview
) -> Response | Awaitable[Response]:
    """Answer a Produce request, versions 3-13. Raises ProtocolError, CloseConnectionError."""
    header = read_header(frame)
    try:
        request = decode_produce(header, frame)
    except SlicesNeededError:
        return _produce_sliced(context.services, header, frame)
    topics = request.topics
    if len(topics) == 1 and len(topics[0][1]) == 1 and request.transactional_id is None:
        name, partitions = topics[0]
        produced = _produce_one(context.services, header, request.acks, name, partitions[0])
        if isinstance(produced, ProducedPartition):
            if request.acks == 0:
                _check_unanswered(produced)
                return None
            return encode_produced(header.api_version, header.correlation_id, name, produced)
        return _answer_one(header, request.acks, name, produced)
    return _answer_all(context.services, header, request)


async def _answer_one(
    header: RequestHeader, acks: int, name: TopicRef, waiting: Awaitable[ProducedPartition]
) -> Response:
    produced = await waiting
    if acks == 0:
        _check_unanswered(produced)
        return None
    return encode_produced(header.api_version, header.correlation_id, name, produced)


async def _produce_sliced(services: Services, header: RequestHeader, frame: memoryview) -> Response:
    """Answer a request of many rows. Raises ProtocolError, CloseConnectionError."""
    max_rows = services.limits.of(ApiKey.PRODUCE).rows
    request = await run_in_turns(decode_produce_sliced(header, frame, max_rows))
    return await _answer_all(services, header, request)


async def _answer_all(
    services: Services, header: RequestHeader, request: ProduceRequest
) -> Response:
    """Append all batches first, then wait for fsyncs and threads."""
    refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    rows: list[tuple[TopicRef, list[ProducedPartition | asyncio.Future[ProducedPartition]]]] = []
    turns = Turns()
    for name, partitions in request.topics:
        await turns.take()
        row: list[ProducedPartition | asyncio.Future[ProducedPartition]] = []
        for partition in partitions:
            await turns.take()
            if request.transactional_id is not None:
                row.append(
                    ProducedPartition(partition[0], refused, error_message="no transactions yet")
                )
                continue
            produced = _produce_one(services, header, request.acks, name, partition)
            row.append(
                produced
                if isinstance(produced, ProducedPartition)
                else asyncio.ensure_future(produced)
            )
        rows.append((name, row))
    answers: list[tuple[TopicRef, list[ProducedPartition]]] = []
    for name, row in rows:
        await turns.take()
        answer: list[ProducedPartition] = []
        for waiting in row:
            await turns.take()
            answer.append(waiting if isinstance(waiting, ProducedPartition) else await waiting)
            if request.acks == 0:
                _check_unanswered(answer[-1])
        answers.append((name, answer))
    if request.acks == 0:
        return None
    return await run_in_turns(
        encode_produce_response_sliced(header.api_version, header.correlation_id, answers)
    )


def _check_unanswered(produced: ProducedPartition) -> None:
    """Close the connection after an error with acks=0, which has no response (as Kafka does)."""
    if produced.error_code != ErrorCode.NONE:
        raise CloseConnectionError(
            f"acks=0 and error {ErrorCode(produced.error_code).name}: {produced.error_message}"
        )


def _produce_one(
    services: Services, request: RequestHeader, acks: int, name: TopicRef, item: PartitionRecords
) -> ProducedPartition | Awaitable[ProducedPartition]:
    """Check and append one batch; return a coroutine if that has to wait."""
    index, records = item
    if acks not in LEGAL_ACKS:
        return ProducedPartition(index, ErrorCode.INVALID_REQUIRED_ACKS)
    version = request.api_version
    partition = services.topics.find(name, index)
    if isinstance(partition, ErrorCode):
        if isinstance(services.views.find(name, index), ViewPartition):
            refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED  # clients do not retry it
            return ProducedPartition(index, refused, error_message=READ_ONLY)
        return ProducedPartition(index, partition)
    config = partition.log.config
    if partition.partition.topic in INTERNAL_TOPICS:
        return _refused(
            partition, index, records, ErrorCode.INVALID_TOPIC_EXCEPTION, "an internal topic"
        )
    partition.stats.produce_requests += 1
    now_ms = services.env.wall_ms()
    try:
        header = check_produced(records or _NOTHING, config, produce_version=version, now_ms=now_ms)
        assert records is not None
        checks = needs_record_check(header, config, now_ms)
        unpacks = checks or needs_size_check(records, header, config)
        if (header.codec and unpacks) or needs_recompression(header, config):
            batch = _Batch(index, records, header, now_ms)
            return _unpack_in_thread(services, partition, batch, acks)
        if checks:
            check_records(records, header, config, now_ms)
        info = partition.append(records, header, now_ms)
    except StorageError as error:
        return _failed(services, partition, index, records, error)
    if acks and not partition.is_acked(info):
        return _wait_flushed(services, partition, index, info)
    return _produced(partition, index, header, info)


_NOTHING: Final = memoryview(b"")


class _Batch(NamedTuple):
    """A batch between its check and its append."""

    partition_index: int
    records: memoryview
    header: BatchHeader
    now_ms: int


async def _unpack_in_thread(
    services: Services, partition: Partition, batch: _Batch, acks: int
) -> ProducedPartition:
    """Check and recompress the records as the topic requires, then append."""
    index, records, header, now_ms = batch
    try:
        config = None
        while config is not partition.log.config:  # a topic may become compacted meanwhile
            config = partition.log.config
            records = await asyncio.to_thread(_unpack, batch, config)
        header = read_batch_header(records)
        info = partition.append(records, header, now_ms)
    except StorageError as error:
        return _failed(services, partition, index, batch.records, error)
    if acks and not partition.is_acked(info):
        return await _wait_flushed(services, partition, index, info)
    return _produced(partition, index, header, info)


def _unpack(batch: _Batch, config: TopicConfig) -> memoryview:
    _, records, header, now_ms = batch
    if needs_record_check(header, config, now_ms):
        check_records(records, header, config, now_ms)
    elif needs_size_check(records, header, config):
        check_size(records, header, config)
    if needs_recompression(header, config):
        return memoryview(recompress(records, header, config))
    return records


async def _wait_flushed(
    services: Services, partition: Partition, index: int, info: AppendInfo
) -> ProducedPartition:
    services.stats.delayed_produces += 1
    try:
        await partition.wait_flushed(info.last_offset + 1)
    except (StorageError, OfflinePartitionError, TopicError) as error:
        return ProducedPartition(index, ErrorCode.KAFKA_STORAGE_ERROR, error_message=str(error))
    finally:
        services.stats.delayed_produces -= 1
    return ProducedPartition(
        index, 0, info.first_offset, info.log_append_time_ms, info.log_start_offset
    )


def _produced(
    partition: Partition, index: int, header: BatchHeader, info: AppendInfo
) -> ProducedPartition:
    if not info.duplicate:
        stats = partition.stats
        stats.messages_in += header.record_count
        stats.bytes_in += header.batch_length + 12
    return ProducedPartition(
        index, 0, info.first_offset, info.log_append_time_ms, info.log_start_offset
    )


def _refused(
    partition: Partition, index: int, records: memoryview | None, code: ErrorCode, text: str
) -> ProducedPartition:
    partition.stats.failed_produce_requests += 1
    partition.stats.bytes_rejected += len(records or b"")
    return ProducedPartition(index, code, error_message=text)


def _failed(
    services: Services,
    partition: Partition,
    index: int,
    records: memoryview | None,
    error: StorageError,
) -> ProducedPartition:
    code = code_of(error)
    services.stats.errors["Produce", code.name] += 1
    rejects = services.stats.rejects
    if isinstance(error, UnsupportedMagicError):
        rejects.invalid_magic_number += 1
    elif isinstance(error, CorruptBatchError):
        rejects.invalid_message_crc += 1
    elif isinstance(error, OutOfOrderSequenceError | InvalidProducerEpochError):
        rejects.invalid_offset_or_sequence += 1
    elif isinstance(error, InvalidRecordError) and error.batch_indexes:
        rejects.no_key_compacted_topic += 1
    elif isinstance(error, DecompressionLimitError):
        rejects.decompression_limit += 1
    refused = _refused(partition, index, records, code, str(error))
    if isinstance(error, InvalidRecordError):
        return refused._replace(
            record_errors=tuple((batch_index, error.reason) for batch_index in error.batch_indexes)
        )
    return refused
