"""Message tables: versions, metadata, coordinators, the cluster and its disks.

Source: the Kafka protocol guide (messages of Apache Kafka 4.3).
"""

from protocol.schema import F, api

API_VERSIONS = api(
    18, "ApiVersions", "0-4", "3+",
    request=(
        F("client_software_name", "string", "3+"),
        F("client_software_version", "string", "3+"),
    ),
    response=(
        F("error_code", "int16"),
        F("api_keys", "[]Range", "0+",
          F("api_key", "int16"),
          F("min_version", "int16"),
          F("max_version", "int16")),
        F("throttle_time_ms", "int32", "1+"),
        F("supported_features", "[]SupportedFeature", "3+",
          F("name", "string"),
          F("min_version", "int16"),
          F("max_version", "int16"), tag=0),
        F("finalized_features_epoch", "int64", "3+", tag=1, default=-1),
        F("finalized_features", "[]FinalizedFeature", "3+",
          F("name", "string"),
          F("max_version_level", "int16"),
          F("min_version_level", "int16"), tag=2),
        F("zk_migration_ready", "bool", "3+", tag=3),
    ),
)  # fmt: skip

METADATA = api(
    3, "Metadata", "0-13", "9+",
    request=(
        F("topics", "[]Topic", "0+",
          F("topic_id", "uuid", "10+"),
          F("name", "string", null="10+"), null="1+"),
        F("allow_auto_topic_creation", "bool", "4+", default=True),
        F("include_cluster_authorized_operations", "bool", "8-10"),
        F("include_topic_authorized_operations", "bool", "8+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "3+"),
        F("brokers", "[]Broker", "0+",
          F("node_id", "int32"),
          F("host", "string"),
          F("port", "int32"),
          F("rack", "string", "1+", null="1+", default=None)),
        F("cluster_id", "string", "2+", null="2+", default=None),
        F("controller_id", "int32", "1+", default=-1),
        F("topics", "[]Topic", "0+",
          F("error_code", "int16"),
          F("name", "string", null="12+"),
          F("topic_id", "uuid", "10+"),
          F("is_internal", "bool", "1+"),
          F("partitions", "[]Partition", "0+",
            F("error_code", "int16"),
            F("partition_index", "int32"),
            F("leader_id", "int32"),
            F("leader_epoch", "int32", "7+", default=-1),
            F("replica_nodes", "[]int32"),
            F("isr_nodes", "[]int32"),
            F("offline_replicas", "[]int32", "5+")),
          F("topic_authorized_operations", "int32", "8+", default=-(2**31))),
        F("cluster_authorized_operations", "int32", "8-10", default=-(2**31)),
        F("error_code", "int16", "13+"),
    ),
)  # fmt: skip

FIND_COORDINATOR = api(
    10, "FindCoordinator", "0-6", "3+",
    request=(
        F("key", "string", "0-3"),
        F("key_type", "int8", "1+"),
        F("coordinator_keys", "[]string", "4+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16", "0-3"),
        F("error_message", "string", "1-3", null="1-3", default=None),
        F("node_id", "int32", "0-3"),
        F("host", "string", "0-3"),
        F("port", "int32", "0-3"),
        F("coordinators", "[]Coordinator", "4+",
          F("key", "string"),
          F("node_id", "int32"),
          F("host", "string"),
          F("port", "int32"),
          F("error_code", "int16"),
          F("error_message", "string", null="4+", default=None)),
    ),
)  # fmt: skip

DESCRIBE_CLUSTER = api(
    60, "DescribeCluster", "0-2", "0+",
    request=(
        F("include_cluster_authorized_operations", "bool"),
        F("endpoint_type", "int8", "1+", default=1),
        F("include_fenced_brokers", "bool", "2+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+", default=None),
        F("endpoint_type", "int8", "1+", default=1),
        F("cluster_id", "string"),
        F("controller_id", "int32", default=-1),
        F("brokers", "[]Broker", "0+",
          F("broker_id", "int32"),
          F("host", "string"),
          F("port", "int32"),
          F("rack", "string", null="0+", default=None),
          F("is_fenced", "bool", "2+")),
        F("cluster_authorized_operations", "int32", default=-(2**31)),
    ),
)  # fmt: skip

DESCRIBE_LOG_DIRS = api(
    35, "DescribeLogDirs", "1-5", "2+",
    request=(
        F("topics", "[]Topic", "0+",
          F("topic", "string"),
          F("partitions", "[]int32"), null="0+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16", "3+"),
        F("results", "[]Directory", "0+",
          F("error_code", "int16"),
          F("log_dir", "string"),
          F("topics", "[]Topic", "0+",
            F("name", "string"),
            F("partitions", "[]Partition", "0+",
              F("partition_index", "int32"),
              F("partition_size", "int64"),
              F("offset_lag", "int64"),
              F("is_future_key", "bool"))),
          F("total_bytes", "int64", "4+", default=-1),
          F("usable_bytes", "int64", "4+", default=-1),
          F("is_cordoned", "bool", "5+")),
    ),
)  # fmt: skip

LIST_PARTITION_REASSIGNMENTS = api(
    46, "ListPartitionReassignments", "0", "0+",
    request=(
        F("timeout_ms", "int32", default=60000),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partition_indexes", "[]int32"), null="0+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+", default=None),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("replicas", "[]int32"),
            F("adding_replicas", "[]int32"),
            F("removing_replicas", "[]int32"))),
    ),
)  # fmt: skip

ELECT_LEADERS = api(
    43, "ElectLeaders", "0-2", "2+",
    request=(
        F("election_type", "int8", "1+"),
        F("topic_partitions", "[]TopicPartitions", "0+",
          F("topic", "string"),
          F("partitions", "[]int32"), null="0+"),
        F("timeout_ms", "int32", default=60000),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16", "1+"),
        F("replica_election_results", "[]ReplicaElectionResult", "0+",
          F("topic", "string"),
          F("partition_result", "[]PartitionResult", "0+",
            F("partition_id", "int32"),
            F("error_code", "int16"),
            F("error_message", "string", null="0+", default=None))),
    ),
)  # fmt: skip

ALTER_PARTITION_REASSIGNMENTS = api(
    45, "AlterPartitionReassignments", "0-1", "0+",
    request=(
        F("timeout_ms", "int32", default=60000),
        F("allow_replication_factor_change", "bool", "1+", default=True),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("replicas", "[]int32", null="0+"))),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("allow_replication_factor_change", "bool", "1+", default=True),
        F("error_code", "int16"),
        F("error_message", "string", null="0+", default=None),
        F("responses", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"),
            F("error_message", "string", null="0+", default=None))),
    ),
)  # fmt: skip

DESCRIBE_QUORUM = api(
    55, "DescribeQuorum", "0-2", "0+",
    request=(
        F("topics", "[]Topic", "0+",
          F("topic_name", "string"),
          F("partitions", "[]Partition", "0+", F("partition_index", "int32"))),
    ),
    response=(
        F("error_code", "int16"),
        F("error_message", "string", "2+", null="2+", default=None),
        F("topics", "[]Topic", "0+",
          F("topic_name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"),
            F("error_message", "string", "2+", null="2+", default=None),
            F("leader_id", "int32"),
            F("leader_epoch", "int32"),
            F("high_watermark", "int64"),
            F("current_voters", "[]Voter", "0+",
              F("replica_id", "int32"),
              F("replica_directory_id", "uuid", "2+"),
              F("log_end_offset", "int64"),
              F("last_fetch_timestamp", "int64", "1+", default=-1),
              F("last_caught_up_timestamp", "int64", "1+", default=-1)),
            F("observers", "[]Observer", "0+",
              F("replica_id", "int32"),
              F("replica_directory_id", "uuid", "2+"),
              F("log_end_offset", "int64"),
              F("last_fetch_timestamp", "int64", "1+", default=-1),
              F("last_caught_up_timestamp", "int64", "1+", default=-1)))),
        F("nodes", "[]Node", "2+",
          F("node_id", "int32", "2+"),
          F("listeners", "[]Listener", "2+",
            F("name", "string", "2+"),
            F("host", "string", "2+"),
            F("port", "uint16", "2+"))),
    ),
)  # fmt: skip

ALTER_REPLICA_LOG_DIRS = api(
    34, "AlterReplicaLogDirs", "1-2", "2+",
    request=(
        F("dirs", "[]Dir", "0+",
          F("path", "string"),
          F("topics", "[]Topic", "0+",
            F("name", "string"),
            F("partitions", "[]int32"))),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Result", "0+",
          F("topic_name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"))),
    ),
)  # fmt: skip

UPDATE_FEATURES = api(
    57, "UpdateFeatures", "0-2", "0+",
    request=(
        F("timeout_ms", "int32", default=60000),
        F("feature_updates", "[]FeatureUpdate", "0+",
          F("feature", "string"),
          F("max_version_level", "int16"),
          F("allow_downgrade", "bool", "0"),
          F("upgrade_type", "int8", "1+", default=1)),
        F("validate_only", "bool", "1+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+"),
        F("results", "[]Result", "0-1",
          F("feature", "string"),
          F("error_code", "int16"),
          F("error_message", "string", null="0+")),
    ),
)  # fmt: skip

CLUSTER_APIS = (
    API_VERSIONS,
    METADATA,
    FIND_COORDINATOR,
    DESCRIBE_CLUSTER,
    DESCRIBE_LOG_DIRS,
    ELECT_LEADERS,
    ALTER_PARTITION_REASSIGNMENTS,
    LIST_PARTITION_REASSIGNMENTS,
    DESCRIBE_QUORUM,
    ALTER_REPLICA_LOG_DIRS,
    UPDATE_FEATURES,
)
