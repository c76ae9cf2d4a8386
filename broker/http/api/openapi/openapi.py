"""The OpenAPI document of the API, kept by hand; a test compares its paths with the routes."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from aiohttp import web

from broker.http.api import events
from broker.http.api.compaction import erasures
from broker.http.api.kafka.topic_changes import ROOT as TOPICS
from broker.http.api.openapi import kafka
from broker.http.api.openapi.parts import (
    PARTITION,
    TOPIC,
    UNKNOWN,
    change,
    get,
    query,
    responses,
)
from cleaner.remote_compaction import COMPACTIONS_PATH

PATH: Final = "/api/v1/openapi.json"

_PRODUCER: Final = {
    "name": "producer_id", "in": "path", "required": True,
    "schema": {"type": "integer", "minimum": 0},
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
_ERASURE: Final = {
    "name": "erasure_id", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_NO_ERASURE: Final = (404, "The topic has no erasure with this ID.")
_NO_LEASE: Final = (404, "No remote compaction has this ID, or the token belongs to another one.")
_LEASE_ENDED: Final = (410, "The lease has ended.")
_STALE: Final = (
    409,
    "The lease is stale because the log changed, or another lease has the partition.",
)


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
_CONFLICT: Final = (409, "Not possible now: the partition is offline or not compacted.")
_UNKNOWN: Final = (409, "The file of the erasures cannot be read.")
_NO_VIEW: Final = (409, "The topic has no view.")


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
            "parameters": [TOPIC, PARTITION, *parameters] if of_partition else [],
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
            "responses": responses(
                *((UNKNOWN, _CONFLICT) if of_partition else ()),
                (415, "Content-Type is not application/json."),
            ),
        }
    }


def _stream(summary: str, *parameters: Any) -> dict[str, Any]:
    """Return a GET operation that streams events."""
    operation = get(
        summary,
        list(parameters),
        *((UNKNOWN, _CONFLICT) if parameters else ()),
        (503, "All streams are taken; see Retry-After."),
    )
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    operation["get"]["responses"]["200"] = {"description": "The stream.", "content": stream}
    return operation


def _log_paths() -> dict[str, Any]:
    """Return the paths under /api/v1/log."""
    partition = "/api/v1/log/partitions/{topic}/{partition}"
    from_offset = query("from_offset", "integer", "First offset; default: log start.", minimum=0)
    end_offset = query("end_offset", "integer", "End, exclusive; default: log end.", minimum=0)
    offset = query("offset", "integer", "Any offset in the damaged range.", minimum=0)
    end = query("to", "integer", "The new log end offset.", minimum=0)
    return {
        f"{partition}/damage": get(
            "Damaged ranges, the readers they block, and batches that cannot be cleaned.",
            [TOPIC, PARTITION],
            UNKNOWN,
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


def _erasure_paths() -> dict[str, Any]:
    """Return the paths of erasures."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    within = {"type": "integer", "minimum": 1, "maximum": erasures.WITHIN_SECONDS_MAX}
    list_keys = [
        query("key", "string", "Only erasures of this key."),
        query("key_base64", "string", "The same for a key that is not UTF-8."),
    ]
    request = change(
        "post",
        "Erase a key from all files of a topic. Needs WRITE on the topic.",
        [TOPIC],
        (404, "There is no such topic."),
        (409, "Too many erasures are open, they are unknown, or this one could not be stored."),
        body={
            "key": {"type": "string"},
            "key_base64": {"type": "string", "description": "A key that is not UTF-8."},
            "partitions": {**numbers, "description": "Search these only; default: all."},
            "within_seconds": {**within, "description": "The deadline, from now; default: a day."},
        },
    )
    answers = request["post"]["responses"]
    answers["201"] = {**answers.pop("200"), "description": "Requested."}
    return {
        erasures.ROOT: get(
            "List erasures. Needs DESCRIBE on the topic.", [TOPIC, *list_keys], _UNKNOWN
        )
        | request,
        erasures.ONE: get(
            "Show an erasure: its receipt, or what it waits for. Needs DESCRIBE on the topic.",
            [TOPIC, _ERASURE],
            _NO_ERASURE,
            _UNKNOWN,
        )
        | change(
            "delete",
            "Cancel an open erasure; a tombstone that was written stays. Needs WRITE on the topic.",
            [TOPIC, _ERASURE],
            _NO_ERASURE,
            (409, "The file of the erasures cannot be read, or the change could not be stored."),
        ),
    }


def _lease_paths() -> dict[str, Any]:
    """Return the paths of remote compactions and their leases."""
    root = COMPACTIONS_PATH
    files = f"{root}/{{compaction_id}}/partitions/{{partition}}"
    ttl = {"ttl_seconds": {"type": "integer", "minimum": 1, "maximum": 3600}}
    return {
        root: get("List remote compactions, including those that ended recently.", [])
        | change(
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
        f"{root}/{{compaction_id}}": get("Show one remote compaction.", [_LEASE], _NO_LEASE)
        | change(
            "delete",
            "End a remote compaction: release its partitions and remove its files.",
            [_LEASE],
            _NO_LEASE,
            _LEASE_ENDED,
        ),
        f"{root}/{{compaction_id}}/renew": change(
            "post",
            "Renew the leases of a remote compaction for `ttl_seconds` from now.",
            [_LEASE],
            _NO_LEASE,
            _STALE,
            _LEASE_ENDED,
            body=ttl,
        ),
        f"{root}/{{compaction_id}}/adopt": change(
            "post",
            "Verify the uploaded output and publish it. Repeat this request until `done`.",
            [_LEASE],
            _NO_LEASE,
            _STALE,
            _LEASE_ENDED,
            body={"partition": {"type": "integer", "minimum": 0}},
        ),
        f"{files}/inputs/{{name}}": get(
            "Download a range of a leased segment file.",
            [_LEASE, PARTITION, _FILE],
            _NO_LEASE,
            _LEASE_ENDED,
        ),
        f"{files}/outputs/{{folder}}/{{name}}": get(
            "Download a range of an uploaded file.",
            [_LEASE, PARTITION, _FOLDER, _FILE],
            _NO_LEASE,
            _LEASE_ENDED,
        )
        | _put("Upload a file.", [_LEASE, PARTITION, _FOLDER, _FILE]),
        f"{files}/manifest": _put(
            "Upload the manifest, which lists the output files. No upload is accepted after it.",
            [_LEASE, PARTITION],
        ),
    }


def _put(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "put": {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
            "responses": responses(
                _NO_LEASE,
                _STALE,
                _LEASE_ENDED,
                (413, "The upload exceeds the limit of the lease."),
                (422, "The checksum is wrong, or the manifest is malformed."),
                (507, "The disk has too little free space."),
            ),
        }
    }


@cache
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
            "/api/v1/overview": get(
                "Show readiness, what needs attention, data directories, and counters of traffic.",
                [],
            ),
            TOPICS: kafka.create_topic()
            | get(
                "List the topics that the sender may describe, with their sizes and the cleaner's "
                "figures.",
                [
                    query("contains", "string", "Part of the names."),
                    query("internal", "boolean", "List Kafka's own topics; default: true."),
                    query("after", "string", "`next` of the previous page."),
                    query(*limit, "Rows per page; default: 1000.", minimum=1, maximum=5000),
                ],
            ),
            "/api/v1/topics/{topic}/partitions/{partition}/segments": get(
                "List the segments of a partition: an array for each, with `columns`.",
                [
                    TOPIC,
                    PARTITION,
                    query("after", "integer", "`next` of the previous page.", minimum=0),
                    query(*limit, "Rows per page; default: 5000.", minimum=1, maximum=20_000),
                ],
                UNKNOWN,
                (409, "The partition is offline."),
            ),
            "/api/v1/topics/{topic}/schemas/{id}": get(
                "Get a schema of the registry, to decode records. Needs READ on the topic.",
                [
                    TOPIC,
                    {
                        "name": "id",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                    },
                ],
                (404, "The registry has no such schema."),
                (409, "The settings name no registry."),
                (502, "The registry did not answer."),
            ),
            "/api/v1/topics/{topic}/partitions/{partition}/history": get(
                "List the changes of a partition's segments in the last hours, newest first.",
                [TOPIC, PARTITION],
                UNKNOWN,
                (409, "The partition is offline."),
            ),
            events.CLEANER: _stream(
                "Stream an event within a second of each change of the cleaner."
            ),
            events.LISTS: _stream(
                "Stream an event within a second of a change of the overview or of a list.",
                {
                    "name": "resource",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "enum": ["overview", "topics", "groups"]},
                },
            ),
            events.TOPIC: _stream(
                "Stream an event within a second of each change of a topic.", TOPIC
            ),
            events.PARTITION: _stream(
                "Stream an event within a second of each change of a partition.",
                TOPIC,
                PARTITION,
            ),
            "/api/v1/groups": get(
                "List consumer groups with their members, topics and lag.",
                [
                    query("contains", "string", "Part of the names."),
                    query("after", "string", "`next` of the previous page."),
                    query(*limit, "Rows per page; default: 500.", minimum=1, maximum=2000),
                ],
            ),
            "/api/v1/cleaner": get(
                "Show workers, rates, totals, settings, and counts of partitions.", []
            ),
            "/api/v1/cleaner/partitions": get(
                "List compacted partitions, or all served ones of one topic, as of the last scan.",
                [
                    query("topic", "string", "This topic only."),
                    query("after", "string", "`next` of the previous page."),
                    query(*limit, "Rows per page; default: 1000.", minimum=1, maximum=5000),
                ],
                UNKNOWN,
            ),
            "/api/v1/audit": get(
                "List the last events of the audit log, newest first. Needs ALTER on the cluster.",
                [
                    query("contains", "string", "Part of an event, in any case."),
                    query("after", "integer", "`next` of the previous page.", minimum=0),
                    query(*limit, "Events per page; default: 100.", minimum=1, maximum=1000),
                ],
            ),
            "/api/v1/cleaner/queue": get(
                "List what waits for a worker, in order and with reasons; then what is blocked.",
                [
                    query("after", "integer", "`next` of the previous page.", minimum=0),
                    query(*limit, "Rows per page; default: 100.", minimum=1, maximum=1000),
                ],
            ),
            "/api/v1/cleaner/history": get(
                "List finished jobs, newest first.",
                [
                    query("topic", "string", "This topic only."),
                    query("partition", "integer", "This partition of the topic only.", minimum=0),
                    query(*limit, "Number of jobs; default: 100.", minimum=1, maximum=2000),
                ],
            ),
            partition: get(
                "Explain why a partition is not being cleaned, or show its job.",
                [TOPIC, PARTITION],
                UNKNOWN,
            ),
            f"{partition}/estimate": get(
                "Estimate what the next clean of a partition reads, writes and frees, what another "
                "slack or dirty ratio costs, and which share of the records of an age survives.",
                [
                    TOPIC,
                    PARTITION,
                    query(
                        "slack",
                        "number",
                        "In place of varve.compaction.slack.",
                        minimum=0,
                        maximum=1000,
                    ),
                ],
                UNKNOWN,
                (409, "The partition is offline, or no closed segment of it can be cleaned."),
            ),
            f"{partition}/verify": get(
                "Show the running or the last check of a log: records by segment, differences.",
                [TOPIC, PARTITION],
                (404, "There is no such topic or partition, or it was not verified."),
            )
            | _post("Verify the closed segments of the log; one check runs at a time."),
            f"{partition}/verify/abort": _post("Abort the check of the log."),
            f"{partition}/run": _post(
                "Clean the partition next, regardless of its dirty ratio.",
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
                "Abort an open transaction that the coordinator does not know.",
                parameters=[_PRODUCER],
            ),
            f"{partition}/retry": _post("End a quarantine and clear its failures."),
            "/api/v1/view": get(
                "List compacted views, in order of topics and partitions.",
                [
                    query("topic", "string", "This topic only."),
                    query("contains", "string", "Part of the names of topics."),
                    query("after", "string", "`next` of the previous page."),
                    query(*limit, "Rows per page; default: 1000.", minimum=1, maximum=5000),
                ],
                UNKNOWN,
            ),
            view: get("Show the view of a partition.", [TOPIC, PARTITION], UNKNOWN, _NO_VIEW),
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
            **(_log_paths() | _lease_paths() | _erasure_paths()),
            **kafka.paths(),
            PATH: get("This document.", []),
        },
    }


def routes(version: str) -> Iterator[web.RouteDef]:
    """Yield the route of the document."""
    answer = document(version)

    async def handle(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    yield web.get(PATH, handle)
