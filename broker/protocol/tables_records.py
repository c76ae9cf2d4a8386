"""Message tables: records in and out, offsets of the log, producer ids.

Produce and Fetch have hand-written codecs for the broker's side (`produce.py`, `fetch.py`); their
tables serve clients of ours and the tests. Source: the Kafka protocol guide (messages of Apache
Kafka 4.3).
"""

from broker.protocol.schema import F, api

PRODUCE = api(
    0, "Produce", "3-13", "9+",
    request=(
        F("transactional_id", "string", "3+", null="3+", default=None),
        F("acks", "int16"),
        F("timeout_ms", "int32"),
        F("topic_data", "[]Topic", "0+",
          F("name", "string", "0-12"),
          F("topic_id", "uuid", "13+"),
          F("partition_data", "[]Partition", "0+",
            F("index", "int32"),
            F("records", "records", null="0+"))),
    ),
    response=(
        F("responses", "[]Topic", "0+",
          F("name", "string", "0-12"),
          F("topic_id", "uuid", "13+"),
          F("partition_responses", "[]Partition", "0+",
            F("index", "int32"),
            F("error_code", "int16"),
            F("base_offset", "int64"),
            F("log_append_time_ms", "int64", "2+", default=-1),
            F("log_start_offset", "int64", "5+", default=-1),
            F("record_errors", "[]RecordError", "8+",
              F("batch_index", "int32"),
              F("batch_index_error_message", "string", null="8+", default=None)),
            F("error_message", "string", "8+", null="8+", default=None),
            F("current_leader", "Leader", "10+",
              F("leader_id", "int32", default=-1),
              F("leader_epoch", "int32", default=-1), tag=0))),
        F("throttle_time_ms", "int32", "1+"),
        F("node_endpoints", "[]Node", "10+",
          F("node_id", "int32"),
          F("host", "string"),
          F("port", "int32"),
          F("rack", "string", null="10+", default=None), tag=0),
    ),
)  # fmt: skip

FETCH = api(
    1, "Fetch", "4-18", "12+",
    request=(
        F("cluster_id", "string", "12+", null="12+", tag=0, default=None),
        F("replica_id", "int32", "0-14", default=-1),
        F("replica_state", "ReplicaState", "15+",
          F("replica_id", "int32", default=-1),
          F("replica_epoch", "int64", default=-1), tag=1),
        F("max_wait_ms", "int32"),
        F("min_bytes", "int32"),
        F("max_bytes", "int32", "3+", default=2**31 - 1),
        F("isolation_level", "int8", "4+"),
        F("session_id", "int32", "7+"),
        F("session_epoch", "int32", "7+", default=-1),
        F("topics", "[]Topic", "0+",
          F("topic", "string", "0-12"),
          F("topic_id", "uuid", "13+"),
          F("partitions", "[]Partition", "0+",
            F("partition", "int32"),
            F("current_leader_epoch", "int32", "9+", default=-1),
            F("fetch_offset", "int64"),
            F("last_fetched_epoch", "int32", "12+", default=-1),
            F("log_start_offset", "int64", "5+", default=-1),
            F("partition_max_bytes", "int32"),
            F("replica_directory_id", "uuid", "17+", tag=0),
            F("high_watermark", "int64", "18+", tag=1, default=2**63 - 1))),
        F("forgotten_topics_data", "[]ForgottenTopic", "7+",
          F("topic", "string", "7-12"),
          F("topic_id", "uuid", "13+"),
          F("partitions", "[]int32")),
        F("rack_id", "string", "11+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "1+"),
        F("error_code", "int16", "7+"),
        F("session_id", "int32", "7+"),
        F("responses", "[]Topic", "0+",
          F("topic", "string", "0-12"),
          F("topic_id", "uuid", "13+"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"),
            F("high_watermark", "int64"),
            F("last_stable_offset", "int64", "4+", default=-1),
            F("log_start_offset", "int64", "5+", default=-1),
            F("diverging_epoch", "EpochEndOffset", "12+",
              F("epoch", "int32", default=-1),
              F("end_offset", "int64", default=-1), tag=0),
            F("current_leader", "Leader", "12+",
              F("leader_id", "int32", default=-1),
              F("leader_epoch", "int32", default=-1), tag=1),
            F("snapshot_id", "Snapshot", "12+",
              F("end_offset", "int64", default=-1),
              F("epoch", "int32", default=-1), tag=2),
            F("aborted_transactions", "[]AbortedTransaction", "4+",
              F("producer_id", "int64"),
              F("first_offset", "int64"), null="4+"),
            F("preferred_read_replica", "int32", "11+", default=-1),
            F("records", "records", null="0+"))),
        F("node_endpoints", "[]Node", "16+",
          F("node_id", "int32"),
          F("host", "string"),
          F("port", "int32"),
          F("rack", "string", null="16+", default=None), tag=0),
    ),
)  # fmt: skip

LIST_OFFSETS = api(
    2, "ListOffsets", "1-11", "6+",
    request=(
        F("replica_id", "int32", default=-1),
        F("isolation_level", "int8", "2+"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("current_leader_epoch", "int32", "4+", default=-1),
            F("timestamp", "int64"))),
        F("timeout_ms", "int32", "10+"),
    ),
    response=(
        F("throttle_time_ms", "int32", "2+"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"),
            F("timestamp", "int64", "1+", default=-1),
            F("offset", "int64", "1+", default=-1),
            F("leader_epoch", "int32", "4+", default=-1))),
    ),
)  # fmt: skip

DELETE_RECORDS = api(
    21, "DeleteRecords", "0-2", "2+",
    request=(
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("offset", "int64"))),
        F("timeout_ms", "int32"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("low_watermark", "int64"),
            F("error_code", "int16"))),
    ),
)  # fmt: skip

INIT_PRODUCER_ID = api(
    22, "InitProducerId", "0-5", "2+",
    request=(
        F("transactional_id", "string", null="0+", default=None),
        F("transaction_timeout_ms", "int32"),
        F("producer_id", "int64", "3+", default=-1),
        F("producer_epoch", "int16", "3+", default=-1),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("producer_id", "int64", default=-1),
        F("producer_epoch", "int16"),
    ),
)  # fmt: skip

OFFSET_FOR_LEADER_EPOCH = api(
    23, "OffsetForLeaderEpoch", "2-4", "4+",
    request=(
        F("replica_id", "int32", "3+", default=-2),
        F("topics", "[]Topic", "0+",
          F("topic", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition", "int32"),
            F("current_leader_epoch", "int32", "2+", default=-1),
            F("leader_epoch", "int32"))),
    ),
    response=(
        F("throttle_time_ms", "int32", "2+"),
        F("topics", "[]Topic", "0+",
          F("topic", "string"),
          F("partitions", "[]Partition", "0+",
            F("error_code", "int16"),
            F("partition", "int32"),
            F("leader_epoch", "int32", "1+", default=-1),
            F("end_offset", "int64", default=-1))),
    ),
)  # fmt: skip

RECORD_APIS = (
    PRODUCE,
    FETCH,
    LIST_OFFSETS,
    DELETE_RECORDS,
    INIT_PRODUCER_ID,
    OFFSET_FOR_LEADER_EPOCH,
)
