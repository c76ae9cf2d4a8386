"""`varve pipeline verify`: check a compacted topic, a view or a table against its source.

Rules
- The check shares no code with the cleaner: Spark reads decoded records, plain Spark SQL compares
  them (rules.py), and the order of batches is checked apart (batches.py).
- A view is checked up to its horizon (beyond it consumers read the log), a compacted topic up to
  the first dirty offset, another topic up to its last stable offset, a table up to its end offsets.
- Bounds are fixed before reading and compared afterwards. If the log or the view changed in a way
  that matters, the check starts again, TRIES times in all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from admin.client import ApiClient, ApiRefusedError, UnreachableError, partition_path
from admin.command import TOPICS_HINT
from config import exit_codes
from config.security.clients import Cluster
from config.topics.names import RESERVED_SUFFIX, view_name
from config.units import counted
from pipeline.client.kafka_client import EARLIEST
from pipeline.client.topics import (
    Bounds,
    TopicBounds,
    cluster_errors,
    fetch_bounds,
    fetch_settings,
    fetch_topic_id,
    reach_topic,
    read_offsets,
    read_topic,
    with_cluster,
)
from pipeline.command import (
    SparkOptions,
    exit_on_error,
    json_option,
    show,
    with_broker,
    with_partitions,
    with_spark_options,
)
from pipeline.errors import JobError
from pipeline.progress import progress_bars
from pipeline.records.key_text import key_json, key_text
from pipeline.tables.state import fetch_cleaned_end_offset
from pipeline.tables.table_reading import FORMATS, find_version, read_reach, read_table
from pipeline.verification.batches import BatchFault, BatchWalk, walk_all
from pipeline.verification.rules import (
    COLUMNS,
    COMPARED,
    SOUND,
    TOPIC_COLUMNS,
    Rule,
    classified,
    select_faults,
    select_faults_alone,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEWS: Final = "/api/v1/view"
TRIES: Final = 3  # comparisons, if the view or the log start changes meanwhile
EXAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class Example:
    """One fault. An offset is None if there is no such record."""

    kind: str
    partition: int
    key: bytes | None
    expected_offset: int | None
    served_offset: int | None


class ViewVersion(NamedTuple):
    """The parts of a view's status that the check depends on."""

    horizon: int
    strategy: str
    version_header: str
    null_key: str
    made_ms: int


@dataclass(slots=True)
class Counts:
    """The counts of one partition."""

    first_offset: int = 0
    end_offset: int = 0
    originals: int = 0  # records of the source
    copies: int = 0  # records of the checked side
    keys: int = 0  # distinct keys, plus records without a key
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class VerifyResult:
    """The result of a check. `mode` is view, topic, table or alone."""

    topic: str
    against: str
    mode: str
    partitions: dict[int, Counts]
    examples: list[Example] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, int]:
        """Keys by kind of result, over all partitions."""
        total: Counter[str] = Counter()
        for counts in self.partitions.values():
            total.update(counts.kinds)
        return dict(sorted(total.items()))

    @property
    def faults(self) -> int:
        """Return the number of faults."""
        return sum(count for kind, count in self.kinds.items() if kind not in SOUND)

    @property
    def exit_code(self) -> int:
        """See config/exit_codes.py."""
        return exit_codes.UNVERIFIED if self.faults else exit_codes.DONE


def compare(
    original: "DataFrame", served: "DataFrame", rule: Rule, bounds: TopicBounds, examples: int
) -> tuple[dict[int, Counts], list[Example]]:
    """Compare two sets of records; return counts by partition and the first faults.

    Both sides have some of rules.COLUMNS, or TOPIC_COLUMNS; a column that one side lacks is not
    compared.
    """
    from pyspark.sql import functions as f

    counts = {n: Counts(bounds.first[n], end) for n, end in bounds.end.items()}
    rows = classified(original, served, rule)
    totals = rows.groupBy("partition", "kind").agg(
        f.count(f.lit(1)).alias("keys"),
        f.sum("originals").alias("originals"),
        f.sum("copies").alias("copies"),
    )
    for row in totals.collect():
        count = counts.setdefault(row.partition, Counts())
        count.originals += row.originals
        count.copies += row.copies
        count.keys += row["keys"]
        if row.kind in SOUND:
            count.kinds[row.kind] += row["keys"]
        else:
            count.kinds["?"] = 1
    if not any("?" in counts.kinds for counts in counts.values()):
        return counts, []
    faults = select_faults(rows).persist()  # read again only if there are faults
    try:
        return _with_faults(counts, faults, examples)
    finally:
        faults.unpersist()


def _with_faults(
    counts: dict[int, Counts], faults: "DataFrame", examples: int
) -> tuple[dict[int, Counts], list[Example]]:
    for count in counts.values():
        count.kinds.pop("?", None)
    for row in faults.groupBy("partition", "kind").count().collect():
        counts.setdefault(row.partition, Counts()).kinds[row.kind] += row["count"]
    first = faults.orderBy("partition", "expected_offset", "served_offset", "kind").limit(examples)
    return counts, [_example(row) for row in first.collect()]


def _example(row: Any) -> Example:
    key = None if row.key is None else bytes(row.key)
    return Example(row.kind, row.partition, key, row.expected_offset, row.served_offset)


def add_batch_faults(result: VerifyResult, faults: Sequence[BatchFault], examples: int) -> None:
    """Add the faults of the batch check to the result."""
    for fault in faults:
        result.partitions.setdefault(fault.partition, Counts()).kinds[fault.kind] += 1
        if len(result.examples) < examples:
            result.examples.append(
                Example(
                    fault.kind,
                    fault.partition,
                    fault.key,
                    fault.expected_offset,
                    fault.served_offset,
                )
            )


@dataclass(frozen=True, slots=True)
class Verifier:
    """Checks one topic of one broker."""

    spark: "SparkSession"
    client: ApiClient
    cluster: Cluster
    topic: str
    partitions: Sequence[int] | None = None
    examples: int = EXAMPLES

    def _bounds(self, topic: str) -> TopicBounds:
        return fetch_bounds(self.cluster, topic, partitions=self.partitions)

    def _read(self, topic: str, first: Bounds, end: Bounds) -> "DataFrame":
        return read_topic(self.spark, self.cluster, topic, first, end, columns=TOPIC_COLUMNS)

    # A view against its topic ---------------------------------------------------------------

    def view(self) -> VerifyResult:
        """Check the view of the topic up to its horizon. Raises JobError, ApiRefusedError."""
        settings = fetch_settings(self.cluster, self.topic)
        for _ in range(TRIES):
            bounds = self._bounds(self.topic)  # first: raises for unknown partitions
            views = self._views()
            result = self._view(views, bounds, settings)
            if self._views() == views and self._bounds(self.topic).first == bounds.first:
                return result
        raise JobError(
            f"the view of {self.topic} or its log start offset changed during each of"
            f" {TRIES} checks; try again",
            exit_codes.STALE,
        )

    def _views(self) -> dict[int, ViewVersion]:
        """Return the state of the view of each partition."""
        result = {}
        for row in self.client.below(VIEWS).get("", topic=self.topic)["views"]:
            if self.partitions is not None and row["partition"] not in self.partitions:
                continue
            if not row["is_usable"]:
                reason = f"{self.topic}-{row['partition']}: the view is unusable: {row['error']}"
                raise JobError(reason, exit_codes.UNVERIFIED)
            result[row["partition"]] = ViewVersion(*(row[name] for name in ViewVersion._fields))
        if not result:
            raise JobError(f"topic {self.topic} has no view", exit_codes.USAGE)
        return result

    def _view(
        self,
        views: dict[int, ViewVersion],
        bounds: TopicBounds,
        settings: dict[str, str],
    ) -> VerifyResult:
        result = VerifyResult(self.topic, view_name(self.topic), "view", {})
        kept_ms = int(settings.get("delete.retention.ms", "0"))
        for rule_of, numbers in _by_rule(views).items():
            strategy, header, null_key = rule_of
            made_ms = [made for n in numbers if (made := views[n].made_ms) >= 0]
            rule = Rule(
                strategy=strategy,
                version_header=header,
                keeps_keyless=null_key == "keep",
                starts={n: bounds.first[n] for n in numbers},
                is_whole="compact" not in settings.get("cleanup.policy", "")
                and all(self._is_uncleaned(n, bounds.first[n]) for n in numbers),
                forget_before_ms=max(made_ms) - kept_ms if made_ms else None,
            )
            end = {n: max(views[n].horizon, bounds.first[n]) for n in numbers}
            served_end = {n: views[n].horizon for n in numbers}
            original = self._read(self.topic, bounds.first, end)
            served = self._read(view_name(self.topic), dict.fromkeys(numbers, EARLIEST), served_end)
            topic_bounds = TopicBounds({n: bounds.first[n] for n in numbers}, served_end)
            counts, examples = compare(original, served, rule, topic_bounds, self.examples)
            result.partitions |= counts
            result.examples += examples[: self.examples - len(result.examples)]
        walks = [
            BatchWalk(view_name(self.topic), n, 0, view.horizon)
            for n, view in views.items()
            if view.horizon
        ]
        add_batch_faults(result, walk_all(self.spark, self.cluster, walks), self.examples)
        if empty := [n for n, view in sorted(views.items()) if view.horizon == 0]:
            result.notes.append(f"the view is still empty in partitions {_listed(empty)}")
        for n, begin in bounds.first.items():
            if begin > 0:
                result.notes.append(
                    f"the log of partition {n} starts at offset {begin}: records of the view below"
                    " it cannot be verified"
                )
        return result

    def _is_uncleaned(self, partition: int, first_offset: int) -> bool:
        """Return whether no clean has reached the records from an offset on, under any policy."""
        cleaned = fetch_cleaned_end_offset(self.client, self.topic, partition)
        return cleaned is not None and cleaned <= first_offset

    # Two topics, or a table -----------------------------------------------------------------

    def other(self, against: str, as_of: Bounds | None) -> VerifyResult:
        """Check another topic with the same partitions by the latest value of each key.

        Offsets, timestamps and records without a key differ by nature and are not compared. Raises
        JobError.
        """
        bounds, others = self._bounds(self.topic), self._bounds(against)
        ends = _until(bounds, as_of)
        rule = Rule(is_table=False, compares=frozenset(("headers",)))
        original = self._read(self.topic, bounds.first, ends.end)
        served = self._read(against, others.first, others.end)
        counts, examples = self._compare_below(original, served, rule, ends)
        notes = ["offsets, timestamps and records without a key were not compared"]
        return VerifyResult(self.topic, against, "topic", counts, examples, notes)

    def table(
        self, path: str, table_format: str, as_of: Bounds | None, *, keyless: bool
    ) -> VerifyResult:
        """Check that a table has the latest record of each key, by its columns."""
        from pyspark.sql import functions as f

        # Before the bounds: a job may merge later records into the table at any time.
        version = find_version(path, table_format)
        served = read_table(self.spark, path, table_format, version)
        for name in ("key", "partition", "offset"):
            if name not in served.columns:
                raise JobError(f"{path} has no column {name}", exit_codes.USAGE)
        notes = []
        kinds = dict(served.dtypes)
        if kinds.get("value") not in ("binary", "string"):
            served = served.drop("value")
            notes.append(
                "values were not compared: the table holds another type than bytes or text"
            )
        if kinds["key"] not in ("binary", "string"):
            raise JobError(
                f"the key column of {path} has type {kinds['key']}; it must be binary or string",
                exit_codes.USAGE,
            )
        present = [name for name in COLUMNS if name in served.columns]
        served = served.select(*present)
        if self.partitions is not None:
            served = served.where(served["partition"].isin(list(self.partitions)))
        bounds = self._bounds(self.topic)
        if as_of is None:
            as_of = read_reach(path, table_format, self.topic, list(bounds.end), version)
            if not as_of:
                as_of = dict.fromkeys(bounds.end, 0) | _reach(served)
                notes.append(
                    "checked up to the last record of the table; --as-of-offsets sets other offsets"
                )
        ends = _until(bounds, as_of)
        original = self._read(self.topic, bounds.first, ends.end)
        if "value" not in present:  # keeps which records are tombstones
            original = original.withColumn("value", f.when(f.col("value").isNotNull(), f.lit(b"")))
        original = original.select(*dict.fromkeys((*present, "value")))
        rule = Rule(
            keeps_keyless=keyless, compares=frozenset(_compared(present)), starts=bounds.first
        )
        counts, examples = self._compare_below(original, served, rule, ends)
        return VerifyResult(self.topic, path, "table", counts, examples, notes)

    def _compare_below(
        self,
        original: "DataFrame",
        served: "DataFrame",
        rule: Rule,
        ends: TopicBounds,
    ) -> tuple[dict[int, Counts], list[Example]]:
        """Compare below `ends`; again if a clean passes them meanwhile. Raises JobError (STALE)."""
        for _ in range(TRIES):
            passed = replace(rule, cleaned_beyond=self._cleaned_beyond(ends.end))
            result = compare(original, served, passed, ends, self.examples)
            if self._cleaned_beyond(ends.end) == passed.cleaned_beyond:
                return result
        raise JobError(
            f"{self.topic} was cleaned beyond the compared offsets during each of {TRIES} checks;"
            " try again",
            exit_codes.STALE,
        )

    def _cleaned_beyond(self, ends: Bounds) -> Bounds:
        """Return the ends of those partitions that a clean has passed, or may have passed."""
        try:
            return {n: end for n, end in ends.items() if not self._is_uncleaned(n, end)}
        except (ApiRefusedError, UnreachableError):  # no other answer of the API is needed
            log_ends = self._bounds(self.topic).end
            return {n: end for n, end in ends.items() if end < log_ends.get(n, end)}

    # A compacted topic alone ----------------------------------------------------------------

    def alone(self) -> VerifyResult:
        """Check a compacted topic below its first dirty offset."""
        for _ in range(TRIES):
            before = self._bounds(self.topic)
            cleaned = self._cleaned(before)
            result = self._alone(cleaned, before)
            if self._bounds(self.topic).first == before.first:
                return result
        raise JobError(
            f"the log start offset of {self.topic} changed during each of {TRIES} checks;"
            " try again",
            exit_codes.STALE,
        )

    def _cleaned(self, bounds: TopicBounds) -> dict[int, dict[str, Any]]:
        result = {}
        for n in bounds.end:
            row = self.client.get(partition_path(self.topic, n))
            if "compact" not in row["cleanup_policy"]:
                policy = ",".join(row["cleanup_policy"]) or "empty"
                raise JobError(
                    f"{self.topic} has no view and is not compacted (cleanup.policy is {policy})",
                    exit_codes.USAGE,
                )
            result[n] = row
        return result

    def _alone(self, cleaned: dict[int, dict[str, Any]], bounds: TopicBounds) -> VerifyResult:
        from pyspark.sql import functions as f

        ends = {n: int(row.get("first_dirty_offset") or 0) for n, row in cleaned.items()}
        ends = {n: max(min(end, bounds.end[n]), bounds.first[n]) for n, end in ends.items()}
        records = read_topic(
            self.spark, self.cluster, self.topic, bounds.first, ends,
            columns=("key", "partition", "offset"),
        )  # fmt: skip
        counts = {n: Counts(bounds.first[n], end) for n, end in ends.items()}
        for row in records.groupBy("partition").agg(
            f.count(f.lit(1)).alias("rows"), f.count_distinct("key").alias("distinct")
        ).collect():  # fmt: skip
            item = counts[row.partition]
            item.originals = item.copies = row.rows
            item.keys = row.distinct
        faults = select_faults_alone(records).persist()
        try:
            counts, examples = _with_faults(counts, faults, self.examples)
        finally:
            faults.unpersist()
        result = VerifyResult(self.topic, self.topic, "alone", counts, examples)
        walks = [
            BatchWalk(self.topic, n, bounds.first[n], end, _expired_before(cleaned[n], end))
            for n, end in ends.items()
            if end > bounds.first[n]
        ]
        add_batch_faults(result, walk_all(self.spark, self.cluster, walks), self.examples)
        result.notes += list(_notes(cleaned, ends, bounds))
        return result


def _by_rule(
    views: dict[int, ViewVersion],
) -> dict[tuple[str, str, str], list[int]]:
    """Group partitions whose ledgers follow the same rule; they are compared together."""
    results: dict[tuple[str, str, str], list[int]] = {}
    for n, view in sorted(views.items()):
        rule = (view.strategy, view.version_header, view.null_key)
        results.setdefault(rule, []).append(n)
    return results


def _until(bounds: TopicBounds, as_of: Bounds | None) -> TopicBounds:
    if as_of is None:
        return bounds
    beyond = [n for n, end in as_of.items() if end > bounds.end.get(n, 0)]
    if beyond:
        n = beyond[0]
        raise JobError(
            f"partition {n}: offset {as_of[n]} is beyond the last stable offset"
            f" {bounds.end.get(n, 0)}"
        )
    end = {n: as_of.get(n, last) for n, last in bounds.end.items()}
    return TopicBounds({n: min(bounds.first[n], last) for n, last in end.items()}, end)


def _compared(columns: Sequence[str]) -> Iterator[str]:
    for name in COMPARED:
        needed = ("timestamp", "timestampType") if name == "timestamp" else (name,)
        if all(item in columns for item in needed):
            yield name


def _reach(table: "DataFrame") -> dict[int, int]:
    from pyspark.sql import functions as f

    rows = table.groupBy("partition").agg(f.max("offset").alias("last")).collect()
    return {row.partition: row["last"] + 1 for row in rows}


def _expired_before(row: dict[str, Any], end: int) -> int:
    """Return the time before which delete horizons had expired at the last full clean."""
    job = row.get("last_job")
    if not job or job["outcome"] != "finished" or job["next_dirty_offset"] < end:
        return -1
    return int(job["started_ms"])


def _notes(cleaned: dict[int, dict[str, Any]], ends: Bounds, bounds: TopicBounds) -> Iterator[str]:
    if unclean := [n for n, end in sorted(ends.items()) if end <= bounds.first[n]]:
        yield f"nothing has been cleaned yet in partitions {_listed(unclean)}"
    for n, row in sorted(cleaned.items()):
        job = row.get("last_job")
        if job and job["damaged_segments"]:
            yield f"partition {n} has damaged segments, which the cleaner copies unchanged"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def answer(result: VerifyResult) -> dict[str, Any]:
    """Return the result as JSON."""
    return {
        "topic": result.topic,
        "against": result.against,
        "mode": result.mode,
        "same": result.faults == 0,
        "faults": result.faults,
        "kinds": result.kinds,
        "partitions": [
            {"partition": n, **asdict(counts), "kinds": dict(counts.kinds)}
            for n, counts in sorted(result.partitions.items())
        ],
        "examples": [
            {"kind": example.kind, "partition": example.partition, **key_json(example.key),
             "expected_offset": example.expected_offset, "served_offset": example.served_offset}
            for example in result.examples
        ],
        "notes": result.notes,
    }  # fmt: skip


def lines(result: VerifyResult) -> list[str]:
    """Return the result as lines of text."""
    texts = []
    for n, counts in sorted(result.partitions.items()):
        bad = sum(count for kind, count in counts.kinds.items() if kind not in SOUND)
        message = counted(bad, "fault") if bad else "correct"
        subject = (
            f"{counted(counts.keys, 'key')}, {counted(counts.originals, 'source record')}, "
            f"{counts.copies:,} served"
        )
        texts.append(f"{result.topic}-{n} below offset {counts.end_offset}: {message} ({subject})")
    for kind, count in result.kinds.items():
        if kind != "same":
            texts.append(f"  {kind.replace('_', ' ')}: {count:,}")
    for fault in result.examples:
        expected, served = _or_none(fault.expected_offset), _or_none(fault.served_offset)
        subject = f"{key_text(fault.key)}: {fault.kind.replace('_', ' ')}"
        offsets = f"expected offset {expected}, served {served}"
        texts.append(f"  {result.topic}-{fault.partition} {subject}, {offsets}")
    verdict = "is not correct" if result.faults else "is correct"
    return [*texts, *(f"note: {note}" for note in result.notes), f"{result.against} {verdict}"]


def _or_none(offset: int | None) -> str:
    return "none" if offset is None else str(offset)


@click.command("verify", short_help="Check a compacted topic, view or table.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@click.option(
    "--against",
    metavar="VIEW|TOPIC",
    help="View or topic to check; default: the view of TOPIC, if any.",
)
@click.option("--table", metavar="PATH", help="Check a table that was made from TOPIC.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), default="parquet",
              show_default=True, help="Format of the table.")  # fmt: skip
@click.option("--null-keys", type=click.Choice(["keep", "drop"]), default="drop",
              show_default=True, help="Whether the table keeps records without a key.")  # fmt: skip
@click.option("--as-of-offsets", "as_of", metavar="JSON|@FILE",
              help='Exclusive end offsets by partition, such as {"0": 12}.')  # fmt: skip
@with_partitions
@click.option("--examples", type=click.IntRange(0, 10_000), default=EXAMPLES, show_default=True,
              metavar="N",               help="Number of faults to list.")  # fmt: skip
@with_spark_options
@with_broker
@with_cluster
@json_option
def command(
    *,
    topic: str,
    against: str | None,
    table: str | None,
    table_format: str,
    null_keys: str,
    as_of: str | None,
    partitions: Sequence[int] | None,
    examples: int,
    spark_options: SparkOptions,
    client: ApiClient,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Check that a view, topic or table holds exactly the latest records of TOPIC.

    Without --against and --table, check the view of TOPIC if it has one, otherwise TOPIC itself
    below its first dirty offset. The exit code is 4 if there are faults.
    """
    if table is not None and against is not None:
        raise click.UsageError("give --table or --against, not both")
    if table is None and against is None and topic.endswith(RESERVED_SUFFIX):
        base = topic.removesuffix(RESERVED_SUFFIX)
        raise click.UsageError(f"{topic} is the view of {base}: use `verify {base}`")
    there = reach_topic(cluster, topic)
    mode = "table" if table is not None else _mode(client, topic, against)
    if as_of is not None and mode in ("view", "alone"):
        raise click.UsageError("--as-of-offsets needs --table, or --against with another topic")
    ends = None if as_of is None else read_offsets(as_of, there)
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve verify", reporter) as spark,
    ):
        reporter.note("reading and comparing")
        verifier = Verifier(spark, client, cluster, topic, partitions, examples)
        topics = [topic, str(against)] if mode == "topic" else [topic]
        topic_ids = {name: fetch_topic_id(cluster, name) for name in topics}
        match mode:
            case "view":
                result = verifier.view()
            case "alone":
                result = verifier.alone()
            case "topic":
                result = verifier.other(str(against), ends)
            case _:
                keyless = null_keys == "keep"
                result = verifier.table(str(table), table_format, ends, keyless=keyless)
        for name, topic_id in topic_ids.items():
            if fetch_topic_id(cluster, name) != topic_id:
                raise JobError(
                    f"{name} was deleted and created again during the check; try again",
                    exit_codes.STALE,
                )
    show(answer(result), as_json, lambda _: lines(result))
    if result.exit_code != exit_codes.DONE:
        raise SystemExit(result.exit_code)


def _mode(client: ApiClient, topic: str, against: str | None) -> str:
    """Return what to check: view, topic or alone."""
    if against == topic:
        return "alone"
    if against is not None:
        return "view" if against == view_name(topic) else "topic"
    try:
        return "view" if client.below(VIEWS).get("", topic=topic)["views"] else "alone"
    except ApiRefusedError as error:
        if error.status != 404:
            raise
        raise JobError(f"there is no topic {topic}; {TOPICS_HINT}") from error
