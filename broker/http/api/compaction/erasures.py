"""/api/v1/topics/{topic}/erasures: erase a key, with a deadline and a receipt.

Permissions: WRITE on the topic to request or cancel an erasure, because it does what a tombstone of
a producer leads to, only sooner; DESCRIBE on the topic to look at erasures. The audit log gets the
digest of the key, never its bytes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from broker.erasure.erasures import ErasureRefusedError, Erasures
from broker.erasure.model import Erasure, PartitionErasure
from broker.event_loop.loop_turns import Turns
from broker.http.api.json_shapes import Json
from broker.http.api.lookup import find_topic
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    body_value,
    bytes_value,
    encode_rows,
    json_object,
    query_parameters,
    text_response,
)
from broker.http.audited import note_event, note_secrets, principal_of, sender_of
from broker.http.authentication import Allows
from broker.security.acls import Operation, ResourceType
from broker.security.audit import log_change, shorten
from broker.topics.topics import Topics

ROOT: Final = "/api/v1/topics/{topic}/erasures"
ONE: Final = f"{ROOT}/{{erasure_id}}"
ADMINISTRATIVE: Final = (("GET", ROOT), ("POST", ROOT), ("GET", ONE), ("DELETE", ONE))
KEY_PARAMETERS: Final = ("key", "key_base64")
WITHIN_SECONDS: Final = 86_400
WITHIN_SECONDS_MAX: Final = 366 * 86_400


class ErasuresApi:
    """Handlers of the requests about erasures."""

    def __init__(self, topics: Topics, erasures: Erasures, allows: Allows) -> None:
        self._topics = topics
        self._erasures = erasures
        self._permissions = Permissions(allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._list)
        yield web.post(ROOT, self._request)
        yield web.get(ONE, self._one)
        yield web.delete(ONE, self._cancel)

    async def _list(self, request: web.Request) -> web.Response:
        query = query_parameters(request, KEY_PARAMETERS)
        topic = self._permitted(request, Operation.DESCRIBE)
        key = bytes_value(query, "key")
        digest = None if key is None else self._erasures.digest_of(key)
        turns = Turns()
        texts = [
            await self._encode(erasure, turns)
            for erasure in self._erasures.all()
            if erasure.topic == topic and digest in (None, erasure.digest)
        ]
        return text_response(f'{{"erasures": [{", ".join(texts)}]}}')

    async def _one(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        self._permitted(request, Operation.DESCRIBE)
        return text_response(await self._encode(self._find(request), Turns()))

    async def _request(self, request: web.Request) -> web.Response:
        note_secrets(request, KEY_PARAMETERS)
        query_parameters(request, ())
        body = await json_object(request, (*KEY_PARAMETERS, "partitions", "within_seconds"))
        name = self._permitted(request, Operation.WRITE)
        key = bytes_value(body, "key")
        if key is None:
            raise ApiError(400, "key: give the key as text, or its bytes in key_base64")
        within = body_value(body, "within_seconds", int, WITHIN_SECONDS)
        if not 0 < within <= WITHIN_SECONDS_MAX:
            raise ApiError(400, f"within_seconds: expected 1 to {WITHIN_SECONDS_MAX}")
        topic = find_topic(self._topics, name)
        if topic.is_internal:
            raise ApiError(400, f"{name} is an internal topic: its keys cannot be erased")
        if not topic.config.compacts:
            policy = ",".join(topic.config.cleanup_policy) or "empty"
            raise ApiError(
                400,
                f"{name} is not compacted (cleanup.policy is {policy}): only retention or "
                "DeleteRecords can remove its records",
            )
        partitions = _partitions(body, topic.partition_count)
        is_of_all = len(partitions) == topic.partition_count
        details: dict[str, object] = {
            "resource": shorten(name),
            "parameters": {
                "key_digest": self._erasures.digest_of(key),
                "within_seconds": str(within),
                "partitions": "all" if is_of_all else shorten(str(partitions)),
            },
        }
        try:
            erasure = await self._erasures.request(
                topic,
                key,
                partitions,
                within_ms=within * 1000,
                requested_by=principal_of(request),
                has_share=not sender_of(request).is_unlimited,
            )
        except (ErasureRefusedError, OSError) as error:
            self._log(request, str(error), details)
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"the request could not be stored: {error}"
            raise ApiError(409, reason) from error
        details["erasure"] = erasure.erasure_id
        self._log(request, "NONE", details)
        return text_response(await self._encode(erasure, Turns()), 201)

    async def _cancel(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        await json_object(request, ())
        self._permitted(request, Operation.WRITE)
        erasure = self._find(request)
        if erasure.is_open:
            reason = f"{principal_of(request)} cancelled it"
            try:
                erasure = await self._erasures.cancel(erasure.erasure_id, reason)
            except OSError as error:
                raise ApiError(409, f"the change could not be stored: {error}") from error
        return text_response(await self._encode(erasure, Turns()))

    def _log(self, request: web.Request, result: str, details: dict[str, object]) -> None:
        note_event(request)
        log_change(principal_of(request), request.remote or "", f"POST {ROOT}", result, details)

    def _permitted(self, request: web.Request, operation: Operation) -> str:
        """Return the topic in the path. Raises ApiError 403, or 409 if no erasure is known."""
        name = request.match_info["topic"]
        self._permissions.check(request, operation, ResourceType.TOPIC, name)
        if self._erasures.unknown_because is not None:
            raise ApiError(409, self._erasures.unknown_because)
        return name

    def _find(self, request: web.Request) -> Erasure:
        match = request.match_info
        erasure = self._erasures.get(match["erasure_id"])
        if erasure is None or erasure.topic != match["topic"]:
            topic, erasure_id = match["topic"][:300], match["erasure_id"][:100]
            raise ApiError(404, f"topic {topic} has no erasure {erasure_id}")
        return erasure

    async def _encode(self, erasure: Erasure, turns: Turns) -> str:
        """Return an erasure as JSON; it may have ten thousand partitions."""
        rows = (self._part_json(erasure, part) for part in erasure.parts)
        fields = {
            "id": erasure.erasure_id,
            "topic": erasure.topic,
            "key_digest": erasure.digest,
            "state": erasure.state.value,
            "reason": erasure.reason,
            "requested_by": erasure.requested_by,
            "requested_ms": erasure.requested_ms,
            "deadline_ms": erasure.deadline_ms,
            "ended_ms": erasure.ended_ms,
        }
        return await encode_rows("partitions", rows, fields, turns)

    def _part_json(self, erasure: Erasure, part: PartitionErasure) -> Json:
        progress = self._erasures.progress_of(erasure, part)
        is_open = erasure.is_open and not part.is_done
        reason = None if progress is None else progress.reason
        waits_for = reason or "it waits for its turn"
        expected = self._erasures.forecast_of(erasure, part) if is_open else None
        risk = None if expected is None else expected.risk
        return {
            **part.to_json(),
            "expected_ms": None if expected is None else expected.expected_ms,
            "risk": None if risk is None else risk.value,
            "waits_for": waits_for if is_open else None,
            "records_left": progress.records if is_open and progress is not None else None,
            "files_left": len(progress.found) if is_open and progress is not None else None,
        }


def _partitions(body: Mapping[str, Any], count: int) -> list[int]:
    """Return the partitions of the request: all of the topic, or some. Raises ApiError 400."""
    chosen = body_value(body, "partitions", list, list(range(count)))
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in chosen)
    if not chosen or not are_numbers or not all(0 <= n < count for n in chosen):
        raise ApiError(400, f"partitions: expected a list of numbers from 0 to {count - 1}")
    return sorted(set(chosen))
