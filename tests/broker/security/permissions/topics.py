"""Questions about topics: their metadata, creation, deletion and partitions."""

from typing import Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import TOPIC, Asked, Questions, victims

questions: Final = Questions()


def _metadata(*topics: m.MetadataRequestTopic, create: bool = False) -> Message:
    return m.MetadataRequest(
        topics=list(topics),
        allow_auto_topic_creation=create,
        include_topic_authorized_operations=True,
    )


@questions.add(ApiKey.METADATA)
def metadata(_: Asked) -> Message:
    names = (TOPIC, "missing")
    return _metadata(*(m.MetadataRequestTopic(name=name) for name in names))


@questions.add(ApiKey.METADATA)
def metadata_that_creates(asked: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(name=f"new-{asked.user}"), create=True)


@questions.add(ApiKey.METADATA)
def metadata_by_id(asked: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(topic_id=asked.topic_ids[TOPIC], name=None))


@questions.add(ApiKey.METADATA)
def metadata_by_an_unknown_id(_: Asked) -> Message:
    return _metadata(m.MetadataRequestTopic(topic_id=bytes(range(16)), name=None))


@questions.add(ApiKey.DESCRIBE_TOPIC_PARTITIONS)
def describe_topic_partitions(_: Asked) -> Message:
    rows = [m.DescribeTopicPartitionsRequestTopic(name=name) for name in (TOPIC, "missing")]
    return m.DescribeTopicPartitionsRequest(topics=rows, response_partition_limit=100)


@questions.add(ApiKey.CREATE_TOPICS)
def create_topics(_: Asked) -> Message:
    rows = [
        m.CreateTopicsRequestTopic(name=name, num_partitions=1, replication_factor=1)
        for name in (TOPIC, "brand-new")
    ]
    return m.CreateTopicsRequest(topics=rows, timeout_ms=5_000, validate_only=True)


@questions.add(ApiKey.DELETE_TOPICS, 5)
def delete_topics(asked: Asked) -> Message:
    names = [victims(asked.user)[0], "missing"]
    return m.DeleteTopicsRequest(topic_names=names, timeout_ms=5_000)


@questions.add(ApiKey.DELETE_TOPICS)
def delete_topics_by_id(asked: Asked) -> Message:
    ids = [asked.topic_ids[victims(asked.user)[1]], bytes(range(16))]
    rows = [m.DeleteTopicsRequestTopic(name=None, topic_id=topic_id) for topic_id in ids]
    return m.DeleteTopicsRequest(topics=rows, timeout_ms=5_000)


@questions.add(ApiKey.CREATE_PARTITIONS)
def create_partitions(_: Asked) -> Message:
    rows = [
        m.CreatePartitionsRequestTopic(name=name, count=3, assignments=None)
        for name in (TOPIC, "missing")
    ]
    return m.CreatePartitionsRequest(topics=rows, timeout_ms=5_000, validate_only=True)


@questions.add(ApiKey.DELETE_RECORDS)
def delete_records(_: Asked) -> Message:
    rows = [
        m.DeleteRecordsRequestTopic(
            name=name, partitions=[m.DeleteRecordsRequestPartition(partition_index=0, offset=0)]
        )
        for name in (TOPIC, "missing")
    ]
    return m.DeleteRecordsRequest(topics=rows, timeout_ms=5_000)
