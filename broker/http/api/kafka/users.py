"""/api/v1/users: list, create and delete users of SASL/SCRAM (openapi/).

The handlers of the Kafka protocol do the work, so permissions and the audit log are theirs. Users
of the settings file are not listed and cannot be changed, as on the Kafka port.

Rules
- A password is salted here, in a thread, as Kafka's clients do it. It is not stored and not logged.
"""

import asyncio
from collections.abc import Iterator
from operator import attrgetter
from secrets import token_bytes
from typing import Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.json_shapes import Json
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    body_value,
    first_page,
    json_object,
    json_response,
    page_limit,
    parse_choice,
    query_parameters,
    rows_response,
)
from broker.http.audited import note_secrets
from broker.http.authentication import Allows
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType
from broker.security.scram import (
    HASHES,
    ITERATIONS,
    MECHANISM_CODES,
    SALT_BYTES,
    salt_password,
)
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode

ROOT: Final = "/api/v1/users"
USER: Final = f"{ROOT}/{{user}}"
ADMINISTRATIVE: Final = (("GET", ROOT), ("PUT", USER), ("DELETE", USER))
USERS: Final = 500
USERS_MAX: Final = 2000
PASSWORD_CHARS_MAX: Final = 1024  # each byte is hashed thousands of times
DEFAULT_MECHANISM: Final = "SCRAM-SHA-512"
MECHANISMS: Final = tuple(HASHES)
_CODES: Final = {mechanism: code for code, mechanism in MECHANISM_CODES.items()}


class UsersApi:
    """Handlers of the requests under /api/v1/users."""

    def __init__(self, handlers: KafkaHandlers, allows: Allows) -> None:
        self._handlers = handlers
        self._permissions = Permissions(allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._list)
        yield web.put(USER, self._put)
        yield web.delete(USER, self._delete)

    async def _list(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("contains", "after", "limit"))
        limit = page_limit(query, USERS, USERS_MAX)
        after, part = query.get("after", ""), query.get("contains", "")
        answer = await self._describe(request, None)
        users = (
            row
            async for row in Turns().over(answer.results)
            if row.user > after and part in row.user
        )
        page, last = await first_page(users, limit, attrgetter("user"))
        cursor = None if last is None else last.user
        return await rows_response("users", map(_user_json, page), {"next": cursor})

    async def _put(self, request: web.Request) -> web.Response:
        """Create a user, or give one another password."""
        note_secrets(request, ())
        query_parameters(request, ())
        body = await json_object(request, ("password", "mechanism"))
        password = body_value(body, "password", str, "")
        mechanism = parse_choice(
            body_value(body, "mechanism", str, DEFAULT_MECHANISM), "mechanism", MECHANISMS
        )
        if not 1 <= len(password) <= PASSWORD_CHARS_MAX:
            raise ApiError(422, f"password: expected 1 to {PASSWORD_CHARS_MAX} characters")
        # The handler checks it, too, but a password is salted for those who may set it only.
        self._permissions.check(request, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
        client, salt = KafkaClient(self._handlers, request), token_bytes(SALT_BYTES)
        row = m.AlterUserScramCredentialsRequestUpsertion(
            name=request.match_info["user"],
            mechanism=_CODES[mechanism],
            iterations=ITERATIONS,
            salt=salt,
            salted_password=await asyncio.to_thread(salt_password, mechanism, password, salt),
        )
        await _alter(client, m.AlterUserScramCredentialsRequest(deletions=[], upsertions=[row]))
        return json_response({"user": row.name, "mechanism": mechanism})

    async def _delete(self, request: web.Request) -> web.Response:
        """Delete the password of one mechanism, or the user with all of them."""
        query = query_parameters(request, ("mechanism",))
        await json_object(request, ())
        name, client = request.match_info["user"], KafkaClient(self._handlers, request)
        if "mechanism" in query:
            mechanisms = [parse_choice(query["mechanism"], "mechanism", MECHANISMS)]
        else:
            (described,) = (await self._describe(request, name)).results
            client.check(
                ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
                described.error_code,
                described.error_message,
            )
            mechanisms = [MECHANISM_CODES[info.mechanism] for info in described.credential_infos]
        for mechanism in mechanisms:  # a request may name a user once only
            row = m.AlterUserScramCredentialsRequestDeletion(name=name, mechanism=_CODES[mechanism])
            await _alter(client, m.AlterUserScramCredentialsRequest(deletions=[row], upsertions=[]))
        return json_response({"user": name, "deleted": mechanisms})

    async def _describe(
        self, request: web.Request, name: str | None
    ) -> m.DescribeUserScramCredentialsResponse:
        users = None
        if name is not None:
            users = [m.DescribeUserScramCredentialsRequestUser(name=name)]
        client, key = KafkaClient(self._handlers, request), ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS
        answer: m.DescribeUserScramCredentialsResponse = await client.call(
            key, m.DescribeUserScramCredentialsRequest(users=users)
        )
        client.check(key, answer.error_code, answer.error_message)
        return answer


async def _alter(client: KafkaClient, body: m.AlterUserScramCredentialsRequest) -> None:
    key = ApiKey.ALTER_USER_SCRAM_CREDENTIALS
    (row,) = (await client.call(key, body)).results
    if row.error_code != ErrorCode.NONE:
        client.check(key, row.error_code, row.error_message)


def _user_json(row: m.DescribeUserScramCredentialsResponseResult) -> Json:
    return {
        "user": row.user,
        "mechanisms": [
            {"mechanism": MECHANISM_CODES[info.mechanism], "iterations": info.iterations}
            for info in row.credential_infos
        ],
    }
