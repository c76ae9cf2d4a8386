"""Message tables: consumer groups of both protocols, and their offsets.

Source: the Kafka protocol guide (messages of Apache Kafka 4.3).
"""

from protocol.schema import F, api

JOIN_GROUP = api(
    11, "JoinGroup", "0-9", "6+",
    request=(
        F("group_id", "string"),
        F("session_timeout_ms", "int32"),
        F("rebalance_timeout_ms", "int32", "1+", default=-1),
        F("member_id", "string"),
        F("group_instance_id", "string", "5+", null="5+", default=None),
        F("protocol_type", "string"),
        F("protocols", "[]Protocol", "0+",
          F("name", "string"),
          F("metadata", "bytes")),
        F("reason", "string", "8+", null="8+", default=None),
    ),
    response=(
        F("throttle_time_ms", "int32", "2+"),
        F("error_code", "int16"),
        F("generation_id", "int32", default=-1),
        F("protocol_type", "string", "7+", null="7+", default=None),
        F("protocol_name", "string", null="7+"),
        F("leader", "string"),
        F("skip_assignment", "bool", "9+"),
        F("member_id", "string"),
        F("members", "[]Member", "0+",
          F("member_id", "string"),
          F("group_instance_id", "string", "5+", null="5+", default=None),
          F("metadata", "bytes")),
    ),
)  # fmt: skip

HEARTBEAT = api(
    12, "Heartbeat", "0-4", "4+",
    request=(
        F("group_id", "string"),
        F("generation_id", "int32"),
        F("member_id", "string"),
        F("group_instance_id", "string", "3+", null="3+", default=None),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16"),
    ),
)  # fmt: skip

LEAVE_GROUP = api(
    13, "LeaveGroup", "0-5", "4+",
    request=(
        F("group_id", "string"),
        F("member_id", "string", "0-2"),
        F("members", "[]Member", "3+",
          F("member_id", "string"),
          F("group_instance_id", "string", null="3+", default=None),
          F("reason", "string", "5+", null="5+", default=None)),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16"),
        F("members", "[]Member", "3+",
          F("member_id", "string"),
          F("group_instance_id", "string", null="3+", default=None),
          F("error_code", "int16")),
    ),
)  # fmt: skip

SYNC_GROUP = api(
    14, "SyncGroup", "0-5", "4+",
    request=(
        F("group_id", "string"),
        F("generation_id", "int32"),
        F("member_id", "string"),
        F("group_instance_id", "string", "3+", null="3+", default=None),
        F("protocol_type", "string", "5+", null="5+", default=None),
        F("protocol_name", "string", "5+", null="5+", default=None),
        F("assignments", "[]Assignment", "0+",
          F("member_id", "string"),
          F("assignment", "bytes")),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16"),
        F("protocol_type", "string", "5+", null="5+", default=None),
        F("protocol_name", "string", "5+", null="5+", default=None),
        F("assignment", "bytes"),
    ),
)  # fmt: skip

OFFSET_COMMIT = api(
    8, "OffsetCommit", "2-10", "8+",
    request=(
        F("group_id", "string"),
        F("generation_id_or_member_epoch", "int32", "1+", default=-1),
        F("member_id", "string", "1+"),
        F("group_instance_id", "string", "7+", null="7+", default=None),
        F("retention_time_ms", "int64", "2-4", default=-1),
        F("topics", "[]Topic", "0+",
          F("name", "string", "0-9"),
          F("topic_id", "uuid", "10+"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("committed_offset", "int64"),
            F("committed_leader_epoch", "int32", "6+", default=-1),
            F("committed_metadata", "string", null="0+"))),
    ),
    response=(
        F("throttle_time_ms", "int32", "3+"),
        F("topics", "[]Topic", "0+",
          F("name", "string", "0-9"),
          F("topic_id", "uuid", "10+"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"))),
    ),
)  # fmt: skip

OFFSET_FETCH = api(
    9, "OffsetFetch", "1-10", "6+",
    request=(
        F("group_id", "string", "0-7"),
        F("topics", "[]Topic", "0-7",
          F("name", "string"),
          F("partition_indexes", "[]int32"), null="2-7"),
        F("groups", "[]Group", "8+",
          F("group_id", "string"),
          F("member_id", "string", "9+", null="9+", default=None),
          F("member_epoch", "int32", "9+", default=-1),
          F("topics", "[]GroupTopic", "8+",
            F("name", "string", "8-9"),
            F("topic_id", "uuid", "10+"),
            F("partition_indexes", "[]int32"), null="8+")),
        F("require_stable", "bool", "7+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "3+"),
        F("topics", "[]Topic", "0-7",
          F("name", "string"),
          F("partitions", "[]Partition", "0-7",
            F("partition_index", "int32"),
            F("committed_offset", "int64"),
            F("committed_leader_epoch", "int32", "5-7", default=-1),
            F("metadata", "string", null="0-7"),
            F("error_code", "int16"))),
        F("error_code", "int16", "2-7"),
        F("groups", "[]Group", "8+",
          F("group_id", "string"),
          F("topics", "[]GroupTopic", "8+",
            F("name", "string", "8-9"),
            F("topic_id", "uuid", "10+"),
            F("partitions", "[]GroupPartition", "8+",
              F("partition_index", "int32"),
              F("committed_offset", "int64"),
              F("committed_leader_epoch", "int32", default=-1),
              F("metadata", "string", null="8+"),
              F("error_code", "int16"))),
          F("error_code", "int16")),
    ),
)  # fmt: skip

DESCRIBE_GROUPS = api(
    15, "DescribeGroups", "0-6", "5+",
    request=(
        F("groups", "[]string"),
        F("include_authorized_operations", "bool", "3+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("groups", "[]Group", "0+",
          F("error_code", "int16"),
          F("error_message", "string", "6+", null="6+", default=None),
          F("group_id", "string"),
          F("group_state", "string"),
          F("protocol_type", "string"),
          F("protocol_data", "string"),
          F("members", "[]Member", "0+",
            F("member_id", "string"),
            F("group_instance_id", "string", "4+", null="4+", default=None),
            F("client_id", "string"),
            F("client_host", "string"),
            F("member_metadata", "bytes"),
            F("member_assignment", "bytes")),
          F("authorized_operations", "int32", "3+", default=-(2**31))),
    ),
)  # fmt: skip

LIST_GROUPS = api(
    16, "ListGroups", "0-5", "3+",
    request=(
        F("states_filter", "[]string", "4+"),
        F("types_filter", "[]string", "5+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16"),
        F("groups", "[]Group", "0+",
          F("group_id", "string"),
          F("protocol_type", "string"),
          F("group_state", "string", "4+"),
          F("group_type", "string", "5+")),
    ),
)  # fmt: skip

DELETE_GROUPS = api(
    42, "DeleteGroups", "0-2", "2+",
    request=(F("groups_names", "[]string"),),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Group", "0+",
          F("group_id", "string"),
          F("error_code", "int16")),
    ),
)  # fmt: skip

OFFSET_DELETE = api(
    47, "OffsetDelete", "0", "",
    request=(
        F("group_id", "string"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+", F("partition_index", "int32"))),
    ),
    response=(
        F("error_code", "int16"),
        F("throttle_time_ms", "int32"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"))),
    ),
)  # fmt: skip

CONSUMER_GROUP_HEARTBEAT = api(
    68, "ConsumerGroupHeartbeat", "0-1", "0+",
    request=(
        F("group_id", "string"),
        F("member_id", "string"),
        F("member_epoch", "int32"),
        F("instance_id", "string", null="0+", default=None),
        F("rack_id", "string", null="0+", default=None),
        F("rebalance_timeout_ms", "int32", default=-1),
        F("subscribed_topic_names", "[]string", null="0+"),
        F("subscribed_topic_regex", "string", "1+", null="1+", default=None),
        F("server_assignor", "string", null="0+", default=None),
        F("topic_partitions", "[]TopicPartition", "0+",
          F("topic_id", "uuid"),
          F("partitions", "[]int32"), null="0+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+", default=None),
        F("member_id", "string", null="0+", default=None),
        F("member_epoch", "int32"),
        F("heartbeat_interval_ms", "int32"),
        F("assignment", "Assignment", "0+",
          F("topic_partitions", "[]TopicPartition", "0+",
            F("topic_id", "uuid"),
            F("partitions", "[]int32")), null="0+", default=None),
    ),
)  # fmt: skip

CONSUMER_GROUP_DESCRIBE = api(
    69, "ConsumerGroupDescribe", "0-1", "0+",
    request=(
        F("group_ids", "[]string"),
        F("include_authorized_operations", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("groups", "[]Group", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+", default=None),
          F("group_id", "string"),
          F("group_state", "string"),
          F("group_epoch", "int32"),
          F("assignment_epoch", "int32"),
          F("assignor_name", "string"),
          F("members", "[]Member", "0+",
            F("member_id", "string"),
            F("instance_id", "string", null="0+", default=None),
            F("rack_id", "string", null="0+", default=None),
            F("member_epoch", "int32"),
            F("client_id", "string"),
            F("client_host", "string"),
            F("subscribed_topic_names", "[]string"),
            F("subscribed_topic_regex", "string", null="0+", default=None),
            F("assignment", "Assignment", "0+",
              F("topic_partitions", "[]TopicPartition", "0+",
                F("topic_id", "uuid"),
                F("topic_name", "string"),
                F("partitions", "[]int32"))),
            F("target_assignment", "TargetAssignment", "0+",
              F("topic_partitions", "[]TargetPartition", "0+",
                F("topic_id", "uuid"),
                F("topic_name", "string"),
                F("partitions", "[]int32"))),
            F("member_type", "int8", "1+", default=-1)),
          F("authorized_operations", "int32", default=-2147483648)),
    ),
)  # fmt: skip

GROUP_APIS = (
    JOIN_GROUP,
    HEARTBEAT,
    LEAVE_GROUP,
    SYNC_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    DESCRIBE_GROUPS,
    LIST_GROUPS,
    DELETE_GROUPS,
    OFFSET_DELETE,
    CONSUMER_GROUP_HEARTBEAT,
    CONSUMER_GROUP_DESCRIBE,
)
