"""Kafka error codes, and the table that translates storage errors into them.

Storage errors are translated here only. A class without a row uses the row of its nearest base
class. An error without any row becomes UNKNOWN_SERVER_ERROR.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from storage import errors as storage


class ProtocolError(Exception):
    """The bytes of a peer are not a valid message; the broker closes the connection.

    `position` counts bytes from the start of the frame (after the size), -1 if unknown; `api_key`
    and `version` are -1 if unknown.
    """

    def __init__(
        self, reason: str, api_key: int = -1, version: int = -1, position: int = -1
    ) -> None:
        where = f" at byte {position}" if position >= 0 else ""
        subject = f"api {api_key} version {version}: " if api_key >= 0 else ""
        super().__init__(f"{subject}{reason}{where}")
        self.reason = reason
        self.api_key = api_key
        self.version = version
        self.position = position


class RowLimitError(ProtocolError):
    """The request has more rows than its API allows (limits.py). No row was built."""


class SlicesNeededError(Exception):
    """The request is valid, but has too many rows to be decoded without a pause."""


class UnsupportedVersionError(ProtocolError):
    """The broker does not support this API or version."""

    def __init__(self, api_key: int, version: int, correlation_id: int) -> None:
        super().__init__("not supported", api_key, version)
        self.correlation_id = correlation_id


class ErrorCode(IntEnum):
    """Error codes of the Kafka protocol guide (Apache Kafka 4.3), under Kafka's own names."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    INVALID_PRINCIPAL_TYPE = 67
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    TRANSACTION_ABORTABLE = 120
    INVALID_REGULAR_EXPRESSION = 128
    REBOOTSTRAP_REQUIRED = 129

    @property
    def retriable(self) -> bool:
        """Return whether a client retries the request after this error."""
        return self in _RETRIABLE


_RETRIABLE: Final = frozenset((
    ErrorCode.CORRUPT_MESSAGE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.REPLICA_NOT_AVAILABLE, ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR, ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, ErrorCode.NOT_CONTROLLER,
    ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.LISTENER_NOT_FOUND, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, ErrorCode.ELECTION_NOT_NEEDED,
    ErrorCode.UNSTABLE_OFFSET_COMMIT, ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
))  # fmt: skip

_CODES: Final[Mapping[type[Exception], ErrorCode]] = {
    storage.CorruptBatchError: ErrorCode.CORRUPT_MESSAGE,
    # Like Kafka for Produce 3 and later: batches of old formats are invalid records.
    storage.UnsupportedMagicError: ErrorCode.INVALID_RECORD,
    # Not MESSAGE_TOO_LARGE: clients would split the batch and send it again.
    storage.DecompressionLimitError: ErrorCode.INVALID_RECORD,
    storage.InvalidRecordError: ErrorCode.INVALID_RECORD,
    storage.InvalidTimestampError: ErrorCode.INVALID_TIMESTAMP,
    storage.UnsupportedCompressionError: ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
    storage.MessageTooLargeError: ErrorCode.MESSAGE_TOO_LARGE,
    storage.RecordListTooLargeError: ErrorCode.RECORD_LIST_TOO_LARGE,
    storage.OutOfOrderSequenceError: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    storage.InvalidProducerEpochError: ErrorCode.INVALID_PRODUCER_EPOCH,
    storage.InvalidTransactionStateError: ErrorCode.INVALID_TXN_STATE,
    storage.OffsetOutOfRangeError: ErrorCode.OFFSET_OUT_OF_RANGE,
    # As if the client had checked the checksum itself, which it does with Kafka.
    storage.DamagedSegmentError: ErrorCode.CORRUPT_MESSAGE,
    storage.TransactionIndexError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.LogDirectoryError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.OfflinePartitionError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.DirectoryStalledError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.DirectoryLockedError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.InconsistentDirectoryError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.LostIdentityError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.CorruptCheckpointError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.NewerFormatError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.SwapRefusedError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.SwapInterruptedError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.UnfinishedSwapError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.OverlappingSegmentsError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.TruncatedLogError: ErrorCode.KAFKA_STORAGE_ERROR,
    storage.InvalidViewError: ErrorCode.KAFKA_STORAGE_ERROR,
    # The topic was deleted while the request waited: the client refreshes its metadata.
    storage.LogClosedError: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    OSError: ErrorCode.KAFKA_STORAGE_ERROR,
}


def code_of(error: BaseException) -> ErrorCode:
    """Return the code of an error, by its class or its nearest base class in the table."""
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            return code
    return ErrorCode.UNKNOWN_SERVER_ERROR
