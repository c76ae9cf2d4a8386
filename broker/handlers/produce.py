"""Handle Produce: check batches, append them to logs, acknowledge them.

- A request for one partition that need not wait is answered without a coroutine. This is the common
  case.
- A request waits for an fsync if `varve.flush.on.ack` is set, and for a thread if its records
  decompress to more than LOOP_UNPACKED_BYTES: a few kilobytes may decompress to the topic's limit.
- A large batch is checked in a thread and written in parts. Other batches of its partition wait
  while it is written. What decides whether and where a batch is appended happens in one step, with
  its last part, in both cases.
- The request's frame stays valid while it waits, because its connection reads nothing meanwhile.
- A request for many partitions is decoded and appended in slices, so that it does not block the
  event loop.
"""

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from broker.event_loop.directory_writer import ChangePendingError
from broker.event_loop.loop_turns import Turns, run_in_turns, run_to_end
from broker.event_loop.unpack_threads import may_be_large
from broker.logging import RateLimitedLogger
from broker.network.connection import CloseConnectionError, Response
from broker.network.request_context import RequestContext, Services
from broker.security.acls import Operation, ResourceType
from broker.topics.partition import LARGE_BATCH_BYTES, Partition
from broker.topics.producer_ids import Producer
from broker.topics.topics import TopicError
from broker.transactions.model import TransactionVersion
from broker.views.view_partition import ViewPartition
from broker.views.views import READ_ONLY
from config.topics.keys import TopicConfig
from config.topics.names import INTERNAL_TOPICS
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
    InvalidOffsetsError,
    InvalidProducerEpochError,
    InvalidRecordError,
    MissingKeyError,
    NoRoomError,
    OutOfOrderSequenceError,
    StorageError,
    UnsupportedMagicError,
)
from storage.format.batch import (
    TRANSACTIONAL,
    BatchHeader,
    correct_max_timestamp,
    stamp_log_append_time,
    unpack_header,
)
from storage.format.batch import read_header as read_batch_header
from storage.format.recompression import needs_recompression, recompress
from storage.format.validation import check_produced, check_records
from storage.log.log import LOG_APPEND_TIME_TYPE
from storage.model import AppendInfo, TopicPartition

if TYPE_CHECKING:  # it imports the compiler
    from cleaner.engine.selective.appended_keys import BatchKeys

limited_logger: Final = RateLimitedLogger(structlog.get_logger("broker.produce"))

FIRST_V2_PRODUCE: Final = 12  # the first version of clients that follow transaction version 2
FIRST_ABORTABLE_VERSION: Final = 11  # the first version whose clients know TRANSACTION_ABORTABLE
WRITE: Final = Operation.WRITE  # a look-up of an enum's member costs as much as the check
NOT_IN_TRANSACTION: Final = "the batch belongs to no open transaction of its transactional id"
# Errors of the coordinator that end soon, and that producers do not expect from a partition.
_RETRIED_LATER: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
# Decompressing as much takes 0.03 ms (lz4) to 0.2 ms (gzip); to hand a batch to a thread and back
# takes 0.1 ms. Compressed batches above a quarter of it are likely to unpack to more.
LOOP_UNPACKED_BYTES: Final = 64 << 10
LOOP_COMPRESSED_BYTES: Final = LOOP_UNPACKED_BYTES // 4
LEGAL_ACKS: Final = (-1, 0, 1)  # all, none, leader; on one node, all is the leader


def produce(
    context: RequestContext, _version: int, frame: memoryview
) -> Response | Awaitable[Response]:
    """Answer a Produce request, versions 3-13. Raises ProtocolError, CloseConnectionError."""
    header = read_header(frame)
    try:
        request = decode_produce(header, frame)
    except SlicesNeededError:
        return _produce_sliced(context, header, frame)
    throttle_ms = 0
    if context.services.quotas.enforced:
        throttle_ms = _throttle(context, header, request.acks, len(frame))
    topics = request.topics
    if len(topics) == 1 and len(topics[0][1]) == 1 and request.transactional_id is None:
        name, partitions = topics[0]
        produced = _produce_one(context, header, request.acks, name, partitions[0])
        if isinstance(produced, ProducedPartition):
            if request.acks == 0:
                _check_unanswered(produced)
                return None
            return encode_produced(
                header.api_version, header.correlation_id, name, produced, throttle_ms
            )
        return _answer_one(header, request.acks, name, produced, throttle_ms)
    return _answer_all(context, header, request, throttle_ms)


async def _answer_one(
    header: RequestHeader,
    acks: int,
    name: TopicRef,
    waiting: Awaitable[ProducedPartition],
    throttle_ms: int,
) -> Response:
    produced = await waiting
    if acks == 0:
        _check_unanswered(produced)
        return None
    version, correlation_id = header.api_version, header.correlation_id
    return encode_produced(version, correlation_id, name, produced, throttle_ms)


async def _produce_sliced(
    context: RequestContext, header: RequestHeader, frame: memoryview
) -> Response:
    """Answer a request of many rows. Raises ProtocolError, CloseConnectionError."""
    services = context.services
    max_rows = services.limits.of(ApiKey.PRODUCE).rows
    request = await run_in_turns(decode_produce_sliced(header, frame, max_rows))
    throttle_ms = 0
    if services.quotas.enforced:
        throttle_ms = _throttle(context, header, request.acks, len(frame))
    return await _answer_all(context, header, request, throttle_ms)


def _throttle(context: RequestContext, header: RequestHeader, acks: int, frame_bytes: int) -> int:
    """Count the request for the client's quotas; return the throttle time of the response."""
    quotas, meters = context.services.quotas, context.find_meters(header.client_id)
    throttle_ms = quotas.charge_produce(meters, frame_bytes)
    if acks != 0:  # as in Kafka
        throttle_ms = max(throttle_ms, quotas.check_request(meters))
    return context.throttle(throttle_ms)


async def _answer_all(
    context: RequestContext, header: RequestHeader, request: ProduceRequest, throttle_ms: int
) -> Response:
    """Append all batches first, then wait for fsyncs and threads."""
    transaction, transactional_id = None, request.transactional_id
    refused = transactional_id is not None and not context.may(
        Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id
    )
    if transactional_id is not None and not refused:
        transaction = await _join_transaction(
            context, transactional_id, header.api_version, request
        )
    rows: list[tuple[TopicRef, list[ProducedPartition | asyncio.Future[ProducedPartition]]]] = []
    turns = Turns()
    for name, partitions in request.topics:
        await turns.take()
        row: list[ProducedPartition | asyncio.Future[ProducedPartition]] = []
        for partition in partitions:
            await turns.take()
            if refused:
                code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                row.append(ProducedPartition(partition[0], code))
                continue
            produced = _produce_one(
                context, header, request.acks, name, partition, transaction=transaction
            )
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
        encode_produce_response_sliced(
            header.api_version, header.correlation_id, answers, throttle_ms
        )
    )


def _check_unanswered(produced: ProducedPartition) -> None:
    """Close the connection after an error with acks=0, which has no response (as Kafka does)."""
    if produced.error_code != ErrorCode.NONE:
        raise CloseConnectionError(
            f"acks=0 and error {ErrorCode(produced.error_code).name}: {produced.error_message}"
        )


class _Transaction(NamedTuple):
    """The transaction of a request."""

    transactional_id: str
    version: int  # of the request
    added: ErrorCode  # the outcome of adding the request's partitions (version 12 and later)


async def _join_transaction(
    context: RequestContext, transactional_id: str, version: int, request: ProduceRequest
) -> _Transaction:
    """Add the partitions of a request to its transaction, as transaction version 2 has it."""
    services = context.services
    added = ErrorCode.NONE
    if version >= FIRST_V2_PRODUCE:
        partitions: dict[Producer, set[TopicPartition]] = {}
        turns = Turns()
        for name, items in request.topics:
            for index, records in items:
                await turns.take()
                partition = services.topics.find(name, index)
                producer = _transactional_producer(records)
                if producer is None or isinstance(partition, ErrorCode):
                    continue
                if not context.may_topic(Operation.WRITE, partition.partition.topic):
                    continue
                is_open = _is_in_transaction(partition, producer)
                if not is_open and partition.partition.topic not in INTERNAL_TOPICS:
                    partitions.setdefault(producer, set()).add(partition.partition)
        for producer, new in partitions.items():
            error = await services.coordinators.transactions.add_partitions(
                transactional_id, producer, frozenset(new), TransactionVersion.V2
            )
            added = added or error
    return _Transaction(transactional_id, version, added)


def _transactional_producer(records: memoryview | None) -> Producer | None:
    """Return the producer of a transactional batch; None for any other, also for a broken one."""
    try:
        header = read_batch_header(records or _NOTHING)
    except StorageError:
        return None
    return Producer(header.producer_id, header.producer_epoch) if header.is_transactional else None


def _is_in_transaction(partition: Partition, producer: Producer) -> bool:
    """Return whether the log has records of the producer's open transaction."""
    entry = partition.log.producers.states.producer(producer.producer_id)
    return (
        entry is not None
        and entry.transaction_first_offset is not None
        and entry.epoch == producer.epoch
    )


def _transaction_error(
    services: Services,
    transaction: _Transaction | None,
    partition: Partition,
    header: BatchHeader,
) -> ErrorCode:
    """Return NONE if a transactional batch may be appended now (KIP-890).

    The transaction must not end between this check and the append: there is no await between them.
    Producer ids and epochs are no secrets, so each batch has to name the transactional id that owns
    its producer id. Kafka compares them only for the first batch of a transaction in a partition.
    """
    if transaction is None:
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    producer = Producer(header.producer_id, header.producer_epoch)
    coordinator = services.coordinators.transactions
    transactional_id = transaction.transactional_id
    if _is_in_transaction(partition, producer):
        error = coordinator.producer_id_error(transactional_id, producer.producer_id)
        # As in Kafka, an open transaction continues while its coordinator is loading or offline.
        return ErrorCode.NONE if error in _RETRIED_LATER else error
    error = coordinator.produce_error(transactional_id, producer, partition.partition)
    if error is ErrorCode.INVALID_TXN_STATE and transaction.added is not ErrorCode.NONE:
        error = transaction.added
    is_v2 = transaction.version >= FIRST_V2_PRODUCE
    if error in _RETRIED_LATER or (error is ErrorCode.CONCURRENT_TRANSACTIONS and not is_v2):
        return ErrorCode.NOT_ENOUGH_REPLICAS  # as in Kafka: a code that producers retry
    if error is ErrorCode.INVALID_TXN_STATE and transaction.version >= FIRST_ABORTABLE_VERSION:
        return ErrorCode.TRANSACTION_ABORTABLE
    return ErrorCode.INVALID_PRODUCER_EPOCH if error is ErrorCode.PRODUCER_FENCED else error


def _produce_one(
    context: RequestContext,
    request: RequestHeader,
    acks: int,
    name: TopicRef,
    item: PartitionRecords,
    *,
    transaction: _Transaction | None = None,
) -> ProducedPartition | Awaitable[ProducedPartition]:
    """Check and append one batch; return a coroutine if that has to wait."""
    index, records = item
    if acks not in LEGAL_ACKS:
        return ProducedPartition(index, ErrorCode.INVALID_REQUIRED_ACKS)
    if not context.may_ref(WRITE, name):
        return ProducedPartition(index, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    services = context.services
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
    if records is not None and len(records) > LARGE_BATCH_BYTES:
        batch = _Batch(index, records, unpack_header(records), now_ms, acks)
        return _produce_large(context, partition, batch, transaction, version=version)
    try:
        header = check_produced(records or _NOTHING, config, produce_version=version)
        assert records is not None
        batch = _Batch(index, records, header, now_ms, acks)
        if not _is_checked_on_loop(partition, batch) or partition.appending.locked():
            return _append_in_turn(context, partition, batch, transaction)
        try:
            checked = check_records(
                records, header, config, now_ms, limit_bytes=LOOP_UNPACKED_BYTES
            )
        except DecompressionLimitError:
            return _append_in_turn(context, partition, batch, transaction)
        if checked.max_timestamp != header.max_timestamp:
            header = correct_max_timestamp(records, header, checked.max_timestamp)
            batch = batch._replace(header=header)
        return _append(context, partition, batch, transaction)
    except StorageError as failure:
        return _failed(services, partition, index, records, failure)


_NOTHING: Final = memoryview(b"")


class _Batch(NamedTuple):
    """A batch between its check and its append."""

    partition_index: int
    records: memoryview
    header: BatchHeader
    now_ms: int
    acks: int


def _is_checked_on_loop(partition: Partition, batch: _Batch) -> bool:
    """Return whether to check the batch at once; a thread checks and prepares any other."""
    header, config = batch.header, partition.log.config
    if needs_recompression(header, config):
        return False
    # A thread also lists the keys of compressed records.
    is_small = header.size_bytes <= LOOP_COMPRESSED_BYTES
    return header.codec == 0 or (is_small and partition.keys is None)


async def _produce_large(
    context: RequestContext,
    partition: Partition,
    batch: _Batch,
    transaction: _Transaction | None,
    *,
    version: int,
) -> ProducedPartition:
    """Check a batch whose header is not yet checked in a thread, then append it."""
    services, config = context.services, partition.log.config
    check = partial(check_produced, batch.records, config, produce_version=version)
    note_cpu = partial(services.quotas.charge_thread, context.meters)
    try:
        await services.unpack_threads.run(context.client, check, note_cpu)
    except StorageError as failure:
        return _failed(services, partition, batch.partition_index, batch.records, failure)
    return await _append_in_turn(context, partition, batch, transaction)


async def _append_in_turn(
    context: RequestContext,
    partition: Partition,
    batch: _Batch,
    transaction: _Transaction | None,
) -> ProducedPartition:
    """Prepare a batch in a thread, and append it when no large batch is being written."""
    services = context.services
    note_cpu = partial(services.quotas.charge_thread, context.meters)
    produced: ProducedPartition | Awaitable[ProducedPartition] | None = None
    try:
        while produced is None:
            config = partition.log.config
            recorded = partition.keys
            hash_key = recorded.hash_key if recorded and recorded.is_usable else None
            ready, keys = await services.unpack_threads.run(
                context.client,
                partial(_prepare, batch, config, hash_key),
                note_cpu,
                is_large=may_be_large(
                    batch.records, batch.header, config.varve_decompressed_batch_bytes
                ),
            )
            async with partition.turn_to_append(ready.records, ready.header, batch.now_ms):
                # Meanwhile a topic may become compacted, and a roll begins the keys of a segment.
                has_keys = keys is not None or recorded is partition.keys
                if has_keys and config is partition.log.config:
                    produced = _append(context, partition, ready, transaction, keys)
    except StorageError as failure:
        return _failed(services, partition, batch.partition_index, batch.records, failure)
    return produced if isinstance(produced, ProducedPartition) else await produced


def _prepare(
    batch: _Batch, config: TopicConfig, hash_key: bytes | None
) -> "tuple[_Batch, BatchKeys | None]":
    """Check and recompress the records as the topic requires.

    Return the batch as it is to be appended, and its keys if there is a hash key.
    """
    _, records, header, now_ms, _ = batch
    keys = None
    unpacked, max_timestamp = check_records(records, header, config, now_ms)
    header = correct_max_timestamp(records, header, max_timestamp)
    if hash_key is not None:
        from cleaner.engine.selective.appended_keys import list_keys

        keys = list_keys(records, unpacked, hash_key)
    if needs_recompression(header, config):
        records = memoryview(recompress(records, header, config))
    if len(records) > LARGE_BATCH_BYTES and config.message_timestamp_type == LOG_APPEND_TIME_TYPE:
        stamp_log_append_time(records, now_ms)
    return batch._replace(records=records, header=read_batch_header(records)), keys


def _append(
    context: RequestContext,
    partition: Partition,
    batch: _Batch,
    transaction: _Transaction | None,
    keys: "BatchKeys | None" = None,
) -> ProducedPartition | Awaitable[ProducedPartition]:
    """Append a checked batch and acknowledge it. Raises StorageError.

    `keys` are those of its records, if they are known already.
    """
    index, records, header, now_ms, _ = batch
    services = context.services
    in_transaction = bool(header.attributes & TRANSACTIONAL)
    if in_transaction:
        error = _transaction_error(services, transaction, partition, header)
        if error is not ErrorCode.NONE:
            return _refused(partition, index, records, error, NOT_IN_TRANSACTION)
    try:
        info = partition.append(
            records,
            header,
            now_ms,
            in_transaction=in_transaction,
            client=context.client if partition.log.config.varve_flush_on_ack else None,
        )
    except ChangePendingError as stalled:
        return _wait_appended(services, partition, batch, stalled.pending, keys)
    return _acknowledge(services, partition, batch, info, keys)


async def _wait_appended(
    services: Services,
    partition: Partition,
    batch: _Batch,
    pending: "asyncio.Future[AppendInfo]",
    keys: "BatchKeys | None",
) -> ProducedPartition:
    """Wait for an append that the disk has not finished, then acknowledge it."""
    try:
        info = await run_to_end(pending)
        produced = _acknowledge(services, partition, batch, info, keys)
    except StorageError as failure:
        return _failed(services, partition, batch.partition_index, batch.records, failure)
    return produced if isinstance(produced, ProducedPartition) else await produced


def _acknowledge(
    services: Services,
    partition: Partition,
    batch: _Batch,
    info: AppendInfo,
    keys: "BatchKeys | None",
) -> ProducedPartition | Awaitable[ProducedPartition]:
    """Count an appended batch and record its keys; return a coroutine if it waits for an fsync."""
    index, records, header, _, acks = batch
    if not info.duplicate:
        partition.stats.messages_in += header.record_count
        partition.stats.bytes_in += header.size_bytes
    partition.record_keys(records, header, info, keys)
    if acks and not partition.is_acked(info):
        return _wait_flushed(services, partition, index, info)
    return _produced(index, info)


async def _wait_flushed(
    services: Services, partition: Partition, index: int, info: AppendInfo
) -> ProducedPartition:
    services.stats.delayed_produces += 1
    try:
        await partition.wait_flushed(info.last_offset + 1)
    except (StorageError, TopicError) as error:
        return ProducedPartition(index, ErrorCode.KAFKA_STORAGE_ERROR, error_message=str(error))
    finally:
        services.stats.delayed_produces -= 1
    return _produced(index, info)


def _produced(index: int, info: AppendInfo) -> ProducedPartition:
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
    elif isinstance(
        error, InvalidOffsetsError | OutOfOrderSequenceError | InvalidProducerEpochError
    ):
        rejects.invalid_offset_or_sequence += 1
    elif isinstance(error, MissingKeyError):
        rejects.no_key_compacted_topic += 1
    elif isinstance(error, DecompressionLimitError):
        rejects.decompression_limit += 1
    elif isinstance(error, NoRoomError):
        # A producer repeats the request, and its user sees a time-out, not the reason.
        limited_logger.error(
            "records not written", partition=str(partition.partition), reason=str(error)
        )
    refused = _refused(partition, index, records, code, str(error))
    if isinstance(error, InvalidRecordError):
        refused = refused._replace(
            record_errors=tuple((batch_index, error.reason) for batch_index in error.batch_indexes)
        )
    if isinstance(error, InvalidRecordError | OutOfOrderSequenceError | InvalidProducerEpochError):
        # As in Kafka: it tells a producer whether records before these have been deleted.
        return refused._replace(log_start_offset=partition.log.log_start_offset)
    return refused
