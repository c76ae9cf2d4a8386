"""`verify` against a real broker: sound views and topics pass, every planted fault is named."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from admin.client import ApiClient
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.kafka_client import Fetched, WireClient
from pipeline.errors import JobError
from pipeline.jobs import verify
from pipeline.jobs.verify import Verifier, VerifyResult, ViewVersion, answer, lines
from pipeline.tables.delta import version_id
from pipeline.tables.publish import publish
from pipeline.tables.target import target
from pipeline.verification.batches import DISORDER, EXPIRED, BatchWalk, walk
from pipeline.verification.rules import DELETED, FORGOTTEN, Rule, classified
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
)
from tests.pipeline.jobs.test_bootstrap import alter_policy
from tests.pipeline.planted import (
    CODECS,
    START_MS,
    VIEW,
    Rows,
    append_raw,
    clean,
    client_of,
    compact_view,
    copied,
    encoded,
    make_topic,
    original_rows,
    plant_in_ledgers,
    plant_in_log,
    write,
)
from tests.support.draws import cases, seed_of_test
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker, running_varve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200}}
PARTITIONS = 2


def random_rows(rng: random.Random, count: int, first: int = 0) -> Iterator[tuple[Any, ...]]:
    for n in range(first, first + count):
        key = None if rng.random() < 0.05 else b"key-%d" % rng.randrange(60)
        value = None if key and rng.random() < 0.15 else b"value-%d" % n
        headers = [("n", b"%d" % n), ("none", None)] if rng.random() < 0.3 else None
        yield n % PARTITIONS, key, value, START_MS + rng.randrange(10**6), headers


def transactions(first_offset: int) -> list[bytes]:
    """One that was aborted, and one that was committed, after `first_offset`."""
    result, at = [], first_offset
    for producer, kind in ((900, ControlType.ABORT), (901, ControlType.COMMIT)):
        rows = [
            Record(at + n, START_MS + n, b"key-%d" % n, b"%s-%d" % (kind.name.encode(), n))
            for n in range(5)
        ]
        result.append(
            bytes(
                build_batch(
                    rows,
                    producer_id=producer,
                    producer_epoch=0,
                    base_sequence=0,
                    attributes=TRANSACTIONAL,
                )
            )
        )
        marker = marker_record(kind, 0, START_MS)._replace(offset=at + 5)
        result.append(
            bytes(
                build_batch(
                    [marker],
                    producer_id=producer,
                    producer_epoch=0,
                    attributes=TRANSACTIONAL | CONTROL,
                )
            )
        )
        at += 6
    return result


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's files: `orders` with a view, `states` that was compacted itself."""
    directory = tmp_path_factory.mktemp("verify")
    rng = random.Random(seed_of_test(20))
    with running_varve(directory, SETTINGS) as broker:
        make_topic(broker, "orders", PARTITIONS, **VIEW)
        make_topic(broker, "states", 1, cleanup_policy="compact", min_cleanable_dirty_ratio="1")
        for n, codec in enumerate(CODECS):
            write(broker, "orders", random_rows(rng, 100, 100 * n), codec)
        write(broker, "orders", [(p, b"deleted", b"once", START_MS, None) for p in range(2)])
        write(broker, "orders", [(p, b"deleted", None, START_MS, None) for p in range(2)])
        keyed = [(0, row[1] or b"k", *row[2:]) for row in random_rows(rng, 400)]
        write(broker, "states", keyed, "zstd")
        clean(broker, "states", 0)
    for n in range(PARTITIONS):
        rows = original_rows(directory / "data", "orders", n)
        append_raw(directory / "data", "orders", n, transactions(rows[-1].offset + 1))
    with running_varve(directory, SETTINGS) as broker:
        for n in range(PARTITIONS):
            horizon = compact_view(broker, "orders", n)
            assert horizon > 200
        write(broker, "orders", random_rows(rng, 50, 1000))  # after the horizon
    return directory


def verifier(spark: "SparkSession", broker: VarveBroker, topic: str) -> Verifier:
    return Verifier(spark, client_of(broker), Cluster(broker.bootstrap), topic)


def latest(rows: Rows) -> dict[bytes, Record]:
    return {row.key: row for row in rows if row.key is not None}


def test_a_sound_view_is_the_latest_of_each_key(
    spark: "SparkSession", stopped: Path, tmp_path: Path
) -> None:
    """With every codec, transactions, records without a key, headers and deletes."""
    with running_varve(copied(stopped, tmp_path), SETTINGS) as broker:
        result = verifier(spark, broker, "orders").view()
    assert (result.faults, result.examples, result.notes) == (0, [], [])
    assert result.kinds.keys() == {"same"}
    for n in range(PARTITIONS):
        counts = result.partitions[n]
        rows = original_rows(tmp_path / "data", "orders", n)
        below = [row for row in rows if row.offset < counts.end_offset]
        decided = [row for row in below if not (row.value or b"").startswith(b"ABORT-")]
        assert len(decided) == len(below) - 5
        values = [row for row in latest(decided).values() if row.value is not None]
        keyless = [row for row in decided if row.key is None]
        assert counts.originals == len(decided)
        assert counts.copies == len(values) + len(keyless)
        assert counts.keys == len(latest(decided)) + len(keyless)
    assert lines(result)[-1] == "orders.compacted is correct"


def test_a_sound_compacted_topic_has_each_key_once(
    spark: "SparkSession", stopped: Path, tmp_path: Path
) -> None:
    with running_varve(copied(stopped, tmp_path), SETTINGS) as broker:
        write(broker, "states", [(0, b"key-1", b"dirty", START_MS, None)] * 3)
        result = verifier(spark, broker, "states").alone()
    assert result.faults == 0
    assert result.partitions[0].keys == result.partitions[0].copies > 0
    assert result.partitions[0].end_offset == 400


def gap_in(rows: Rows) -> int:
    """An offset that no record has."""
    used = {row.offset for row in rows}
    return next(n for n in range(1, 10_000) if n not in used)


def value_at(rows: Rows, place: int = 3) -> int:
    """The place of a record with a key and headers or not, somewhere in the midst."""
    return [n for n, row in enumerate(rows) if row.key is not None][place]


def missing(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    del rows[0][value_at(rows[0])]


def wrong_value(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    at = value_at(rows[1])
    rows[1][at] = rows[1][at]._replace(value=b"planted")


def older(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    at = next(n for n, row in enumerate(rows[0]) if older_of(row, originals[0]))
    rows[0][at] = older_of(rows[0][at], originals[0])[-1]


def older_of(row: Record, originals: Rows) -> Rows:
    return [
        record
        for record in originals
        if record.key is not None
        and record.key == row.key
        and record.offset < row.offset
        and record.value
    ]


def deleted(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    rows[1].append(next(row for row in originals[1] if row.key == b"deleted"))


def extra(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    rows[0].append(Record(gap_in(rows[0]), START_MS, b"never", b"written"))


def wrong_offset(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    at = value_at(rows[0])
    rows[0][at] = rows[0][at]._replace(offset=gap_in(rows[0]))


def wrong_timestamp(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    at = value_at(rows[0])
    rows[0][at] = rows[0][at]._replace(timestamp=rows[0][at].timestamp + 1)


def wrong_headers(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    at = next(n for n, row in enumerate(rows[0]) if row.headers and row.key)
    rows[0][at] = rows[0][at]._replace(headers=rows[0][at].headers[:1])


def duplicate(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    row = next(row for row in rows[0] if older_of(row, originals[0]))
    rows[0].append(older_of(row, originals[0])[0])


def elsewhere(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    there = latest(originals[1])
    at = next(n for n, row in enumerate(rows[0]) if row.key and row.key not in there)
    rows[1].append(rows[0].pop(at)._replace(offset=gap_in(rows[1])))


def tombstone(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    rows[0].append(next(row for row in reversed(originals[0]) if row.key == b"deleted"))


def keyless_lost(rows: dict[int, Rows], _: dict[int, Rows]) -> None:
    del rows[0][next(n for n, row in enumerate(rows[0]) if row.key is None)]


def aborted(rows: dict[int, Rows], originals: dict[int, Rows]) -> None:
    row = next(row for row in originals[0] if row.value == b"ABORT-1")
    rows[0] = [record for record in rows[0] if record.key != row.key] + [row]


PLANTED: dict[Callable[..., None], tuple[str, int]] = {
    missing: ("missing_key", 0),
    older: ("older_record_served", 0),
    deleted: ("deleted_key_served", 1),
    wrong_headers: ("wrong_headers", 0),
    duplicate: ("duplicate_key", 0),
    elsewhere: ("other_partition", 1),
    wrong_value: ("wrong_value", 1),
    extra: ("extra_key", 0),
    wrong_offset: ("wrong_offset", 0),
    wrong_timestamp: ("wrong_timestamp", 0),
    tombstone: ("tombstone_served", 0),
    keyless_lost: ("missing_key", 0),
    aborted: ("older_record_served", 0),
}


# Those of a default run are in one ledger: they touch different records.
PLANTED_TOGETHER = (missing, older, deleted, wrong_value)


@pytest.mark.parametrize(
    "plants",
    cases(few=[PLANTED_TOGETHER], many=[PLANTED_TOGETHER, *((plant,) for plant in PLANTED)]),
    ids=lambda plants: "-".join(plant.__name__ for plant in plants),
)
def test_a_fault_in_the_ledger_is_found_and_named(
    spark: "SparkSession", stopped: Path, tmp_path: Path, plants: tuple[Callable[..., None], ...]
) -> None:
    home = copied(stopped, tmp_path)
    originals = {n: original_rows(home / "data", "orders", n) for n in range(PARTITIONS)}
    if elsewhere in plants:  # every key is in both partitions: one that is not is planted in both
        only = Record(originals[0][-1].offset + 1, START_MS, b"only-here", b"1")
        append_raw(home / "data", "orders", 0, [encoded([only])])
        with running_varve(home, SETTINGS) as broker:
            compact_view(broker, "orders", 0)

    def plant_all(rows: dict[int, Rows]) -> None:
        for plant in plants:
            plant(rows, originals)

    plant_in_ledgers(home / "data", "orders", plant_all)
    with running_varve(home, SETTINGS) as broker:
        result = verifier(spark, broker, "orders").view()
    expected = sorted(PLANTED[plant] for plant in plants)
    results = {kind: count for kind, count in result.kinds.items() if kind != "same"}
    assert results == {kind: 1 for kind, _ in expected}, answer(result)
    examples = [(example.kind, example.partition) for example in result.examples]
    assert sorted(examples) == expected
    assert result.exit_code == exit_codes.UNVERIFIED


PLANTED_IN_LOG: dict[str, Callable[[Rows], Rows]] = {
    "duplicate_key": lambda rows: [rows[0]._replace(key=rows[5].key), *rows[1:]],
    "record_without_key": lambda rows: [rows[0], rows[1]._replace(key=None), *rows[2:]],
    EXPIRED: lambda rows: [*rows[:2], rows[2]._replace(value=None), *rows[3:]],
}


@pytest.mark.parametrize(
    "kinds",
    cases(few=[tuple(PLANTED_IN_LOG)], many=[(kind,) for kind in PLANTED_IN_LOG]),
    ids="-".join,
)
def test_a_fault_in_a_compacted_log_is_found_and_named(
    spark: "SparkSession", stopped: Path, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    home = copied(stopped, tmp_path)

    def plant_all(rows: Rows) -> Rows:
        for kind in kinds:
            rows = PLANTED_IN_LOG[kind](rows)
        return rows

    horizon = {"delete_horizon_ms": START_MS} if EXPIRED in kinds else {}
    plant_in_log(home / "data", "states", 0, plant_all, **horizon)
    with running_varve(home, SETTINGS) as broker:
        result = verifier(spark, broker, "states").alone()
    assert result.kinds.keys() == set(kinds), answer(result)
    assert result.exit_code == exit_codes.UNVERIFIED


class OneAnswer(WireClient):
    """A log of one fetch."""

    def __init__(self, records: bytes) -> None:
        super().__init__(Cluster("nobody:1"))
        self._records = records

    def fetch(self, *_: Any, **__: Any) -> Fetched:
        records, self._records = self._records, b""
        return Fetched(records, 0, 100, 100, ())


def test_batches_that_do_not_ascend_are_found() -> None:
    rows = [Record(n, START_MS, b"k%d" % n, b"v") for n in range(40)]
    sound = [encoded(rows[n : n + 10]) for n in range(0, 40, 10)]
    assert list(walk(OneAnswer(b"".join(sound)), BatchWalk("t", 0, 0, 40))) == []
    swapped = [sound[1], sound[0], *sound[2:]]
    (fault,) = walk(OneAnswer(b"".join(swapped)), BatchWalk("t", 0, 0, 40))
    assert (fault.kind, fault.expected_offset, fault.served_offset) == (DISORDER, 20, 0)
    twice = [sound[0], sound[0], *sound[1:]]
    assert [fault.kind for fault in walk(OneAnswer(b"".join(twice)), BatchWalk("t", 0, 0, 40))]


# Other rules of a view ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"varve_view_strategy": "timestamp"},
        {"varve_view_strategy": "header", "varve_view_version_header": "v"},
        {"varve_view_null_key": "drop"},
    ],
    ids=["timestamp", "header", "null-key"],
)
def test_a_view_is_held_against_its_own_rule(
    spark: "SparkSession", broker: VarveBroker, topic: str, keys: dict[str, str]
) -> None:
    rng = random.Random(seed_of_test(21))
    make_topic(broker, topic, 1, **VIEW, **keys)
    rows = []
    for n in range(400):
        version = rng.randrange(-50, 50).to_bytes(8, "big", signed=True)
        headers = [("v", version)] if rng.random() < 0.9 else None
        key = None if n % 20 == 0 else b"key-%d" % rng.randrange(40)
        value = None if key and rng.random() < 0.2 else b"value-%d" % n
        rows.append((0, key, value, START_MS + rng.randrange(1000), headers))
    write(broker, topic, rows[:200])
    compact_view(broker, topic, 0)
    write(broker, topic, rows[200:])
    compact_view(broker, topic, 0)
    result = verifier(spark, broker, topic).view()
    assert result.kinds.keys() == {"same"}, answer(result)
    assert result.partitions[0].originals == (380 if "varve_view_null_key" in keys else 400)
    if not cases(few=False, many=True):
        return
    by_another = Verifier(spark, client_of(broker), Cluster(broker.bootstrap), topic)
    views = by_another._views()
    views = {
        n: ViewVersion(view.horizon, "offset", "", "keep", view.made_ms)
        for n, view in views.items()
    }
    wrong = by_another._view(views, by_another._bounds(topic), {})
    assert wrong.faults > 0, "the records tell the rules apart"


def test_a_view_by_time_is_held_against_times_that_spark_does_not_have(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """The record of the lower offset is the latest, as far beyond the range as both are."""
    keys = {"varve_view_strategy": "timestamp", "message_timestamp_after_max_ms": str(2**63 - 1)}
    make_topic(broker, topic, 1, **VIEW, **keys)
    times = [(1 << 62) + 1, 1 << 62]
    with RawClient(broker.port) as client:
        rows = [Record(n, at, b"k", b"%d" % n) for n, at in enumerate(times)]
        client.produce(topic, bytes(build_batch(rows)))
    compact_view(broker, topic, 0)
    result = verifier(spark, broker, topic).view()
    assert result.kinds == {"same": 1}, answer(result)


@pytest.mark.parametrize(("age_ms", "kind"), [(0, DELETED), (1, FORGOTTEN)])
def test_a_deleted_key_that_is_served_again_is_sound_only_after_its_tombstone_has_expired(
    spark: "SparkSession", age_ms: int, kind: str
) -> None:
    """A record that was written after the tombstone ranks below it by its time."""
    schema = "key binary, value binary, partition int, offset bigint, timestampMs bigint"
    deleted_ms = START_MS - age_ms
    written = (b"k", b"old", 0, 1, deleted_ms - 60_000)
    original = spark.createDataFrame([(b"k", None, 0, 0, deleted_ms), written], schema)
    served = spark.createDataFrame([written], schema)
    rule = Rule(strategy="timestamp", forget_before_ms=START_MS)
    assert [row.kind for row in classified(original, served, rule).collect()] == [kind]


def test_what_expired_in_the_log_cannot_be_held_against_it(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    make_topic(broker, topic, 1, **VIEW)
    write(broker, topic, [(0, b"key-%d" % (n % 60), b"%d" % n, START_MS, None) for n in range(100)])
    compact_view(broker, topic, 0)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, 70)]).values():
        future.result()
    result = verifier(spark, broker, topic).view()
    assert result.kinds == {"same": 30, "unverifiable": 30}
    assert "starts at offset 70" in result.notes[0]


def test_what_a_clean_removed_under_an_earlier_policy_cannot_be_held_against_a_view(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """The clean kept the last record, the view the latest one."""
    keys = {"cleanup_policy": "compact", "retention_ms": "-1", "varve_view_strategy": "timestamp"}
    make_topic(broker, topic, 1, **VIEW, **keys)
    write(broker, topic, [(0, b"k", b"%d" % n, START_MS - n, None) for n in range(10)])
    compact_view(broker, topic, 0)
    clean(broker, topic, 0)
    for policy in ("compact", "delete"):
        alter_policy(broker, topic, policy)
        assert verifier(spark, broker, topic).view().kinds == {"unverifiable": 1}


def test_a_view_that_changes_whenever_it_is_read_is_given_up(
    broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that changes once is read again."""
    make_topic(broker, topic, 1, **VIEW)
    check = Verifier(None, client_of(broker), Cluster(broker.bootstrap), topic)  # type: ignore[arg-type]
    reported = iter(range(100))
    changes = [2]
    checked: list[dict[int, ViewVersion]] = []

    def views(_: Verifier) -> dict[int, ViewVersion]:
        return {0: ViewVersion(0, "offset", "", "keep", min(next(reported), changes[0]))}

    def compare_view(_: Verifier, views: dict[int, ViewVersion], *__: Any) -> VerifyResult:
        checked.append(views)
        return VerifyResult(topic, "", "view", {})

    monkeypatch.setattr(Verifier, "_views", views)
    monkeypatch.setattr(Verifier, "_view", compare_view)
    assert check.view().faults == 0
    assert [view[0].made_ms for view in checked] == [0, 2]
    changes[0] = 100
    with pytest.raises(JobError, match="changed during each of 3 checks") as raised:
        check.view()
    assert raised.value.code == exit_codes.STALE
    assert len(checked) == 2 + 3


# Topics, tables, nothing --------------------------------------------------------------------


def test_another_topic_is_compared_by_what_its_keys_stand_for(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        make_topic(broker, name, 2)
    rows = [(n % 2, b"k%d" % (n % 30), b"%d" % n, START_MS + n, None) for n in range(90)]
    write(broker, topic, rows)
    write(broker, copy, rows[60:])
    check = verifier(spark, broker, topic)
    assert check.other(copy, None).kinds == {"same": 30}
    write(broker, topic, [(0, b"k0", None, START_MS, None), (1, b"k1", b"x", START_MS, None)])
    result = check.other(copy, None)
    assert result.kinds == {"deleted_key_served": 1, "same": 28, "wrong_value": 1}
    assert check.other(copy, {0: 45, 1: 45}).faults == 0
    with pytest.raises(JobError, match="offset 1000 is beyond the last stable offset 46"):
        check.other(copy, {0: 1000})


def test_a_table_is_compared_by_the_columns_it_has(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 2)
    rows = [(n % 2, b"k%d" % (n % 30), b"%d" % n, START_MS + n, None) for n in range(90)]
    write(broker, topic, rows)
    check = verifier(spark, broker, topic)
    bounds = check._bounds(topic)
    every = check._read(topic, bounds.first, bounds.end)
    path = str(tmp_path / "table")
    every.where("offset >= 30").drop("headers").write.parquet(path)
    assert check.table(path, "parquet", None, keyless=False).kinds == {"same": 30}
    texts = every.where("offset >= 30 and key <> 'k3'").selectExpr(
        "cast(key as string) key", "cast(value as string) value", "partition", "offset"
    )
    texts.write.mode("overwrite").parquet(path)
    result = check.table(path, "parquet", None, keyless=False)
    assert result.kinds == {"missing_key": 1, "same": 29}
    assert result.examples[0].key == b"k3"
    every.selectExpr("key", "offset").write.mode("overwrite").parquet(path)
    with pytest.raises(JobError, match="has no column partition"):
        check.table(path, "parquet", None, keyless=False)
    with pytest.raises(JobError, match="does not exist"):
        check.table(f"{path}-not", "parquet", None, keyless=False)


def test_deleted_keys_are_not_missing_in_a_table_without_values(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1)
    rows = [(0, b"k%d" % n, b"v", START_MS, None) for n in range(10)]
    write(broker, topic, [*rows, (0, b"k3", None, START_MS, None)])
    check = verifier(spark, broker, topic)
    bounds = check._bounds(topic)
    every = check._read(topic, bounds.first, bounds.end)
    path = str(tmp_path / "table")
    live = every.where("offset < 10 and offset <> 3").select("key", "partition", "offset")
    live.write.parquet(path)
    result = check.table(path, "parquet", {0: 11}, keyless=False)
    assert result.kinds == {"same": 10}
    every.where("offset < 10").select("key", "partition", "offset").write.mode("overwrite").parquet(
        path
    )
    result = check.table(path, "parquet", {0: 11}, keyless=False)
    assert result.kinds == {"deleted_key_served": 1, "same": 9}


@pytest.mark.parametrize("table_format", cases(few=["delta"], many=["parquet", "delta", "iceberg"]))
def test_a_table_says_itself_how_far_it_goes(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path, table_format: str
) -> None:
    """Notes as `latest` leaves them: what came later is not missing."""
    make_topic(broker, topic, 2)
    rows = [(n % 2, b"k%d" % (n % 30), b"%d" % n, START_MS + n, None) for n in range(90)]
    write(broker, topic, rows)
    check = verifier(spark, broker, topic)
    bounds = check._bounds(topic)
    every = check._read(topic, bounds.first, bounds.end).drop("headers").where("offset >= 30")
    place = target(str(tmp_path / "table"), table_format, overwrite=False)  # type: ignore[arg-type]
    notes = {"topic": topic, "end_offsets": {str(n): end for n, end in bounds.end.items()}}
    publish(every, place, notes, versions={version_id(topic, n): 45 for n in range(2)})
    write(broker, topic, [(0, b"k0", b"later", START_MS, None)])
    result = check.table(str(place.path), table_format, None, keyless=False)
    assert (result.kinds, result.notes) == ({"same": 30}, [])
    other = check.table(str(place.path), table_format, {0: 46, 1: 45}, keyless=False)
    assert other.kinds == {"older_record_served": 1, "same": 29}


def test_the_rows_and_the_offsets_of_a_table_that_a_job_replaces_are_those_of_one_version(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_topic(broker, topic, 1)
    write(broker, topic, [(0, b"k%d" % n, b"v", START_MS, None) for n in range(4)])
    check, path = verifier(spark, broker, topic), str(tmp_path / "table")
    fetch = Verifier._bounds

    def publish_state(first: int, end: int) -> None:
        place = target(path, "delta", overwrite=True)
        rows = check._read(topic, {0: first}, {0: end}).drop("headers")
        publish(rows, place, {}, versions={version_id(topic, 0): end})

    def replaced_first(*arguments: Any) -> Any:
        monkeypatch.setattr(Verifier, "_bounds", fetch)
        write(broker, topic, [(0, b"k0", b"new", START_MS, None)])
        publish_state(1, 5)
        return fetch(*arguments)

    publish_state(0, 4)
    monkeypatch.setattr(Verifier, "_bounds", replaced_first)
    assert check.table(path, "delta", None, keyless=False).kinds == {"same": 4}
    assert check.table(path, "delta", None, keyless=False).kinds == {"same": 4}


def test_a_record_that_a_clean_removed_since_a_table_was_written_cannot_be_held_against_it(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1, cleanup_policy="compact")
    write(broker, topic, [(0, b"k%d" % n, b"v", START_MS, None) for n in range(4)])
    check, path = verifier(spark, broker, topic), str(tmp_path / "table")
    check._read(topic, {0: 0}, {0: 4}).select("key", "value", "partition", "offset").write.parquet(
        path
    )
    later: Rows = [(0, b"k1", b"new", START_MS, None), (0, b"k2", None, START_MS, None)]
    write(broker, topic, later)
    clean(broker, topic, 0)
    result = check.table(path, "parquet", {0: 4}, keyless=False)
    assert result.kinds == {"same": 2, "unverifiable": 2}
    behind = check.table(path, "parquet", {0: 6}, keyless=False)
    assert behind.kinds == {"same": 2, "older_record_served": 1, "deleted_key_served": 1}


def test_a_record_that_a_clean_removed_later_cannot_be_held_against_another_topic(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    copy = f"{topic}-copy"
    make_topic(broker, topic, 1, cleanup_policy="compact")
    make_topic(broker, copy, 1, cleanup_policy="compact")
    rows: Rows = [(0, b"k%d" % n, b"v", START_MS, None) for n in range(4)]
    write(broker, topic, rows)
    write(broker, copy, rows)
    write(broker, topic, [(0, b"k1", b"new", START_MS, None), (0, b"k2", None, START_MS, None)])
    check = verifier(spark, broker, topic)
    assert check.other(copy, {0: 4}).kinds == {"same": 4}
    clean(broker, topic, 0)
    assert check.other(copy, {0: 4}).kinds == {"same": 2, "unverifiable": 2}
    write(broker, copy, [(0, b"k0", b"other", START_MS, None), (0, b"k3", None, START_MS, None)])
    result = check.other(copy, {0: 4})
    assert result.kinds == {"missing_key": 1, "unverifiable": 2, "wrong_value": 1}


def test_without_the_http_api_no_clean_has_passed_the_end_of_the_log(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        make_topic(broker, name, 1)
    write(broker, topic, [(0, b"k0", b"v", START_MS, None), (0, b"k1", b"v", START_MS, None)])
    rows: Rows = [(0, b"k%d" % n, b"v", START_MS, None) for n in range(3)]
    write(broker, copy, rows)
    check = replace(verifier(spark, broker, topic), client=ApiClient("http://127.0.0.1:1"))
    assert check.other(copy, None).kinds == {"same": 2, "extra_key": 1}
    assert check.other(copy, {0: 1}).kinds == {"same": 1, "unverifiable": 2}


def test_a_table_is_checked_again_if_a_clean_passes_it_meanwhile(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_topic(broker, topic, 1, cleanup_policy="compact")
    write(broker, topic, [(0, b"k%d" % n, b"v", START_MS, None) for n in range(2)])
    check, path = verifier(spark, broker, topic), str(tmp_path / "table")
    check._read(topic, {0: 0}, {0: 2}).select("key", "partition", "offset").write.parquet(path)
    write(broker, topic, [(0, b"k1", b"new", START_MS, None)])
    compare = verify.compare

    def cleaned_first(*arguments: Any) -> Any:
        clean(broker, topic, 0)
        return compare(*arguments)

    monkeypatch.setattr(verify, "compare", cleaned_first)
    result = check.table(path, "parquet", {0: 2}, keyless=False)
    assert result.kinds == {"same": 1, "unverifiable": 1}


def test_without_the_http_api_a_clean_may_pass_a_log_that_grows_during_the_check(
    spark: "SparkSession", broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        make_topic(broker, name, 1, cleanup_policy="compact")
        write(broker, name, [(0, b"k%d" % n, b"v", START_MS, None) for n in range(2)])
    compare = verify.compare

    def cleaned_first(*arguments: Any) -> Any:
        write(broker, topic, [(0, b"k1", b"new", START_MS, None)])
        clean(broker, topic, 0)
        return compare(*arguments)

    monkeypatch.setattr(verify, "compare", cleaned_first)
    check = replace(verifier(spark, broker, topic), client=ApiClient("http://127.0.0.1:1"))
    assert check.other(copy, None).kinds == {"same": 1, "unverifiable": 1}


def test_nothing_to_compare_is_right_and_says_so(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 2, **VIEW)
    check = verifier(spark, broker, topic)
    result = check.view()
    assert (result.faults, len(result.notes)) == (0, 1)
    write(broker, topic, [(0, b"k", None, START_MS, None), (0, None, b"v", START_MS, None)])
    compact_view(broker, topic, 0)
    assert check.view().kinds == {"same": 2}
