"""/api/v1/topics/{topic}: create, describe, change and delete a topic (openapi/).

The handlers of the Kafka protocol do the work, so permissions, validation, quotas and the audit log
are theirs.

Rules
- The ETag of a topic is a digest of its id, its number of partitions and its settings. A change
  with If-Match is refused with 412 if they have changed; the answer names what changed if this
  process still knows the old state. The changes of one topic follow each other, so of two with the
  same ETag one is refused.
- A change of settings and of the number of partitions is validated as a whole before its first
  part happens.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from aiohttp import web

from broker.http.api.json_shapes import Json
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
from broker.http.api.lookup import find_topic
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    body_value,
    json_object,
    json_response,
    query_parameters,
    rows_response,
)
from broker.http.audited import client_of
from broker.http.authentication import Allows
from broker.inspection.keyless_records import KeylessSampler
from broker.security.acls import Operation, ResourceType
from broker.topics.topics import Topic, Topics
from config.topics.keys import (
    TOPIC_KEYS,
    ConfigSource,
    Effect,
    TopicKey,
    ValueKind,
    unknown_config,
)
from config.units import parse_duration_ms, parse_size
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.limits import SETTINGS_PER_RESOURCE_MAX
from storage.format.checkpoints import decode_topic_id, encode_topic_id

ROOT: Final = "/api/v1/topics"
TOPIC: Final = f"{ROOT}/{{topic}}"
SETTINGS: Final = "/api/v1/topic-settings"
ADMINISTRATIVE: Final = (
    ("GET", SETTINGS),
    ("POST", ROOT),
    ("GET", TOPIC),
    ("PATCH", TOPIC),
    ("DELETE", TOPIC),
)
STATES_MAX: Final = 256  # each has the values of forty settings, about 5 KB
CHANGES_MAX: Final = 10  # named in an answer
TOPIC_RESOURCE: Final = 2  # a resource type of the Kafka protocol
POLICY: Final = "cleanup.policy"
SET: Final = 0  # operations of IncrementalAlterConfigs
UNSET: Final = 1


@dataclass(frozen=True, slots=True)
class TopicDefinition:
    """What a client can change of a topic."""

    topic_id: bytes
    partitions: int
    settings: Mapping[str, str | None]

    @property
    def etag(self) -> str:
        """Return a digest of the state."""
        text = json.dumps([self.topic_id.hex(), self.partitions, sorted(self.settings.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def changes_since(self, before: "TopicDefinition") -> list[str]:
        """Return a phrase for each difference to an earlier state."""
        if before.topic_id != self.topic_id:
            return ["it was deleted and created again"]
        changes = []
        if before.partitions != self.partitions:
            changes.append(f"partitions is {self.partitions}, was {before.partitions}")
        changes += [
            f"{name} is {value}, was {before.settings.get(name)}"
            for name, value in self.settings.items()
            if before.settings.get(name) != value
        ]
        return changes


@dataclass(frozen=True, slots=True)
class RequestedSettings:
    """Settings of a request as Kafka sends them: strings, and numbers without units."""

    values: dict[str, str]
    problem: str | None  # of the first value whose unit is not known; it stays as it is

    def reason(self, code: int, text: str | None) -> str | None:
        """Return why Kafka's handler refused them: `text`, unless a unit was wrong."""
        is_value = code in (ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST)
        return self.problem if is_value and self.problem is not None else text


class TopicChanges:
    """Handlers of the requests that describe and change one topic."""

    def __init__(
        self, handlers: KafkaHandlers, topics: Topics, allows: Allows, keyless: KeylessSampler
    ) -> None:
        self._handlers = handlers
        self._keyless = keyless
        self._topics = topics
        self._permissions = Permissions(allows)
        self._states: OrderedDict[str, TopicDefinition] = OrderedDict()  # by ETag, the newest last
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by topic

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.post(ROOT, self._create)
        yield web.get(TOPIC, self._describe)
        yield web.get(SETTINGS, self._list_settings)
        yield web.patch(TOPIC, self._alter)
        yield web.delete(TOPIC, self._delete)

    async def _list_settings(self, request: web.Request) -> web.Response:
        """Return every setting that a topic can have: documentation, which is no secret."""
        query_parameters(request, ())
        rows = (
            {
                "name": key.name,
                "default": key.default,
                "compact_default": key.compact_default,
                "type": key.kind.name.lower(),
                **setting_documentation(key),
            }
            for key in TOPIC_KEYS.values()
        )
        return await rows_response("settings", rows)

    async def _create(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        body = await json_object(request, ("name", "partitions", "settings", "validate_only"))
        name = body_value(body, "name", str, "")
        settings = parse_settings(body_value(body, "settings", dict, {}))
        validate_only = body_value(body, "validate_only", bool, default=False)
        if not name:
            raise ApiError(400, "name is missing")
        topic = m.CreateTopicsRequestTopic(
            name=name,
            num_partitions=body_value(body, "partitions", int, -1),
            replication_factor=-1,
            configs=[
                m.CreateTopicsRequestConfig(name=key, value=value)
                for key, value in settings.values.items()
            ],
        )
        client = KafkaClient(self._handlers, request)
        answer = await client.call(
            ApiKey.CREATE_TOPICS,
            m.CreateTopicsRequest(topics=[topic], timeout_ms=0, validate_only=validate_only),
        )
        (row,) = answer.topics
        client.check(
            ApiKey.CREATE_TOPICS,
            row.error_code,
            settings.reason(row.error_code, row.error_message),
            throttle_ms=answer.throttle_time_ms,
        )
        if validate_only:
            return json_response({"name": name, "valid": True})
        created = {
            "name": name,
            "topic_id": encode_topic_id(row.topic_id),
            "partitions": self._topics.existing(name).partition_count,
        }
        return json_response(created, 201, {"Location": f"{ROOT}/{name}"})

    async def _describe(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        return await self._answer(KafkaClient(self._handlers, request))

    async def _answer(
        self,
        client: KafkaClient,
        *,
        validate_only: bool = False,
        warnings: Sequence[str] | None = None,
    ) -> web.Response:
        topic, rows = await self._settings_of(client)
        state = self._remember(topic, rows)
        answer: Json = {
            "name": topic.name,
            "topic_id": encode_topic_id(topic.topic_id),
            "internal": topic.is_internal,
            "partitions": topic.partition_count,
            "settings": [_setting_json(row) for row in rows],
        }
        if validate_only:
            answer["valid"] = True
        if warnings is not None:
            answer["warnings"] = list(warnings)
        return json_response(answer, headers={"ETag": f'"{state.etag}"'})

    async def _settings_of(
        self, client: KafkaClient
    ) -> tuple[Topic, list[m.DescribeConfigsResponseConfig]]:
        """Return a topic and the rows of its settings. Raises ApiError."""
        name = client.request.match_info["topic"]
        resource = m.DescribeConfigsRequestResource(
            resource_type=TOPIC_RESOURCE, resource_name=name, configuration_keys=None
        )
        answer = await client.call(
            ApiKey.DESCRIBE_CONFIGS,
            m.DescribeConfigsRequest(resources=[resource], include_synonyms=True),
        )
        (result,) = answer.results
        client.check(ApiKey.DESCRIBE_CONFIGS, result.error_code, result.error_message)
        # Not found for a view: its topic has the settings.
        return find_topic(self._topics, name), result.configs

    def _remember(
        self, topic: Topic, rows: list[m.DescribeConfigsResponseConfig]
    ) -> TopicDefinition:
        settings = {row.name: row.value for row in rows}
        state = TopicDefinition(topic.topic_id, topic.partition_count, settings)
        self._states[state.etag] = state
        self._states.move_to_end(state.etag)
        if len(self._states) > STATES_MAX:
            self._states.popitem(last=False)
        return state

    async def _alter(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        body = await json_object(request, ("set", "unset", "partitions", "validate_only"))
        to_set = parse_settings(body_value(body, "set", dict, {}))
        to_unset = parse_names(body_value(body, "unset", list, []))
        partitions = body_value(body, "partitions", int, 0)
        validate_only = body_value(body, "validate_only", bool, default=False)
        if both := sorted(to_set.values.keys() & set(to_unset)):
            raise ApiError(400, f"{both[0]} is both in set and in unset")
        name, client = request.match_info["topic"], KafkaClient(self._handlers, request)
        operations: dict[str, tuple[int, str | None]] = dict.fromkeys(to_unset, (UNSET, None))
        operations |= {name: (SET, value) for name, value in to_set.values.items()}
        # The handlers check this too, but behind the lock: those who may change nothing must not
        # delay those who may.
        for operation, is_needed in (
            (Operation.ALTER, partitions),
            (Operation.ALTER_CONFIGS, operations),
            (Operation.DESCRIBE_CONFIGS, True),  # the answer has the settings
        ):
            if is_needed:
                self._permissions.check(request, operation, ResourceType.TOPIC, name)
        for key in to_unset:  # the handler ignores a name that no setting has
            if key not in TOPIC_KEYS:
                raise ApiError(422, str(unknown_config(key, TOPIC_KEYS)))
        lock = self._changing.setdefault(name, asyncio.Lock())
        async with lock:
            if request.headers.get("If-Match", "*") != "*":
                await self._check_unchanged(client)
            becomes_compacted = self._becomes_compacted(client, to_set.values)
            if partitions:
                await self._grow(client, partitions, validate_only=True)
            if operations:
                await self._alter_settings(client, operations, to_set, validate_only=validate_only)
            if partitions and not validate_only:
                await self._grow(client, partitions, validate_only=False)
        warnings = await self._keyless_warnings(client) if becomes_compacted else []
        return await self._answer(client, validate_only=validate_only, warnings=warnings)

    def _becomes_compacted(self, client: KafkaClient, to_set: Mapping[str, str]) -> bool:
        """Return whether a change turns compaction on."""
        topic = self._topics.get(client.request.match_info["topic"])
        policies = [policy.strip() for policy in to_set.get(POLICY, "").split(",")]
        return topic is not None and not topic.config.compacts and "compact" in policies

    async def _keyless_warnings(self, client: KafkaClient) -> list[str]:
        """Return a sentence if the topic has records without a key."""
        topic = self._topics.get(client.request.match_info["topic"])
        if topic is None:
            return []
        requester = client_of(client.request)
        warning = (await self._keyless.of_topic(topic, requester)).warning(topic.name)
        return [f"{warning}."] if warning else []

    async def _check_unchanged(self, client: KafkaClient) -> None:
        """Raise ApiError 412 if the topic is not as the client read it."""
        wanted = client.request.headers["If-Match"].strip().strip('"')
        topic, rows = await self._settings_of(client)
        before = self._states.get(wanted)
        state = self._remember(topic, rows)
        if state.etag == wanted:
            return
        changes = [] if before is None else state.changes_since(before)
        listed = ": " + "; ".join(changes[:CHANGES_MAX]) if changes else ""
        raise ApiError(
            412, f"{topic.name} has changed since you read it{listed}. Read it again, then repeat"
        )

    async def _alter_settings(
        self,
        client: KafkaClient,
        operations: Mapping[str, tuple[int, str | None]],
        to_set: RequestedSettings,
        *,
        validate_only: bool,
    ) -> None:
        resource = m.IncrementalAlterConfigsRequestResource(
            resource_type=TOPIC_RESOURCE,
            resource_name=client.request.match_info["topic"],
            configs=[
                m.IncrementalAlterConfigsRequestConfig(
                    name=name, config_operation=operation, value=value
                )
                for name, (operation, value) in operations.items()
            ],
        )
        key = ApiKey.INCREMENTAL_ALTER_CONFIGS
        answer = await client.call(
            key,
            m.IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate_only),
        )
        (row,) = answer.responses
        client.check(key, row.error_code, to_set.reason(row.error_code, row.error_message))

    async def _grow(self, client: KafkaClient, partitions: int, *, validate_only: bool) -> None:
        topic = m.CreatePartitionsRequestTopic(
            name=client.request.match_info["topic"], count=partitions, assignments=None
        )
        key = ApiKey.CREATE_PARTITIONS
        answer = await client.call(
            key,
            m.CreatePartitionsRequest(topics=[topic], timeout_ms=0, validate_only=validate_only),
        )
        (row,) = answer.results
        throttle_ms = answer.throttle_time_ms
        client.check(key, row.error_code, row.error_message, throttle_ms=throttle_ms)

    async def _delete(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("topic_id",))
        await json_object(request, ())
        name, client = request.match_info["topic"], KafkaClient(self._handlers, request)
        row = m.DeleteTopicsRequestTopic(name=name, topic_id=bytes(16))
        if "topic_id" in query:
            topic_id = _parse_id(query["topic_id"])
            self._check_id(request, name, topic_id)
            row = m.DeleteTopicsRequestTopic(name=None, topic_id=topic_id)
        key = ApiKey.DELETE_TOPICS
        answer = await client.call(key, m.DeleteTopicsRequest(topics=[row], timeout_ms=0))
        (result,) = answer.responses
        throttle_ms = answer.throttle_time_ms
        client.check(key, result.error_code, result.error_message, throttle_ms=throttle_ms)
        return json_response({"name": name, "deleted": True})

    def _check_id(self, request: web.Request, name: str, topic_id: bytes) -> None:
        """Raise ApiError unless the topic has this id; 403 tells nothing of others' topics."""
        self._permissions.check(request, Operation.DESCRIBE, ResourceType.TOPIC, name)
        if find_topic(self._topics, name).topic_id != topic_id:
            raise ApiError(409, f"{name} was deleted and created again since you read it")


def _parse_id(text: str) -> bytes:
    """Return a topic id. Raises ApiError 400."""
    topic_id = decode_topic_id(text)
    if topic_id is None:
        raise ApiError(400, f"topic_id: expected 22 characters of base64, not {text[:40]!r}")
    return topic_id


def topic_unit(name: str) -> str:
    """Return the unit of a topic setting; empty without one and for an unknown name."""
    key = TOPIC_KEYS.get(name)
    return "" if key is None else key.unit


def parse_settings(
    values: Mapping[str, Any], unit_of: Callable[[str], str] = topic_unit
) -> RequestedSettings:
    """Return the settings of a request. `unit_of`: "ms", "bytes" or "". Raises ApiError 400."""
    _check_number(values)
    settings, problem = {}, None
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            raise ApiError(400, f"{name[:100]}: expected a string, a number, true or false")
        settings[name] = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, str) and (unit := unit_of(name)):
            try:
                parsed = parse_size(value) if unit == "bytes" else parse_duration_ms(value)
            except ValueError as error:  # the handler refuses it, after it has checked permissions
                problem = problem or f"{name}: {error}"
            else:
                settings[name] = str(parsed)
    return RequestedSettings(settings, problem)


def parse_names(names: list[Any]) -> list[str]:
    """Return the names of the settings that a request removes. Raises ApiError 400."""
    _check_number(names)
    if not all(isinstance(name, str) for name in names):
        raise ApiError(400, "unset: expected a list of names")
    return names


def _check_number(settings: Sized) -> None:
    """Refuse more settings than the handler would: their values take long to parse."""
    if len(settings) > SETTINGS_PER_RESOURCE_MAX:
        raise ApiError(
            400, f"{len(settings)} settings, at most {SETTINGS_PER_RESOURCE_MAX} are allowed"
        )


def _setting_json(row: m.DescribeConfigsResponseConfig) -> Json:
    """Return a setting; `default` is its value without that of the topic itself."""
    key = TOPIC_KEYS[row.name]
    is_own = row.config_source == ConfigSource.DYNAMIC_TOPIC
    return {
        "name": row.name,
        "value": row.value,
        "default": row.synonyms[1].value if is_own else row.value,
        "source": ConfigSource(row.config_source).name.lower(),
        "type": ValueKind(row.config_type).name.lower(),
        **setting_documentation(key),
    }


def setting_documentation(key: TopicKey) -> Json:
    """Return what a form needs to know of a setting: its help, its range and its choices."""
    return {
        "choices": list(key.choices),
        "minimum": key.minimum,
        "maximum": key.maximum,
        "unit": key.unit,
        "has_effect": key.effect is Effect.FULL,
        "text": key.text,
    }
