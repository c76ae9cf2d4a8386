"""Small blocking clients for requests that librdkafka does not have.

The demo and `varve topics` ask for sizes on disk, `varve users` for users, `varve acls` for access
control lists. Each client is a context manager with one connection. Its methods raise OSError,
WireError, ProtocolError and RefusedError.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Final, NamedTuple, Self, TypeVar

from config.security.clients import SCRAM, Cluster
from protocol.acl_codes import Operation, PatternType, Permission, ResourceType
from protocol.api import ApiKey
from protocol.client.connection import CONNECT_SECONDS, BlockingConnection, BrokerRefusedError
from protocol.errors import ErrorCode
from protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsRequestDeletion,
    AlterUserScramCredentialsRequestUpsertion,
    AlterUserScramCredentialsResponse,
    CreateAclsRequest,
    CreateAclsRequestCreation,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsRequestFilter,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsRequestUser,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResponseResult,
    Message,
    MetadataRequest,
    MetadataResponse,
)

TIMEOUT_SECONDS = 10.0
SALT_BYTES: Final = 20
SCRAM_CODES: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}  # of Kafka's ScramMechanism

M = TypeVar("M", bound=Message)


class BlockingClient:
    """A connection to the first address of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._connection = BlockingConnection(
            cluster.addresses[0], "varve", cluster.security, CONNECT_SECONDS
        )
        try:
            self._connection.handshake(TIMEOUT_SECONDS)
        except Exception:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def check_session(self) -> None:
        """Make a request about nothing: a listener with SASL refuses it before authentication.

        It closes the connection: ConnectionError.
        """
        self._ask(ApiKey.METADATA, MetadataRequest(topics=[]), MetadataResponse, 1, 4)

    def _ask(
        self, key: ApiKey, request: Message, answer: type[M], first: int = 0, last: int = 0
    ) -> M:
        """Send a request in the newest version from `first` to `last`; return the answer."""
        version = self._connection.negotiated_version(key, first, last)
        self._connection.send(key, version, request)
        return self._connection.receive(answer, TIMEOUT_SECONDS)


class LogDirClient(BlockingClient):
    """Asks for sizes on disk."""

    def size_of(self, topic: str) -> int:
        """Return the bytes of all partitions of a topic on disk."""
        return sum(self.sizes().get(topic, {}).values())

    def sizes(self) -> dict[str, dict[int, int]]:
        """Return the bytes of each partition on disk: topic -> partition -> bytes.

        Raises RefusedError without the permission to describe the cluster.
        """
        answer = self._ask(
            ApiKey.DESCRIBE_LOG_DIRS,
            DescribeLogDirsRequest(topics=None),
            DescribeLogDirsResponse,
            first=1,
            last=4,
        )
        _check(answer.error_code, None)
        sizes: dict[str, dict[int, int]] = {}
        for directory in answer.results:
            for topic in directory.topics:
                of_topic = sizes.setdefault(topic.name, {})
                for partition in topic.partitions:
                    if not partition.is_future_key:
                        of_topic[partition.partition_index] = partition.partition_size
        return sizes


class RefusedError(Exception):
    """The broker refused a request with this error code."""

    def __init__(self, code: int, message: str | None) -> None:
        refusal = BrokerRefusedError("the broker refused", code)
        super().__init__(message or str(refusal))
        self.code = code
        self.name = refusal.code.name if isinstance(refusal.code, ErrorCode) else ""


class UsersClient(BlockingClient):
    """Shows and changes the users whose salted passwords a broker stores."""

    def describe(
        self, names: Sequence[str] = ()
    ) -> list[DescribeUserScramCredentialsResponseResult]:
        """Return the users with these names, or all. A row may have an error."""
        users = [DescribeUserScramCredentialsRequestUser(name=name) for name in names]
        answer = self._ask(
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
            DescribeUserScramCredentialsRequest(users=users or None),
            DescribeUserScramCredentialsResponse,
        )
        _check(answer.error_code, answer.error_message)
        return answer.results

    def mechanisms(self, user: str) -> list[str]:
        """Return the mechanisms for which the broker stores a password of a user."""
        (row,) = self.describe((user,))
        _check(row.error_code, row.error_message)
        stored = {info.mechanism for info in row.credential_infos}
        return [name for name, code in SCRAM_CODES.items() if code in stored]

    def set_password(self, user: str, password: str, mechanism: str, iterations: int) -> None:
        """Salt a password and store it."""
        salt = os.urandom(SALT_BYTES)
        row = AlterUserScramCredentialsRequestUpsertion(
            name=user,
            mechanism=SCRAM_CODES[mechanism],
            iterations=iterations,
            salt=salt,
            salted_password=hashlib.pbkdf2_hmac(
                SCRAM[mechanism], password.encode(), salt, iterations
            ),
        )
        self._alter(AlterUserScramCredentialsRequest(upsertions=[row]))

    def delete_password(self, user: str, mechanism: str) -> None:
        """Delete a stored password."""
        row = AlterUserScramCredentialsRequestDeletion(name=user, mechanism=SCRAM_CODES[mechanism])
        self._alter(AlterUserScramCredentialsRequest(deletions=[row]))

    def _alter(self, request: AlterUserScramCredentialsRequest) -> None:
        key = ApiKey.ALTER_USER_SCRAM_CREDENTIALS
        for result in self._ask(key, request, AlterUserScramCredentialsResponse).results:
            _check(result.error_code, result.error_message)


def _check(code: int, message: str | None) -> None:
    if code:
        raise RefusedError(code, message)


class Acl(NamedTuple):
    """One access control list entry, with the codes of protocol/acl_codes.py."""

    resource_type: int
    resource_name: str
    pattern_type: int
    principal: str
    host: str
    operation: int
    permission: int


class AclsClient(BlockingClient):
    """Shows and changes access control lists."""

    def describe(
        self, *, principal: str | None, resource_type: int | None, name: str | None
    ) -> list[Acl]:
        """Return the entries of a principal that concern a resource; None means any."""
        request = DescribeAclsRequest(
            resource_type_filter=resource_type or ResourceType.ANY,
            resource_name_filter=name,
            pattern_type_filter=PatternType.ANY if name is None else PatternType.MATCH,
            principal_filter=principal,
            host_filter=None,
            operation=Operation.ANY,
            permission_type=Permission.ANY,
        )
        answer = self._ask(ApiKey.DESCRIBE_ACLS, request, DescribeAclsResponse, 1, 3)
        _check(answer.error_code, answer.error_message)
        return [
            Acl(
                resource.resource_type,
                resource.resource_name,
                resource.pattern_type,
                acl.principal,
                acl.host,
                acl.operation,
                acl.permission_type,
            )
            for resource in answer.resources
            for acl in resource.acls
        ]

    def create(self, acls: Sequence[Acl]) -> None:
        """Add entries."""
        rows = [
            CreateAclsRequestCreation(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                resource_pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ]
        request = CreateAclsRequest(creations=rows)
        for result in self._ask(ApiKey.CREATE_ACLS, request, CreateAclsResponse, 1, 3).results:
            _check(result.error_code, result.error_message)

    def delete(self, acls: Sequence[Acl]) -> list[Acl]:
        """Remove entries; return those that existed."""
        rows = [
            DeleteAclsRequestFilter(
                resource_type_filter=acl.resource_type,
                resource_name_filter=acl.resource_name,
                pattern_type_filter=acl.pattern_type,
                principal_filter=acl.principal,
                host_filter=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ]
        request, removed = DeleteAclsRequest(filters=rows), []
        answer = self._ask(ApiKey.DELETE_ACLS, request, DeleteAclsResponse, 1, 3)
        for acl, result in zip(acls, answer.filter_results, strict=True):
            _check(result.error_code, result.error_message)
            if result.matching_acls:
                removed.append(acl)
        return removed
