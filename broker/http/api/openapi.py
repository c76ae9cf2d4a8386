"""The OpenAPI document of the API, kept by hand; a test compares its paths with the routes."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from aiohttp import web

from cleaner.remote_compaction import COMPACTIONS_PATH

PATH: Final = "/api/v1/openapi.json"

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
    for code, text in ((400, "The request makes no sense."), (401, "Credentials are needed."),
                       (403, "No permission, or wrong Host or Origin."), *codes):  # fmt: skip
        answers[str(code)] = {"description": text, "content": _PROBLEM}
    return answers


_PROBLEM: Final = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_PROBLEM_SCHEMA: Final = {
    "description": "A problem document (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"const": "about:blank"},
        "title": {"type": "string", "description": "The phrase of the status."},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong and what to do."},
    },
}
_UNKNOWN: Final = (404, "There is no such topic or partition.")
_CONFLICT: Final = (409, "Not possible now: the partition is offline or not compacted.")
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
    end = _query("to", "integer", "The new log end offset.", minimum=0)
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
        "security": [{}, {"token": []}, {"user": []}],
        "components": {
            "schemas": {"Problem": _PROBLEM_SCHEMA},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "user": {"type": "http", "scheme": "basic"},
            },
        },
        "paths": {
            "/api/v1/overview": _get(
                "Show readiness, what needs attention, data directories, and counters of traffic.",
                [],
            ),
            "/api/v1/topics": _get(
                "List topics with their sizes and what the cleaner knows of them.",
                [
                    _query("contains", "string", "Part of the names."),
                    _query("internal", "boolean", "List Kafka's own topics; default: true."),
                    _query("after", "string", "`next` of the previous page."),
                    _query(*limit, "Rows per page; default: 1000.", minimum=1, maximum=5000),
                ],
            ),
            "/api/v1/topics/{topic}/partitions/{partition}/segments": _get(
                "List the segments of a partition: an array for each, with `columns`.",
                [
                    _TOPIC,
                    _PARTITION,
                    _query("after", "integer", "`next` of the previous page.", minimum=0),
                    _query(*limit, "Rows per page; default: 5000.", minimum=1, maximum=20_000),
                ],
                _UNKNOWN,
                (409, "The partition is offline."),
            ),
            "/api/v1/groups": _get(
                "List consumer groups with their members, topics and lag.",
                [
                    _query("contains", "string", "Part of the names."),
                    _query("after", "string", "`next` of the previous page."),
                    _query(*limit, "Rows per page; default: 500.", minimum=1, maximum=2000),
                ],
            ),
            "/api/v1/cleaner": _get(
                "Show workers, rates, totals, settings, and counts of partitions.", []
            ),
            "/api/v1/cleaner/partitions": _get(
                "List compacted partitions, or all of one topic, as of the last scan.",
                [
                    _query("topic", "string", "This topic only."),
                    _query("after", "string", "`next` of the previous page."),
                    _query(*limit, "Rows per page; default: 1000.", minimum=1, maximum=5000),
                ],
                _UNKNOWN,
            ),
            "/api/v1/cleaner/history": _get(
                "List finished jobs, newest first.",
                [
                    _query("topic", "string", "This topic only."),
                    _query("partition", "integer", "This partition of the topic only.", minimum=0),
                    _query(*limit, "Number of jobs; default: 100.", minimum=1, maximum=2000),
                ],
            ),
            partition: _get(
                "Explain why a partition is not being cleaned, or show its job.",
                [_TOPIC, _PARTITION],
                _UNKNOWN,
            ),
            f"{partition}/estimate": _get(
                "Estimate what the next clean of a partition reads, writes and frees.",
                [
                    _TOPIC,
                    _PARTITION,
                    _query(
                        "slack",
                        "number",
                        "In place of varve.compaction.slack.",
                        minimum=0,
                        maximum=1000,
                    ),
                ],
                _UNKNOWN,
                (409, "The partition is offline, or no closed segment of it can be cleaned."),
            ),
            f"{partition}/run": _post(
                "Clean the partition next, whatever its dirty ratio.",
                body={
                    "roll": {
                        "type": "boolean",
                        "description": "Close the active segment first: it is cleaned, too.",
                    }
                },
            ),
            f"{partition}/pause": _post(
                "Pause the partition: do not clean it until it is resumed."
            ),
            f"{partition}/resume": _post("Resume a paused partition."),
            f"{partition}/abort": _post("Abort the running job and cancel a requested clean."),
            f"{partition}/transactions/{{producer_id}}/abort": _post(
                "Abort an open transaction that has no coordinator.",
                parameters=[_PRODUCER],
            ),
            f"{partition}/retry": _post("End a quarantine and clear its failures."),
            "/api/v1/view": _get(
                "List compacted views.", [_query("topic", "string", "This topic only.")], _UNKNOWN
            ),
            view: _get("Show the view of a partition.", [_TOPIC, _PARTITION], _UNKNOWN, _NO_VIEW),
            f"{view}/compact": _post(
                "Start a compaction of the view, up to the log end offset.",
                body={
                    "from_scratch": {
                        "type": "boolean",
                        "description": "Rebuild the view from the records in the log.",
                    }
                },
            ),
            f"{view}/abort": _post("Abort the view's compaction; the view does not change."),
            "/api/v1/cleaner/pause": _post("Pause every compacted partition.", of_partition=False),
            "/api/v1/cleaner/resume": _post("Resume every paused partition.", of_partition=False),
            **(_log_paths() | _lease_paths()),
            PATH: _get("This document.", []),
        },
    }


def routes(version: str) -> Iterator[web.RouteDef]:
    """Yield the route of the document."""
    answer = document(version)

    async def handle(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    yield web.get(PATH, handle)
