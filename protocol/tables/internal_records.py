"""The records of Kafka's internal topics, __consumer_offsets and __transaction_state, as tables.

Source: the message schemas of these names in Kafka 4.3.0's group and transaction coordinators.
Records of consumer groups are those of KIP-848.
"""

from typing import Final

from protocol.schema import F, RecordSchema, record

OFFSET_COMMIT_KEY = record(
    "OffsetCommitKey", "0-1", "",
    F("group", "string"),
    F("topic", "string"),
    F("partition", "int32"),
)  # fmt: skip

OFFSET_COMMIT_VALUE = record(
    "OffsetCommitValue", "0-4", "4+",
    F("offset", "int64"),
    F("leader_epoch", "int32", "3+", default=-1),
    F("metadata", "string"),
    F("commit_timestamp", "int64"),
    F("expire_timestamp", "int64", "1", default=-1),
    F("topic_id", "uuid", "4+", tag=0),
)  # fmt: skip

GROUP_METADATA_KEY = record("GroupMetadataKey", "2", "", F("group", "string"))

GROUP_METADATA_VALUE = record(
    "GroupMetadataValue", "0-4", "4+",
    F("protocol_type", "string"),
    F("generation", "int32"),
    F("protocol", "string", null="0+"),
    F("leader", "string", null="0+"),
    F("current_state_timestamp", "int64", "2+", default=-1),
    F("members", "[]Member", "0+",
      F("member_id", "string"),
      F("group_instance_id", "string", "3+", null="3+", default=None),
      F("client_id", "string"),
      F("client_host", "string"),
      F("rebalance_timeout", "int32", "1+", default=-1),
      F("session_timeout", "int32"),
      F("subscription", "bytes"),
      F("assignment", "bytes")),
)  # fmt: skip

TRANSACTION_LOG_KEY = record("TransactionLogKey", "0", "", F("transactional_id", "string"))

TRANSACTION_LOG_VALUE = record(
    "TransactionLogValue", "0-1", "1+",
    F("producer_id", "int64"),
    F("previous_producer_id", "int64", "1+", tag=0, default=-1),
    F("next_producer_id", "int64", "1+", tag=1, default=-1),
    F("producer_epoch", "int16"),
    F("next_producer_epoch", "int16", "1+", tag=3, default=-1),
    F("transaction_timeout_ms", "int32"),
    F("transaction_status", "int8"),
    F("transaction_partitions", "[]Topic", "0+",
      F("topic", "string"),
      F("partition_ids", "[]int32"), null="0+"),
    F("transaction_last_update_timestamp_ms", "int64"),
    F("transaction_start_timestamp_ms", "int64"),
    F("client_transaction_version", "int16", "1+", tag=2),
)  # fmt: skip

CONSUMER_GROUP_METADATA_KEY = record("ConsumerGroupMetadataKey", "3", "", F("group_id", "string"))

CONSUMER_GROUP_METADATA_VALUE = record(
    "ConsumerGroupMetadataValue", "0", "0+",
    F("epoch", "int32"),
    F("metadata_hash", "int64", tag=0),
)  # fmt: skip

CONSUMER_GROUP_MEMBER_METADATA_KEY = record(
    "ConsumerGroupMemberMetadataKey", "5", "",
    F("group_id", "string"),
    F("member_id", "string"),
)  # fmt: skip

CONSUMER_GROUP_MEMBER_METADATA_VALUE = record(
    "ConsumerGroupMemberMetadataValue", "0", "0+",
    F("instance_id", "string", null="0+"),
    F("rack_id", "string", null="0+"),
    F("client_id", "string"),
    F("client_host", "string"),
    F("subscribed_topic_names", "[]string"),
    F("subscribed_topic_regex", "string", null="0+"),
    F("rebalance_timeout_ms", "int32", default=-1),
    F("server_assignor", "string", null="0+"),
    F("classic_member_metadata", "ClassicMemberMetadata", "0+",
      F("session_timeout_ms", "int32"),
      F("supported_protocols", "[]ClassicProtocol", "0+",
        F("name", "string"),
        F("metadata", "bytes")), null="0+", tag=0),
)  # fmt: skip

CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY = record(
    "ConsumerGroupTargetAssignmentMetadataKey", "6", "", F("group_id", "string")
)

CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE = record(
    "ConsumerGroupTargetAssignmentMetadataValue", "0", "0+", F("assignment_epoch", "int32")
)

CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_KEY = record(
    "ConsumerGroupTargetAssignmentMemberKey", "7", "",
    F("group_id", "string"),
    F("member_id", "string"),
)  # fmt: skip

CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE = record(
    "ConsumerGroupTargetAssignmentMemberValue", "0", "0+",
    F("topic_partitions", "[]TopicPartition", "0+",
      F("topic_id", "uuid"),
      F("partitions", "[]int32")),
)  # fmt: skip

CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_KEY = record(
    "ConsumerGroupCurrentMemberAssignmentKey", "8", "",
    F("group_id", "string"),
    F("member_id", "string"),
)  # fmt: skip

CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE = record(
    "ConsumerGroupCurrentMemberAssignmentValue", "0", "0+",
    F("member_epoch", "int32"),
    F("previous_member_epoch", "int32"),
    F("state", "int8"),
    F("assigned_partitions", "[]TopicPartition", "0+",
      F("topic_id", "uuid"),
      F("partitions", "[]int32"),
      F("assignment_epochs", "[]int32", null="0+", tag=0, default=None)),
    F("partitions_pending_revocation", "[]PendingPartition", "0+",
      F("topic_id", "uuid"),
      F("partitions", "[]int32"),
      F("assignment_epochs", "[]int32", null="0+", tag=0, default=None)),
)  # fmt: skip

CONSUMER_GROUP_REGULAR_EXPRESSION_KEY = record(
    "ConsumerGroupRegularExpressionKey", "16", "",
    F("group_id", "string"),
    F("regular_expression", "string"),
)  # fmt: skip

CONSUMER_GROUP_REGULAR_EXPRESSION_VALUE = record(
    "ConsumerGroupRegularExpressionValue", "0", "0+",
    F("topics", "[]string"),
    F("version", "int64"),
    F("timestamp", "int64"),
)  # fmt: skip

INTERNAL_RECORDS: Final[tuple[RecordSchema, ...]] = (
    OFFSET_COMMIT_KEY,
    OFFSET_COMMIT_VALUE,
    GROUP_METADATA_KEY,
    GROUP_METADATA_VALUE,
    TRANSACTION_LOG_KEY,
    TRANSACTION_LOG_VALUE,
    CONSUMER_GROUP_METADATA_KEY,
    CONSUMER_GROUP_METADATA_VALUE,
    CONSUMER_GROUP_MEMBER_METADATA_KEY,
    CONSUMER_GROUP_MEMBER_METADATA_VALUE,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_KEY,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA_VALUE,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_KEY,
    CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER_VALUE,
    CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_KEY,
    CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT_VALUE,
    CONSUMER_GROUP_REGULAR_EXPRESSION_KEY,
    CONSUMER_GROUP_REGULAR_EXPRESSION_VALUE,
)
