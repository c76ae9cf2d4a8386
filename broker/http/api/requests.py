"""Parsing of API requests, and JSON responses built in turns.

Every error in a request raises an `ApiError`, which becomes the response.
"""

import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from aiohttp import web

from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.http.audited import note_no_change
from broker.http.observation import Handler
from broker.http.server import error_response
from cleaner.host import NotServedError
from config.json_text import is_unicode
from storage.errors import NoRoomError
from storage.model import TopicPartition

# A partition, a limit, a producer id. ASCII only, because int() accepts digits of any script.
_NUMBER: Final = re.compile(r"[0-9]{1,19}", re.ASCII)
_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_T = TypeVar("_T")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of half a character
SMALL_BODY_BYTES: Final = 8 << 10
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


class ApiError(Exception):
    """The request is refused with this status and text."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = headers


@web.middleware
async def translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Translate an ApiError, or that the files of a partition cannot be read, into its response."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error.status, error.reason, error.headers)
    except NotServedError as error:
        return error_response(409, f"{error}: see the broker's log")
    except NoRoomError as error:
        return error_response(409, f"no space or no file descriptor is left: {error}. Try again")


def parse_integer(text: str, name: str, minimum: int = 0, maximum: int = (1 << 31) - 1) -> int:
    """Return an integer from the path or the query. Raises ApiError 400."""
    if not _NUMBER.fullmatch(text) or not minimum <= int(text) <= maximum:
        raise ApiError(400, f"{name}: expected {minimum} to {maximum}, not {text[:40]!r}")
    return int(text)


def page_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return the parameter `limit`: the rows of a page. Raises ApiError 400."""
    return parse_integer(query.get("limit", str(default)), "limit", 1, maximum)


def cut_page(rows: Sequence[_T], limit: int) -> tuple[Sequence[_T], _T | None]:
    """Return the first rows, and the last one of these if more follow: the next page's `after`."""
    return rows[:limit], rows[limit - 1] if len(rows) > limit else None


async def first_page(
    rows: AsyncIterator[_T], limit: int, key: Callable[[_T], Any]
) -> tuple[Sequence[_T], _T | None]:
    """Return the first rows in the order of `key`, and the last one as `cut_page` does.

    It keeps at most `2 * limit` rows: to sort or free 25,000 at once takes 15 ms. `rows` yields to
    the event loop.
    """
    page: list[_T] = []
    async for row in rows:
        page.append(row)
        if len(page) >= 2 * limit:
            page.sort(key=key)
            del page[limit + 1 :]
    page.sort(key=key)
    return cut_page(page, limit)


def parse_boolean(text: str, name: str) -> bool:
    """Return a boolean from the query. Raises ApiError 400."""
    if text not in ("true", "false"):
        raise ApiError(400, f"{name}: expected true or false, not {text[:40]!r}")
    return text == "true"


def parse_choice(text: str, name: str, choices: Collection[str]) -> str:
    """Return one of the choices from the query or the body. Raises ApiError 400."""
    if text not in choices:
        raise ApiError(400, f"{name}: expected {', '.join(choices)}, not {text[:40]!r}")
    return text


def parse_number(text: str, name: str, maximum: float) -> float:
    """Return a decimal number from the query, at least 0. Raises ApiError 400."""
    if not _DECIMAL.fullmatch(text) or float(text) > maximum:
        raise ApiError(400, f"{name}: expected a number from 0 to {maximum:g}, not {text[:40]!r}")
    return float(text)


def parse_partition(request: web.Request) -> TopicPartition:
    """Return the partition in the path, which may not exist. Raises ApiError 400."""
    match = request.match_info
    return TopicPartition(match["topic"], parse_integer(match["partition"], "partition"))


def cursor_of(partition: TopicPartition) -> str:
    """Return the text of a partition as `next` of a page."""
    return f"{partition.topic}/{partition.partition}"


def parse_cursor(text: str) -> TopicPartition:
    """Return the partition after which a page begins. Raises ApiError 400."""
    topic, _, index = text.rpartition("/")
    return TopicPartition(topic, parse_integer(index, "after"))


def query_parameters(request: web.Request, allowed: Collection[str]) -> Mapping[str, str]:
    """Return the query parameters. Raises ApiError 400 for unknown or repeated ones."""
    results: dict[str, str] = {}
    for key, value in request.query.items():
        if key not in allowed:
            raise ApiError(400, f"unknown parameter {key[:40]!r}; there are {', '.join(allowed)}")
        if key in results:
            raise ApiError(400, f"parameter {key} is given twice")
        results[key] = value
    return results


async def json_object(request: web.Request, allowed: Collection[str]) -> dict[str, Any]:
    """Return the body: empty, or a JSON object with these keys. Raises ApiError 400."""
    body = await request.read()
    try:
        document = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(document, dict):
        raise ApiError(400, "expected a JSON object as the body")
    if len(body) > SMALL_BODY_BYTES:
        await yield_to_loop()  # to parse more may take most of a turn
    if _may_have_surrogates(body) and not is_unicode(document):
        raise ApiError(400, "the body has a string that is not Unicode: half of a surrogate pair")
    for key in document:
        if key not in allowed:
            raise ApiError(400, f"unknown key {key[:40]!r} in the body")
    return document


def _may_have_surrogates(body: bytes) -> bool:
    """Return whether strings of a JSON document may have halves of characters."""
    if b"\0" in body:  # in UTF-16 or UTF-32, which json accepts as well
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return True
    return _SURROGATE.search(body) is not None


async def query_flags(request: web.Request, allowed: Collection[str] = ()) -> Mapping[str, bool]:
    """Return the body: empty, or a JSON object of booleans. Raises ApiError 400."""
    document = await json_object(request, allowed)
    for key in document:
        body_value(document, key, bool, False)
    return document


def body_value(document: Mapping[str, Any], key: str, kind: type[_T], default: _T) -> _T:
    """Return a value of the body, the default if it is missing. Raises ApiError 400."""
    value = document.get(key, default)
    is_boolean = isinstance(value, bool) and kind is not bool  # a bool is an int for Python
    if not isinstance(value, kind) or is_boolean:
        raise ApiError(400, f"{key}: expected {_KINDS[kind]}")
    return value


def bytes_value(values: Mapping[str, Any], name: str) -> bytes | None:
    """Return bytes given as text or in base64; None for neither. Raises ApiError 400."""
    text, encoded = values.get(name), values.get(f"{name}_base64")
    if text is not None and encoded is not None:
        raise ApiError(400, f"both {name} and {name}_base64 are given")
    for part in (text, encoded):
        if part is not None and not isinstance(part, str):
            raise ApiError(400, f"{name}: expected a string")
    try:
        if encoded is not None:
            return base64.b64decode(encoded, validate=True)
        return None if text is None else text.encode()
    except ValueError:  # also a lone surrogate
        raise ApiError(400, f"{name}: expected UTF-8, or base64 in {name}_base64") from None


def json_response(
    answer: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a small JSON response."""
    return _response(json.dumps(answer).encode(), status, headers)


def action_response(request: web.Request, answer: Mapping[str, Any]) -> web.Response:
    """Return the response of an action; one without effect (`changed`) is not audited."""
    if not answer.get("changed", True):
        note_no_change(request)
    return json_response(answer)


async def rows_response(
    key: str, rows: Iterable[object], extra: Mapping[str, Any] | None = None
) -> web.Response:
    """Return {key: [rows], ...extra}. Rows are made and encoded in turns of the loop."""
    await yield_to_loop()  # the handler may have used its turn up
    document = await encode_rows(key, rows, extra or {}, Turns())
    await yield_to_loop()  # each copy of an answer of megabytes has a turn of its own
    return text_response(document)


async def encode_rows(
    key: str, rows: Iterable[object], extra: Mapping[str, Any], turns: Turns
) -> str:
    """Return {key: [rows], ...extra} as JSON. Rows are made and encoded in turns of the loop."""
    parts = [f"{{{json.dumps(key)}: ", *[part async for part in _encode_list(rows, turns)]]
    for name, item in extra.items():
        parts.append(f", {json.dumps(name)}: ")
        if isinstance(item, list):
            parts += [part async for part in _encode_list(item, turns)]
        else:
            parts.append(json.dumps(item))
    await yield_to_loop()
    return "".join([*parts, "}"])


async def _encode_list(rows: Iterable[object], turns: Turns) -> AsyncIterator[str]:
    yield "["
    separator = ""
    for row in rows:
        yield separator + json.dumps(row)
        separator = ", "
        await turns.take()
    yield "]"


def text_response(document: str, status: int = 200) -> web.Response:
    """Return a document that is JSON already."""
    return _response(document.encode(), status)


def _response(body: bytes, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
