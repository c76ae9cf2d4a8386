import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.topics.keys import (
    INDEX_INTERVAL_BYTES_MIN,
    INT_MAX,
    LONG_MAX,
    SEGMENT_INDEX_BYTES_MIN,
    TOPIC_KEYS,
    ConfigSource,
    Effect,
    InvalidTopicConfigError,
    TopicConfig,
    TopicLayers,
    ValueKind,
    describe,
    parse_value,
    resolve,
)
from storage.format.index import TIME_ENTRY_BYTES
from storage.log.roll import SMALL_SEGMENT_BYTES

ROOT = Path(__file__).parents[3]
DAY_MS = 86_400_000


def kafka_table() -> list[list[str]]:
    """name, type, default, valid values, broker synonym: as Kafka 4.3.0 prints its own table."""
    text = (ROOT / "tests/golden/kafka_4.3_topic_keys.txt").read_text()
    return [line.split("|") for line in text.splitlines()]


@pytest.mark.parametrize("row", kafka_table(), ids=lambda row: row[0])
def test_every_key_of_kafka_has_its_type_default_range_and_synonym(row: list[str]) -> None:
    name, kind, default, valid, synonym = row
    key = TOPIC_KEYS[name]
    assert key.kind is ValueKind[kind.upper()]
    assert key.default == default
    assert key.synonym == (name if synonym == "null" else synonym)
    if key.choices:
        assert valid == f"[{', '.join(key.choices)}]"
    numbers = re.fullmatch(r"\[(-?\d+),\.\.\.,?(-?\d*)\](?: or (-1))?", valid)
    if numbers:
        low, high, also = numbers.groups()
        assert key.minimum == int(also or low)
        assert key.maximum == (int(high) if high else None)
    elif key.kind in (ValueKind.INT, ValueKind.LONG, ValueKind.DOUBLE):
        assert (key.minimum, key.maximum) == (None, None)


def test_only_our_own_keys_are_not_kafkas() -> None:
    others = set(TOPIC_KEYS) - {row[0] for row in kafka_table()}
    assert [name for name in others if not name.startswith("varve.")] == []


def test_the_defaults_of_topic_config_are_those_of_the_table() -> None:
    assert resolve(TopicLayers()) == TopicConfig()


def test_every_obeyed_key_has_a_field_and_is_read_somewhere() -> None:
    names = {field.name for field in fields(TopicConfig)}
    code = "".join(
        path.read_text()
        for package in ("storage", "cleaner", "broker")
        for path in (ROOT / package).rglob("*.py")
    )
    obeyed = [key for key in TOPIC_KEYS.values() if key.effect is Effect.FULL]
    assert [key.name for key in obeyed if key.field_name not in names] == []
    read = {key.name for key in obeyed if re.search(rf"\.{key.field_name}\b", code)}
    # These are read through properties of TopicConfig, or by codec.
    by_property = (
        "cleanup.policy",
        "varve.cleaner.engine",
        "varve.cleaner.io.max.bytes.per.second",
        "varve.view",
    )
    read |= {key.name for key in obeyed if key.name in by_property}
    read |= {key.name for key in obeyed if re.fullmatch(r"compression\.\w+\.level", key.name)}
    assert [key.name for key in obeyed if key.name not in read] == []


@pytest.mark.parametrize(
    ("key", "raw", "effective"),
    [
        ("segment.index.bytes", "4", 16_384),
        ("segment.index.bytes", "20000", 20_000),
        ("index.interval.bytes", "0", 1_024),
        ("index.interval.bytes", "2000", 2_000),
    ],
)
def test_an_index_is_full_in_large_segments_only(key: str, raw: str, effective: int) -> None:
    layers = TopicLayers(dynamic={key: raw})
    assert getattr(resolve(layers), TOPIC_KEYS[key].field_name) == effective
    rows = {entry.name: entry.value for entry in describe(layers)}
    assert rows[key] == raw
    entries = SEGMENT_INDEX_BYTES_MIN // TIME_ENTRY_BYTES - 1  # one is kept for the end
    assert entries * INDEX_INTERVAL_BYTES_MIN >= SMALL_SEGMENT_BYTES


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("compact", "compact"),
        ("delete,compact", "delete,compact"),
        (" compact , delete ", "compact,delete"),
        ("compact,compact", "compact"),
        ("dedupe", "compact"),
        ("dedupe,compact,delete", "compact,delete"),
        ("", ""),
        ("  ", ""),
        ([], ""),
        (["compact", "delete"], "compact,delete"),
    ],
)
def test_a_policy_keeps_its_order_and_loses_duplicates(raw: object, canonical: str) -> None:
    assert parse_value("cleanup.policy", raw) == canonical


@pytest.mark.parametrize("raw", ["compakt", "compact,", ",", "compact;delete", None, 3, True, [3]])
def test_a_policy_of_unknown_words_is_refused(raw: object) -> None:
    with pytest.raises(InvalidTopicConfigError) as caught:
        parse_value("cleanup.policy", raw)
    assert caught.value.key == "cleanup.policy"


@pytest.mark.parametrize(
    ("key", "raw", "canonical"),
    [
        ("segment.bytes", "1048576", "1048576"),
        ("segment.bytes", 1 << 20, "1048576"),
        ("segment.bytes", INT_MAX, str(INT_MAX)),
        ("retention.ms", " -1 ", "-1"),
        ("retention.ms", "+5", "5"),
        ("max.compaction.lag.ms", LONG_MAX, str(LONG_MAX)),
        ("min.cleanable.dirty.ratio", "0", "0.0"),
        ("min.cleanable.dirty.ratio", 1, "1.0"),
        ("min.cleanable.dirty.ratio", ".25", "0.25"),
        ("min.cleanable.dirty.ratio", "1e-1", "0.1"),
        ("preallocate", "TRUE", "true"),
        ("preallocate", False, "false"),
        ("compression.type", "zstd", "zstd"),
        ("compression.gzip.level", "-1", "-1"),
        ("leader.replication.throttled.replicas", "0:1,1:2", "0:1,1:2"),
        ("leader.replication.throttled.replicas", "*", "*"),
    ],
)
def test_good_values_become_canonical(key: str, raw: object, canonical: str) -> None:
    assert parse_value(key, raw) == canonical
    assert parse_value(key, canonical) == canonical


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("segment.bytes", "1048575"),
        ("segment.bytes", "2147483648"),
        ("segment.bytes", "1MiB"),
        ("segment.bytes", "1_048_576"),
        ("segment.bytes", "1e9"),
        ("segment.bytes", 1048576.0),
        ("segment.bytes", True),
        ("segment.bytes", ""),
        ("segment.bytes", "9" * 5000),
        ("segment.bytes", "١٠٤٨٥٧٦"),
        ("retention.ms", "-2"),
        ("retention.ms", str(LONG_MAX + 1)),
        ("max.compaction.lag.ms", "0"),
        ("min.cleanable.dirty.ratio", "1.01"),
        ("min.cleanable.dirty.ratio", "-0.1"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("min.cleanable.dirty.ratio", float("nan")),
        ("min.cleanable.dirty.ratio", "inf"),
        ("min.cleanable.dirty.ratio", 10**400),
        ("preallocate", "yes"),
        ("preallocate", 1),
        ("compression.type", "brotli"),
        ("compression.type", False),
        ("compression.gzip.level", "0"),
        ("compression.gzip.level", "10"),
        ("compression.zstd.level", "23"),
        ("message.timestamp.type", "createtime"),
        ("leader.replication.throttled.replicas", "zero"),
        ("segment.ms", None),
    ],
)
def test_bad_values_are_refused_by_key(key: str, raw: object) -> None:
    with pytest.raises(InvalidTopicConfigError) as caught:
        parse_value(key, raw)
    assert caught.value.key == key
    assert len(str(caught.value)) < 300


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidTopicConfigError, match=r"did you mean retention\.ms"):
        parse_value("retention.msec", "1")
    with pytest.raises(InvalidTopicConfigError) as caught:
        parse_value("x" * 100_000, "1")
    assert len(str(caught.value)) < 300


def test_units_are_for_yaml_only() -> None:
    assert parse_value("segment.bytes", "64MiB", units=True) == str(64 << 20)
    assert parse_value("retention.ms", "7d", units=True) == str(7 * DAY_MS)
    for key, raw in (("segment.bytes", "64MiB"), ("retention.ms", "7d")):
        with pytest.raises(InvalidTopicConfigError):
            parse_value(key, raw)
    for key, raw in (("segment.bytes", "64d"), ("retention.ms", "1MiB"), ("flush.messages", "1s")):
        with pytest.raises(InvalidTopicConfigError):
            parse_value(key, raw, units=True)


@given(st.sampled_from(sorted(TOPIC_KEYS)), st.text() | st.integers() | st.floats() | st.booleans())
def test_parsing_refuses_or_gives_what_it_gives_again(key: str, raw: object) -> None:
    try:
        canonical = parse_value(key, raw, units=True)
    except InvalidTopicConfigError:
        return
    assert parse_value(key, canonical) == canonical
    resolve_or_refuse(TopicLayers(dynamic={key: canonical}))


def resolve_or_refuse(layers: TopicLayers) -> TopicConfig | None:
    try:
        return resolve(layers)
    except InvalidTopicConfigError:
        return None


def test_dynamic_wins_over_yaml_over_broker_over_topic_defaults_over_builtin() -> None:
    key, synonym = "retention.ms", "log.retention.ms"
    layers = TopicLayers({key: "1"}, {key: "2"}, {key: "4"}, {synonym: "3"})
    entry = {entry.name: entry for entry in describe(layers)}[key]
    assert [(s.name, s.value, s.source) for s in entry.synonyms] == [
        (key, "1", ConfigSource.DYNAMIC_TOPIC),
        (key, "2", ConfigSource.STATIC_BROKER),
        (synonym, "3", ConfigSource.DYNAMIC_BROKER),
        (synonym, "4", ConfigSource.STATIC_BROKER),
        (synonym, str(7 * DAY_MS), ConfigSource.DEFAULT),
    ]
    assert (entry.value, entry.source, entry.is_default) == ("1", ConfigSource.DYNAMIC_TOPIC, False)
    for expected in (1, 2, 3, 4):
        assert resolve(layers).retention_ms == expected
        layers = TopicLayers(
            {},
            layers.yaml if expected < 2 else {},
            layers.topic_defaults if expected < 4 else {},
            layers.broker_dynamic if expected < 3 else {},
        )
    assert resolve(TopicLayers()).retention_ms == 7 * DAY_MS


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_has_defaults_that_let_it_shrink(policy: str) -> None:
    layers = TopicLayers(yaml={"cleanup.policy": policy})
    config = resolve(layers)
    assert config.segment_bytes == 64 << 20
    assert config.max_compaction_lag_ms == DAY_MS
    entries = {entry.name: entry for entry in describe(layers)}
    assert entries["segment.bytes"].source is ConfigSource.DEFAULT
    assert entries["segment.bytes"].value == str(64 << 20)
    assert entries["max.compaction.lag.ms"].is_default


def test_what_was_set_wins_over_the_defaults_of_compacted_topics() -> None:
    layers = TopicLayers(
        dynamic={"cleanup.policy": "compact"},
        topic_defaults={"segment.bytes": "2000000", "max.compaction.lag.ms": "7"},
    )
    assert resolve(layers).segment_bytes == 2_000_000
    assert resolve(layers).max_compaction_lag_ms == 7


def test_a_default_never_contradicts_what_was_set() -> None:
    policy = {"cleanup.policy": "compact"}
    waits = resolve(TopicLayers(yaml={**policy, "min.compaction.lag.ms": str(30 * DAY_MS)}))
    assert waits.max_compaction_lag_ms == 31 * DAY_MS
    forever = resolve(TopicLayers(yaml={**policy, "min.compaction.lag.ms": str(LONG_MAX)}))
    assert forever.max_compaction_lag_ms == LONG_MAX
    large = resolve(TopicLayers(yaml={**policy, "max.message.bytes": str(90 << 20)}))
    assert large.segment_bytes == 90 << 20


def test_a_minimum_lag_above_the_maximum_is_refused() -> None:
    lags = {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "9"}
    with pytest.raises(InvalidTopicConfigError, match=r"above max\.compaction\.lag\.ms"):
        resolve(TopicLayers(dynamic=lags))
    with pytest.raises(InvalidTopicConfigError):
        resolve(TopicLayers({"min.compaction.lag.ms": "10"}, {"max.compaction.lag.ms": "9"}))


def test_tiered_storage_is_refused_but_its_keys_are_taken() -> None:
    with pytest.raises(InvalidTopicConfigError, match="tiered"):
        resolve(TopicLayers(dynamic={"remote.storage.enable": "true"}))
    resolve(TopicLayers(dynamic={"remote.storage.enable": "false", "local.retention.ms": "5"}))


def test_a_topic_taken_over_is_neither_cleaned_nor_expired_until_a_policy_is_set() -> None:
    defaults = {"cleanup.policy": "compact,delete"}
    unknown = resolve(TopicLayers(topic_defaults=defaults, taken_over=True))
    assert (unknown.policy_known, unknown.compacts, unknown.deletes) == (False, False, False)
    for layers in (
        TopicLayers(dynamic={"cleanup.policy": "delete"}, taken_over=True),
        TopicLayers(yaml={"cleanup.policy": "delete"}, taken_over=True),
    ):
        assert resolve(layers).deletes
        assert resolve(layers).policy_known


def test_an_unknown_policy_is_shown_as_the_empty_one_whatever_the_defaults_say() -> None:
    defaults = {"cleanup.policy": "compact", "retention.ms": "5"}
    unknown = TopicLayers(topic_defaults=defaults, taken_over=True)
    rows = {entry.name: entry for entry in describe(unknown)}
    assert (rows["cleanup.policy"].value, rows["cleanup.policy"].is_default) == ("", False)
    assert rows["cleanup.policy"].source is ConfigSource.UNKNOWN
    assert rows["retention.ms"].value == "5"
    assert resolve(unknown).cleanup_policy == ()
    layers = TopicLayers(dynamic={"cleanup.policy": "compact"}, taken_over=True)
    assert {e.name: e.value for e in describe(layers)}["cleanup.policy"] == "compact"


def test_an_empty_policy_keeps_everything() -> None:
    config = resolve(TopicLayers(dynamic={"cleanup.policy": ""}))
    assert (config.cleanup_policy, config.compacts, config.deletes) == ((), False, False)


def test_describe_lists_every_kafka_key_and_removed_ones_only_where_set() -> None:
    names = [entry.name for entry in describe(TopicLayers())]
    assert {row[0] for row in kafka_table()} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "key",
    [
        "message.format.version",
        "message.downconversion.enable",
        "message.timestamp.difference.max.ms",
    ],
)
def test_keys_that_kafka_4_removed_are_unknown(key: str) -> None:
    with pytest.raises(InvalidTopicConfigError, match="unknown"):
        parse_value(key, "1")


def test_topic_config_takes_any_value_so_that_tests_can_have_small_segments() -> None:
    assert TopicConfig(segment_bytes=14).segment_bytes == 14


@pytest.mark.parametrize("key", TOPIC_KEYS)
def test_a_value_beside_control_characters_is_taken_or_refused(key: str) -> None:
    for space in [*map(chr, range(0x21)), "\x7f", "\x85", "\u2028"]:
        for text in (f"{space}5", f"5{space}", f"{space}1e3", space, f"1{space}2"):
            try:
                canonical = parse_value(key, text)
            except InvalidTopicConfigError:
                continue
            assert parse_value(key, canonical) == canonical
