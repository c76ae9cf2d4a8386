"""Questions about the cluster: its brokers, quorum, replicas, directories and features."""

from typing import Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import TOPIC, Asked, Questions

questions: Final = Questions()


@questions.add(ApiKey.METADATA, 10)
def metadata_with_operations_on_the_cluster(_: Asked) -> Message:
    return m.MetadataRequest(topics=[], include_cluster_authorized_operations=True)


@questions.add(ApiKey.DESCRIBE_CLUSTER)
def describe_cluster(_: Asked) -> Message:
    return m.DescribeClusterRequest(include_cluster_authorized_operations=True)


@questions.add(ApiKey.DESCRIBE_LOG_DIRS)
def describe_log_dirs(_: Asked) -> Message:
    row = m.DescribeLogDirsRequestTopic(topic=TOPIC, partitions=[0])
    return m.DescribeLogDirsRequest(topics=[row])


@questions.add(ApiKey.DESCRIBE_QUORUM)
def describe_quorum(_: Asked) -> Message:
    partition = m.DescribeQuorumRequestPartition(partition_index=0)
    row = m.DescribeQuorumRequestTopic(topic_name="__cluster_metadata", partitions=[partition])
    return m.DescribeQuorumRequest(topics=[row])


@questions.add(ApiKey.ELECT_LEADERS)
def elect_leaders(_: Asked) -> Message:
    row = m.ElectLeadersRequestTopicPartitions(topic=TOPIC, partitions=[0])
    return m.ElectLeadersRequest(topic_partitions=[row], timeout_ms=5_000)


@questions.add(ApiKey.ALTER_PARTITION_REASSIGNMENTS)
def cancel_a_reassignment(_: Asked) -> Message:
    partition = m.AlterPartitionReassignmentsRequestPartition(partition_index=0, replicas=None)
    row = m.AlterPartitionReassignmentsRequestTopic(name=TOPIC, partitions=[partition])
    return m.AlterPartitionReassignmentsRequest(topics=[row], timeout_ms=5_000)


@questions.add(ApiKey.LIST_PARTITION_REASSIGNMENTS)
def list_partition_reassignments(_: Asked) -> Message:
    return m.ListPartitionReassignmentsRequest(topics=None, timeout_ms=5_000)


@questions.add(ApiKey.UPDATE_FEATURES)
def update_features(_: Asked) -> Message:
    return m.UpdateFeaturesRequest(timeout_ms=5_000, feature_updates=[], validate_only=True)


@questions.add(ApiKey.ALTER_REPLICA_LOG_DIRS)
def alter_replica_log_dirs(_: Asked) -> Message:
    topic = m.AlterReplicaLogDirsRequestTopic(name="missing", partitions=[0])
    row = m.AlterReplicaLogDirsRequestDir(path="/nowhere", topics=[topic])
    return m.AlterReplicaLogDirsRequest(dirs=[row])
