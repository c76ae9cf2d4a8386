"""Message tables: topics and their configuration.

Source: the Kafka protocol guide (messages of Apache Kafka 4.3).
"""

from protocol.schema import F, api

CREATE_TOPICS = api(
    19, "CreateTopics", "2-7", "5+",
    request=(
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("num_partitions", "int32"),
          F("replication_factor", "int16"),
          F("assignments", "[]Assignment", "0+",
            F("partition_index", "int32"),
            F("broker_ids", "[]int32")),
          F("configs", "[]Config", "0+",
            F("name", "string"),
            F("value", "string", null="0+"))),
        F("timeout_ms", "int32", default=60000),
        F("validate_only", "bool", "1+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "2+"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("topic_id", "uuid", "7+"),
          F("error_code", "int16"),
          F("error_message", "string", "1+", null="0+", default=None),
          F("topic_config_error_code", "int16", "5+", tag=0),
          F("num_partitions", "int32", "5+", default=-1),
          F("replication_factor", "int16", "5+", default=-1),
          F("configs", "[]Config", "5+",
            F("name", "string"),
            F("value", "string", null="5+"),
            F("read_only", "bool"),
            F("config_source", "int8", default=-1),
            F("is_sensitive", "bool"), null="5+")),
    ),
)  # fmt: skip

DELETE_TOPICS = api(
    20, "DeleteTopics", "1-6", "4+",
    request=(
        F("topics", "[]Topic", "6+",
          F("name", "string", null="6+", default=None),
          F("topic_id", "uuid")),
        F("topic_names", "[]string", "0-5"),
        F("timeout_ms", "int32"),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("responses", "[]Topic", "0+",
          F("name", "string", null="6+"),
          F("topic_id", "uuid", "6+"),
          F("error_code", "int16"),
          F("error_message", "string", "5+", null="5+", default=None)),
    ),
)  # fmt: skip

CREATE_PARTITIONS = api(
    37, "CreatePartitions", "0-3", "2+",
    request=(
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("count", "int32"),
          F("assignments", "[]Assignment", "0+", F("broker_ids", "[]int32"), null="0+")),
        F("timeout_ms", "int32"),
        F("validate_only", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Topic", "0+",
          F("name", "string"),
          F("error_code", "int16"),
          F("error_message", "string", null="0+", default=None)),
    ),
)  # fmt: skip

DESCRIBE_TOPIC_PARTITIONS = api(
    75, "DescribeTopicPartitions", "0", "0+",
    request=(
        F("topics", "[]Topic", "0+", F("name", "string")),
        F("response_partition_limit", "int32", default=2000),
        F("cursor", "Cursor", "0+",
          F("topic_name", "string"),
          F("partition_index", "int32"), null="0+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("topics", "[]Topic", "0+",
          F("error_code", "int16"),
          F("name", "string", null="0+"),
          F("topic_id", "uuid"),
          F("is_internal", "bool"),
          F("partitions", "[]Partition", "0+",
            F("error_code", "int16"),
            F("partition_index", "int32"),
            F("leader_id", "int32"),
            F("leader_epoch", "int32", default=-1),
            F("replica_nodes", "[]int32"),
            F("isr_nodes", "[]int32"),
            F("eligible_leader_replicas", "[]int32", null="0+"),
            F("last_known_elr", "[]int32", null="0+"),
            F("offline_replicas", "[]int32")),
          F("topic_authorized_operations", "int32", default=-(2**31))),
        F("next_cursor", "Cursor", "0+",
          F("topic_name", "string"),
          F("partition_index", "int32"), null="0+"),
    ),
)  # fmt: skip

DESCRIBE_CONFIGS = api(
    32, "DescribeConfigs", "1-4", "4+",
    request=(
        F("resources", "[]Resource", "0+",
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("configuration_keys", "[]string", null="0+")),
        F("include_synonyms", "bool", "1+"),
        F("include_documentation", "bool", "3+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Result", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+", default=None),
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("configs", "[]Config", "0+",
            F("name", "string"),
            F("value", "string", null="0+"),
            F("read_only", "bool"),
            F("config_source", "int8", "1+", default=-1),
            F("is_sensitive", "bool"),
            F("synonyms", "[]Synonym", "1+",
              F("name", "string"),
              F("value", "string", null="0+"),
              F("source", "int8")),
            F("config_type", "int8", "3+"),
            F("documentation", "string", "3+", null="0+", default=None))),
    ),
)  # fmt: skip

ALTER_CONFIGS = api(
    33, "AlterConfigs", "0-2", "2+",
    request=(
        F("resources", "[]Resource", "0+",
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("configs", "[]Config", "0+",
            F("name", "string"),
            F("value", "string", null="0+"))),
        F("validate_only", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("responses", "[]Resource", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+", default=None),
          F("resource_type", "int8"),
          F("resource_name", "string")),
    ),
)  # fmt: skip

INCREMENTAL_ALTER_CONFIGS = api(
    44, "IncrementalAlterConfigs", "0-1", "1+",
    request=(
        F("resources", "[]Resource", "0+",
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("configs", "[]Config", "0+",
            F("name", "string"),
            F("config_operation", "int8"),
            F("value", "string", null="0+"))),
        F("validate_only", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("responses", "[]Resource", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+", default=None),
          F("resource_type", "int8"),
          F("resource_name", "string")),
    ),
)  # fmt: skip

LIST_CONFIG_RESOURCES = api(
    74, "ListConfigResources", "0-1", "0+",
    request=(F("resource_types", "[]int8", "1+"),),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("config_resources", "[]ConfigResource", "0+",
          F("resource_name", "string"),
          F("resource_type", "int8", "1+", default=16)),
    ),
)  # fmt: skip

TOPIC_APIS = (
    CREATE_TOPICS,
    DELETE_TOPICS,
    CREATE_PARTITIONS,
    DESCRIBE_TOPIC_PARTITIONS,
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES,
)
