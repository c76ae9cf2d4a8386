"""Handlers of offsets that are committed in a transaction: AddOffsetsToTxn, TxnOffsetCommit."""

from typing import Final

from broker.event_loop.loop_turns import Turns
from broker.groups.classic.model import UNKNOWN_WAITER, CommitRequested
from broker.groups.group_log import offset_chunks
from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC, TopicIndex
from broker.handlers.groups.offsets_to_commit import OffsetsToCommit
from broker.handlers.transactions.producers import in_version, may_use
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from broker.topics.producer_ids import Producer
from broker.transactions.model import TransactionVersion
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from storage.model import TopicPartition

FIRST_V2_COMMIT: Final = 5  # TxnOffsetCommit of clients that follow transaction version 2
FIRST_ABORTABLE_VERSION: Final = 4  # the first version whose clients know TRANSACTION_ABORTABLE


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
    error = in_version("AddOffsetsToTxn", header.api_version, error)
    return AddOffsetsToTxnResponse(error_code=error)


def _group_refusal(context: RequestContext, transactional_id: str, group_id: str) -> ErrorCode:
    """Return why the client may not commit offsets of a group in a transaction, or NONE."""
    if not may_use(context, transactional_id):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if not context.may_group(Operation.READ, group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    return ErrorCode.NONE


def _offsets_partition(context: RequestContext, group_id: str) -> TopicPartition:
    return TopicPartition(OFFSETS_TOPIC, context.coordinator.partition_of(group_id))


async def txn_offset_commit(
    context: RequestContext, header: RequestHeader, body: TxnOffsetCommitRequest
) -> TxnOffsetCommitResponse:
    """Answer TxnOffsetCommit 0-5. Version 5 adds the group to the transaction (KIP-890)."""
    now_ms, turns = context.wall_ms(), Turns()
    refusal = _group_refusal(context, body.transactional_id, body.group_id)
    requested = OffsetsToCommit(context, refusal, -1, now_ms)
    async for topic in turns.over(body.topics):
        await requested.add(topic, turns)
    errors, offsets = requested.errors, requested.offsets
    error = ErrorCode.NONE
    if requested.concern_group and header.api_version >= FIRST_V2_COMMIT:
        error = await _add_group(context, body)
    for chunk in offset_chunks(offsets):
        if error is ErrorCode.NONE and requested.concern_group:
            error = await _commit(context, header.api_version, body, chunk)
        if error is not ErrorCode.NONE:
            requested.refuse(chunk, error)
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


async def _add_group(context: RequestContext, body: TxnOffsetCommitRequest) -> ErrorCode:
    error = await context.wait_offsets_topic()
    if error is not ErrorCode.NONE:
        return error
    error = await context.transactions.add_partitions(
        body.transactional_id,
        Producer(body.producer_id, body.producer_epoch),
        frozenset((_offsets_partition(context, body.group_id),)),
        TransactionVersion.V2,
    )
    return ErrorCode.INVALID_PRODUCER_EPOCH if error is ErrorCode.PRODUCER_FENCED else error


async def _commit(
    context: RequestContext,
    version: int,
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
    if error is ErrorCode.INVALID_TXN_STATE and version >= FIRST_ABORTABLE_VERSION:
        return ErrorCode.TRANSACTION_ABORTABLE
    if error is not ErrorCode.NONE:
        return error
    request = CommitRequested(
        UNKNOWN_WAITER, body.member_id, body.group_instance_id, body.generation_id
    )
    return await context.coordinator.offsets.commit_in_transaction(
        body.group_id, request, offsets, producer, context.creator
    )
