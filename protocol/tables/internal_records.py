"""The records of Kafka's internal topic __consumer_offsets, as tables.

Source: the message schemas OffsetCommitKey, OffsetCommitValue, GroupMetadataKey and
GroupMetadataValue of Kafka 4.3.0's group coordinator.
"""

from typing import Final

from protocol.schema import F, Record, record

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

INTERNAL_RECORDS: Final[tuple[Record, ...]] = (
    OFFSET_COMMIT_KEY,
    OFFSET_COMMIT_VALUE,
    GROUP_METADATA_KEY,
    GROUP_METADATA_VALUE,
)
