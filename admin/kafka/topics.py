"""`varve topics`: list, describe, create, change and delete topics, over the Kafka protocol."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from admin.client import Json
from admin.command import (
    TOPICS_HINT,
    confirm_deletion,
    fail,
    json_option,
    show,
    topic_hint,
    with_command_config,
)
from admin.kafka.client import (
    REQUEST_SECONDS,
    bootstrap_option,
    connected,
    error_text,
    hides_resources,
    librdkafka,
)
from admin.rangeless_option import RangelessOption
from admin.tables import columns
from admin.watch import watched
from config.printable import printable
from config.topics.names import INTERNAL_TOPICS, RESERVED_SUFFIX
from config.units import about_size, about_span, counted

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ConfigEntry  # type: ignore[attr-defined]

POLICY: Final = "cleanup.policy"
TOPICS_PER_REQUEST: Final = 200  # in one DescribeConfigs request


def _parse_settings(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """Return the keys and values of "KEY=VALUE" texts, as Kafka writes them.

    Values may have units, as in the settings file. Raises click.BadParameter.
    """
    from config.topics.keys import InvalidTopicConfigError, parse_value

    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"expected KEY=VALUE, not {text!r}")
        if key == "partitions":
            raise click.BadParameter("use --partitions for the number")
        try:
            pairs[key] = parse_value(key, value, units=True)
        except InvalidTopicConfigError as error:
            raise click.BadParameter(str(error)) from None
    return pairs


def _check_names(
    _context: click.Context, _parameter: click.Parameter, keys: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse a name that no setting has; the broker ignores it. Raises click.BadParameter."""
    from config.topics.keys import TOPIC_KEYS, unknown_config

    for key in keys:
        if key not in TOPIC_KEYS:
            raise click.BadParameter(str(unknown_config(key, TOPIC_KEYS)))
    return keys


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_parse_settings,
    metavar="KEY=VALUE",
    help="Set a topic setting, such as retention.ms=7d or segment.bytes=64MiB. Repeatable.",
)
one_partition_option = click.option(
    "--partition",
    cls=RangelessOption,
    type=click.IntRange(min=0),
    metavar="N",
    help="Only this partition; default: all.",
)


@click.group(short_help="List, create, change and delete topics.")
def topics() -> None:
    """List, describe, create, change and delete topics."""


@topics.command("list", short_help="List topics.")
@click.option("--internal", is_flag=True, help="Include the topics that the broker keeps itself.")
@json_option
@bootstrap_option
@with_command_config
@watched
def list_topics(*, internal: bool, as_json: bool, bootstrap: str) -> None:
    """List topics with their partitions, cleanup.policy and size on disk."""
    from confluent_kafka.admin import AdminClient

    with librdkafka(bootstrap) as settings:
        admin = AdminClient(settings)
        topics = admin.list_topics(timeout=REQUEST_SECONDS).topics
        names = sorted(name for name in topics if internal or name not in INTERNAL_TOPICS)
        entries = _settings(admin, names)
        may_be_hidden = not names and hides_resources()
    sizes = _sizes(bootstrap)
    rows = [
        {
            "topic": name,
            "partitions": len(topics[name].partitions),
            **_policy_json(entries[name]),
            "size_bytes": None if sizes is None else sum(sizes.get(name, {}).values()),
        }
        for name in names
    ]
    show({"topics": rows}, as_json, lambda answer: _list_lines(answer, may_be_hidden))


def _list_lines(answer: Json, may_be_hidden: bool) -> list[str]:
    rows = answer["topics"]
    if not rows:
        hidden = ", or you may describe none" if may_be_hidden else ""
        return [f"There are no topics{hidden}. `varve topics create` creates one."]
    table = [("TOPIC", "PARTITIONS", "POLICY", "SIZE")]
    table += [
        (
            row["topic"],
            str(row["partitions"]),
            _policy_text(row),
            _size(row),
        )
        for row in rows
    ]
    return columns(table, right={1, 3})


def _policy_json(entries: "dict[str, ConfigEntry] | None") -> Json:
    """Return the policy; null if the user may not see the settings."""
    from config.topics.keys import ConfigSource

    if entries is None:
        return {"cleanup_policy": None, "policy_unknown": False}
    entry = entries[POLICY]
    is_unknown = _source(entry) == ConfigSource.UNKNOWN
    return {"cleanup_policy": entry.value, "policy_unknown": is_unknown}


def _policy_text(row: Json) -> str:
    if row["policy_unknown"]:
        return "policy unknown"
    return "-" if row["cleanup_policy"] is None else row["cleanup_policy"] or "policy empty"


@topics.command("describe", short_help="Show a topic's partitions and settings.")
@click.argument("topic")
@json_option
@bootstrap_option
@with_command_config
@watched
def describe_topic(topic: str, *, as_json: bool, bootstrap: str) -> None:
    """Show the partitions of TOPIC, and the settings that are set on it or on the broker."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
        AdminClient,
        OffsetSpec,
    )

    with librdkafka(bootstrap, needs=f"DESCRIBE on topic:{topic}") as settings:
        admin = AdminClient(settings)
        numbers = partition_numbers(admin, topic)
        (entries,) = _settings(admin, [topic]).values()
        bounds = []
        specs = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]
        for spec in specs:
            asked = {TopicPartition(topic, number): spec for number in numbers}
            answers = admin.list_offsets(asked, request_timeout=REQUEST_SECONDS)
            bounds.append({key.partition: row.result().offset for key, row in answers.items()})
    sizes = _sizes(bootstrap)
    partitions = [
        {
            "partition": number,
            "log_start_offset": bounds[0][number],
            "end_offset": bounds[1][number],
            "size_bytes": None if sizes is None else sizes.get(topic, {}).get(number, 0),
        }
        for number in numbers
    ]
    answer = {
        "topic": topic,
        **_policy_json(entries),
        "settings": None if entries is None else _set_values(entries),
        "set_to_default": [] if entries is None else _set_to_default(entries),
        "set_by": {} if entries is None else _set_by(entries),
        "partitions": partitions,
    }
    show(answer, as_json, _describe_lines)


def _set_values(entries: "dict[str, ConfigEntry]") -> dict[str, str | None]:
    values = {name: entry.value for name, entry in entries.items() if not entry.is_default}
    return dict(sorted(values.items()))


def _set_to_default(entries: "dict[str, ConfigEntry]") -> list[str]:
    """Return the settings that are set to the value that they would have anyway."""
    from config.topics.keys import ConfigSource

    return sorted(
        name
        for name, entry in entries.items()
        if not entry.is_default
        and any(
            _source(synonym) == ConfigSource.DEFAULT and synonym.value == entry.value
            for synonym in entry.synonyms.values()
        )
    )


def _set_by(entries: "dict[str, ConfigEntry]") -> dict[str, str]:
    """Return where each setting is set: "topic", "settings file", "broker" or "nowhere"."""
    return {name: _place(entry) for name, entry in sorted(entries.items()) if not entry.is_default}


def _place(entry: "ConfigEntry") -> str:
    from config.topics.keys import ConfigSource

    return {
        ConfigSource.UNKNOWN: "nowhere",
        ConfigSource.DYNAMIC_TOPIC: "topic",
        ConfigSource.STATIC_BROKER: "settings file",
    }.get(ConfigSource(_source(entry)), "broker")


def _source(entry: "ConfigEntry") -> int:
    return int(entry.source)  # type: ignore[call-overload,no-any-return]


def _describe_lines(answer: Json) -> list[str]:
    rows, topic = answer["partitions"], answer["topic"]
    title = f"{topic}: {counted(len(rows), 'partition')}"
    if answer["settings"] is None:
        lines = [
            title,
            f"You may not see its settings: they need DESCRIBE_CONFIGS on topic:{topic}",
        ]
    else:
        lines = [f"{title}, {_policy_text(answer)}"]
    if answer["policy_unknown"]:
        lines.append(
            "The broker neither cleans nor expires it until cleanup.policy is set, in the settings "
            f"file or with `varve topics alter {topic} --set cleanup.policy=...`."
        )
    if answer["settings"]:
        lines += ["", "Settings that are set; all others have their defaults:"]
        for name, value in answer["settings"].items():
            mark = ", same as the default" if name in answer["set_to_default"] else ""
            lines.append(f"  {_setting(name, value)}{_PLACES[answer['set_by'][name]]}{mark}")
    table = [("PARTITION", "OFFSETS", "SIZE")]
    table += [(str(row["partition"]), _offsets(row), _size(row)) for row in rows]
    return [*lines, "", *columns(table, right={0, 2})]


_PLACES: Final = {
    "topic": "",
    "settings file": ", from the settings file",
    "broker": ", from the broker's settings",
    "nowhere": ", unknown",
}


def _offsets(row: Json) -> str:
    """Return the offsets of a partition, with the last one."""
    start, end = row["log_start_offset"], row["end_offset"]
    return f"{start} to {end - 1}" if start < end else f"empty, next is {end}"


@topics.command("create", short_help="Create a topic.")
@click.argument("topic")
@click.option(
    "--partitions",
    cls=RangelessOption,
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of partitions; default: topic_defaults.partitions of the settings file.",
)
@set_option
@bootstrap_option
@with_command_config
def create_topic(
    topic: str, *, partitions: int | None, settings: dict[str, str], bootstrap: str
) -> None:
    """Create TOPIC, for example:

    varve topics create customers --partitions 4 --set cleanup.policy=compact
    """
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    with librdkafka(bootstrap, needs=f"CREATE on topic:{topic} or on the cluster") as connection:
        admin = AdminClient(connection)
        new = NewTopic(topic, num_partitions=partitions or -1, config=settings)
        (future,) = admin.create_topics([new], operation_timeout=REQUEST_SECONDS).values()
        future.result()
    click.echo(f"{printable(topic)} is created.")


@topics.command("alter", short_help="Change settings, or add partitions.")
@click.argument("topic")
@set_option
@click.option("--unset", multiple=True, metavar="KEY", callback=_check_names,
              help="Remove a setting that --set has set: the settings file's value or the default "
              "applies again. Repeatable.")  # fmt: skip
@click.option("--partitions", cls=RangelessOption, type=click.IntRange(min=1), metavar="N",
              help="New number of partitions.")  # fmt: skip
@bootstrap_option
@with_command_config
def alter_topic(
    topic: str,
    *,
    settings: dict[str, str],
    unset: tuple[str, ...],
    partitions: int | None,
    bootstrap: str,
) -> None:
    """Change settings of TOPIC, or add partitions, for example:

    varve topics alter customers --set min.cleanable.dirty.ratio=0.2 --unset segment.ms

    These settings take precedence over those of the topic in the broker's settings file; --unset
    removes them again. When partitions are added, records stay where they are, and producers may
    write the next record of a key to another partition. If a change makes the topic compacted, the
    command says how many records without a key a clean will remove.
    """
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
        AdminClient,
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        NewPartitions,
        ResourceType,
    )

    if both := sorted(settings.keys() & set(unset)):
        raise click.UsageError(f"--set and --unset of the same key: {both[0]}")
    if not settings and not unset and partitions is None:
        raise click.UsageError("give --set, --unset or --partitions")
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    entries += [
        ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in unset
    ]
    operations = ["ALTER_CONFIGS"] * bool(entries) + ["ALTER"] * (partitions is not None)
    needs = f"{' and '.join(operations)} on topic:{topic}"
    with librdkafka(bootstrap, needs=needs) as connection:
        admin = AdminClient(connection)
        warning = _keyless_warning(admin, connection, topic, settings)  # before a clean removes any
        if entries:
            resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
            (future,) = admin.incremental_alter_configs([resource]).values()
            future.result(REQUEST_SECONDS)
            for key, value in settings.items():
                click.echo(printable(f"{topic}: {_setting(key, value)}"))
            if unset:
                (results,) = _settings(admin, [topic]).values()
                for key in unset:
                    text = (
                        f"{key} is removed" if results is None else _unset_text(key, results[key])
                    )
                    click.echo(printable(f"{topic}: {text}"))
        if warning:
            click.echo(f"varve: {warning}", err=True)
        if partitions is not None:
            grown = NewPartitions(topic, partitions)
            (future,) = admin.create_partitions([grown]).values()
            future.result(REQUEST_SECONDS)
            click.echo(printable(f"{topic}: {partitions} partitions"))


def _keyless_warning(
    admin: "AdminClient", connection: dict[str, Any], topic: str, values: dict[str, str]
) -> str:
    """Return a sentence if a change makes a topic compacted that has records without a key."""
    from confluent_kafka import KafkaException

    from admin.kafka.keyless_records import keyless_records

    if not _compacts(values.get(POLICY, "")):
        return ""
    try:
        (entries,) = _settings(admin, [topic]).values()
        if entries is not None and _compacts(entries[POLICY].value):
            return ""
        numbers = partition_numbers(admin, topic)
        warning = keyless_records(admin, connection, topic, numbers).warning(printable(topic))
    except KafkaException as error:
        reason = error_text(error.args[0], f"READ on topic:{topic}")
        return (
            f"cannot tell whether {printable(topic)} has records without a key, which a clean of a "
            f"compacted topic removes: {reason}"
        )
    return f"{warning}." if warning else ""


def _compacts(policy: str) -> bool:
    return "compact" in [word.strip() for word in policy.split(",")]


@topics.command("delete", short_help="Delete topics with all records.")
@click.argument("names", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@bootstrap_option
@with_command_config
def delete_topics(names: tuple[str, ...], *, yes: bool, bootstrap: str) -> None:
    """Delete each TOPIC with all its records."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient

    failures = []
    with librdkafka(bootstrap) as connection:
        admin = AdminClient(connection)
        for name in names:
            partition_numbers(admin, name)  # it exists
        if not yes:
            listed = printable(", ".join(names))
            confirm_deletion(f"Delete {listed} with all records?")
        deletions = admin.delete_topics(list(names), operation_timeout=REQUEST_SECONDS)
        for name, future in deletions.items():
            try:
                future.result()
            except KafkaException as error:
                reason = error_text(error.args[0], f"DELETE on topic:{name}")
                source = name.removesuffix(RESERVED_SUFFIX)
                if source != name and error.args[0].code() == KafkaError.INVALID_REQUEST:
                    reason = (  # librdkafka does not pass on the reason that the broker sends
                        f"it is the compacted view of {source}; to remove it: `varve topics alter "
                        f"{source} --set varve.view=none`"
                    )
                failures.append(f"{name}: {reason}")
            else:
                click.echo(f"{printable(name)} is deleted.")
    if failures:
        fail("\n".join(failures))


def _unset_text(key: str, result: "ConfigEntry") -> str:
    """Say which value applies after the topic's own was removed."""
    source = ", the default" if result.is_default else _PLACES[_place(result)]
    return f"{_setting(key, result.value)}{source}"


def _setting(key: str, value: str | None) -> str:
    """Return KEY=VALUE; a duration or size also in the unit that people use for it."""
    text = f"{key}={value}"
    from config.topics.table import LONG_MAX, TOPIC_KEYS

    unit = TOPIC_KEYS[key].unit if key in TOPIC_KEYS else ""
    if value is None or not unit or not 1000 < int(value) < LONG_MAX:
        return text
    rounded = about_size(int(value)) if unit == "bytes" else about_span(int(value))
    return f"{text} ({rounded.replace('.0 ', ' ')})"


def partition_numbers(
    admin: "AdminClient", topic: str, partition: int | None = None, *, hint: str = TOPICS_HINT
) -> Sequence[int]:
    """Return all partitions of a topic, or the one that is named.

    Ends the process if the topic or the partition does not exist; for a topic it names a similar
    one, or gives the `hint`.
    """
    # All topics: a request for one topic may create it (auto.create.topics.enable).
    topics = admin.list_topics(timeout=REQUEST_SECONDS).topics
    described = topics.get(topic)
    if described is None:
        hidden = ", or you may not describe it" if hides_resources() else ""
        fail(f"there is no topic {topic}{hidden}; {topic_hint(topic, topics, hint)}")
    count = len(described.partitions)
    if partition is None:
        return range(count)
    if partition >= count:
        fail(f"{topic} has no partition {partition}; its last one is {count - 1}")
    return (partition,)


def _settings(admin: "AdminClient", names: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return the settings of topics by name; None where the user may not see them.

    Raises KafkaException.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
        ConfigResource,
        ResourceType,
    )

    results: dict[str, dict[str, Any] | None] = {}
    for first in range(0, len(names), TOPICS_PER_REQUEST):
        some = names[first : first + TOPICS_PER_REQUEST]
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in some]
        for resource, future in admin.describe_configs(resources).items():
            try:
                results[resource.name] = future.result(REQUEST_SECONDS)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise
                results[resource.name] = None
    return results


def _sizes(bootstrap: str) -> dict[str, dict[int, int]] | None:
    """Return the bytes of each partition on disk; None if the user may not see them."""
    from protocol.client.administration import LogDirClient, RefusedError

    with connected(bootstrap, LogDirClient) as client:
        try:
            return client.sizes()
        except RefusedError:
            return None


def _size(row: Json) -> str:
    return "-" if row["size_bytes"] is None else about_size(row["size_bytes"])
