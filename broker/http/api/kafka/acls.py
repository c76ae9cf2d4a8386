"""/api/v1/acls: list, add and remove entries of the access control lists (openapi/).

The handlers of the Kafka protocol do the work, so permissions, validation and the audit log are
theirs.

Rules
- An entry has seven fields, in Kafka's words. A request adds or removes one entry, which all seven
  name; nobody removes more than they see.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, TypeAlias, cast

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.json_shapes import Json
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
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
from broker.security.acls import Operation, PatternType, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode

ROOT: Final = "/api/v1/acls"
ADMINISTRATIVE: Final = (("GET", ROOT), ("POST", ROOT), ("DELETE", ROOT))
ACLS: Final = 500
ACLS_MAX: Final = 5000
# The fields of an entry; those with a code have its enumeration.
FIELDS: Final[Mapping[str, type[IntEnum] | None]] = {
    "principal": None,
    "host": None,
    "permission": Permission,
    "operation": Operation,
    "resource_type": ResourceType,
    "pattern_type": PatternType,
    "resource_name": None,
}
_Entry: TypeAlias = tuple[str, str, str, int, int, int, int]  # sorted; see _acl_json
DEFAULTS: Final = {"host": "*", "permission": "allow", "pattern_type": "literal"}


def choices(field: str) -> tuple[str, ...]:
    """Return the values that a field of an entry can have; none if it is free text."""
    codes = FIELDS[field]
    if codes is None:
        return ()
    filters = ("ANY", "MATCH")  # for selections, not for entries
    return tuple(code.name.lower() for code in codes if code.name not in filters)


class AclsApi:
    """Handlers of the requests under /api/v1/acls."""

    def __init__(self, handlers: KafkaHandlers) -> None:
        self._handlers = handlers

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._list)
        yield web.post(ROOT, self._add)
        yield web.delete(ROOT, self._remove)

    async def _list(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("contains", "after", "limit"))
        limit, part = page_limit(query, ACLS, ACLS_MAX), query.get("contains", "")
        after = _parse_cursor(query["after"]) if "after" in query else None
        key, client = ApiKey.DESCRIBE_ACLS, KafkaClient(self._handlers, request)
        answer = await client.call(
            key,
            m.DescribeAclsRequest(
                resource_type_filter=ResourceType.ANY,
                resource_name_filter=None,
                pattern_type_filter=PatternType.ANY,
                principal_filter=None,
                host_filter=None,
                operation=Operation.ANY,
                permission_type=Permission.ANY,
            ),
        )
        _check(client, key, answer.error_code, answer.error_message)
        entries = (
            entry
            async for resource in Turns().over(answer.resources)
            for acl in resource.acls
            if part in acl.principal or part in resource.resource_name
            for entry in (_sort_key(resource, acl),)
            if after is None or entry > after
        )
        page, last = await first_page(entries, limit, key=tuple)
        cursor = None if last is None else json.dumps(last)
        return await rows_response("acls", map(_acl_json, page), {"next": cursor})

    async def _add(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        body = await json_object(request, FIELDS)
        entry = {name: body_value(body, name, str, DEFAULTS.get(name, "")) for name in FIELDS}
        codes = _codes(entry)
        key, client = ApiKey.CREATE_ACLS, KafkaClient(self._handlers, request)
        creation = m.CreateAclsRequestCreation(
            resource_type=codes["resource_type"],
            resource_name=entry["resource_name"],
            resource_pattern_type=codes["pattern_type"],
            principal=entry["principal"],
            host=entry["host"],
            operation=codes["operation"],
            permission_type=codes["permission"],
        )
        (row,) = (await client.call(key, m.CreateAclsRequest(creations=[creation]))).results
        _check(client, key, row.error_code, row.error_message)
        return json_response(entry, 201)

    async def _remove(self, request: web.Request) -> web.Response:
        query = query_parameters(request, FIELDS)
        await json_object(request, ())
        for name in FIELDS:
            if name not in query:
                raise ApiError(400, f"{name} is missing: all fields of the entry are needed")
        codes = _codes(query)
        key, client = ApiKey.DELETE_ACLS, KafkaClient(self._handlers, request)
        selection = m.DeleteAclsRequestFilter(
            resource_type_filter=codes["resource_type"],
            resource_name_filter=query["resource_name"],
            pattern_type_filter=codes["pattern_type"],
            principal_filter=query["principal"],
            host_filter=query["host"],
            operation=codes["operation"],
            permission_type=codes["permission"],
        )
        (row,) = (await client.call(key, m.DeleteAclsRequest(filters=[selection]))).filter_results
        _check(client, key, row.error_code, row.error_message)
        if not row.matching_acls:
            raise ApiError(404, "there is no such entry")
        return json_response({**query, "deleted": True})


def _codes(entry: Mapping[str, str]) -> dict[str, int]:
    """Return the codes of the fields that have some. Raises ApiError 400."""
    return {
        name: codes[parse_choice(entry[name], name, choices(name)).upper()]
        for name, codes in FIELDS.items()
        if codes is not None
    }


def _check(client: KafkaClient, key: ApiKey, code: int, text: str | None) -> None:
    # The text of the handler is Kafka's, and does not say what to do.
    client.check(key, code, None if code == ErrorCode.SECURITY_DISABLED else text)


def _parse_cursor(text: str) -> _Entry:
    """Return the entry after which a page begins; others may come and go. Raises ApiError 400."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, list) and [*map(type, fields)] == [str, str, str, int, int, int, int]:
            return cast(_Entry, tuple(fields))
    raise ApiError(400, "after: expected `next` of the previous page")


def _sort_key(resource: Any, acl: Any) -> _Entry:
    return (
        acl.principal,
        resource.resource_name,
        acl.host,
        resource.resource_type,
        resource.pattern_type,
        acl.operation,
        acl.permission_type,
    )


def _acl_json(entry: _Entry) -> Json:
    principal, name, host, kind, pattern, operation, permission = entry
    return {
        "principal": principal,
        "host": host,
        "permission": Permission(permission).name.lower(),
        "operation": Operation(operation).name.lower(),
        "resource_type": ResourceType(kind).name.lower(),
        "pattern_type": PatternType(pattern).name.lower(),
        "resource_name": name,
    }
