import pytest

from config.broker_keys import (
    BROKER_KEYS,
    STORED_ONLY,
    UNLIMITED,
    cleaner_settings,
    describe_broker,
    parse_broker_value,
)
from config.settings import Settings
from config.topics.keys import (
    ConfigSource,
    InvalidTopicConfigError,
    TopicLayers,
    ValueKind,
    describe,
    resolve,
)

MIB = 1 << 20


def rows(settings: Settings, dynamic: dict[str, str] | None = None) -> dict[str, str | None]:
    return {entry.name: entry.value for entry in describe_broker(settings, dynamic or {})}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advertised.listeners", "PLAINTEXT://127.0.0.1:9092"),
        ("listeners", "PLAINTEXT://127.0.0.1:9092"),
        ("log.dirs", "./data"),
        ("log.cleaner.enable", "true"),
        ("log.cleaner.threads", "1"),
        ("log.cleaner.dedupe.buffer.size", "134217728"),
        ("log.cleaner.io.max.bytes.per.second", UNLIMITED),
        ("log.cleaner.min.cleanable.ratio", "0.5"),
        ("auto.create.topics.enable", "true"),
        ("delete.topic.enable", "true"),
        ("num.partitions", "1"),
        ("default.replication.factor", "1"),
        ("offsets.topic.num.partitions", "50"),
        ("offsets.topic.replication.factor", "1"),
        ("offsets.retention.minutes", "10080"),
        ("message.max.bytes", "1048588"),
    ],
)
def test_what_tools_look_for_is_shown_with_kafkas_defaults(name: str, value: str) -> None:
    assert rows(Settings())[name] == value


def test_values_of_the_file_are_static_and_others_default() -> None:
    settings = Settings.model_validate(
        {
            "cleaner": {"workers": 2, "dedupe_buffer_bytes": "64MiB"},
            "topic_defaults": {"partitions": 4, "keys": {"retention.ms": 5}},
            "advertise": "example.org:19092",
        }
    )
    entries = {entry.name: entry for entry in describe_broker(settings, {})}
    assert entries["num.partitions"].value == "4"
    assert entries["num.partitions"].source is ConfigSource.STATIC_BROKER
    assert entries["log.retention.ms"].value == "5"
    assert entries["advertised.listeners"].value == "PLAINTEXT://example.org:19092"
    # Two workers with 64 MiB each are what Kafka calls 128 MiB over all threads: its default.
    assert entries["log.cleaner.dedupe.buffer.size"].is_default
    assert not entries["log.cleaner.threads"].is_default
    assert [s.source for s in entries["log.cleaner.threads"].synonyms] == [
        ConfigSource.STATIC_BROKER,
        ConfigSource.DEFAULT,
    ]


def test_a_dynamic_value_hides_the_file() -> None:
    name = "log.cleaner.min.cleanable.ratio"
    entry = next(e for e in describe_broker(Settings(), {name: "0.1"}) if e.name == name)
    assert (entry.value, entry.source, entry.is_default) == (
        "0.1",
        ConfigSource.DYNAMIC_BROKER,
        False,
    )
    assert [synonym.value for synonym in entry.synonyms] == ["0.1", "0.5"]


def test_a_dynamic_broker_value_reaches_topics_under_its_broker_name() -> None:
    layers = TopicLayers(broker_dynamic={"log.cleaner.min.cleanable.ratio": "0.1"})
    assert resolve(layers).min_cleanable_dirty_ratio == 0.1
    row = next(e for e in describe(layers) if e.name == "min.cleanable.dirty.ratio")
    assert row.source is ConfigSource.DYNAMIC_BROKER


def test_every_dynamic_key_takes_the_value_it_shows() -> None:
    for entry in describe_broker(Settings(), {}):
        if not entry.read_only:
            assert entry.value is not None
            assert parse_broker_value(entry.name, entry.value) == parse_broker_value(
                entry.name, parse_broker_value(entry.name, entry.value)
            )


@pytest.mark.parametrize("name", ["log.dirs", "listeners", "num.partitions", "no.such.key", ""])
def test_static_and_unknown_keys_cannot_be_altered(name: str) -> None:
    with pytest.raises(InvalidTopicConfigError):
        parse_broker_value(name, "1")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("log.cleaner.threads", "0"),
        ("log.cleaner.threads", "65"),
        ("log.cleaner.threads", "1.5"),
        ("log.cleaner.threads", True),
        ("log.cleaner.dedupe.buffer.size", "1000"),
        ("log.cleaner.io.max.bytes.per.second", "nan"),
        ("log.cleaner.io.max.bytes.per.second", "0"),
        ("log.cleaner.backoff.ms", "-1"),
        ("log.cleaner.backoff.ms", "9" * 4000),
        ("log.segment.bytes", "100"),
    ],
)
def test_bad_values_are_refused_under_the_broker_name(name: str, raw: object) -> None:
    with pytest.raises(InvalidTopicConfigError) as caught:
        parse_broker_value(name, raw)
    assert caught.value.key == name


def test_the_cleaner_obeys_its_dynamic_keys() -> None:
    changed = cleaner_settings(
        Settings(),
        {
            "log.cleaner.threads": "2",
            "log.cleaner.dedupe.buffer.size": str(64 * MIB),
            "log.cleaner.io.buffer.size": str(8 * MIB),
            "log.cleaner.io.max.bytes.per.second": "20000000.0",
            "log.cleaner.backoff.ms": "50",
        },
    )
    assert (changed.workers, changed.backoff_ms) == (2, 50)
    assert (changed.dedupe_buffer_bytes, changed.read_buffer_bytes) == (32 * MIB, 4 * MIB)
    assert changed.read_bytes_per_second == changed.write_bytes_per_second == 10_000_000
    free = cleaner_settings(Settings(), {"log.cleaner.io.max.bytes.per.second": UNLIMITED})
    assert free.read_bytes_per_second is None
    assert cleaner_settings(Settings(), {}) == Settings().cleaner


def test_a_key_map_too_small_to_work_with_is_refused() -> None:
    dynamic = {"log.cleaner.threads": "64", "log.cleaner.dedupe.buffer.size": str(32 * MIB)}
    with pytest.raises(InvalidTopicConfigError, match="1 MiB"):
        cleaner_settings(Settings(), dynamic)


def test_the_node_is_shown_by_number_when_it_is_known() -> None:
    names = [entry.name for entry in describe_broker(Settings(), {}, node_id=7)]
    assert names[:2] == ["node.id", "broker.id"]
    assert len(names) == len(set(names))


def test_kinds_are_those_of_kafka() -> None:
    assert BROKER_KEYS["log.cleaner.threads"].kind is ValueKind.INT
    assert BROKER_KEYS["log.cleanup.policy"].kind is ValueKind.LIST
    assert BROKER_KEYS["log.cleaner.io.max.bytes.per.second"].kind is ValueKind.DOUBLE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num.io.threads", "9"),
        ("background.threads", "20"),
        ("transaction.partition.verification.enable", "false"),
        ("remote.log.reader.threads", "4"),
    ],
)
def test_dynamic_keys_of_kafka_without_effect_are_stored_and_say_so(name: str, value: str) -> None:
    assert parse_broker_value(name, value) == value
    entries = {entry.name: entry for entry in describe_broker(Settings(), {name: value})}
    entry = entries[name]
    assert (entry.value, entry.source, entry.read_only) == (
        value,
        ConfigSource.DYNAMIC_BROKER,
        False,
    )
    assert entry.text == STORED_ONLY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num.io.threads", "0"),
        ("num.io.threads", "many"),
        ("num.io.threads", "3000000000"),
        ("transaction.partition.verification.enable", "maybe"),
    ],
)
def test_values_of_keys_without_effect_are_checked_all_the_same(name: str, value: str) -> None:
    with pytest.raises(InvalidTopicConfigError):
        parse_broker_value(name, value)
