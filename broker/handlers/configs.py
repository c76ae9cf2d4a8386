"""DescribeConfigs, IncrementalAlterConfigs, AlterConfigs, ListConfigResources."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from broker.event_loop.loop_turns import Turns
from broker.handlers.topics import (
    DENIED,
    check_size,
    check_topic_settings,
    parse_setting,
    refuse_view,
)
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from broker.topics.metadata_service import TopicAlteration, TopicResult
from broker.topics.topics import Topic, TopicError
from config.broker_keys import describe_broker, parse_broker_value
from config.fixed_keys import describe_client_metrics, describe_group, describe_loggers
from config.topics.keys import (
    ConfigEntry,
    InvalidTopicConfigError,
    ValueKind,
    describe,
)
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.limits import STRING_BYTES_MAX
from protocol.messages import (
    AlterConfigsRequest,
    AlterConfigsRequestResource,
    AlterConfigsResponse,
    AlterConfigsResponseResource,
    DescribeConfigsRequest,
    DescribeConfigsRequestResource,
    DescribeConfigsResponse,
    DescribeConfigsResponseConfig,
    DescribeConfigsResponseResult,
    DescribeConfigsResponseSynonym,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsRequestResource,
    IncrementalAlterConfigsResponse,
    IncrementalAlterConfigsResponseResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    ListConfigResourcesResponseConfigResource,
)
from storage.errors import StorageError

# Resource types and operations of the Kafka protocol guide.
TOPIC: Final = 2
BROKER: Final = 4
BROKER_LOGGER: Final = 8
CLIENT_METRICS: Final = 16
GROUP: Final = 32
RESOURCE_NAMES: Final = {
    TOPIC: "TOPIC",
    BROKER: "BROKER",
    BROKER_LOGGER: "BROKER_LOGGER",
    CLIENT_METRICS: "CLIENT_METRICS",
    GROUP: "GROUP",
}
SET, DELETE, APPEND, SUBTRACT = range(4)

AlteredResource = IncrementalAlterConfigsRequestResource | AlterConfigsRequestResource
ResourceKey = tuple[int, str]  # type and name
Changes = Sequence[tuple[str, int, str | None]]  # key, operation, value
Outcome = tuple[ErrorCode, str | None]  # code and message of a row
SUCCESS: Final[Outcome] = (ErrorCode.NONE, None)
Parse = Callable[[str, str], str]

_Resource = TypeVar("_Resource", bound=AlteredResource)


async def describe_configs(
    context: RequestContext, _header: RequestHeader, body: DescribeConfigsRequest
) -> DescribeConfigsResponse:
    """Return every setting of topics and of this broker, with its source.

    If a resource is named more than once, the last row counts: the answer has forty rows for each.
    """
    results, turns = [], Turns()
    resources = {
        (resource.resource_type, resource.resource_name): resource
        async for resource in turns.over(body.resources)
    }
    for resource in resources.values():
        await turns.take()
        results.append(_describe(context, resource, body))
    return DescribeConfigsResponse(results=results)


def _describe(
    context: RequestContext, resource: DescribeConfigsRequestResource, body: DescribeConfigsRequest
) -> DescribeConfigsResponseResult:
    result = DescribeConfigsResponseResult(
        resource_type=resource.resource_type, resource_name=resource.resource_name
    )
    try:
        _authorize(
            context, Operation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name
        )
        entries = _entries(context, resource.resource_type, resource.resource_name)
    except TopicError as error:
        result.error_code, result.error_message = error.code, error.reason
        return result
    keys = resource.configuration_keys
    requested = frozenset(keys or ())  # none: all
    result.configs = [
        _row(entry, body) for entry in entries if not requested or entry.name in requested
    ]
    return result


def _authorize(context: RequestContext, operation: Operation, kind: int, name: str) -> None:
    """Refuse a resource that the client may not describe or alter. Raises TopicError."""
    if kind == TOPIC:
        is_allowed, code = context.may_topic(operation, name), ErrorCode.TOPIC_AUTHORIZATION_FAILED
    elif kind == GROUP:
        is_allowed = context.may_group(operation, name)
        code = ErrorCode.GROUP_AUTHORIZATION_FAILED
    elif kind in (BROKER, BROKER_LOGGER, CLIENT_METRICS):
        is_allowed, code = context.may_cluster(operation), ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    else:
        return  # it has no settings
    if not is_allowed:
        raise TopicError(code, DENIED)


def _entries(context: RequestContext, kind: int, name: str) -> Sequence[ConfigEntry]:
    services = context.services
    if kind == TOPIC:
        topic = services.topic(name)
        if topic is None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return describe(topic.layers)
    if kind == BROKER:
        _check_broker(context, name)
        return describe_broker(
            services.settings,
            services.manager.metadata.broker_dynamic,
            node_id=services.node_id,
        )
    _check_fixed(context, kind, name)
    if kind == GROUP:
        return describe_group(services.settings)
    if kind == BROKER_LOGGER:
        return describe_loggers(services.settings)
    return describe_client_metrics()


def _check_fixed(context: RequestContext, kind: int, name: str) -> None:
    """Refuse a resource of a kind without changeable settings, unless it exists. Raises TopicError.

    Groups and client metrics exist under every name, as in Kafka.
    """
    if kind == BROKER_LOGGER and name != str(context.services.node_id):
        raise TopicError(ErrorCode.INVALID_REQUEST, f"this is broker {context.services.node_id}")
    if kind == GROUP and not name:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Group name must not be empty")
    if kind == CLIENT_METRICS and not name:
        raise TopicError(
            ErrorCode.INVALID_REQUEST, "Client metrics subscription name must not be empty"
        )
    if kind not in RESOURCE_NAMES:
        raise _unknown_type(kind)


def _row(entry: ConfigEntry, body: DescribeConfigsRequest) -> DescribeConfigsResponseConfig:
    synonyms = []
    if body.include_synonyms:
        synonyms = [
            DescribeConfigsResponseSynonym(name=s.name, value=s.value, source=s.source)
            for s in entry.synonyms
        ]
    return DescribeConfigsResponseConfig(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        synonyms=synonyms,
        config_type=entry.kind,
        documentation=entry.text if body.include_documentation else None,
    )


async def incremental_alter_configs(
    context: RequestContext, _header: RequestHeader, body: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    """Set, delete, append to and subtract from the settings of each resource."""

    def changes_of(resource: IncrementalAlterConfigsRequestResource) -> Changes:
        return [(row.name, row.config_operation, row.value) for row in resource.configs]

    outcomes = await _alter(context, body.resources, changes_of, validate_only=body.validate_only)
    return IncrementalAlterConfigsResponse(
        responses=[
            IncrementalAlterConfigsResponseResource(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            async for resource, (code, message) in Turns().over(
                zip(body.resources, outcomes, strict=True)
            )
        ]
    )


async def alter_configs(
    context: RequestContext, _header: RequestHeader, body: AlterConfigsRequest
) -> AlterConfigsResponse:
    """Replace all dynamic settings of each resource (deprecated in Kafka)."""

    def changes_of(resource: AlterConfigsRequestResource) -> Changes:
        return [(row.name, SET, row.value) for row in resource.configs]

    outcomes = await _alter(
        context, body.resources, changes_of, validate_only=body.validate_only, replaces_all=True
    )
    return AlterConfigsResponse(
        responses=[
            AlterConfigsResponseResource(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            async for resource, (code, message) in Turns().over(
                zip(body.resources, outcomes, strict=True)
            )
        ]
    )


async def _alter(
    context: RequestContext,
    resources: Sequence[_Resource],
    changes_of: Callable[[_Resource], Changes],
    *,
    validate_only: bool,
    replaces_all: bool = False,
) -> list[Outcome]:
    """Change the settings of resources; return the error code and message of each row."""
    metadata_service, turns = context.services.metadata_service, Turns()
    named = Counter([(row.resource_type, row.resource_name) async for row in turns.over(resources)])
    outcomes: list[Outcome] = []
    alterations: dict[int, TopicAlteration] = {}  # by row
    for row, resource in enumerate(resources):
        await turns.take()
        kind, name = resource.resource_type, resource.resource_name
        outcomes.append(SUCCESS)
        try:
            if kind == BROKER_LOGGER and replaces_all:
                raise _unknown_type(kind)  # for everyone, as Kafka
            _authorize(context, Operation.ALTER_CONFIGS, kind, name)
            check_size(resource.configs)
            changes = changes_of(resource)
            _refuse_ambiguous(resource, named)
            change = partial(_change, context, kind, name, changes, replaces_all=replaces_all)
            if kind == TOPIC:
                refuse_view(context, name)
                alterations[row] = TopicAlteration(name, change)
            elif kind == BROKER:
                _check_broker(context, name)
                await metadata_service.alter_broker(
                    change, validate_only=validate_only, client=context.client
                )
            else:
                _refuse_fixed(context, kind, name, changes)
        except (TopicError, StorageError) as error:
            outcomes[row] = _failure(error)
    results: list[TopicResult] = []
    if alterations:
        results = await _alter_topics(
            context, list(alterations.values()), validate_only=validate_only
        )
    for row, result in zip(alterations, results, strict=True):
        if isinstance(result, Exception):
            outcomes[row] = _failure(result)
    return outcomes


async def _alter_topics(
    context: RequestContext, alterations: Sequence[TopicAlteration], *, validate_only: bool
) -> list[TopicResult]:
    """Change the settings of topics, and look for records without keys in those now compacted."""
    services = context.services
    topics = [services.topics.get(alteration.name) for alteration in alterations]
    compacted = {topic.name for topic in topics if topic is not None and topic.config.compacts}
    results = await services.metadata_service.alter_all(
        alterations, validate_only=validate_only, client=context.client
    )
    async for result in Turns().over(results):
        if isinstance(result, Topic) and result.config.compacts and result.name not in compacted:
            services.keyless.warn_later(result)
    return results


def _change(
    context: RequestContext,
    kind: int,
    name: str,
    changes: Changes,
    present: Mapping[str, str],
    *,
    replaces_all: bool,
) -> Mapping[str, str]:
    """Return the dynamic settings of a resource after a change. Raises TopicError."""
    changed = _apply(context, kind, name, {} if replaces_all else present, changes)
    if kind == TOPIC:
        check_topic_settings(context, present, changed)
    return changed


def _failure(error: TopicError | StorageError) -> Outcome:
    if isinstance(error, TopicError):
        return error.code, error.reason
    return code_of(error), str(error)


def _refuse_ambiguous(resource: AlteredResource, named: Counter[ResourceKey]) -> None:
    """Refuse a resource or a setting that the request names twice. Raises TopicError."""
    if named[resource.resource_type, resource.resource_name] > 1:
        raise TopicError(ErrorCode.INVALID_REQUEST, "Each resource must appear at most once.")
    if len({config.name for config in resource.configs}) < len(resource.configs):
        raise TopicError(ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys")


def _refuse_fixed(context: RequestContext, kind: int, name: str, changes: Changes) -> None:
    """Refuse to change what clients cannot change. Raises TopicError, with Kafka's error codes."""
    _check_fixed(context, kind, name)
    key = next((key for key, _, _ in changes), "")
    names = {entry.name for entry in _entries(context, kind, name)}
    if kind == GROUP and key in names:
        setting = f"groups.{key.replace('.', '_')} in the settings file of the broker"
        raise TopicError(
            ErrorCode.INVALID_CONFIG, f"{key} is the same for all groups: set {setting}"
        )
    if kind == GROUP:
        raise TopicError(ErrorCode.INVALID_CONFIG, f"Unknown group config name: {key}")
    if kind == BROKER_LOGGER:
        reason = "the level of the log is logging.level in the settings file of the broker"
        if key not in names:
            reason = f"Logger {key} does not exist; {reason}"
        raise TopicError(ErrorCode.INVALID_CONFIG, reason)
    raise TopicError(
        ErrorCode.INVALID_REQUEST, "this broker collects no metrics of clients (KIP-714)"
    )


def _unknown_type(kind: int) -> TopicError:
    return TopicError(ErrorCode.INVALID_REQUEST, f"Unknown resource type {kind}")


def _check_broker(context: RequestContext, name: str) -> None:
    """Refuse another broker. An empty name means the default of all brokers. Raises TopicError."""
    if name not in ("", str(context.services.node_id)):
        raise TopicError(ErrorCode.INVALID_REQUEST, f"this is broker {context.services.node_id}")


def _apply(
    context: RequestContext, kind: int, name: str, present: Mapping[str, str], changes: Changes
) -> Mapping[str, str]:
    """Return the dynamic layer after the changes. Raises TopicError."""
    dynamic = dict(present)
    parse: Parse = parse_setting if kind == TOPIC else _parse_broker_setting
    entries = {entry.name: entry for entry in _entries(context, kind, name)}
    for key, operation, value in changes:
        if operation == DELETE:
            dynamic.pop(key, None)  # an unknown key, too: a program may remove what Kafka 4 dropped
            continue
        if value is None:
            raise TopicError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {key}")
        if operation == SET:
            dynamic[key] = parse(key, value)
        elif operation in (APPEND, SUBTRACT):
            entry = entries.get(key)
            if entry is None or entry.kind is not ValueKind.LIST:
                raise TopicError(ErrorCode.INVALID_CONFIG, f"{key} is not a list")
            dynamic[key] = parse(key, _combine(entry.value or "", operation, value))
        else:
            raise TopicError(ErrorCode.INVALID_REQUEST, f"operation {operation} is unknown")
    return dynamic


def _combine(present: str, operation: int, value: str) -> str:
    """Append to or subtract from a list without duplicates. Raises TopicError."""
    items = [item for item in present.split(",") if item]
    named = [item.strip() for item in value.split(",") if item.strip()]
    if operation == APPEND:
        items = list(dict.fromkeys(items + named))
    else:
        removed = frozenset(named)
        items = [item for item in items if item not in removed]
    combined = ",".join(items)
    if len(combined.encode()) > STRING_BYTES_MAX:  # more than a response can hold
        raise TopicError(
            ErrorCode.INVALID_CONFIG, f"the list would be longer than {STRING_BYTES_MAX} bytes"
        )
    return combined


def _parse_broker_setting(key: str, value: str) -> str:
    """Return the canonical value. Raises TopicError: Kafka answers 42 here, and 40 for topics."""
    try:
        return parse_broker_value(key, value)
    except InvalidTopicConfigError as error:
        raise TopicError(ErrorCode.INVALID_REQUEST, str(error)) from error


async def list_config_resources(
    context: RequestContext, header: RequestHeader, body: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    """List the resources that have settings: topics, views and this broker (KIP-1142).

    Loggers, client metrics and groups have no settings of their own, so none of them is listed.
    Version 0 asks for client metrics alone.
    """
    requested = set(body.resource_types) or set(RESOURCE_NAMES)
    if not context.may_cluster(Operation.DESCRIBE_CONFIGS):
        return ListConfigResourcesResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if header.api_version == 0:
        requested = {CLIENT_METRICS}
    if not requested.issubset(RESOURCE_NAMES):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    services, turns = context.services, Turns()
    names: list[tuple[int, str]] = []
    if TOPIC in requested:
        names += [(TOPIC, topic.name) for topic in (*services.topics, *services.views)]
    if BROKER in requested:
        names.append((BROKER, str(services.node_id)))
    response = ListConfigResourcesResponse()
    for kind, name in names:
        await turns.take()
        response.config_resources.append(
            ListConfigResourcesResponseConfigResource(resource_name=name, resource_type=kind)
        )
    return response
