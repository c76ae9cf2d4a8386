"""Message tables: the APIs of the transaction coordinator."""

from typing import Final

from protocol.schema import Api, F, api

ADD_PARTITIONS_TO_TXN = api(
    24, "AddPartitionsToTxn", "0-5", "3+",
    request=(
        F("transactions", "[]Transaction", "4+",
          F("transactional_id", "string", "4+"),
          F("producer_id", "int64", "4+"),
          F("producer_epoch", "int16", "4+"),
          F("verify_only", "bool", "4+"),
          F("topics", "[]Topic", "4+",
            F("name", "string"),
            F("partitions", "[]int32"))),
        F("v3_and_below_transactional_id", "string", "0-3"),
        F("v3_and_below_producer_id", "int64", "0-3"),
        F("v3_and_below_producer_epoch", "int16", "0-3"),
        F("v3_and_below_topics", "[]TopicV3", "0-3",
          F("name", "string"),
          F("partitions", "[]int32")),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16", "4+"),
        F("results_by_transaction", "[]Transaction", "4+",
          F("transactional_id", "string", "4+"),
          F("topic_results", "[]Topic", "4+",
            F("name", "string"),
            F("results_by_partition", "[]Partition", "0+",
              F("partition_index", "int32"),
              F("partition_error_code", "int16")))),
        F("results_by_topic_v3_and_below", "[]TopicV3", "0-3",
          F("name", "string"),
          F("results_by_partition", "[]PartitionV3", "0+",
            F("partition_index", "int32"),
            F("partition_error_code", "int16"))),
    ),
)  # fmt: skip

ADD_OFFSETS_TO_TXN = api(
    25, "AddOffsetsToTxn", "0-4", "3+",
    request=(
        F("transactional_id", "string"),
        F("producer_id", "int64"),
        F("producer_epoch", "int16"),
        F("group_id", "string"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
    ),
)  # fmt: skip

END_TXN = api(
    26, "EndTxn", "0-5", "3+",
    request=(
        F("transactional_id", "string"),
        F("producer_id", "int64"),
        F("producer_epoch", "int16"),
        F("committed", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("producer_id", "int64", "5+", default=-1),
        F("producer_epoch", "int16", "5+", default=-1),
    ),
)  # fmt: skip

WRITE_TXN_MARKERS = api(
    27, "WriteTxnMarkers", "1-2", "1+",
    request=(
        F("markers", "[]Marker", "0+",
          F("producer_id", "int64"),
          F("producer_epoch", "int16"),
          F("transaction_result", "bool"),
          F("topics", "[]Topic", "0+",
            F("name", "string"),
            F("partition_indexes", "[]int32")),
          F("coordinator_epoch", "int32"),
          F("transaction_version", "int8", "2+")),
    ),
    response=(
        F("markers", "[]Marker", "0+",
          F("producer_id", "int64"),
          F("topics", "[]Topic", "0+",
            F("name", "string"),
            F("partitions", "[]Partition", "0+",
              F("partition_index", "int32"),
              F("error_code", "int16")))),
    ),
)  # fmt: skip

TXN_OFFSET_COMMIT = api(
    28, "TxnOffsetCommit", "0-5", "3+",
    request=(
        F("transactional_id", "string"),
        F("group_id", "string"),
        F("producer_id", "int64"),
        F("producer_epoch", "int16"),
        F("generation_id", "int32", "3+", default=-1),
        F("member_id", "string", "3+"),
        F("group_instance_id", "string", "3+", null="3+", default=None),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("committed_offset", "int64"),
            F("committed_leader_epoch", "int32", "2+", default=-1),
            F("committed_metadata", "string", null="0+"))),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("topics", "[]Topic", "0+",
          F("name", "string"),
          F("partitions", "[]Partition", "0+",
            F("partition_index", "int32"),
            F("error_code", "int16"))),
    ),
)  # fmt: skip

DESCRIBE_TRANSACTIONS = api(
    65, "DescribeTransactions", "0", "0+",
    request=(
        F("transactional_ids", "[]string"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("transaction_states", "[]Transaction", "0+",
          F("error_code", "int16"),
          F("transactional_id", "string"),
          F("transaction_state", "string"),
          F("transaction_timeout_ms", "int32"),
          F("transaction_start_time_ms", "int64"),
          F("producer_id", "int64"),
          F("producer_epoch", "int16"),
          F("topics", "[]Topic", "0+",
            F("topic", "string"),
            F("partitions", "[]int32"))),
    ),
)  # fmt: skip

LIST_TRANSACTIONS = api(
    66, "ListTransactions", "0-2", "0+",
    request=(
        F("state_filters", "[]string"),
        F("producer_id_filters", "[]int64"),
        F("duration_filter", "int64", "1+", default=-1),
        F("transactional_id_pattern", "string", "2+", null="2+", default=None),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("unknown_state_filters", "[]string"),
        F("transaction_states", "[]Transaction", "0+",
          F("transactional_id", "string"),
          F("producer_id", "int64"),
          F("transaction_state", "string")),
    ),
)  # fmt: skip

TRANSACTION_APIS: Final[tuple[Api, ...]] = (
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    WRITE_TXN_MARKERS,
    TXN_OFFSET_COMMIT,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
)
