# Written by protocol/stubs.py from the message tables; do not edit.
# ruff: noqa
from collections.abc import Iterator
from typing import Final

from protocol.schema import Field, Struct

class Message:
    __slots__: tuple[str, ...]

CLASSES: Final[dict[str, type[Message]]]

def default_expression(field: Field) -> str | None: ...
def bodies() -> Iterator[Struct]: ...

class ProduceRequestPartition(Message):
    index: int
    records: bytes | None
    def __init__(
        self,
        *,
        index: int = ...,
        records: bytes | None = ...,
    ) -> None: ...

class ProduceRequestTopic(Message):
    name: str
    topic_id: bytes
    partition_data: list[ProduceRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partition_data: list[ProduceRequestPartition] = ...,
    ) -> None: ...

class ProduceRequest(Message):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topic_data: list[ProduceRequestTopic]
    def __init__(
        self,
        *,
        transactional_id: str | None = ...,
        acks: int = ...,
        timeout_ms: int = ...,
        topic_data: list[ProduceRequestTopic] = ...,
    ) -> None: ...

class ProduceResponseRecordError(Message):
    batch_index: int
    batch_index_error_message: str | None
    def __init__(
        self,
        *,
        batch_index: int = ...,
        batch_index_error_message: str | None = ...,
    ) -> None: ...

class ProduceResponseLeader(Message):
    leader_id: int
    leader_epoch: int
    def __init__(
        self,
        *,
        leader_id: int = ...,
        leader_epoch: int = ...,
    ) -> None: ...

class ProduceResponsePartition(Message):
    index: int
    error_code: int
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    record_errors: list[ProduceResponseRecordError]
    error_message: str | None
    current_leader: ProduceResponseLeader
    def __init__(
        self,
        *,
        index: int = ...,
        error_code: int = ...,
        base_offset: int = ...,
        log_append_time_ms: int = ...,
        log_start_offset: int = ...,
        record_errors: list[ProduceResponseRecordError] = ...,
        error_message: str | None = ...,
        current_leader: ProduceResponseLeader = ...,
    ) -> None: ...

class ProduceResponseTopic(Message):
    name: str
    topic_id: bytes
    partition_responses: list[ProduceResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partition_responses: list[ProduceResponsePartition] = ...,
    ) -> None: ...

class ProduceResponseNode(Message):
    node_id: int
    host: str
    port: int
    rack: str | None
    def __init__(
        self,
        *,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        rack: str | None = ...,
    ) -> None: ...

class ProduceResponse(Message):
    responses: list[ProduceResponseTopic]
    throttle_time_ms: int
    node_endpoints: list[ProduceResponseNode]
    def __init__(
        self,
        *,
        responses: list[ProduceResponseTopic] = ...,
        throttle_time_ms: int = ...,
        node_endpoints: list[ProduceResponseNode] = ...,
    ) -> None: ...

class FetchRequestReplicaState(Message):
    replica_id: int
    replica_epoch: int
    def __init__(
        self,
        *,
        replica_id: int = ...,
        replica_epoch: int = ...,
    ) -> None: ...

class FetchRequestPartition(Message):
    partition: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    partition_max_bytes: int
    replica_directory_id: bytes
    high_watermark: int
    def __init__(
        self,
        *,
        partition: int = ...,
        current_leader_epoch: int = ...,
        fetch_offset: int = ...,
        last_fetched_epoch: int = ...,
        log_start_offset: int = ...,
        partition_max_bytes: int = ...,
        replica_directory_id: bytes = ...,
        high_watermark: int = ...,
    ) -> None: ...

class FetchRequestTopic(Message):
    topic: str
    topic_id: bytes
    partitions: list[FetchRequestPartition]
    def __init__(
        self,
        *,
        topic: str = ...,
        topic_id: bytes = ...,
        partitions: list[FetchRequestPartition] = ...,
    ) -> None: ...

class FetchRequestForgottenTopic(Message):
    topic: str
    topic_id: bytes
    partitions: list[int]
    def __init__(
        self,
        *,
        topic: str = ...,
        topic_id: bytes = ...,
        partitions: list[int] = ...,
    ) -> None: ...

class FetchRequest(Message):
    cluster_id: str | None
    replica_id: int
    replica_state: FetchRequestReplicaState
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchRequestTopic]
    forgotten_topics_data: list[FetchRequestForgottenTopic]
    rack_id: str
    def __init__(
        self,
        *,
        cluster_id: str | None = ...,
        replica_id: int = ...,
        replica_state: FetchRequestReplicaState = ...,
        max_wait_ms: int = ...,
        min_bytes: int = ...,
        max_bytes: int = ...,
        isolation_level: int = ...,
        session_id: int = ...,
        session_epoch: int = ...,
        topics: list[FetchRequestTopic] = ...,
        forgotten_topics_data: list[FetchRequestForgottenTopic] = ...,
        rack_id: str = ...,
    ) -> None: ...

class FetchResponseEpochEndOffset(Message):
    epoch: int
    end_offset: int
    def __init__(
        self,
        *,
        epoch: int = ...,
        end_offset: int = ...,
    ) -> None: ...

class FetchResponseLeader(Message):
    leader_id: int
    leader_epoch: int
    def __init__(
        self,
        *,
        leader_id: int = ...,
        leader_epoch: int = ...,
    ) -> None: ...

class FetchResponseSnapshot(Message):
    end_offset: int
    epoch: int
    def __init__(
        self,
        *,
        end_offset: int = ...,
        epoch: int = ...,
    ) -> None: ...

class FetchResponseAbortedTransaction(Message):
    producer_id: int
    first_offset: int
    def __init__(
        self,
        *,
        producer_id: int = ...,
        first_offset: int = ...,
    ) -> None: ...

class FetchResponsePartition(Message):
    partition_index: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    diverging_epoch: FetchResponseEpochEndOffset
    current_leader: FetchResponseLeader
    snapshot_id: FetchResponseSnapshot
    aborted_transactions: list[FetchResponseAbortedTransaction] | None
    preferred_read_replica: int
    records: bytes | None
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
        high_watermark: int = ...,
        last_stable_offset: int = ...,
        log_start_offset: int = ...,
        diverging_epoch: FetchResponseEpochEndOffset = ...,
        current_leader: FetchResponseLeader = ...,
        snapshot_id: FetchResponseSnapshot = ...,
        aborted_transactions: list[FetchResponseAbortedTransaction] | None = ...,
        preferred_read_replica: int = ...,
        records: bytes | None = ...,
    ) -> None: ...

class FetchResponseTopic(Message):
    topic: str
    topic_id: bytes
    partitions: list[FetchResponsePartition]
    def __init__(
        self,
        *,
        topic: str = ...,
        topic_id: bytes = ...,
        partitions: list[FetchResponsePartition] = ...,
    ) -> None: ...

class FetchResponseNode(Message):
    node_id: int
    host: str
    port: int
    rack: str | None
    def __init__(
        self,
        *,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        rack: str | None = ...,
    ) -> None: ...

class FetchResponse(Message):
    throttle_time_ms: int
    error_code: int
    session_id: int
    responses: list[FetchResponseTopic]
    node_endpoints: list[FetchResponseNode]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        session_id: int = ...,
        responses: list[FetchResponseTopic] = ...,
        node_endpoints: list[FetchResponseNode] = ...,
    ) -> None: ...

class ListOffsetsRequestPartition(Message):
    partition_index: int
    current_leader_epoch: int
    timestamp: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        current_leader_epoch: int = ...,
        timestamp: int = ...,
    ) -> None: ...

class ListOffsetsRequestTopic(Message):
    name: str
    partitions: list[ListOffsetsRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[ListOffsetsRequestPartition] = ...,
    ) -> None: ...

class ListOffsetsRequest(Message):
    replica_id: int
    isolation_level: int
    topics: list[ListOffsetsRequestTopic]
    timeout_ms: int
    def __init__(
        self,
        *,
        replica_id: int = ...,
        isolation_level: int = ...,
        topics: list[ListOffsetsRequestTopic] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class ListOffsetsResponsePartition(Message):
    partition_index: int
    error_code: int
    timestamp: int
    offset: int
    leader_epoch: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
        timestamp: int = ...,
        offset: int = ...,
        leader_epoch: int = ...,
    ) -> None: ...

class ListOffsetsResponseTopic(Message):
    name: str
    partitions: list[ListOffsetsResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[ListOffsetsResponsePartition] = ...,
    ) -> None: ...

class ListOffsetsResponse(Message):
    throttle_time_ms: int
    topics: list[ListOffsetsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[ListOffsetsResponseTopic] = ...,
    ) -> None: ...

class DeleteRecordsRequestPartition(Message):
    partition_index: int
    offset: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        offset: int = ...,
    ) -> None: ...

class DeleteRecordsRequestTopic(Message):
    name: str
    partitions: list[DeleteRecordsRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[DeleteRecordsRequestPartition] = ...,
    ) -> None: ...

class DeleteRecordsRequest(Message):
    topics: list[DeleteRecordsRequestTopic]
    timeout_ms: int
    def __init__(
        self,
        *,
        topics: list[DeleteRecordsRequestTopic] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class DeleteRecordsResponsePartition(Message):
    partition_index: int
    low_watermark: int
    error_code: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        low_watermark: int = ...,
        error_code: int = ...,
    ) -> None: ...

class DeleteRecordsResponseTopic(Message):
    name: str
    partitions: list[DeleteRecordsResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[DeleteRecordsResponsePartition] = ...,
    ) -> None: ...

class DeleteRecordsResponse(Message):
    throttle_time_ms: int
    topics: list[DeleteRecordsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DeleteRecordsResponseTopic] = ...,
    ) -> None: ...

class InitProducerIdRequest(Message):
    transactional_id: str | None
    transaction_timeout_ms: int
    producer_id: int
    producer_epoch: int
    def __init__(
        self,
        *,
        transactional_id: str | None = ...,
        transaction_timeout_ms: int = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
    ) -> None: ...

class InitProducerIdResponse(Message):
    throttle_time_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
    ) -> None: ...

class OffsetForLeaderEpochRequestPartition(Message):
    partition: int
    current_leader_epoch: int
    leader_epoch: int
    def __init__(
        self,
        *,
        partition: int = ...,
        current_leader_epoch: int = ...,
        leader_epoch: int = ...,
    ) -> None: ...

class OffsetForLeaderEpochRequestTopic(Message):
    topic: str
    partitions: list[OffsetForLeaderEpochRequestPartition]
    def __init__(
        self,
        *,
        topic: str = ...,
        partitions: list[OffsetForLeaderEpochRequestPartition] = ...,
    ) -> None: ...

class OffsetForLeaderEpochRequest(Message):
    replica_id: int
    topics: list[OffsetForLeaderEpochRequestTopic]
    def __init__(
        self,
        *,
        replica_id: int = ...,
        topics: list[OffsetForLeaderEpochRequestTopic] = ...,
    ) -> None: ...

class OffsetForLeaderEpochResponsePartition(Message):
    error_code: int
    partition: int
    leader_epoch: int
    end_offset: int
    def __init__(
        self,
        *,
        error_code: int = ...,
        partition: int = ...,
        leader_epoch: int = ...,
        end_offset: int = ...,
    ) -> None: ...

class OffsetForLeaderEpochResponseTopic(Message):
    topic: str
    partitions: list[OffsetForLeaderEpochResponsePartition]
    def __init__(
        self,
        *,
        topic: str = ...,
        partitions: list[OffsetForLeaderEpochResponsePartition] = ...,
    ) -> None: ...

class OffsetForLeaderEpochResponse(Message):
    throttle_time_ms: int
    topics: list[OffsetForLeaderEpochResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetForLeaderEpochResponseTopic] = ...,
    ) -> None: ...

class DescribeProducersRequestTopic(Message):
    name: str
    partition_indexes: list[int]
    def __init__(
        self,
        *,
        name: str = ...,
        partition_indexes: list[int] = ...,
    ) -> None: ...

class DescribeProducersRequest(Message):
    topics: list[DescribeProducersRequestTopic]
    def __init__(
        self,
        *,
        topics: list[DescribeProducersRequestTopic] = ...,
    ) -> None: ...

class DescribeProducersResponseProducerState(Message):
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int
    def __init__(
        self,
        *,
        producer_id: int = ...,
        producer_epoch: int = ...,
        last_sequence: int = ...,
        last_timestamp: int = ...,
        coordinator_epoch: int = ...,
        current_txn_start_offset: int = ...,
    ) -> None: ...

class DescribeProducersResponsePartition(Message):
    partition_index: int
    error_code: int
    error_message: str | None
    active_producers: list[DescribeProducersResponseProducerState]
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        active_producers: list[DescribeProducersResponseProducerState] = ...,
    ) -> None: ...

class DescribeProducersResponseTopic(Message):
    name: str
    partitions: list[DescribeProducersResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[DescribeProducersResponsePartition] = ...,
    ) -> None: ...

class DescribeProducersResponse(Message):
    throttle_time_ms: int
    topics: list[DescribeProducersResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DescribeProducersResponseTopic] = ...,
    ) -> None: ...

class ApiVersionsRequest(Message):
    client_software_name: str
    client_software_version: str
    def __init__(
        self,
        *,
        client_software_name: str = ...,
        client_software_version: str = ...,
    ) -> None: ...

class ApiVersionsResponseRange(Message):
    api_key: int
    min_version: int
    max_version: int
    def __init__(
        self,
        *,
        api_key: int = ...,
        min_version: int = ...,
        max_version: int = ...,
    ) -> None: ...

class ApiVersionsResponseSupportedFeature(Message):
    name: str
    min_version: int
    max_version: int
    def __init__(
        self,
        *,
        name: str = ...,
        min_version: int = ...,
        max_version: int = ...,
    ) -> None: ...

class ApiVersionsResponseFinalizedFeature(Message):
    name: str
    max_version_level: int
    min_version_level: int
    def __init__(
        self,
        *,
        name: str = ...,
        max_version_level: int = ...,
        min_version_level: int = ...,
    ) -> None: ...

class ApiVersionsResponse(Message):
    error_code: int
    api_keys: list[ApiVersionsResponseRange]
    throttle_time_ms: int
    supported_features: list[ApiVersionsResponseSupportedFeature]
    finalized_features_epoch: int
    finalized_features: list[ApiVersionsResponseFinalizedFeature]
    zk_migration_ready: bool
    def __init__(
        self,
        *,
        error_code: int = ...,
        api_keys: list[ApiVersionsResponseRange] = ...,
        throttle_time_ms: int = ...,
        supported_features: list[ApiVersionsResponseSupportedFeature] = ...,
        finalized_features_epoch: int = ...,
        finalized_features: list[ApiVersionsResponseFinalizedFeature] = ...,
        zk_migration_ready: bool = ...,
    ) -> None: ...

class MetadataRequestTopic(Message):
    topic_id: bytes
    name: str | None
    def __init__(
        self,
        *,
        topic_id: bytes = ...,
        name: str | None = ...,
    ) -> None: ...

class MetadataRequest(Message):
    topics: list[MetadataRequestTopic] | None
    allow_auto_topic_creation: bool
    include_cluster_authorized_operations: bool
    include_topic_authorized_operations: bool
    def __init__(
        self,
        *,
        topics: list[MetadataRequestTopic] | None = ...,
        allow_auto_topic_creation: bool = ...,
        include_cluster_authorized_operations: bool = ...,
        include_topic_authorized_operations: bool = ...,
    ) -> None: ...

class MetadataResponseBroker(Message):
    node_id: int
    host: str
    port: int
    rack: str | None
    def __init__(
        self,
        *,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        rack: str | None = ...,
    ) -> None: ...

class MetadataResponsePartition(Message):
    error_code: int
    partition_index: int
    leader_id: int
    leader_epoch: int
    replica_nodes: list[int]
    isr_nodes: list[int]
    offline_replicas: list[int]
    def __init__(
        self,
        *,
        error_code: int = ...,
        partition_index: int = ...,
        leader_id: int = ...,
        leader_epoch: int = ...,
        replica_nodes: list[int] = ...,
        isr_nodes: list[int] = ...,
        offline_replicas: list[int] = ...,
    ) -> None: ...

class MetadataResponseTopic(Message):
    error_code: int
    name: str | None
    topic_id: bytes
    is_internal: bool
    partitions: list[MetadataResponsePartition]
    topic_authorized_operations: int
    def __init__(
        self,
        *,
        error_code: int = ...,
        name: str | None = ...,
        topic_id: bytes = ...,
        is_internal: bool = ...,
        partitions: list[MetadataResponsePartition] = ...,
        topic_authorized_operations: int = ...,
    ) -> None: ...

class MetadataResponse(Message):
    throttle_time_ms: int
    brokers: list[MetadataResponseBroker]
    cluster_id: str | None
    controller_id: int
    topics: list[MetadataResponseTopic]
    cluster_authorized_operations: int
    error_code: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        brokers: list[MetadataResponseBroker] = ...,
        cluster_id: str | None = ...,
        controller_id: int = ...,
        topics: list[MetadataResponseTopic] = ...,
        cluster_authorized_operations: int = ...,
        error_code: int = ...,
    ) -> None: ...

class FindCoordinatorRequest(Message):
    key: str
    key_type: int
    coordinator_keys: list[str]
    def __init__(
        self,
        *,
        key: str = ...,
        key_type: int = ...,
        coordinator_keys: list[str] = ...,
    ) -> None: ...

class FindCoordinatorResponseCoordinator(Message):
    key: str
    node_id: int
    host: str
    port: int
    error_code: int
    error_message: str | None
    def __init__(
        self,
        *,
        key: str = ...,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
    ) -> None: ...

class FindCoordinatorResponse(Message):
    throttle_time_ms: int
    error_code: int
    error_message: str | None
    node_id: int
    host: str
    port: int
    coordinators: list[FindCoordinatorResponseCoordinator]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        coordinators: list[FindCoordinatorResponseCoordinator] = ...,
    ) -> None: ...

class DescribeClusterRequest(Message):
    include_cluster_authorized_operations: bool
    endpoint_type: int
    include_fenced_brokers: bool
    def __init__(
        self,
        *,
        include_cluster_authorized_operations: bool = ...,
        endpoint_type: int = ...,
        include_fenced_brokers: bool = ...,
    ) -> None: ...

class DescribeClusterResponseBroker(Message):
    broker_id: int
    host: str
    port: int
    rack: str | None
    is_fenced: bool
    def __init__(
        self,
        *,
        broker_id: int = ...,
        host: str = ...,
        port: int = ...,
        rack: str | None = ...,
        is_fenced: bool = ...,
    ) -> None: ...

class DescribeClusterResponse(Message):
    throttle_time_ms: int
    error_code: int
    error_message: str | None
    endpoint_type: int
    cluster_id: str
    controller_id: int
    brokers: list[DescribeClusterResponseBroker]
    cluster_authorized_operations: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        endpoint_type: int = ...,
        cluster_id: str = ...,
        controller_id: int = ...,
        brokers: list[DescribeClusterResponseBroker] = ...,
        cluster_authorized_operations: int = ...,
    ) -> None: ...

class DescribeLogDirsRequestTopic(Message):
    topic: str
    partitions: list[int]
    def __init__(
        self,
        *,
        topic: str = ...,
        partitions: list[int] = ...,
    ) -> None: ...

class DescribeLogDirsRequest(Message):
    topics: list[DescribeLogDirsRequestTopic] | None
    def __init__(
        self,
        *,
        topics: list[DescribeLogDirsRequestTopic] | None = ...,
    ) -> None: ...

class DescribeLogDirsResponsePartition(Message):
    partition_index: int
    partition_size: int
    offset_lag: int
    is_future_key: bool
    def __init__(
        self,
        *,
        partition_index: int = ...,
        partition_size: int = ...,
        offset_lag: int = ...,
        is_future_key: bool = ...,
    ) -> None: ...

class DescribeLogDirsResponseTopic(Message):
    name: str
    partitions: list[DescribeLogDirsResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[DescribeLogDirsResponsePartition] = ...,
    ) -> None: ...

class DescribeLogDirsResponseDirectory(Message):
    error_code: int
    log_dir: str
    topics: list[DescribeLogDirsResponseTopic]
    total_bytes: int
    usable_bytes: int
    is_cordoned: bool
    def __init__(
        self,
        *,
        error_code: int = ...,
        log_dir: str = ...,
        topics: list[DescribeLogDirsResponseTopic] = ...,
        total_bytes: int = ...,
        usable_bytes: int = ...,
        is_cordoned: bool = ...,
    ) -> None: ...

class DescribeLogDirsResponse(Message):
    throttle_time_ms: int
    error_code: int
    results: list[DescribeLogDirsResponseDirectory]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        results: list[DescribeLogDirsResponseDirectory] = ...,
    ) -> None: ...

class ElectLeadersRequestTopicPartitions(Message):
    topic: str
    partitions: list[int]
    def __init__(
        self,
        *,
        topic: str = ...,
        partitions: list[int] = ...,
    ) -> None: ...

class ElectLeadersRequest(Message):
    election_type: int
    topic_partitions: list[ElectLeadersRequestTopicPartitions] | None
    timeout_ms: int
    def __init__(
        self,
        *,
        election_type: int = ...,
        topic_partitions: list[ElectLeadersRequestTopicPartitions] | None = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class ElectLeadersResponsePartitionResult(Message):
    partition_id: int
    error_code: int
    error_message: str | None
    def __init__(
        self,
        *,
        partition_id: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
    ) -> None: ...

class ElectLeadersResponseReplicaElectionResult(Message):
    topic: str
    partition_result: list[ElectLeadersResponsePartitionResult]
    def __init__(
        self,
        *,
        topic: str = ...,
        partition_result: list[ElectLeadersResponsePartitionResult] = ...,
    ) -> None: ...

class ElectLeadersResponse(Message):
    throttle_time_ms: int
    error_code: int
    replica_election_results: list[ElectLeadersResponseReplicaElectionResult]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        replica_election_results: list[ElectLeadersResponseReplicaElectionResult] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsRequestPartition(Message):
    partition_index: int
    replicas: list[int] | None
    def __init__(
        self,
        *,
        partition_index: int = ...,
        replicas: list[int] | None = ...,
    ) -> None: ...

class AlterPartitionReassignmentsRequestTopic(Message):
    name: str
    partitions: list[AlterPartitionReassignmentsRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[AlterPartitionReassignmentsRequestPartition] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsRequest(Message):
    timeout_ms: int
    allow_replication_factor_change: bool
    topics: list[AlterPartitionReassignmentsRequestTopic]
    def __init__(
        self,
        *,
        timeout_ms: int = ...,
        allow_replication_factor_change: bool = ...,
        topics: list[AlterPartitionReassignmentsRequestTopic] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsResponsePartition(Message):
    partition_index: int
    error_code: int
    error_message: str | None
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
    ) -> None: ...

class AlterPartitionReassignmentsResponseTopic(Message):
    name: str
    partitions: list[AlterPartitionReassignmentsResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[AlterPartitionReassignmentsResponsePartition] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsResponse(Message):
    throttle_time_ms: int
    allow_replication_factor_change: bool
    error_code: int
    error_message: str | None
    responses: list[AlterPartitionReassignmentsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        allow_replication_factor_change: bool = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        responses: list[AlterPartitionReassignmentsResponseTopic] = ...,
    ) -> None: ...

class ListPartitionReassignmentsRequestTopic(Message):
    name: str
    partition_indexes: list[int]
    def __init__(
        self,
        *,
        name: str = ...,
        partition_indexes: list[int] = ...,
    ) -> None: ...

class ListPartitionReassignmentsRequest(Message):
    timeout_ms: int
    topics: list[ListPartitionReassignmentsRequestTopic] | None
    def __init__(
        self,
        *,
        timeout_ms: int = ...,
        topics: list[ListPartitionReassignmentsRequestTopic] | None = ...,
    ) -> None: ...

class ListPartitionReassignmentsResponsePartition(Message):
    partition_index: int
    replicas: list[int]
    adding_replicas: list[int]
    removing_replicas: list[int]
    def __init__(
        self,
        *,
        partition_index: int = ...,
        replicas: list[int] = ...,
        adding_replicas: list[int] = ...,
        removing_replicas: list[int] = ...,
    ) -> None: ...

class ListPartitionReassignmentsResponseTopic(Message):
    name: str
    partitions: list[ListPartitionReassignmentsResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[ListPartitionReassignmentsResponsePartition] = ...,
    ) -> None: ...

class ListPartitionReassignmentsResponse(Message):
    throttle_time_ms: int
    error_code: int
    error_message: str | None
    topics: list[ListPartitionReassignmentsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        topics: list[ListPartitionReassignmentsResponseTopic] = ...,
    ) -> None: ...

class DescribeQuorumRequestPartition(Message):
    partition_index: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
    ) -> None: ...

class DescribeQuorumRequestTopic(Message):
    topic_name: str
    partitions: list[DescribeQuorumRequestPartition]
    def __init__(
        self,
        *,
        topic_name: str = ...,
        partitions: list[DescribeQuorumRequestPartition] = ...,
    ) -> None: ...

class DescribeQuorumRequest(Message):
    topics: list[DescribeQuorumRequestTopic]
    def __init__(
        self,
        *,
        topics: list[DescribeQuorumRequestTopic] = ...,
    ) -> None: ...

class DescribeQuorumResponseVoter(Message):
    replica_id: int
    replica_directory_id: bytes
    log_end_offset: int
    last_fetch_timestamp: int
    last_caught_up_timestamp: int
    def __init__(
        self,
        *,
        replica_id: int = ...,
        replica_directory_id: bytes = ...,
        log_end_offset: int = ...,
        last_fetch_timestamp: int = ...,
        last_caught_up_timestamp: int = ...,
    ) -> None: ...

class DescribeQuorumResponseObserver(Message):
    replica_id: int
    replica_directory_id: bytes
    log_end_offset: int
    last_fetch_timestamp: int
    last_caught_up_timestamp: int
    def __init__(
        self,
        *,
        replica_id: int = ...,
        replica_directory_id: bytes = ...,
        log_end_offset: int = ...,
        last_fetch_timestamp: int = ...,
        last_caught_up_timestamp: int = ...,
    ) -> None: ...

class DescribeQuorumResponsePartition(Message):
    partition_index: int
    error_code: int
    error_message: str | None
    leader_id: int
    leader_epoch: int
    high_watermark: int
    current_voters: list[DescribeQuorumResponseVoter]
    observers: list[DescribeQuorumResponseObserver]
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        leader_id: int = ...,
        leader_epoch: int = ...,
        high_watermark: int = ...,
        current_voters: list[DescribeQuorumResponseVoter] = ...,
        observers: list[DescribeQuorumResponseObserver] = ...,
    ) -> None: ...

class DescribeQuorumResponseTopic(Message):
    topic_name: str
    partitions: list[DescribeQuorumResponsePartition]
    def __init__(
        self,
        *,
        topic_name: str = ...,
        partitions: list[DescribeQuorumResponsePartition] = ...,
    ) -> None: ...

class DescribeQuorumResponseListener(Message):
    name: str
    host: str
    port: int
    def __init__(
        self,
        *,
        name: str = ...,
        host: str = ...,
        port: int = ...,
    ) -> None: ...

class DescribeQuorumResponseNode(Message):
    node_id: int
    listeners: list[DescribeQuorumResponseListener]
    def __init__(
        self,
        *,
        node_id: int = ...,
        listeners: list[DescribeQuorumResponseListener] = ...,
    ) -> None: ...

class DescribeQuorumResponse(Message):
    error_code: int
    error_message: str | None
    topics: list[DescribeQuorumResponseTopic]
    nodes: list[DescribeQuorumResponseNode]
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        topics: list[DescribeQuorumResponseTopic] = ...,
        nodes: list[DescribeQuorumResponseNode] = ...,
    ) -> None: ...

class CreateTopicsRequestAssignment(Message):
    partition_index: int
    broker_ids: list[int]
    def __init__(
        self,
        *,
        partition_index: int = ...,
        broker_ids: list[int] = ...,
    ) -> None: ...

class CreateTopicsRequestConfig(Message):
    name: str
    value: str | None
    def __init__(
        self,
        *,
        name: str = ...,
        value: str | None = ...,
    ) -> None: ...

class CreateTopicsRequestTopic(Message):
    name: str
    num_partitions: int
    replication_factor: int
    assignments: list[CreateTopicsRequestAssignment]
    configs: list[CreateTopicsRequestConfig]
    def __init__(
        self,
        *,
        name: str = ...,
        num_partitions: int = ...,
        replication_factor: int = ...,
        assignments: list[CreateTopicsRequestAssignment] = ...,
        configs: list[CreateTopicsRequestConfig] = ...,
    ) -> None: ...

class CreateTopicsRequest(Message):
    topics: list[CreateTopicsRequestTopic]
    timeout_ms: int
    validate_only: bool
    def __init__(
        self,
        *,
        topics: list[CreateTopicsRequestTopic] = ...,
        timeout_ms: int = ...,
        validate_only: bool = ...,
    ) -> None: ...

class CreateTopicsResponseConfig(Message):
    name: str
    value: str | None
    read_only: bool
    config_source: int
    is_sensitive: bool
    def __init__(
        self,
        *,
        name: str = ...,
        value: str | None = ...,
        read_only: bool = ...,
        config_source: int = ...,
        is_sensitive: bool = ...,
    ) -> None: ...

class CreateTopicsResponseTopic(Message):
    name: str
    topic_id: bytes
    error_code: int
    error_message: str | None
    topic_config_error_code: int
    num_partitions: int
    replication_factor: int
    configs: list[CreateTopicsResponseConfig] | None
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        topic_config_error_code: int = ...,
        num_partitions: int = ...,
        replication_factor: int = ...,
        configs: list[CreateTopicsResponseConfig] | None = ...,
    ) -> None: ...

class CreateTopicsResponse(Message):
    throttle_time_ms: int
    topics: list[CreateTopicsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[CreateTopicsResponseTopic] = ...,
    ) -> None: ...

class DeleteTopicsRequestTopic(Message):
    name: str | None
    topic_id: bytes
    def __init__(
        self,
        *,
        name: str | None = ...,
        topic_id: bytes = ...,
    ) -> None: ...

class DeleteTopicsRequest(Message):
    topics: list[DeleteTopicsRequestTopic]
    topic_names: list[str]
    timeout_ms: int
    def __init__(
        self,
        *,
        topics: list[DeleteTopicsRequestTopic] = ...,
        topic_names: list[str] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class DeleteTopicsResponseTopic(Message):
    name: str | None
    topic_id: bytes
    error_code: int
    error_message: str | None
    def __init__(
        self,
        *,
        name: str | None = ...,
        topic_id: bytes = ...,
        error_code: int = ...,
        error_message: str | None = ...,
    ) -> None: ...

class DeleteTopicsResponse(Message):
    throttle_time_ms: int
    responses: list[DeleteTopicsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[DeleteTopicsResponseTopic] = ...,
    ) -> None: ...

class CreatePartitionsRequestAssignment(Message):
    broker_ids: list[int]
    def __init__(
        self,
        *,
        broker_ids: list[int] = ...,
    ) -> None: ...

class CreatePartitionsRequestTopic(Message):
    name: str
    count: int
    assignments: list[CreatePartitionsRequestAssignment] | None
    def __init__(
        self,
        *,
        name: str = ...,
        count: int = ...,
        assignments: list[CreatePartitionsRequestAssignment] | None = ...,
    ) -> None: ...

class CreatePartitionsRequest(Message):
    topics: list[CreatePartitionsRequestTopic]
    timeout_ms: int
    validate_only: bool
    def __init__(
        self,
        *,
        topics: list[CreatePartitionsRequestTopic] = ...,
        timeout_ms: int = ...,
        validate_only: bool = ...,
    ) -> None: ...

class CreatePartitionsResponseTopic(Message):
    name: str
    error_code: int
    error_message: str | None
    def __init__(
        self,
        *,
        name: str = ...,
        error_code: int = ...,
        error_message: str | None = ...,
    ) -> None: ...

class CreatePartitionsResponse(Message):
    throttle_time_ms: int
    results: list[CreatePartitionsResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[CreatePartitionsResponseTopic] = ...,
    ) -> None: ...

class DescribeTopicPartitionsRequestTopic(Message):
    name: str
    def __init__(
        self,
        *,
        name: str = ...,
    ) -> None: ...

class DescribeTopicPartitionsRequestCursor(Message):
    topic_name: str
    partition_index: int
    def __init__(
        self,
        *,
        topic_name: str = ...,
        partition_index: int = ...,
    ) -> None: ...

class DescribeTopicPartitionsRequest(Message):
    topics: list[DescribeTopicPartitionsRequestTopic]
    response_partition_limit: int
    cursor: DescribeTopicPartitionsRequestCursor | None
    def __init__(
        self,
        *,
        topics: list[DescribeTopicPartitionsRequestTopic] = ...,
        response_partition_limit: int = ...,
        cursor: DescribeTopicPartitionsRequestCursor | None = ...,
    ) -> None: ...

class DescribeTopicPartitionsResponsePartition(Message):
    error_code: int
    partition_index: int
    leader_id: int
    leader_epoch: int
    replica_nodes: list[int]
    isr_nodes: list[int]
    eligible_leader_replicas: list[int] | None
    last_known_elr: list[int] | None
    offline_replicas: list[int]
    def __init__(
        self,
        *,
        error_code: int = ...,
        partition_index: int = ...,
        leader_id: int = ...,
        leader_epoch: int = ...,
        replica_nodes: list[int] = ...,
        isr_nodes: list[int] = ...,
        eligible_leader_replicas: list[int] | None = ...,
        last_known_elr: list[int] | None = ...,
        offline_replicas: list[int] = ...,
    ) -> None: ...

class DescribeTopicPartitionsResponseTopic(Message):
    error_code: int
    name: str | None
    topic_id: bytes
    is_internal: bool
    partitions: list[DescribeTopicPartitionsResponsePartition]
    topic_authorized_operations: int
    def __init__(
        self,
        *,
        error_code: int = ...,
        name: str | None = ...,
        topic_id: bytes = ...,
        is_internal: bool = ...,
        partitions: list[DescribeTopicPartitionsResponsePartition] = ...,
        topic_authorized_operations: int = ...,
    ) -> None: ...

class DescribeTopicPartitionsResponseCursor(Message):
    topic_name: str
    partition_index: int
    def __init__(
        self,
        *,
        topic_name: str = ...,
        partition_index: int = ...,
    ) -> None: ...

class DescribeTopicPartitionsResponse(Message):
    throttle_time_ms: int
    topics: list[DescribeTopicPartitionsResponseTopic]
    next_cursor: DescribeTopicPartitionsResponseCursor | None
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DescribeTopicPartitionsResponseTopic] = ...,
        next_cursor: DescribeTopicPartitionsResponseCursor | None = ...,
    ) -> None: ...

class DescribeConfigsRequestResource(Message):
    resource_type: int
    resource_name: str
    configuration_keys: list[str] | None
    def __init__(
        self,
        *,
        resource_type: int = ...,
        resource_name: str = ...,
        configuration_keys: list[str] | None = ...,
    ) -> None: ...

class DescribeConfigsRequest(Message):
    resources: list[DescribeConfigsRequestResource]
    include_synonyms: bool
    include_documentation: bool
    def __init__(
        self,
        *,
        resources: list[DescribeConfigsRequestResource] = ...,
        include_synonyms: bool = ...,
        include_documentation: bool = ...,
    ) -> None: ...

class DescribeConfigsResponseSynonym(Message):
    name: str
    value: str | None
    source: int
    def __init__(
        self,
        *,
        name: str = ...,
        value: str | None = ...,
        source: int = ...,
    ) -> None: ...

class DescribeConfigsResponseConfig(Message):
    name: str
    value: str | None
    read_only: bool
    config_source: int
    is_sensitive: bool
    synonyms: list[DescribeConfigsResponseSynonym]
    config_type: int
    documentation: str | None
    def __init__(
        self,
        *,
        name: str = ...,
        value: str | None = ...,
        read_only: bool = ...,
        config_source: int = ...,
        is_sensitive: bool = ...,
        synonyms: list[DescribeConfigsResponseSynonym] = ...,
        config_type: int = ...,
        documentation: str | None = ...,
    ) -> None: ...

class DescribeConfigsResponseResult(Message):
    error_code: int
    error_message: str | None
    resource_type: int
    resource_name: str
    configs: list[DescribeConfigsResponseConfig]
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        resource_type: int = ...,
        resource_name: str = ...,
        configs: list[DescribeConfigsResponseConfig] = ...,
    ) -> None: ...

class DescribeConfigsResponse(Message):
    throttle_time_ms: int
    results: list[DescribeConfigsResponseResult]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[DescribeConfigsResponseResult] = ...,
    ) -> None: ...

class AlterConfigsRequestConfig(Message):
    name: str
    value: str | None
    def __init__(
        self,
        *,
        name: str = ...,
        value: str | None = ...,
    ) -> None: ...

class AlterConfigsRequestResource(Message):
    resource_type: int
    resource_name: str
    configs: list[AlterConfigsRequestConfig]
    def __init__(
        self,
        *,
        resource_type: int = ...,
        resource_name: str = ...,
        configs: list[AlterConfigsRequestConfig] = ...,
    ) -> None: ...

class AlterConfigsRequest(Message):
    resources: list[AlterConfigsRequestResource]
    validate_only: bool
    def __init__(
        self,
        *,
        resources: list[AlterConfigsRequestResource] = ...,
        validate_only: bool = ...,
    ) -> None: ...

class AlterConfigsResponseResource(Message):
    error_code: int
    error_message: str | None
    resource_type: int
    resource_name: str
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        resource_type: int = ...,
        resource_name: str = ...,
    ) -> None: ...

class AlterConfigsResponse(Message):
    throttle_time_ms: int
    responses: list[AlterConfigsResponseResource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[AlterConfigsResponseResource] = ...,
    ) -> None: ...

class IncrementalAlterConfigsRequestConfig(Message):
    name: str
    config_operation: int
    value: str | None
    def __init__(
        self,
        *,
        name: str = ...,
        config_operation: int = ...,
        value: str | None = ...,
    ) -> None: ...

class IncrementalAlterConfigsRequestResource(Message):
    resource_type: int
    resource_name: str
    configs: list[IncrementalAlterConfigsRequestConfig]
    def __init__(
        self,
        *,
        resource_type: int = ...,
        resource_name: str = ...,
        configs: list[IncrementalAlterConfigsRequestConfig] = ...,
    ) -> None: ...

class IncrementalAlterConfigsRequest(Message):
    resources: list[IncrementalAlterConfigsRequestResource]
    validate_only: bool
    def __init__(
        self,
        *,
        resources: list[IncrementalAlterConfigsRequestResource] = ...,
        validate_only: bool = ...,
    ) -> None: ...

class IncrementalAlterConfigsResponseResource(Message):
    error_code: int
    error_message: str | None
    resource_type: int
    resource_name: str
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        resource_type: int = ...,
        resource_name: str = ...,
    ) -> None: ...

class IncrementalAlterConfigsResponse(Message):
    throttle_time_ms: int
    responses: list[IncrementalAlterConfigsResponseResource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[IncrementalAlterConfigsResponseResource] = ...,
    ) -> None: ...

class ListConfigResourcesRequest(Message):
    resource_types: list[int]
    def __init__(
        self,
        *,
        resource_types: list[int] = ...,
    ) -> None: ...

class ListConfigResourcesResponseConfigResource(Message):
    resource_name: str
    resource_type: int
    def __init__(
        self,
        *,
        resource_name: str = ...,
        resource_type: int = ...,
    ) -> None: ...

class ListConfigResourcesResponse(Message):
    throttle_time_ms: int
    error_code: int
    config_resources: list[ListConfigResourcesResponseConfigResource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        config_resources: list[ListConfigResourcesResponseConfigResource] = ...,
    ) -> None: ...

class JoinGroupRequestProtocol(Message):
    name: str
    metadata: bytes
    def __init__(
        self,
        *,
        name: str = ...,
        metadata: bytes = ...,
    ) -> None: ...

class JoinGroupRequest(Message):
    group_id: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str
    protocols: list[JoinGroupRequestProtocol]
    reason: str | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        session_timeout_ms: int = ...,
        rebalance_timeout_ms: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        protocol_type: str = ...,
        protocols: list[JoinGroupRequestProtocol] = ...,
        reason: str | None = ...,
    ) -> None: ...

class JoinGroupResponseMember(Message):
    member_id: str
    group_instance_id: str | None
    metadata: bytes
    def __init__(
        self,
        *,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        metadata: bytes = ...,
    ) -> None: ...

class JoinGroupResponse(Message):
    throttle_time_ms: int
    error_code: int
    generation_id: int
    protocol_type: str | None
    protocol_name: str | None
    leader: str
    skip_assignment: bool
    member_id: str
    members: list[JoinGroupResponseMember]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        generation_id: int = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        leader: str = ...,
        skip_assignment: bool = ...,
        member_id: str = ...,
        members: list[JoinGroupResponseMember] = ...,
    ) -> None: ...

class HeartbeatRequest(Message):
    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
    ) -> None: ...

class HeartbeatResponse(Message):
    throttle_time_ms: int
    error_code: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
    ) -> None: ...

class LeaveGroupRequestMember(Message):
    member_id: str
    group_instance_id: str | None
    reason: str | None
    def __init__(
        self,
        *,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        reason: str | None = ...,
    ) -> None: ...

class LeaveGroupRequest(Message):
    group_id: str
    member_id: str
    members: list[LeaveGroupRequestMember]
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
        members: list[LeaveGroupRequestMember] = ...,
    ) -> None: ...

class LeaveGroupResponseMember(Message):
    member_id: str
    group_instance_id: str | None
    error_code: int
    def __init__(
        self,
        *,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        error_code: int = ...,
    ) -> None: ...

class LeaveGroupResponse(Message):
    throttle_time_ms: int
    error_code: int
    members: list[LeaveGroupResponseMember]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        members: list[LeaveGroupResponseMember] = ...,
    ) -> None: ...

class SyncGroupRequestAssignment(Message):
    member_id: str
    assignment: bytes
    def __init__(
        self,
        *,
        member_id: str = ...,
        assignment: bytes = ...,
    ) -> None: ...

class SyncGroupRequest(Message):
    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: list[SyncGroupRequestAssignment]
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        assignments: list[SyncGroupRequestAssignment] = ...,
    ) -> None: ...

class SyncGroupResponse(Message):
    throttle_time_ms: int
    error_code: int
    protocol_type: str | None
    protocol_name: str | None
    assignment: bytes
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        assignment: bytes = ...,
    ) -> None: ...

class OffsetCommitRequestPartition(Message):
    partition_index: int
    committed_offset: int
    committed_leader_epoch: int
    committed_metadata: str | None
    def __init__(
        self,
        *,
        partition_index: int = ...,
        committed_offset: int = ...,
        committed_leader_epoch: int = ...,
        committed_metadata: str | None = ...,
    ) -> None: ...

class OffsetCommitRequestTopic(Message):
    name: str
    topic_id: bytes
    partitions: list[OffsetCommitRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partitions: list[OffsetCommitRequestPartition] = ...,
    ) -> None: ...

class OffsetCommitRequest(Message):
    group_id: str
    generation_id_or_member_epoch: int
    member_id: str
    group_instance_id: str | None
    retention_time_ms: int
    topics: list[OffsetCommitRequestTopic]
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id_or_member_epoch: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        retention_time_ms: int = ...,
        topics: list[OffsetCommitRequestTopic] = ...,
    ) -> None: ...

class OffsetCommitResponsePartition(Message):
    partition_index: int
    error_code: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetCommitResponseTopic(Message):
    name: str
    topic_id: bytes
    partitions: list[OffsetCommitResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partitions: list[OffsetCommitResponsePartition] = ...,
    ) -> None: ...

class OffsetCommitResponse(Message):
    throttle_time_ms: int
    topics: list[OffsetCommitResponseTopic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetCommitResponseTopic] = ...,
    ) -> None: ...

class OffsetFetchRequestTopic(Message):
    name: str
    partition_indexes: list[int]
    def __init__(
        self,
        *,
        name: str = ...,
        partition_indexes: list[int] = ...,
    ) -> None: ...

class OffsetFetchRequestGroupTopic(Message):
    name: str
    topic_id: bytes
    partition_indexes: list[int]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partition_indexes: list[int] = ...,
    ) -> None: ...

class OffsetFetchRequestGroup(Message):
    group_id: str
    member_id: str | None
    member_epoch: int
    topics: list[OffsetFetchRequestGroupTopic] | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str | None = ...,
        member_epoch: int = ...,
        topics: list[OffsetFetchRequestGroupTopic] | None = ...,
    ) -> None: ...

class OffsetFetchRequest(Message):
    group_id: str
    topics: list[OffsetFetchRequestTopic] | None
    groups: list[OffsetFetchRequestGroup]
    require_stable: bool
    def __init__(
        self,
        *,
        group_id: str = ...,
        topics: list[OffsetFetchRequestTopic] | None = ...,
        groups: list[OffsetFetchRequestGroup] = ...,
        require_stable: bool = ...,
    ) -> None: ...

class OffsetFetchResponsePartition(Message):
    partition_index: int
    committed_offset: int
    committed_leader_epoch: int
    metadata: str | None
    error_code: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        committed_offset: int = ...,
        committed_leader_epoch: int = ...,
        metadata: str | None = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetFetchResponseTopic(Message):
    name: str
    partitions: list[OffsetFetchResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[OffsetFetchResponsePartition] = ...,
    ) -> None: ...

class OffsetFetchResponseGroupPartition(Message):
    partition_index: int
    committed_offset: int
    committed_leader_epoch: int
    metadata: str | None
    error_code: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        committed_offset: int = ...,
        committed_leader_epoch: int = ...,
        metadata: str | None = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetFetchResponseGroupTopic(Message):
    name: str
    topic_id: bytes
    partitions: list[OffsetFetchResponseGroupPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        topic_id: bytes = ...,
        partitions: list[OffsetFetchResponseGroupPartition] = ...,
    ) -> None: ...

class OffsetFetchResponseGroup(Message):
    group_id: str
    topics: list[OffsetFetchResponseGroupTopic]
    error_code: int
    def __init__(
        self,
        *,
        group_id: str = ...,
        topics: list[OffsetFetchResponseGroupTopic] = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetFetchResponse(Message):
    throttle_time_ms: int
    topics: list[OffsetFetchResponseTopic]
    error_code: int
    groups: list[OffsetFetchResponseGroup]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetFetchResponseTopic] = ...,
        error_code: int = ...,
        groups: list[OffsetFetchResponseGroup] = ...,
    ) -> None: ...

class DescribeGroupsRequest(Message):
    groups: list[str]
    include_authorized_operations: bool
    def __init__(
        self,
        *,
        groups: list[str] = ...,
        include_authorized_operations: bool = ...,
    ) -> None: ...

class DescribeGroupsResponseMember(Message):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    member_metadata: bytes
    member_assignment: bytes
    def __init__(
        self,
        *,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        client_id: str = ...,
        client_host: str = ...,
        member_metadata: bytes = ...,
        member_assignment: bytes = ...,
    ) -> None: ...

class DescribeGroupsResponseGroup(Message):
    error_code: int
    error_message: str | None
    group_id: str
    group_state: str
    protocol_type: str
    protocol_data: str
    members: list[DescribeGroupsResponseMember]
    authorized_operations: int
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        group_id: str = ...,
        group_state: str = ...,
        protocol_type: str = ...,
        protocol_data: str = ...,
        members: list[DescribeGroupsResponseMember] = ...,
        authorized_operations: int = ...,
    ) -> None: ...

class DescribeGroupsResponse(Message):
    throttle_time_ms: int
    groups: list[DescribeGroupsResponseGroup]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        groups: list[DescribeGroupsResponseGroup] = ...,
    ) -> None: ...

class ListGroupsRequest(Message):
    states_filter: list[str]
    types_filter: list[str]
    def __init__(
        self,
        *,
        states_filter: list[str] = ...,
        types_filter: list[str] = ...,
    ) -> None: ...

class ListGroupsResponseGroup(Message):
    group_id: str
    protocol_type: str
    group_state: str
    group_type: str
    def __init__(
        self,
        *,
        group_id: str = ...,
        protocol_type: str = ...,
        group_state: str = ...,
        group_type: str = ...,
    ) -> None: ...

class ListGroupsResponse(Message):
    throttle_time_ms: int
    error_code: int
    groups: list[ListGroupsResponseGroup]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        groups: list[ListGroupsResponseGroup] = ...,
    ) -> None: ...

class DeleteGroupsRequest(Message):
    groups_names: list[str]
    def __init__(
        self,
        *,
        groups_names: list[str] = ...,
    ) -> None: ...

class DeleteGroupsResponseGroup(Message):
    group_id: str
    error_code: int
    def __init__(
        self,
        *,
        group_id: str = ...,
        error_code: int = ...,
    ) -> None: ...

class DeleteGroupsResponse(Message):
    throttle_time_ms: int
    results: list[DeleteGroupsResponseGroup]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[DeleteGroupsResponseGroup] = ...,
    ) -> None: ...

class OffsetDeleteRequestPartition(Message):
    partition_index: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
    ) -> None: ...

class OffsetDeleteRequestTopic(Message):
    name: str
    partitions: list[OffsetDeleteRequestPartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[OffsetDeleteRequestPartition] = ...,
    ) -> None: ...

class OffsetDeleteRequest(Message):
    group_id: str
    topics: list[OffsetDeleteRequestTopic]
    def __init__(
        self,
        *,
        group_id: str = ...,
        topics: list[OffsetDeleteRequestTopic] = ...,
    ) -> None: ...

class OffsetDeleteResponsePartition(Message):
    partition_index: int
    error_code: int
    def __init__(
        self,
        *,
        partition_index: int = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetDeleteResponseTopic(Message):
    name: str
    partitions: list[OffsetDeleteResponsePartition]
    def __init__(
        self,
        *,
        name: str = ...,
        partitions: list[OffsetDeleteResponsePartition] = ...,
    ) -> None: ...

class OffsetDeleteResponse(Message):
    error_code: int
    throttle_time_ms: int
    topics: list[OffsetDeleteResponseTopic]
    def __init__(
        self,
        *,
        error_code: int = ...,
        throttle_time_ms: int = ...,
        topics: list[OffsetDeleteResponseTopic] = ...,
    ) -> None: ...

class OffsetCommitKey(Message):
    group: str
    topic: str
    partition: int
    def __init__(
        self,
        *,
        group: str = ...,
        topic: str = ...,
        partition: int = ...,
    ) -> None: ...

class OffsetCommitValue(Message):
    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp: int
    expire_timestamp: int
    topic_id: bytes
    def __init__(
        self,
        *,
        offset: int = ...,
        leader_epoch: int = ...,
        metadata: str = ...,
        commit_timestamp: int = ...,
        expire_timestamp: int = ...,
        topic_id: bytes = ...,
    ) -> None: ...

class GroupMetadataKey(Message):
    group: str
    def __init__(
        self,
        *,
        group: str = ...,
    ) -> None: ...

class GroupMetadataValueMember(Message):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout: int
    session_timeout: int
    subscription: bytes
    assignment: bytes
    def __init__(
        self,
        *,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        client_id: str = ...,
        client_host: str = ...,
        rebalance_timeout: int = ...,
        session_timeout: int = ...,
        subscription: bytes = ...,
        assignment: bytes = ...,
    ) -> None: ...

class GroupMetadataValue(Message):
    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    current_state_timestamp: int
    members: list[GroupMetadataValueMember]
    def __init__(
        self,
        *,
        protocol_type: str = ...,
        generation: int = ...,
        protocol: str | None = ...,
        leader: str | None = ...,
        current_state_timestamp: int = ...,
        members: list[GroupMetadataValueMember] = ...,
    ) -> None: ...
