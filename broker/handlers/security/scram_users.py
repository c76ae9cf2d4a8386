"""DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554).

Clients send salted passwords. The stored data can verify a login, but nobody can log in with
it. Stored users are in the metadata; the settings file may have others, which clients cannot see
or change.
"""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import structlog

from broker.event_loop.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.authorizer import Operation
from broker.security.scram import (
    HASHES,
    ITERATIONS,
    ITERATIONS_MAX,
    MECHANISM_CODES,
    make_entry,
)
from config.settings import USER_NAME_LENGTH_MAX
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsRequestDeletion,
    AlterUserScramCredentialsRequestUpsertion,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResponseResult,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResponseCredentialInfo,
    DescribeUserScramCredentialsResponseResult,
)
from storage.directory.security_entries import ScramEntry
from storage.errors import StorageError

logger = structlog.get_logger("broker.users")

USERS_MAX: Final = 10_000  # the metadata is written whole at each change
SALT_BYTES_MAX: Final = 256
UNAUTHORIZED: Final = "Cluster authorization failed."

Users = dict[str, Mapping[str, ScramEntry]]
_Row = AlterUserScramCredentialsRequestUpsertion | AlterUserScramCredentialsRequestDeletion


class _RefusedError(Exception):
    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def describe_user_scram_credentials(
    context: RequestContext, _header: RequestHeader, body: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    """Return the mechanisms and iterations of the stored users that the request names, or all."""
    if not context.may_cluster(Operation.DESCRIBE):
        denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        return DescribeUserScramCredentialsResponse(
            error_code=denied,
            error_message=UNAUTHORIZED,
            results=[  # as in Kafka, without the names
                DescribeUserScramCredentialsResponseResult(
                    error_code=denied, error_message=UNAUTHORIZED
                )
                async for _ in Turns().over(body.users or ())
            ],
        )
    users, turns = context.services.metadata_writer.metadata.scram_users, Turns()
    counts: dict[str, int] = {}
    if body.users:
        async for row in turns.over(body.users):
            counts[row.name] = counts.get(row.name, 0) + 1
    else:
        counts = dict.fromkeys(users, 1)
    response = DescribeUserScramCredentialsResponse()
    async for name, count in turns.over(counts.items()):
        response.results.append(_describe(name, users.get(name), is_repeated=count > 1))
    return response


def _describe(
    name: str, entries: Mapping[str, ScramEntry] | None, *, is_repeated: bool
) -> DescribeUserScramCredentialsResponseResult:
    result = DescribeUserScramCredentialsResponseResult(user=name)
    if is_repeated:
        result.error_code = ErrorCode.DUPLICATE_RESOURCE
        result.error_message = (
            f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
        )
    elif not entries:
        result.error_code = ErrorCode.RESOURCE_NOT_FOUND
        result.error_message = f"Attempt to describe a user credential that does not exist: {name}"
    else:
        result.credential_infos = [
            DescribeUserScramCredentialsResponseCredentialInfo(
                mechanism=code, iterations=entries[mechanism].iterations
            )
            for code, mechanism in MECHANISM_CODES.items()
            if mechanism in entries
        ]
    return result


async def alter_user_scram_credentials(
    context: RequestContext, _header: RequestHeader, body: AlterUserScramCredentialsRequest
) -> AlterUserScramCredentialsResponse:
    """Store and delete salted passwords; the response has a row for each user."""
    if context.may_cluster(Operation.ALTER):
        writer = context.services.metadata_writer
        return await writer.run(context.client, _alter, context, body)
    error, turns = _RefusedError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, UNAUTHORIZED), Turns()
    rows = itertools.chain[_Row](body.deletions, body.upsertions)
    return await _respond({row.name: error async for row in turns.over(rows)}, turns)


async def _alter(
    context: RequestContext, body: AlterUserScramCredentialsRequest
) -> AlterUserScramCredentialsResponse:
    writer, turns = context.services.metadata_writer, Turns()
    file_users = context.services.authentication.credentials.file_users
    users: Users = dict(writer.metadata.scram_users)
    results: dict[str, _RefusedError | None] = {}
    async for row in turns.over(itertools.chain[_Row](body.deletions, body.upsertions)):
        try:
            if row.name in results:
                raise _RefusedError(
                    ErrorCode.DUPLICATE_RESOURCE,
                    "A user credential cannot be altered twice in the same request",
                )
            results[row.name] = None
            if isinstance(row, AlterUserScramCredentialsRequestUpsertion):
                _upsert(users, row, file_users)
            else:
                _delete(users, row)
        except _RefusedError as error:
            results[row.name] = results[row.name] or error
            # A repeated row undoes the first one.
            _restore(users, row.name, writer.metadata.scram_users)
    if users != writer.metadata.scram_users:
        try:
            await writer.save(replace(writer.metadata, scram_users=users))
        except StorageError as error:
            failure = _RefusedError(code_of(error), str(error))
            async for name, refusal in turns.over(list(results.items())):
                results[name] = refusal or failure
        else:
            changed = [name async for name, error in turns.over(results.items()) if error is None]
            logger.info("users changed", users=changed[:10], count=len(changed))
            await context.services.authentication.credentials.count_formats()
    return await _respond(results, turns)


def _upsert(
    users: Users, row: AlterUserScramCredentialsRequestUpsertion, file_users: frozenset[str]
) -> None:
    mechanism = _check_row(row)
    if row.iterations < ITERATIONS:
        raise _RefusedError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations")
    if row.iterations > ITERATIONS_MAX:
        raise _RefusedError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations")
    if len(row.name) > USER_NAME_LENGTH_MAX:
        raise _RefusedError(
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            f"The user name has more than {USER_NAME_LENGTH_MAX} characters",
        )
    if not 1 <= len(row.salt) <= SALT_BYTES_MAX:
        raise _RefusedError(
            ErrorCode.UNACCEPTABLE_CREDENTIAL, f"The salt must have 1 to {SALT_BYTES_MAX} bytes"
        )
    if len(row.salted_password) != hashlib.new(HASHES[mechanism]).digest_size:
        raise _RefusedError(
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            f"The salted password does not have the length of {mechanism}",
        )
    if row.name in file_users:
        raise _RefusedError(
            ErrorCode.UNACCEPTABLE_CREDENTIAL,
            "The settings file of the broker has this user; change the password there",
        )
    if row.name not in users and len(users) >= USERS_MAX:
        raise _RefusedError(
            ErrorCode.POLICY_VIOLATION, f"The broker stores at most {USERS_MAX} users"
        )
    entry = make_entry(mechanism, bytes(row.salted_password), bytes(row.salt), row.iterations)
    users[row.name] = {**users.get(row.name, {}), mechanism: entry}


def _delete(users: Users, row: AlterUserScramCredentialsRequestDeletion) -> None:
    mechanism = _check_row(row)
    entries = dict(users.get(row.name, {}))
    if mechanism not in entries:
        raise _RefusedError(
            ErrorCode.RESOURCE_NOT_FOUND,
            "Attempt to delete a user credential that does not exist",
        )
    del entries[mechanism]
    if entries:
        users[row.name] = entries
    else:
        del users[row.name]


def _check_row(row: _Row) -> str:
    if not row.name:
        raise _RefusedError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty")
    mechanism = MECHANISM_CODES.get(row.mechanism)
    if mechanism is None:
        raise _RefusedError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
    return mechanism


def _restore(users: Users, name: str, stored: Mapping[str, Mapping[str, ScramEntry]]) -> None:
    if name in stored:
        users[name] = stored[name]
    else:
        users.pop(name, None)


async def _respond(
    results: Mapping[str, _RefusedError | None], turns: Turns
) -> AlterUserScramCredentialsResponse:
    response = AlterUserScramCredentialsResponse()
    async for name, error in turns.over(results.items()):
        result = AlterUserScramCredentialsResponseResult(user=name, error_message=None)
        if error is not None:
            result.error_code, result.error_message = error.code, error.reason
        response.results.append(result)
    return response
