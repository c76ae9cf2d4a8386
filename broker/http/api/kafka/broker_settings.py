"""/api/v1/settings: the settings in effect, their sources and help, and the last reload.

`settings` are the broker's configs under Kafka's names, as DescribeConfigs shows them. A change
goes through IncrementalAlterConfigs, so permissions, validation and the audit log are those of the
Kafka port. `file` are the keys of the settings file, which only the file can change. openapi/
lists the path.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.http.api.json_shapes import Json
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
from broker.http.api.kafka.topic_changes import (
    parse_names,
    parse_settings,
    setting_documentation,
)
from broker.http.api.requests import (
    body_value,
    json_object,
    json_response,
    query_parameters,
    rows_response,
)
from broker.lifecycle.reload import Reloader
from broker.network.request_context import Services
from config.broker_keys import BROKER_KEYS, STORED_ONLY, topic_key_of
from config.settings_table import file_settings
from config.topics.keys import ConfigSource, ValueKind
from protocol import messages as m
from protocol.api import ApiKey

PATH: Final = "/api/v1/settings"
ADMINISTRATIVE: Final = (("GET", PATH), ("PATCH", PATH))
BROKER_RESOURCE: Final = 4  # a resource type of the Kafka protocol
SET: Final = 0  # operations of IncrementalAlterConfigs
UNSET: Final = 1


class BrokerSettingsApi:
    """Handlers of the requests for the broker's settings."""

    def __init__(
        self, services: Services, handlers: KafkaHandlers, reloader: Reloader | None
    ) -> None:
        self._services = services
        self._handlers = handlers
        self._reloader = reloader

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(PATH, self._get)
        yield web.patch(PATH, self._patch)

    async def _get(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        return await self._answer(request)

    async def _answer(self, request: web.Request) -> web.Response:
        key, client = ApiKey.DESCRIBE_CONFIGS, KafkaClient(self._handlers, request)
        resource = m.DescribeConfigsRequestResource(
            resource_type=BROKER_RESOURCE, resource_name=self._name, configuration_keys=None
        )
        answer = await client.call(
            key, m.DescribeConfigsRequest(resources=[resource], include_synonyms=True)
        )
        (result,) = answer.results
        client.check(key, result.error_code, result.error_message, on="cluster")
        await yield_to_loop()  # the call may have used its turn up
        file = [asdict(row) async for row in Turns().over(file_settings(self._services.settings))]
        rows = (_setting_json(row) for row in result.configs if row.name in BROKER_KEYS)
        return await rows_response("settings", rows, {"file": file, **self._reloads()})

    @property
    def _name(self) -> str:
        return str(self._services.node_id)

    def _reloads(self) -> Json:
        if self._reloader is None:
            return {"has_file": False, "reload": None}
        last = self._reloader.last
        return {"has_file": True, "reload": None if last is None else asdict(last)}

    async def _patch(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        body = await json_object(request, ("set", "unset", "validate_only"))
        to_set = parse_settings(body_value(body, "set", dict, {}), _unit_of)
        to_unset = parse_names(body_value(body, "unset", list, []))
        validate_only = body_value(body, "validate_only", bool, default=False)
        configs = [
            m.IncrementalAlterConfigsRequestConfig(name=name, config_operation=SET, value=value)
            for name, value in to_set.values.items()
        ] + [
            m.IncrementalAlterConfigsRequestConfig(name=name, config_operation=UNSET, value=None)
            for name in to_unset
        ]
        resource = m.IncrementalAlterConfigsRequestResource(
            resource_type=BROKER_RESOURCE, resource_name=self._name, configs=configs
        )
        key, client = ApiKey.INCREMENTAL_ALTER_CONFIGS, KafkaClient(self._handlers, request)
        answer = await client.call(
            key,
            m.IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate_only),
        )
        (row,) = answer.responses
        reason = to_set.reason(row.error_code, row.error_message)
        client.check(key, row.error_code, reason, on="cluster")
        return json_response(
            {"set": to_set.values, "unset": to_unset, "validate_only": validate_only}
        )


def _setting_json(row: m.DescribeConfigsResponseConfig) -> Json:
    """Return a setting; `default` is its value without the change of a client."""
    is_dynamic = row.config_source == ConfigSource.DYNAMIC_BROKER
    synonyms = row.synonyms[1:] if is_dynamic else row.synonyms
    return {
        "name": row.name,
        "value": row.value,
        "default": synonyms[0].value if synonyms else row.value,
        "source": ConfigSource(row.config_source).name.lower(),
        "type": ValueKind(row.config_type).name.lower(),
        "read_only": row.read_only,
        **_documentation(row.name),
    }


def _unit_of(name: str) -> str:
    topic_key = topic_key_of(name)
    if topic_key is not None:
        return topic_key.unit
    return "ms" if name.endswith(".ms") else "bytes" if name.endswith(("bytes", "size")) else ""


def _documentation(name: str) -> Json:
    topic_key = topic_key_of(name)
    if topic_key is not None:
        return setting_documentation(topic_key)
    key = BROKER_KEYS[name]
    return {
        "choices": [],
        "minimum": key.minimum if key.dynamic else None,
        "maximum": key.maximum if key.dynamic else None,
        "unit": _unit_of(name),
        "has_effect": key.text != STORED_ONLY,
        "text": key.text,
    }
