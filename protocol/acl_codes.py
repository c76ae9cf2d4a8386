"""The codes of access control lists in messages (AclOperation, ResourceType, ... of Kafka)."""

from enum import IntEnum


class Operation(IntEnum):
    """Operations of access control lists, with Kafka's codes (AclOperation)."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class ResourceType(IntEnum):
    """Kinds of resources, with Kafka's codes (ResourceType)."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How an entry or a filter names resources, with Kafka's codes."""

    ANY = 1  # filters only
    MATCH = 2  # filters only: the entries that concern a resource of this name
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """Whether an entry allows or denies, with Kafka's codes (AclPermissionType)."""

    ANY = 1  # filters only
    DENY = 2
    ALLOW = 3
