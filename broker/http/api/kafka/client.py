"""Requests of the HTTP API that handlers of the Kafka protocol answer.

The handlers authorize the sender; Kafka's error codes become HTTP status codes here only.

While the changes of a sender would pause on the Kafka port (broker/topics/change_pauses.py), a
request is refused at its first change. It does not pause, because it may hold the lock of a topic.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from broker.http.api.requests import ApiError
from broker.http.api.user_quotas import UserQuotas, throttled
from broker.http.audited import note_event, sender_of
from broker.quotas.muted_http_users import ThrottledError
from broker.security.principal import Principal
from broker.topics.change_pauses import METADATA_CHANGES
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import Message

_HAS_BEGUN: Final = web.RequestKey("has_begun_changes", bool)
# The version of each API that the requests use: the newest one that names topics.
VERSIONS: Final = {
    ApiKey.PRODUCE: 12,
    ApiKey.LIST_OFFSETS: 7,
    ApiKey.CREATE_TOPICS: 7,
    ApiKey.DELETE_TOPICS: 6,
    ApiKey.CREATE_PARTITIONS: 3,
    ApiKey.DESCRIBE_CONFIGS: 4,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.FIND_COORDINATOR: 4,
    ApiKey.DESCRIBE_GROUPS: 6,
    ApiKey.CONSUMER_GROUP_DESCRIBE: 1,
    ApiKey.DELETE_GROUPS: 2,
    ApiKey.OFFSET_FETCH: 9,
    ApiKey.OFFSET_COMMIT: 9,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: 0,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: 0,
    ApiKey.DESCRIBE_ACLS: 3,
    ApiKey.CREATE_ACLS: 3,
    ApiKey.DELETE_ACLS: 3,
}
# What a sender needs, for the text of a denial.
NEEDED: Final = {
    ApiKey.PRODUCE: "WRITE on the topic",
    ApiKey.LIST_OFFSETS: "DESCRIBE on the topic",
    ApiKey.CREATE_TOPICS: "CREATE on the topic or the cluster",
    ApiKey.DELETE_TOPICS: "DELETE on the topic",
    ApiKey.CREATE_PARTITIONS: "ALTER on the topic",
    ApiKey.DESCRIBE_CONFIGS: "DESCRIBE_CONFIGS on the {on}",
    ApiKey.INCREMENTAL_ALTER_CONFIGS: "ALTER_CONFIGS on the {on}",
    ApiKey.FIND_COORDINATOR: "DESCRIBE on the group",
    ApiKey.DESCRIBE_GROUPS: "DESCRIBE on the group",
    ApiKey.CONSUMER_GROUP_DESCRIBE: "DESCRIBE on the group and its topics",
    ApiKey.DELETE_GROUPS: "DELETE on the group",
    ApiKey.OFFSET_FETCH: "DESCRIBE on the group and the topic",
    ApiKey.OFFSET_COMMIT: "READ on the group and the topic",
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: "DESCRIBE on the cluster",
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: "ALTER on the cluster",
    ApiKey.DESCRIBE_ACLS: "DESCRIBE on the cluster",
    ApiKey.CREATE_ACLS: "ALTER on the cluster",
    ApiKey.DELETE_ACLS: "ALTER on the cluster",
}
# Changes that the handlers write to the audit log.
AUDITED: Final = frozenset(
    (
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.DELETE_GROUPS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
    )
)
_STATUS: Final = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: 403,
    ErrorCode.GROUP_AUTHORIZATION_FAILED: 403,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: 403,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: 404,
    ErrorCode.UNKNOWN_TOPIC_ID: 404,
    ErrorCode.GROUP_ID_NOT_FOUND: 404,
    ErrorCode.RESOURCE_NOT_FOUND: 404,
    ErrorCode.TOPIC_ALREADY_EXISTS: 409,
    ErrorCode.NON_EMPTY_GROUP: 409,
    ErrorCode.UNKNOWN_MEMBER_ID: 409,
    ErrorCode.ILLEGAL_GENERATION: 409,
    ErrorCode.REBALANCE_IN_PROGRESS: 409,
    ErrorCode.TOPIC_DELETION_DISABLED: 409,
    ErrorCode.CORRUPT_MESSAGE: 409,
    ErrorCode.SECURITY_DISABLED: 409,
    ErrorCode.MESSAGE_TOO_LARGE: 413,
    ErrorCode.INVALID_CONFIG: 422,
    ErrorCode.INVALID_PARTITIONS: 422,
    ErrorCode.INVALID_REPLICATION_FACTOR: 422,
    ErrorCode.INVALID_TOPIC_EXCEPTION: 422,
    ErrorCode.INVALID_GROUP_ID: 422,
    ErrorCode.INVALID_RECORD: 422,
    ErrorCode.INVALID_TIMESTAMP: 422,
    ErrorCode.POLICY_VIOLATION: 422,
    ErrorCode.UNACCEPTABLE_CREDENTIAL: 422,
    ErrorCode.INVALID_REQUEST: 422,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: 429,
    ErrorCode.KAFKA_STORAGE_ERROR: 503,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: 503,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: 503,
    ErrorCode.NOT_COORDINATOR: 503,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: 503,
}
_TEXTS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "there is no such topic or partition",
    ErrorCode.GROUP_ID_NOT_FOUND: "there is no such group",
    ErrorCode.NON_EMPTY_GROUP: "the group has members: stop them first",
    ErrorCode.UNKNOWN_MEMBER_ID: "the group has members: stop them first",
    ErrorCode.SECURITY_DISABLED: (
        "the broker has no access control: set authorization.enabled in its settings file"
    ),
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: "groups are being loaded: try again in a moment",
}


class KafkaHandlers(UserQuotas, Protocol):
    """The handlers of the Kafka protocol (broker/handlers/administration.py)."""

    async def call(
        self,
        principal: Principal,
        host: str,
        key: ApiKey,
        version: int,
        body: Message,
        *,
        is_unlimited: bool = False,
    ) -> Any:
        """Return the response to a request."""
        ...

    def check_changes(self, principal: Principal, host: str) -> None:
        """Raise ThrottledError while the sender's next change of the metadata has to wait."""

    def charge_read(self, principal: Principal, record_bytes: int) -> None:
        """Count bytes of records that the sender has read."""


@dataclass(frozen=True, slots=True)
class KafkaClient:
    """Sends Kafka requests on behalf of the sender of an HTTP request."""

    handlers: KafkaHandlers
    request: web.Request

    async def call(self, key: ApiKey, body: Message) -> Any:
        """Return the response to a request."""
        sender = sender_of(self.request)
        if key in METADATA_CHANGES:
            self._begin_changes(sender.principal)
        if key in AUDITED:
            note_event(self.request)
        return await self.handlers.call(
            sender.principal,
            self.request.remote or "",
            key,
            VERSIONS[key],
            body,
            is_unlimited=sender.is_unlimited,
        )

    def _begin_changes(self, principal: Principal) -> None:
        """Raise the ApiError for a sender whose next change has to wait.

        Later changes of the same request belong to its first one: half a request is not refused.
        """
        if self.request.get(_HAS_BEGUN, False):
            return
        try:
            self.handlers.check_changes(principal, self.request.remote or "")
        except ThrottledError as error:
            raise throttled(self.request, error) from None
        self.request[_HAS_BEGUN] = True

    def check(
        self,
        key: ApiKey,
        code: int,
        text: str | None = None,
        *,
        throttle_ms: int = 0,
        on: str = "topic",
    ) -> None:
        """Raise the ApiError for an error code of a response.

        `on`: the kind of resource, for APIs of configs, which have several.
        """
        if code == ErrorCode.NONE:
            return
        error = ErrorCode(code)
        status = _STATUS.get(error, 500)
        reason = text or _TEXTS.get(error) or error.name.lower().replace("_", " ")
        if status == 403:
            note_event(self.request)  # the handler has written the denial
            reason = f"{sender_of(self.request).principal} needs {NEEDED[key].format(on=on)}"
        headers = {"Retry-After": str(max(1, -(-throttle_ms // 1000)))} if status == 429 else None
        raise ApiError(status, reason, headers)
