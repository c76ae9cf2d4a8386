"""Handlers of producers and transactions: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn,
EndTxn, TxnOffsetCommit, WriteTxnMarkers, DescribeTransactions, ListTransactions,
DescribeProducers.

The handlers translate between messages and the transaction coordinator, which makes all decisions.
"""

from collections.abc import Iterable
from typing import Final

from broker.client_patterns import ClientPattern, PatternError
from broker.groups.group_log import chunks_of
from broker.groups.model import CommitRequested
from broker.groups.offset_records import CommittedOffset
from broker.groups.offsets_store import OFFSETS_TOPIC, TopicIndex
from broker.handlers.groups.context import UNKNOWN_WAITER
from broker.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, ResourceType
from broker.topics.end_transaction import append_marker, has_open_transaction
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from broker.transactions.model import Status, Transaction, TransactionVersion
from broker.transactions.state_records import TRANSACTION_TOPIC
from config.topics.names import INTERNAL_TOPICS
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnRequestTopic,
    AddPartitionsToTxnRequestTopicV3,
    AddPartitionsToTxnRequestTransaction,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResponsePartition,
    AddPartitionsToTxnResponsePartitionV3,
    AddPartitionsToTxnResponseTopic,
    AddPartitionsToTxnResponseTopicV3,
    AddPartitionsToTxnResponseTransaction,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartition,
    DescribeProducersResponseProducerState,
    DescribeProducersResponseTopic,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTransactionsResponseTopic,
    DescribeTransactionsResponseTransaction,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    ListTransactionsResponseTransaction,
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersRequestMarker,
    WriteTxnMarkersResponse,
    WriteTxnMarkersResponseMarker,
    WriteTxnMarkersResponsePartition,
    WriteTxnMarkersResponseTopic,
)
from storage.errors import StorageError
from storage.format.batch import ControlType
from storage.format.producer_state import ProducerEntry
from storage.model import TopicPartition

MAX_EPOCH: Final = 2**15 - 1
NOT_GIVEN: Final = -1  # a producer id or epoch
# The first version of each API whose clients expect PRODUCER_FENCED, not INVALID_PRODUCER_EPOCH.
FENCED_SINCE: Final = {
    "InitProducerId": 4,
    "AddPartitionsToTxn": 2,
    "AddOffsetsToTxn": 2,
    "EndTxn": 2,
}
FIRST_BATCHED_VERSION: Final = 4  # of AddPartitionsToTxn, between brokers
FIRST_V2_END: Final = 5  # EndTxn of clients that follow transaction version 2
FIRST_V2_COMMIT: Final = 5  # likewise TxnOffsetCommit
STATE_NAMES: Final = {
    status: "".join(word.capitalize() for word in status.name.split("_")) for status in Status
}


def _in_version(api: str, version: int, error: ErrorCode) -> ErrorCode:
    if error is ErrorCode.PRODUCER_FENCED and version < FENCED_SINCE[api]:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def _may_write(context: RequestContext, transactional_id: str) -> bool:
    return context.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)


async def init_producer_id(
    context: RequestContext, header: RequestHeader, body: InitProducerIdRequest
) -> InitProducerIdResponse:
    """Return a new producer id, or the next epoch of the producer's own id (KIP-360)."""
    if body.transactional_id is not None:
        if not _may_write(context, body.transactional_id):
            return InitProducerIdResponse(
                error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            )
        return await _init_transactional(context, header.api_version, body)
    if not context.may_cluster(Operation.IDEMPOTENT_WRITE, is_filter=True) and not (
        context.may_some(Operation.WRITE, ResourceType.TOPIC)
    ):
        return InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if body.producer_id >= 0 and 0 <= body.producer_epoch < MAX_EPOCH:
        return InitProducerIdResponse(
            producer_id=body.producer_id, producer_epoch=body.producer_epoch + 1
        )
    try:
        producer_id = await context.services.producer_ids.take()
    except StorageError as error:
        return InitProducerIdResponse(error_code=code_of(error))
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


async def _init_transactional(
    context: RequestContext, version: int, body: InitProducerIdRequest
) -> InitProducerIdResponse:
    assert body.transactional_id is not None
    has_id, has_epoch = body.producer_id != NOT_GIVEN, body.producer_epoch != NOT_GIVEN
    if not body.transactional_id or has_id != has_epoch:
        return InitProducerIdResponse(error_code=ErrorCode.INVALID_REQUEST)
    error = await context.wait_transaction_topic()
    if error is not ErrorCode.NONE:
        return InitProducerIdResponse(error_code=error)
    expected = Producer(body.producer_id, body.producer_epoch) if has_id else None
    answer = await context.transactions.init_producer(
        body.transactional_id, body.transaction_timeout_ms, expected, context.creator
    )
    if answer.error is not ErrorCode.NONE:
        error = _in_version("InitProducerId", version, answer.error)
        return InitProducerIdResponse(error_code=error)
    assert answer.producer is not None
    return InitProducerIdResponse(
        producer_id=answer.producer.producer_id, producer_epoch=answer.producer.epoch
    )


# Partitions of a transaction ------------------------------------------------------------------


async def add_partitions_to_txn(
    context: RequestContext, header: RequestHeader, body: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    """Answer AddPartitionsToTxn 0-5. Versions 4 and 5 have several transactions (KIP-890)."""
    response, turns = AddPartitionsToTxnResponse(), Turns()
    if header.api_version >= FIRST_BATCHED_VERSION:
        if not context.may_cluster(Operation.CLUSTER_ACTION):
            response.error_code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            return response
        async for transaction in turns.over(body.transactions):
            row = await _add_batched(context, transaction, header.api_version, turns)
            response.results_by_transaction.append(row)
        return response
    errors = await _add_partitions(
        context,
        body.v3_and_below_transactional_id,
        Producer(body.v3_and_below_producer_id, body.v3_and_below_producer_epoch),
        body.v3_and_below_topics,
        header.api_version,
        turns=turns,
    )
    async for topic in turns.over(body.v3_and_below_topics):
        rows = []
        for index in topic.partitions:
            await turns.take()
            code = errors[TopicPartition(topic.name, index)]
            rows.append(
                AddPartitionsToTxnResponsePartitionV3(
                    partition_index=index, partition_error_code=code
                )
            )
        response.results_by_topic_v3_and_below.append(
            AddPartitionsToTxnResponseTopicV3(name=topic.name, results_by_partition=rows)
        )
    return response


async def _add_batched(
    context: RequestContext,
    transaction: AddPartitionsToTxnRequestTransaction,
    version: int,
    turns: Turns,
) -> AddPartitionsToTxnResponseTransaction:
    producer = Producer(transaction.producer_id, transaction.producer_epoch)
    transactional_id = transaction.transactional_id
    errors: dict[TopicPartition, ErrorCode] = {}
    if not transaction.verify_only:
        errors = await _add_partitions(
            context, transactional_id, producer, transaction.topics, version, turns=turns
        )
    response = AddPartitionsToTxnResponseTransaction(transactional_id=transactional_id)
    async for topic in turns.over(transaction.topics):
        rows = []
        for index in topic.partitions:
            await turns.take()
            partition = TopicPartition(topic.name, index)
            code = (
                context.transactions.produce_error(transactional_id, producer, partition)
                if transaction.verify_only
                else errors[partition]
            )
            rows.append(
                AddPartitionsToTxnResponsePartition(
                    partition_index=index, partition_error_code=code
                )
            )
        response.topic_results.append(
            AddPartitionsToTxnResponseTopic(name=topic.name, results_by_partition=rows)
        )
    return response


async def _add_partitions(
    context: RequestContext,
    transactional_id: str,
    producer: Producer,
    topics: Iterable[AddPartitionsToTxnRequestTopic | AddPartitionsToTxnRequestTopicV3],
    version: int,
    *,
    turns: Turns,
) -> dict[TopicPartition, ErrorCode]:
    """Add all partitions or, if one of them cannot be added, none."""
    errors: dict[TopicPartition, ErrorCode] = {}
    batched = version >= FIRST_BATCHED_VERSION  # from brokers: they have checked permissions
    refused = not batched and not _may_write(context, transactional_id)
    async for topic in turns.over(topics):
        may_write = batched or refused or context.may_topic(Operation.WRITE, topic.name)
        count = context.services.topics.get(topic.name)
        for index in topic.partitions:
            await turns.take()
            error = ErrorCode.NONE
            if refused:
                error = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            elif topic.name in INTERNAL_TOPICS or not may_write:
                error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            elif count is None or not 0 <= index < count.partition_count:
                error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            errors[TopicPartition(topic.name, index)] = error
    if any(errors.values()):
        async for partition in turns.over(tuple(errors)):
            errors[partition] = errors[partition] or ErrorCode.OPERATION_NOT_ATTEMPTED
        return errors
    error = await context.transactions.add_partitions(
        transactional_id,
        producer,
        frozenset(errors),
        TransactionVersion.V2 if batched else TransactionVersion.V0,
    )
    return dict.fromkeys(errors, _in_version("AddPartitionsToTxn", version, error))


async def add_offsets_to_txn(
    context: RequestContext, header: RequestHeader, body: AddOffsetsToTxnRequest
) -> AddOffsetsToTxnResponse:
    """AddOffsetsToTxn 0-4: add the partition that stores the offsets of a group."""
    refusal = _group_refusal(context, body.transactional_id, body.group_id)
    if refusal is not ErrorCode.NONE:
        return AddOffsetsToTxnResponse(error_code=refusal)
    error = await context.wait_offsets_topic()
    if error is ErrorCode.NONE:
        error = await context.transactions.add_partitions(
            body.transactional_id,
            Producer(body.producer_id, body.producer_epoch),
            frozenset((_offsets_partition(context, body.group_id),)),
        )
    error = _in_version("AddOffsetsToTxn", header.api_version, error)
    return AddOffsetsToTxnResponse(error_code=error)


def _group_refusal(context: RequestContext, transactional_id: str, group_id: str) -> ErrorCode:
    """Return why the client may not commit offsets of a group in a transaction, or NONE."""
    if not _may_write(context, transactional_id):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if not context.may(Operation.READ, ResourceType.GROUP, group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    return ErrorCode.NONE


def _offsets_partition(context: RequestContext, group_id: str) -> TopicPartition:
    return TopicPartition(OFFSETS_TOPIC, context.coordinator.partition_of(group_id))


async def end_txn(
    context: RequestContext, header: RequestHeader, body: EndTxnRequest
) -> EndTxnResponse:
    """Answer EndTxn 0-5, once the decision is in the log. Version 5 returns the next epoch."""
    is_v2 = header.api_version >= FIRST_V2_END
    if not _may_write(context, body.transactional_id):
        return EndTxnResponse(error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    answer = await context.transactions.end(
        body.transactional_id,
        Producer(body.producer_id, body.producer_epoch),
        commit=body.committed,
        client_version=TransactionVersion.V2 if is_v2 else TransactionVersion.V0,
    )
    error = _in_version("EndTxn", header.api_version, answer.error)
    response = EndTxnResponse(error_code=error)
    if is_v2 and error is ErrorCode.NONE and answer.producer is not None:
        response.producer_id = answer.producer.producer_id
        response.producer_epoch = answer.producer.epoch
    return response


# Offsets --------------------------------------------------------------------------------------


async def txn_offset_commit(
    context: RequestContext, header: RequestHeader, body: TxnOffsetCommitRequest
) -> TxnOffsetCommitResponse:
    """Answer TxnOffsetCommit 0-5. Version 5 adds the group to the transaction (KIP-890)."""
    now_ms, turns = context.wall_ms(), Turns()
    errors: dict[TopicIndex, ErrorCode] = {}
    offsets: dict[TopicIndex, CommittedOffset] = {}
    refusal = _group_refusal(context, body.transactional_id, body.group_id)
    async for topic in turns.over(body.topics):
        count = context.partition_count(topic.name)
        denied = refusal
        if refusal is ErrorCode.NONE and not context.may_topic(Operation.READ, topic.name):
            denied = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        for partition in topic.partitions:
            await turns.take()
            key = (topic.name, partition.partition_index)
            errors[key] = denied or _offset_error(context, partition, count)
            if errors[key] is ErrorCode.NONE:
                offsets[key] = CommittedOffset(
                    partition.committed_offset,
                    partition.committed_leader_epoch,
                    partition.committed_metadata or "",
                    now_ms,
                    -1,
                )
    error = ErrorCode.NONE
    if offsets and header.api_version >= FIRST_V2_COMMIT:
        error = await _add_group(context, body)
    for chunk in chunks_of(list(offsets)):
        if error is ErrorCode.NONE and chunk:
            error = await _commit(context, body, {key: offsets[key] for key in chunk})
        if error is not ErrorCode.NONE:
            errors.update(dict.fromkeys(chunk, error))
        await turns.take()
    response = TxnOffsetCommitResponse()
    async for topic in turns.over(body.topics):
        rows = []
        for partition in topic.partitions:
            await turns.take()
            index = partition.partition_index
            rows.append(
                TxnOffsetCommitResponsePartition(
                    partition_index=index, error_code=errors[topic.name, index]
                )
            )
        response.topics.append(TxnOffsetCommitResponseTopic(name=topic.name, partitions=rows))
    return response


def _offset_error(
    context: RequestContext, partition: TxnOffsetCommitRequestPartition, count: int | None
) -> ErrorCode:
    if count is None or not 0 <= partition.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    limit = context.coordinator.settings.offset_metadata_max_bytes
    if len(partition.committed_metadata or "") > limit:
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE


async def _add_group(context: RequestContext, body: TxnOffsetCommitRequest) -> ErrorCode:
    error = await context.wait_offsets_topic()
    if error is not ErrorCode.NONE:
        return error
    return await context.transactions.add_partitions(
        body.transactional_id,
        Producer(body.producer_id, body.producer_epoch),
        frozenset((_offsets_partition(context, body.group_id),)),
        TransactionVersion.V2,
    )


async def _commit(
    context: RequestContext,
    body: TxnOffsetCommitRequest,
    offsets: dict[TopicIndex, CommittedOffset],
) -> ErrorCode:
    producer = Producer(body.producer_id, body.producer_epoch)
    # No other task runs between this check and the append: the transaction cannot end meanwhile.
    error = context.transactions.produce_error(
        body.transactional_id, producer, _offsets_partition(context, body.group_id)
    )
    if error is ErrorCode.CONCURRENT_TRANSACTIONS:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE  # as in Kafka; clients repeat the request
    if error is not ErrorCode.NONE:
        return error
    request = CommitRequested(
        UNKNOWN_WAITER, body.member_id, body.group_instance_id, body.generation_id
    )
    return await context.coordinator.offsets.commit_in_transaction(
        body.group_id, request, offsets, producer, context.creator
    )


# Markers --------------------------------------------------------------------------------------


async def write_txn_markers(
    context: RequestContext, _header: RequestHeader, body: WriteTxnMarkersRequest
) -> WriteTxnMarkersResponse:
    """WriteTxnMarkers 1-2: what `kafka-transactions abort` sends for a hanging transaction."""
    response, turns = WriteTxnMarkersResponse(), Turns()
    may_write = context.may_cluster(Operation.ALTER, is_filter=True) or context.may_cluster(
        Operation.CLUSTER_ACTION
    )
    async for marker in turns.over(body.markers):
        row = WriteTxnMarkersResponseMarker(producer_id=marker.producer_id)
        async for topic in turns.over(marker.topics):
            rows = []
            for index in topic.partition_indexes:
                await turns.take()
                error = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
                if may_write:
                    partition = TopicPartition(topic.name, index)
                    error = await _write_marker(context, marker, partition)
                rows.append(
                    WriteTxnMarkersResponsePartition(partition_index=index, error_code=error)
                )
            row.topics.append(WriteTxnMarkersResponseTopic(name=topic.name, partitions=rows))
        response.markers.append(row)
    return response


async def _write_marker(
    context: RequestContext, marker: WriteTxnMarkersRequestMarker, partition: TopicPartition
) -> ErrorCode:
    served = context.services.topics.find(*partition)
    if isinstance(served, ErrorCode):
        return served
    is_offsets = partition.topic == OFFSETS_TOPIC
    if is_offsets and context.coordinator.offsets.is_loading_partition(partition.partition):
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    entry = served.log.producers.states.producer(marker.producer_id)
    if entry is not None:
        if marker.producer_epoch < entry.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if 0 <= marker.coordinator_epoch < entry.coordinator_epoch:
            return ErrorCode.TRANSACTION_COORDINATOR_FENCED
    if not has_open_transaction(served, marker.producer_id):
        return ErrorCode.NONE  # the marker is there already
    kind = ControlType.COMMIT if marker.transaction_result else ControlType.ABORT
    producer = Producer(marker.producer_id, marker.producer_epoch)
    try:
        append_marker(served, producer, kind, context.wall_ms())
        await served.flush()
    except StorageError as error:
        return code_of(error)
    if is_offsets:
        context.coordinator.offsets.end_transaction(
            partition.partition, marker.producer_id, commit=marker.transaction_result
        )
    return ErrorCode.NONE


# Descriptions ---------------------------------------------------------------------------------


async def describe_transactions(
    context: RequestContext, _header: RequestHeader, body: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    """DescribeTransactions 0: the state of each transactional id."""
    response, turns = DescribeTransactionsResponse(), Turns()
    for transactional_id in dict.fromkeys(body.transactional_ids):
        await turns.take()
        row = DescribeTransactionsResponseTransaction(transactional_id=transactional_id)
        response.transaction_states.append(row)
        if not context.may(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            row.error_code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            continue
        if not _has_transactions(context):
            row.error_code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            continue
        row.error_code, transaction = context.transactions.transaction(transactional_id)
        if transaction is None:
            continue
        row.transaction_state = STATE_NAMES[transaction.status]
        row.transaction_timeout_ms = transaction.timeout_ms
        row.transaction_start_time_ms = transaction.start_ms
        row.producer_id = transaction.producer_id
        row.producer_epoch = transaction.producer_epoch
        topics: dict[str, list[int]] = {}
        async for topic, index in turns.over(transaction.partitions):
            topics.setdefault(topic, []).append(index)
        async for topic in turns.over(sorted(topics)):
            if context.may_topic(Operation.DESCRIBE, topic, is_filter=True):
                row.topics.append(
                    DescribeTransactionsResponseTopic(topic=topic, partitions=sorted(topics[topic]))
                )
    return response


def _has_transactions(context: RequestContext) -> bool:
    return context.services.topics.get(TRANSACTION_TOPIC) is not None


async def list_transactions(
    context: RequestContext, _header: RequestHeader, body: ListTransactionsRequest
) -> ListTransactionsResponse:
    """ListTransactions 0-2: filter by state, producer, duration and pattern of the id."""
    response = ListTransactionsResponse()
    statuses = {name: status for status, name in STATE_NAMES.items()}
    response.unknown_state_filters = [name for name in body.state_filters if name not in statuses]
    pattern = None
    if body.transactional_id_pattern:
        try:
            pattern = ClientPattern(body.transactional_id_pattern)
        except PatternError:
            response.error_code = ErrorCode.INVALID_REGULAR_EXPRESSION
            return response
    if not _has_transactions(context):
        return response
    if context.transactions.is_loading:
        response.error_code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        return response
    producer_ids, states = frozenset(body.producer_id_filters), frozenset(body.state_filters)
    now_ms, turns = context.wall_ms(), Turns()

    def is_listed(transaction: Transaction) -> bool:
        duration_ms = now_ms - transaction.start_ms
        return (
            (not producer_ids or transaction.producer_id in producer_ids)
            and (not states or STATE_NAMES[transaction.status] in states)
            and not 0 <= duration_ms <= body.duration_filter
            and context.may(
                Operation.DESCRIBE,
                ResourceType.TRANSACTIONAL_ID,
                transaction.transactional_id,
                is_filter=True,
            )
            # Last: the time of the answer must not depend on ids that the client may not see.
            and (pattern is None or pattern.matches(transaction.transactional_id))
        )

    for transaction in context.transactions.transactions():
        await turns.take()
        if is_listed(transaction):
            response.transaction_states.append(
                ListTransactionsResponseTransaction(
                    transactional_id=transaction.transactional_id,
                    producer_id=transaction.producer_id,
                    transaction_state=STATE_NAMES[transaction.status],
                )
            )
    return response


async def describe_producers(
    context: RequestContext, _header: RequestHeader, body: DescribeProducersRequest
) -> DescribeProducersResponse:
    """List the idempotent and transactional producers of each partition (KIP-664).

    Each partition once, however often it is named: a few bytes may stand for many producers.
    """
    response, turns = DescribeProducersResponse(), Turns()
    requested: dict[str, dict[int, None]] = {}
    for topic in body.topics:
        await turns.take()
        indexes = requested.setdefault(topic.name, {})
        for index in topic.partition_indexes:
            await turns.take()
            indexes[index] = None
    for name, indexes in requested.items():
        rows = []
        may_read = context.may_topic(Operation.READ, name)
        for index in indexes:
            await turns.take()
            partition: Partition | ErrorCode = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            if may_read:
                partition = context.services.topics.find(name, index)
            row = DescribeProducersResponsePartition(partition_index=index)
            if isinstance(partition, ErrorCode):
                row.error_code = partition
            else:
                for producer in partition.log.producers.states.producers:
                    await turns.take()
                    row.active_producers.append(_described_producer(producer))
            rows.append(row)
        await turns.take()
        response.topics.append(DescribeProducersResponseTopic(name=name, partitions=rows))
    return response


def _described_producer(producer: ProducerEntry) -> DescribeProducersResponseProducerState:
    first_offset = producer.transaction_first_offset
    return DescribeProducersResponseProducerState(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        last_sequence=producer.last_sequence,
        last_timestamp=producer.timestamp_ms,
        coordinator_epoch=producer.coordinator_epoch,
        current_txn_start_offset=-1 if first_offset is None else first_offset,
    )
