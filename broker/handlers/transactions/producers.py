"""Handlers of InitProducerId, AddPartitionsToTxn and EndTxn."""

from collections.abc import Iterable
from typing import Final

from broker.event_loop.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, ResourceType
from broker.topics.producer_ids import Producer
from broker.transactions.model import TransactionVersion
from config.topics.names import INTERNAL_TOPICS
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
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
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from storage.errors import StorageError
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


def in_version(api: str, version: int, error: ErrorCode) -> ErrorCode:
    """Return the error that clients of this version of an API expect."""
    if error is ErrorCode.PRODUCER_FENCED and version < FENCED_SINCE[api]:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def may_use(context: RequestContext, transactional_id: str) -> bool:
    """Return whether the client may use a transactional id."""
    return context.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)


async def init_producer_id(
    context: RequestContext, header: RequestHeader, body: InitProducerIdRequest
) -> InitProducerIdResponse:
    """Return a new producer id, or the next epoch of the producer's own id (KIP-360)."""
    if body.transactional_id is not None:
        if not may_use(context, body.transactional_id):
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
        error = in_version("InitProducerId", version, answer.error)
        return InitProducerIdResponse(error_code=error)
    assert answer.producer is not None
    return InitProducerIdResponse(
        producer_id=answer.producer.producer_id, producer_epoch=answer.producer.epoch
    )


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
    refused = not batched and not may_use(context, transactional_id)
    async for topic in turns.over(topics):
        may_write = batched or refused or context.may_topic(Operation.WRITE, topic.name)
        served = context.services.topics.get(topic.name)
        for index in topic.partitions:
            await turns.take()
            error = ErrorCode.NONE
            if refused:
                error = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            elif topic.name in INTERNAL_TOPICS or not may_write:
                error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            elif served is None or not 0 <= index < served.partition_count:
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
    return dict.fromkeys(errors, in_version("AddPartitionsToTxn", version, error))


async def end_txn(
    context: RequestContext, header: RequestHeader, body: EndTxnRequest
) -> EndTxnResponse:
    """Answer EndTxn 0-5, once the decision is in the log. Version 5 returns the next epoch."""
    is_v2 = header.api_version >= FIRST_V2_END
    if not may_use(context, body.transactional_id):
        return EndTxnResponse(error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    answer = await context.transactions.end(
        body.transactional_id,
        Producer(body.producer_id, body.producer_epoch),
        commit=body.committed,
        client_version=TransactionVersion.V2 if is_v2 else TransactionVersion.V0,
    )
    error = in_version("EndTxn", header.api_version, answer.error)
    response = EndTxnResponse(error_code=error)
    if is_v2 and error is ErrorCode.NONE and answer.producer is not None:
        response.producer_id = answer.producer.producer_id
        response.producer_epoch = answer.producer.epoch
    return response
