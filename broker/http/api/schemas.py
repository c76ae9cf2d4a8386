"""/api/v1/topics/{topic}/schemas/{id}: a schema of the registry, with which the console decodes.

Rules
- The broker fetches schemas and decodes nothing: records come from any client, and a hostile
  one can harm only the browser tab that shows it.
- Only the registry of the settings is asked, without following redirections, for schemas of at most
  SCHEMA_BYTES_MAX with all that they import, in FETCHES_MAX threads that clients share fairly.
- Schemas never change, so the last CACHED_MAX are kept, with at most CACHED_BYTES_MAX.
- A user who may read any topic may see every schema of the registry.
"""

import asyncio
import json
import urllib.error
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from broker.event_loop.fair_slots import FairSlots
from broker.fetch_document import fetch_document
from broker.http.api.json_shapes import Json
from broker.http.api.permissions import Permissions
from broker.http.api.requests import ApiError, json_response, parse_integer, query_parameters
from broker.http.audited import client_of
from broker.http.authentication import Allows
from broker.security.acls import Operation, ResourceType
from config.security.secrets import SecretError
from config.settings import SchemaRegistrySettings

PATH: Final = "/api/v1/topics/{topic}/schemas/{id}"
ADMINISTRATIVE: Final = (("GET", PATH),)
TIMEOUT_SECONDS: Final = 5.0
SCHEMA_BYTES_MAX: Final = 1 << 20
REFERENCES_MAX: Final = 20  # files that a Protobuf schema imports, with those that they import
CACHED_MAX: Final = 200
CACHED_BYTES_MAX: Final = 16 << 20
FETCHES_MAX: Final = 2  # of the threads that all others share, of which there may be five
ID_MAX: Final = (1 << 31) - 1


class SchemasApi:
    """The handler of the request for a schema."""

    def __init__(self, settings: SchemaRegistrySettings, allows: Allows) -> None:
        self._settings = settings
        self._permissions = Permissions(allows)
        self._cache: OrderedDict[int, Json] = OrderedDict()
        self._slots = FairSlots(FETCHES_MAX)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(PATH, self._schema)

    async def _schema(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        topic = request.match_info["topic"]
        number = parse_integer(request.match_info["id"], "id", 0, ID_MAX)
        self._permissions.check(request, Operation.READ, ResourceType.TOPIC, topic)
        if self._settings.url is None:
            raise ApiError(409, "no schema registry: schema_registry.url is not set")
        if number not in self._cache:
            async with self._slots.slot(client_of(request)):
                schema = await asyncio.to_thread(fetch_schema, self._settings, number)
            self._keep(number, schema)
        self._cache.move_to_end(number)
        return json_response(self._cache[number])

    def _keep(self, number: int, schema: Json) -> None:
        """Keep a schema, and drop those that were not asked for the longest time."""
        self._cache[number] = schema
        size_bytes = sum(map(_size_bytes, self._cache.values()))
        while len(self._cache) > CACHED_MAX or size_bytes > CACHED_BYTES_MAX:
            _, dropped = self._cache.popitem(last=False)
            size_bytes -= _size_bytes(dropped)


def fetch_schema(settings: SchemaRegistrySettings, number: int) -> Json:
    """Fetch a schema. Raises ApiError 404, and 502 if the registry does not answer as one.

    `schemas` are texts: of Avro with all references resolved; of Protobuf as file descriptors in
    base64, those of imported files after the first.
    """
    path = f"/schemas/ids/{number}"
    answer = _ask(settings, path)
    kind = answer.get("schemaType", "AVRO")
    if kind == "AVRO" and answer.get("references"):
        answer = _ask(settings, f"{path}?format=resolved")
    schemas = [answer]
    if kind == "PROTOBUF":
        schemas = _with_imports(settings, _ask(settings, f"{path}?format=serialized"))
    texts = [schema.get("schema") for schema in schemas]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(502, f"the schema registry has no text for schema {number}")
    schema = {"id": number, "type": str(kind), "schemas": texts}
    if _size_bytes(schema) > SCHEMA_BYTES_MAX:
        raise ApiError(502, f"the schema is larger than {SCHEMA_BYTES_MAX} bytes with its imports")
    return schema


def _size_bytes(schema: Json) -> int:
    return sum(map(len, schema["schemas"]))


def _with_imports(settings: SchemaRegistrySettings, first: Json) -> list[Json]:
    """Return a schema and those that it imports, each once."""
    schemas, waiting, seen = [first], _imports(first), set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        if len(seen) == REFERENCES_MAX:
            raise ApiError(502, f"the schema imports more than {REFERENCES_MAX} files")
        seen.add(path)
        schemas.append(_ask(settings, path))
        waiting += _imports(schemas[-1])
    return schemas


def _imports(schema: Json) -> list[str]:
    """Return the paths of the schemas that a schema imports."""
    try:
        return [
            f"/subjects/{quote(reference['subject'], safe='')}"
            f"/versions/{int(reference['version'])}?format=serialized"
            for reference in schema.get("references") or ()
        ]
    except (TypeError, KeyError, ValueError):
        raise ApiError(502, "the schema registry has references without a subject") from None


def _ask(settings: SchemaRegistrySettings, path: str) -> dict[str, Any]:
    assert settings.url is not None
    url = settings.url.rstrip("/") + path
    try:
        data = fetch_document(
            url,
            timeout_seconds=TIMEOUT_SECONDS,
            bytes_max=SCHEMA_BYTES_MAX,
            headers=_headers(settings),
        )
        document = json.loads(data)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise ApiError(404, "the schema registry has no such schema") from None
        raise ApiError(502, f"the schema registry answered {error.code}") from None
    except (OSError, ValueError, SecretError) as error:
        raise ApiError(502, f"the schema registry did not answer: {error}") from None
    except RecursionError:
        raise ApiError(502, "the schema registry answered with too deep a document") from None
    if not isinstance(document, dict):
        raise ApiError(502, "the schema registry did not answer with an object")
    return document


def _headers(settings: SchemaRegistrySettings) -> Mapping[str, str]:
    headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
    if settings.user is not None and settings.password is not None:
        pair = f"{settings.user}:{settings.password.read()}".encode()
        headers["Authorization"] = f"Basic {b64encode(pair).decode()}"
    return headers
