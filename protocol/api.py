"""Which APIs have a table, and which versions of them are advertised.

Rules. A version is advertised when it has a table and a handler. One range differs from its
table: Produce says it starts at 0 although 0-2 are refused, because librdkafka up to 2.11.0 takes
an absent version 0 as "cannot do compression" (KAFKA-18659).
"""

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from protocol.schema import Api, Versions
from protocol.tables.cluster import CLUSTER_APIS
from protocol.tables.groups import GROUP_APIS
from protocol.tables.records import RECORD_APIS
from protocol.tables.security import SECURITY_APIS
from protocol.tables.topics import TOPIC_APIS
from protocol.tables.transactions import TRANSACTION_APIS


class ApiKey(IntEnum):
    """Keys of the Kafka protocol guide."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    CREATE_DELEGATION_TOKEN = 38
    RENEW_DELEGATION_TOKEN = 39
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_QUORUM = 55
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75


class ApiRange(NamedTuple):
    """One line of an ApiVersions answer."""

    api_key: int
    min_version: int
    max_version: int


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        *RECORD_APIS,
        *CLUSTER_APIS,
        *TOPIC_APIS,
        *GROUP_APIS,
        *TRANSACTION_APIS,
        *SECURITY_APIS,
    )
}

_ADVERTISED_OTHERWISE: Final = {ApiKey.PRODUCE: Versions(0, 13)}


_ADVERTISED: Final = {
    key: ApiRange(key, *_ADVERTISED_OTHERWISE.get(ApiKey(key), api.versions))
    for key, api in APIS.items()
}

# The supported versions of each API; looked up for every request.
_SPOKEN: Final = {
    key: (api.versions.first, min(api.versions.last, _ADVERTISED[key].max_version))
    for key, api in APIS.items()
}


def advertised(handlers: Iterable[int]) -> tuple[ApiRange, ...]:
    """Return the lines of an ApiVersions answer for the APIs that have a handler, by key."""
    return tuple(_ADVERTISED[key] for key in sorted(set(handlers)))


def is_supported(api_key: int, version: int, handlers: Collection[int]) -> bool:
    """Return whether a request of this version can be decoded here and was advertised."""
    if api_key not in handlers:
        return False
    first, last = _SPOKEN[api_key]
    return first <= version <= last
