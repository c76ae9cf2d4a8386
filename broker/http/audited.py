"""What the audit log records of HTTP requests: each change, and each request that was denied.

The server passes every request through here, so a new route is recorded without further code. A
transfer of a leased file is not a change; the adoption of the files is. What a handler of the Kafka
protocol answers has the event of that handler (broker/handlers/security/audited.py).
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import web

from broker.http.authentication import Sender
from broker.security.audit import (
    HIDDEN,
    is_secret,
    log_change,
    log_request_denied,
    mask,
    shorten,
)
from broker.security.principal import ANONYMOUS, Principal
from broker.security.principal import client_of as share_of

PARAMETERS_MAX: Final = 20  # of one request in an event; no request has more
DENIALS: Final = frozenset((HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN))

_SENDER: Final = web.RequestKey("sender", Sender)
_IS_CHANGE: Final = web.RequestKey("is_change", bool)
_HAS_EVENT: Final = web.RequestKey("has_event", bool)
_SECRETS: Final = web.RequestKey("secrets", frozenset[str])


def note_sender(request: web.Request, sender: Sender) -> None:
    """Note who sent a request."""
    request[_SENDER] = sender


def sender_of(request: web.Request) -> Sender:
    """Return the authenticated sender of a request."""
    sender: Sender = request[_SENDER]
    return sender


def find_sender(request: web.Request) -> Sender | None:
    """Return the authenticated sender of a request; None if it needs no credentials."""
    return request.get(_SENDER)


def principal_of(request: web.Request) -> Principal:
    """Return who sent a request: a user, the token of the settings, or `User:ANONYMOUS`."""
    return sender_of(request).principal if _SENDER in request else ANONYMOUS


def client_of(request: web.Request) -> Hashable:
    """Return the client of an authenticated request, among which places are shared."""
    return share_of(sender_of(request).principal, request.remote or "")


def note_change(request: web.Request) -> None:
    """Note that a request is a change, that its sender may make it, and that its body was read."""
    request[_IS_CHANGE] = True


def note_no_change(request: web.Request) -> None:
    """Note that a request changes nothing: a dry run, a produced record, or over a quota."""
    request[_IS_CHANGE] = False


def note_secrets(request: web.Request, names: Iterable[str]) -> None:
    """Note parameters whose values the event of a request must not have.

    It has nothing of the body either: a value may be under a misspelled name there.
    """
    request[_SECRETS] = frozenset(names)


def note_event(request: web.Request) -> None:
    """Note that a handler of the Kafka protocol writes the event of a request."""
    request[_HAS_EVENT] = True


async def audit(request: web.Request, response: web.StreamResponse) -> None:
    """Write the event of a request that has its response, if it was a change or was denied."""
    if request.get(_HAS_EVENT):
        return
    principal, host = principal_of(request), request.remote or ""
    if response.status in DENIALS:
        reason = _reason(response)
        log_request_denied(principal, host, _action(request), _target(request), reason)
    elif request.get(_IS_CHANGE):
        details: dict[str, object] = {
            "resource": _target(request),
            "parameters": await _parameters(request),
        }
        log_change(principal, host, _action(request), _reason(response), details)


def _action(request: web.Request) -> str:
    """Return the method and the path, with names of parameters in place of their values."""
    resource = request.match_info.route.resource
    path = request.path if resource is None else resource.canonical
    return f"{request.method} {shorten(path)}"


def _target(request: web.Request) -> str:
    """Return the values in the path, such as `orders-0`; `cluster` if there are none."""
    return shorten("-".join(request.match_info.values())) or "cluster"


def _reason(response: web.StreamResponse) -> str:
    if response.status < HTTPStatus.BAD_REQUEST:
        return "NONE"
    body = response.body if isinstance(response, web.Response) else None
    text = bytes(body).decode(errors="replace") if isinstance(body, bytes | bytearray) else ""
    document = _json_object(text)
    return shorten(str(document.get("detail", text.strip()))) or f"HTTP {response.status}"


async def _parameters(request: web.Request) -> dict[str, str | None]:
    """Return the query and the body, which the server has read."""
    secrets = request.get(_SECRETS, frozenset())
    body = "" if _SECRETS in request else (await request.read()).decode(errors="replace")
    values = {**request.query, **_json_object(body, _without_secrets)}
    return {
        shorten(name): HIDDEN
        if name in secrets
        else mask(name, value if isinstance(value, str) else _text_of(value))
        for name, value in list(values.items())[:PARAMETERS_MAX]
    }


def _text_of(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:  # a little less deep than what can be read
        return "(nested too deeply)"


def _without_secrets(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hide the secrets of an object inside the body, such as the settings of a topic."""
    return {
        name: HIDDEN if is_secret(name) and not isinstance(value, dict) else value
        for name, value in pairs
    }


def _json_object(
    text: str, convert: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> Mapping[str, Any]:
    """Return a JSON object, empty if the text is none; `convert` makes each object in it."""
    try:
        document = json.loads(text, object_pairs_hook=convert)
    except (ValueError, RecursionError):
        return {}
    return cast(Mapping[str, Any], document) if isinstance(document, dict) else {}
