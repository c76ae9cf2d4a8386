"""Questions about producer ids and transactions."""

from typing import Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import GROUP, TOPIC, Asked, Questions

questions: Final = Questions()


@questions.add(ApiKey.INIT_PRODUCER_ID)
def init_an_idempotent_producer(_: Asked) -> Message:
    return m.InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )


@questions.add(ApiKey.INIT_PRODUCER_ID)
def init_a_transactional_producer(asked: Asked) -> Message:
    return m.InitProducerIdRequest(
        transactional_id=f"tx-{asked.user}",
        transaction_timeout_ms=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )


@questions.add(ApiKey.ADD_PARTITIONS_TO_TXN, 3)
def add_partitions_to_a_transaction(_: Asked) -> Message:
    rows = [
        m.AddPartitionsToTxnRequestTopicV3(name=name, partitions=[0]) for name in (TOPIC, "missing")
    ]
    return m.AddPartitionsToTxnRequest(
        v3_and_below_transactional_id="tx-missing",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=rows,
    )


@questions.add(ApiKey.ADD_PARTITIONS_TO_TXN)
def add_partitions_as_a_broker(_: Asked) -> Message:
    topic = m.AddPartitionsToTxnRequestTopic(name=TOPIC, partitions=[0])
    row = m.AddPartitionsToTxnRequestTransaction(
        transactional_id="tx-missing", producer_id=1, producer_epoch=0, topics=[topic]
    )
    return m.AddPartitionsToTxnRequest(transactions=[row])


@questions.add(ApiKey.ADD_OFFSETS_TO_TXN, 3)
def add_offsets_to_a_transaction(_: Asked) -> Message:
    return m.AddOffsetsToTxnRequest(
        transactional_id="tx-missing", producer_id=1, producer_epoch=0, group_id=GROUP
    )


@questions.add(ApiKey.END_TXN, 4)
def end_a_transaction(_: Asked) -> Message:
    return m.EndTxnRequest(transactional_id="tx-missing", producer_id=1, producer_epoch=0)


@questions.add(ApiKey.TXN_OFFSET_COMMIT, 3)
def commit_offsets_in_a_transaction(_: Asked) -> Message:
    rows = [
        m.TxnOffsetCommitRequestTopic(
            name=name,
            partitions=[m.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=0)],
        )
        for name in (TOPIC, "missing")
    ]
    return m.TxnOffsetCommitRequest(
        transactional_id="tx-missing",
        group_id=GROUP,
        producer_id=1,
        producer_epoch=0,
        generation_id=-1,
        group_instance_id=None,
        topics=rows,
    )


@questions.add(ApiKey.WRITE_TXN_MARKERS, 1)
def write_markers(_: Asked) -> Message:
    row = m.WriteTxnMarkersRequestTopic(name="missing", partition_indexes=[0])
    marker = m.WriteTxnMarkersRequestMarker(
        producer_id=1, producer_epoch=0, transaction_result=False, topics=[row]
    )
    return m.WriteTxnMarkersRequest(markers=[marker])


@questions.add(ApiKey.DESCRIBE_TRANSACTIONS)
def describe_transactions(_: Asked) -> Message:
    return m.DescribeTransactionsRequest(transactional_ids=["tx", "tx-missing"])


@questions.add(ApiKey.LIST_TRANSACTIONS)
def list_transactions(_: Asked) -> Message:
    return m.ListTransactionsRequest(duration_filter=-1, transactional_id_pattern="tx|tx-missing")
