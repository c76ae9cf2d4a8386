"""Handlers with which tools find and end transactions: DescribeTransactions, ListTransactions,
DescribeProducers, WriteTxnMarkers.
"""

from typing import Final

from broker.client_patterns import ClientPattern, PatternError
from broker.event_loop.client_presence import ClientLeftError, ClientPresence
from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.network.connection import CloseConnectionError
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, ResourceType
from broker.topics.end_transaction import append_marker, has_open_transaction
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from broker.transactions.model import Status, Transaction
from broker.transactions.state_records import TRANSACTION_TOPIC
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersResponsePartition,
    DescribeProducersResponseProducerState,
    DescribeProducersResponseTopic,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTransactionsResponseTopic,
    DescribeTransactionsResponseTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
    ListTransactionsResponseTransaction,
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

STATE_NAMES: Final = {
    status: "".join(word.capitalize() for word in status.name.split("_")) for status in Status
}


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
    """ListTransactions 0-2: filter by state, producer, duration and pattern of the id.

    Raises CloseConnectionError if the client leaves during a search with a pattern.
    """
    response = ListTransactionsResponse()
    statuses = {name: status for status, name in STATE_NAMES.items()}
    response.unknown_state_filters = [name for name in body.state_filters if name not in statuses]
    pattern = None
    if body.transactional_id_pattern:
        await yield_to_loop()  # a client compiles one expression in a round of the loop
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

    presence = ClientPresence(context.has_left)
    async for transaction in turns.over(context.transactions.transactions()):
        try:
            if pattern is not None:
                presence.check()
            listed = is_listed(transaction)
        except ClientLeftError as error:
            raise CloseConnectionError(str(error)) from error
        except PatternError:
            return ListTransactionsResponse(error_code=ErrorCode.INVALID_REGULAR_EXPRESSION)
        if listed:
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


async def write_txn_markers(
    context: RequestContext, _header: RequestHeader, body: WriteTxnMarkersRequest
) -> WriteTxnMarkersResponse:
    """WriteTxnMarkers 1-2: what `kafka-transactions abort` sends for a hanging transaction."""
    response, turns = WriteTxnMarkersResponse(), Turns()
    may_write = context.may_write_markers()
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
        await append_marker(served, producer, kind, context.wall_ms())
        await served.flush()
    except StorageError as error:
        return code_of(error)
    if is_offsets:
        context.coordinator.offsets.end_transaction(
            partition.partition, marker.producer_id, commit=marker.transaction_result
        )
    return ErrorCode.NONE
