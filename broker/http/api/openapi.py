"""The OpenAPI document of the API, kept by hand; a test compares its paths with the routes."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from aiohttp import web

from cleaner.remote_compaction import COMPACTIONS_PATH

PATH: Final = "/api/v1/openapi.json"

LINKS: Final = {  # of the page at `/`
    PATH: "the HTTP API (OpenAPI)",
    "/metrics": "metrics for Prometheus",
    "/readyz": "whether clients are served",
    "/healthz": "whether the process works",
}
_OBJECT: Final = {"application/json": {"schema": {"type": "object"}}}
_TOPIC: Final = {
    "name": "topic", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_PARTITION: Final = {
    "name": "partition", "in": "path", "required": True,
    "schema": {"type": "integer", "minimum": 0},
}  # fmt: skip

_PRODUCER: Final = {
    "name": "producer_id", "in": "path", "required": True,
    "schema": {"type": "integer", "minimum": 0},
}  # fmt: skip


def _query(name: str, kind: str, text: str, **bounds: int) -> dict[str, Any]:
    return {
        "name": name, "in": "query", "description": text, "schema": {"type": kind, **bounds},
    }  # fmt: skip


_LEASE: Final = {
    "name": "compaction_id", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_FOLDER: Final = {
    "name": "folder", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_FILE: Final = {
    "name": "name", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_NO_LEASE: Final = (404, "No remote compaction has this ID, or the token belongs to another one.")
_LEASE_ENDED: Final = (410, "The lease has ended.")
_STALE: Final = (
    409,
    "The lease is stale because the log changed, or another lease has the partition.",
)


def _responses(*codes: tuple[int, str]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": _OBJECT}}
    for code, text in ((400, "The request makes no sense."), (401, "A token is needed."),
                       (403, "Wrong Host or Origin."), *codes):  # fmt: skip
        answers[str(code)] = {"description": text, "content": _ERROR}
    return answers


_ERROR: Final = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {"type": "string"}},
        }
    }
}
_UNKNOWN: Final = (404, "There is no such topic or partition.")
_CONFLICT: Final = (409, "It makes no sense now: the partition is offline, or not compacted.")
_NO_VIEW: Final = (409, "The topic has no view.")


def _get(summary: str, parameters: list[dict[str, Any]], *codes: tuple[int, str]) -> dict[str, Any]:
    return {"get": {"summary": summary, "parameters": parameters, "responses": _responses(*codes)}}


def _post(
    summary: str,
    *,
    body: dict[str, Any] | None = None,
    of_partition: bool = True,
    parameters: Sequence[Any] = (),
) -> dict[str, Any]:
    schema = {"type": "object", "properties": body or {}, "additionalProperties": False}
    return {
        "post": {
            "summary": summary,
            "parameters": [_TOPIC, _PARTITION, *parameters] if of_partition else [],
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
            "responses": _responses(
                *((_UNKNOWN, _CONFLICT) if of_partition else ()),
                (415, "Content-Type is not application/json."),
            ),
        }
    }


def _log_paths() -> dict[str, Any]:
    """Return the paths under /api/v1/log."""
    partition = "/api/v1/log/partitions/{topic}/{partition}"
    from_offset = _query("from_offset", "integer", "First offset; default: log start.", minimum=0)
    end_offset = _query("end_offset", "integer", "End, exclusive; default: log end.", minimum=0)
    offset = _query("offset", "integer", "Any offset in the damaged range.", minimum=0)
    end = _query("to", "integer", "The offset at which the log shall end.", minimum=0)
    return {
        f"{partition}/damage": _get(
            "Damaged ranges, the readers they block, and batches that cannot be cleaned.",
            [_TOPIC, _PARTITION],
            _UNKNOWN,
            _CONFLICT,
        ),
        f"{partition}/verify": _post(
            "Verify a part of the log; repeat from `next_offset` until `done`.",
            parameters=[from_offset, end_offset],
        ),
        f"{partition}/skip": _post(
            "Remove a damaged range from the log; its records are lost, readers continue after it.",
            parameters=[{**offset, "required": True}],
        ),
        f"{partition}/truncate": _post(
            "Remove all records from an offset on; below the high watermark only with `force`.",
            body={"force": {"type": "boolean"}},
            parameters=[{**end, "required": True}],
        ),
    }


def _lease_paths() -> dict[str, Any]:
    """Return the paths of remote compactions and their leases."""
    root = COMPACTIONS_PATH
    files = f"{root}/{{compaction_id}}/partitions/{{partition}}"
    ttl = {"ttl_seconds": {"type": "integer", "minimum": 1, "maximum": 3600}}
    return {
        root: _get("List remote compactions, including those that ended recently.", [])
        | _change(
            "post",
            "Start a remote compaction: lease partitions of a topic and return the plan.",
            [],
            _STALE,
            body={
                "topic": {"type": "string"},
                "partitions": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "purpose": {"enum": ["compact", "read"]},
                "roll": {"type": "boolean", "description": "Close the active segments first."},
                **ttl,
            },
        ),
        f"{root}/{{compaction_id}}": _get("Show one remote compaction.", [_LEASE], _NO_LEASE)
        | _change(
            "delete",
            "End a remote compaction: release its partitions and remove its files.",
            [_LEASE],
            _NO_LEASE,
            _LEASE_ENDED,
        ),
        f"{root}/{{compaction_id}}/renew": _change(
            "post",
            "Renew the leases of a remote compaction for `ttl_seconds` from now.",
            [_LEASE],
            _NO_LEASE,
            _STALE,
            _LEASE_ENDED,
            body=ttl,
        ),
        f"{root}/{{compaction_id}}/adopt": _change(
            "post",
            "Verify the uploaded output and publish it. Repeat this request until `done`.",
            [_LEASE],
            _NO_LEASE,
            _STALE,
            _LEASE_ENDED,
            body={"partition": {"type": "integer", "minimum": 0}},
        ),
        f"{files}/inputs/{{name}}": _get(
            "Download a range of a leased segment file.",
            [_LEASE, _PARTITION, _FILE],
            _NO_LEASE,
            _LEASE_ENDED,
        ),
        f"{files}/outputs/{{folder}}/{{name}}": _get(
            "Download a range of an uploaded file.",
            [_LEASE, _PARTITION, _FOLDER, _FILE],
            _NO_LEASE,
            _LEASE_ENDED,
        )
        | _put("Upload a file.", [_LEASE, _PARTITION, _FOLDER, _FILE]),
        f"{files}/manifest": _put(
            "Upload the manifest, which lists the output files. No upload is accepted after it.",
            [_LEASE, _PARTITION],
        ),
    }


def _change(
    method: str,
    summary: str,
    parameters: list[dict[str, Any]],
    *codes: tuple[int, str],
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    schema = {"type": "object", "properties": body or {}, "additionalProperties": False}
    return {
        method: {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
            "responses": _responses(*codes, (415, "Content-Type is not application/json.")),
        }
    }


def _put(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "put": {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
            "responses": _responses(
                _NO_LEASE,
                _STALE,
                _LEASE_ENDED,
                (413, "The upload exceeds the limit of the lease."),
                (422, "The checksum is wrong, or the manifest is malformed."),
                (507, "The disk has too little free space."),
            ),
        }
    }


def document(version: str) -> dict[str, Any]:
    """Return the document, for a version of the program."""
    partition = "/api/v1/cleaner/partitions/{topic}/{partition}"
    view = "/api/v1/view/partitions/{topic}/{partition}"
    limit = ("limit", "integer")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Varve", "version": version},
        "security": [{}, {"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/api/v1/cleaner": _get("Workers, rates, counts of partitions, totals, settings.", []),
            "/api/v1/cleaner/partitions": _get(
                "Compacted partitions, or all of one topic, as the last look found them.",
                [
                    _query("topic", "string", "Of this topic only."),
                    _query("after", "string", "The `next` of the page before."),
                    _query(*limit, "Rows of a page; 1000 by default.", minimum=1, maximum=5000),
                ],
                _UNKNOWN,
            ),
            "/api/v1/cleaner/history": _get(
                "Jobs that are over, newest first.",
                [
                    _query("topic", "string", "Of this topic only."),
                    _query("partition", "integer", "Of this partition of it.", minimum=0),
                    _query(*limit, "Jobs; 100 by default.", minimum=1, maximum=2000),
                ],
            ),
            partition: _get(
                "Why is it not being cleaned, or what is being done.",
                [_TOPIC, _PARTITION],
                _UNKNOWN,
            ),
            f"{partition}/run": _post(
                "Clean it next, whatever its ratio.",
                body={
                    "roll": {
                        "type": "boolean",
                        "description": "Close the active segment first, so that all is cleaned.",
                    }
                },
            ),
            f"{partition}/pause": _post("Leave it alone until it is resumed."),
            f"{partition}/resume": _post("End a pause."),
            f"{partition}/abort": _post("Give up the job that runs; it may be chosen again."),
            f"{partition}/transactions/{{producer_id}}/abort": _post(
                "End a transaction that nobody else will end: its records are dropped.",
                parameters=[_PRODUCER],
            ),
            f"{partition}/retry": _post("Forget earlier failures: end a quarantine."),
            "/api/v1/view": _get(
                "Compacted views.", [_query("topic", "string", "Of this topic only.")], _UNKNOWN
            ),
            view: _get("One view.", [_TOPIC, _PARTITION], _UNKNOWN, _NO_VIEW),
            f"{view}/compact": _post(
                "Begin to compact it, up to the log's end.",
                body={
                    "from_scratch": {
                        "type": "boolean",
                        "description": "Make it anew of what the log still holds.",
                    }
                },
            ),
            f"{view}/abort": _post("Give up its compaction; it stays as it was."),
            "/api/v1/cleaner/pause": _post("Pause every compacted partition.", of_partition=False),
            "/api/v1/cleaner/resume": _post(
                "Resume every partition that is paused.", of_partition=False
            ),
            **(_log_paths() | _lease_paths()),
            PATH: _get("This document.", []),
        },
    }


def routes(version: str) -> Iterator[web.RouteDef]:
    """Yield the document, and a page at `/` that leads to it."""
    answer = document(version)
    links = "".join(
        f'<li><a href="{path}">{path}</a>: {text}</li>\n' for path, text in LINKS.items()
    )
    page = f"<!DOCTYPE html>\n<title>Varve</title>\n<h1>Varve {version}</h1>\n<ul>\n{links}</ul>\n"

    async def handle(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def handle_index(_request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    yield web.get("/", handle_index)
    yield web.get(PATH, handle)
