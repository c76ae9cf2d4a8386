"""Questions about records: Produce, Fetch and the offsets of a log."""

from typing import Any, Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from storage.format.batch import TRANSACTIONAL
from tests.broker.security.permissions.question import TOPIC, Asked, Questions
from tests.support.storage.logs import batch_of

questions: Final = Questions()

NO_SESSION: Final = -1


def _records(*, transactional: bool) -> bytes:
    if transactional:
        return bytes(
            batch_of(
                b"v",
                producer_id=1,
                producer_epoch=0,
                base_sequence=0,
                attributes=TRANSACTIONAL,
            )
        )
    return bytes(batch_of(b"v"))


def _produce(topic: dict[str, Any], *, transactional_id: str | None = None) -> Message:
    records = _records(transactional=transactional_id is not None)
    row = m.ProduceRequestTopic(
        partition_data=[m.ProduceRequestPartition(index=0, records=records)], **topic
    )
    return m.ProduceRequest(
        acks=-1, timeout_ms=5_000, topic_data=[row], transactional_id=transactional_id
    )


@questions.add(ApiKey.PRODUCE, 12)
def produce(_: Asked) -> Message:
    return _produce({"name": TOPIC})


@questions.add(ApiKey.PRODUCE, 12)
def produce_to_a_missing_topic(_: Asked) -> Message:
    return _produce({"name": "missing"})


@questions.add(ApiKey.PRODUCE)
def produce_by_id(asked: Asked) -> Message:
    return _produce({"topic_id": asked.topic_ids[TOPIC]})


@questions.add(ApiKey.PRODUCE, 11)
def produce_in_a_transaction(_: Asked) -> Message:
    return _produce({"name": TOPIC}, transactional_id="tx")


def _fetch(partition: int, **topic: Any) -> Message:
    row = m.FetchRequestTopic(
        partitions=[m.FetchRequestPartition(partition=partition, partition_max_bytes=1)], **topic
    )
    return m.FetchRequest(max_wait_ms=0, max_bytes=1, session_epoch=NO_SESSION, topics=[row])


@questions.add(ApiKey.FETCH, 12)
def fetch(_: Asked) -> Message:
    return _fetch(0, topic=TOPIC)


@questions.add(ApiKey.FETCH, 12)
def fetch_a_missing_topic(_: Asked) -> Message:
    return _fetch(0, topic="missing")


@questions.add(ApiKey.FETCH)
def fetch_by_id(asked: Asked) -> Message:
    return _fetch(0, topic_id=asked.topic_ids[TOPIC])


@questions.add(ApiKey.FETCH)
def fetch_a_missing_partition_by_id(asked: Asked) -> Message:
    return _fetch(9, topic_id=asked.topic_ids[TOPIC])


@questions.add(ApiKey.FETCH, 12)
def fetch_as_another_broker(_: Asked) -> Message:
    rows = [
        m.FetchRequestTopic(
            topic=name, partitions=[m.FetchRequestPartition(partition=0, partition_max_bytes=1)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.FetchRequest(
        replica_id=7, max_wait_ms=0, max_bytes=1, session_epoch=NO_SESSION, topics=rows
    )


@questions.add(ApiKey.FETCH)
def fetch_by_id_as_another_broker(asked: Asked) -> Message:
    rows = [
        m.FetchRequestTopic(
            topic_id=topic_id,
            partitions=[m.FetchRequestPartition(partition=0, partition_max_bytes=1)],
        )
        for topic_id in (asked.topic_ids[TOPIC], bytes(range(16)))
    ]
    return m.FetchRequest(
        replica_state=m.FetchRequestReplicaState(replica_id=7, replica_epoch=-1),
        max_wait_ms=0,
        max_bytes=1,
        session_epoch=NO_SESSION,
        topics=rows,
    )


@questions.add(ApiKey.LIST_OFFSETS, 9)
def list_offsets(_: Asked) -> Message:
    rows = [
        m.ListOffsetsRequestTopic(
            name=name, partitions=[m.ListOffsetsRequestPartition(partition_index=0, timestamp=-2)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.ListOffsetsRequest(replica_id=-1, topics=rows)


@questions.add(ApiKey.OFFSET_FOR_LEADER_EPOCH)
def offset_for_leader_epoch(_: Asked) -> Message:
    rows = [
        m.OffsetForLeaderEpochRequestTopic(
            topic=name,
            partitions=[
                m.OffsetForLeaderEpochRequestPartition(
                    partition=0, current_leader_epoch=-1, leader_epoch=0
                )
            ],
        )
        for name in (TOPIC, "missing")
    ]
    return m.OffsetForLeaderEpochRequest(replica_id=-1, topics=rows)


@questions.add(ApiKey.DESCRIBE_PRODUCERS)
def describe_producers(_: Asked) -> Message:
    rows = [
        m.DescribeProducersRequestTopic(name=name, partition_indexes=[0])
        for name in (TOPIC, "missing")
    ]
    return m.DescribeProducersRequest(topics=rows)
