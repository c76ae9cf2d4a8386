"""`varve pipeline verify`: is a compacted topic, view or table what it has to be?

Rules
- The check shares nothing with the cleaner: records are decoded and read into Spark, the rest is
  plain Spark SQL (rules.py), and a look at the order of batches (batches.py).
- A view is looked at up to its horizon, behind which it is the log itself; a compacted topic up to
  where the cleaner says it is clean; another topic as far as it is decided; a table as it goes.
- All bounds are fixed before anything is read, and looked at again behind it: where the log or the
  view went on meanwhile, in a way that matters, it begins anew, and after some tries gives up.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from admin.client import ApiClient, ApiRefusedError, partition_path
from config import exit_codes
from config.topic_names import RESERVED_SUFFIX, view_name
from pipeline.client.kafka_client import EARLIEST
from pipeline.client.topics import (
    Bounds,
    TopicBounds,
    cluster_errors,
    fetch_bounds,
    fetch_settings,
    reach_topic,
    read_offsets,
    read_topic,
    with_bootstrap,
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
from pipeline.tables.table_reading import FORMATS, read_reach, read_table
from pipeline.verification.batches import BatchFault, BatchWalk, walk_all
from pipeline.verification.rules import (
    COLUMNS,
    COMPARED,
    SOUND,
    Rule,
    classified,
    select_faults,
    select_faults_alone,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEWS: Final = "/api/v1/view"
TRIES: Final = 3  # of a comparison during which the view was made anew, or retention went on
EXAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class Example:
    """One fault. Offsets are None where there is no such record."""

    found: str
    partition: int
    key: bytes | None
    wanted_offset: int | None
    served_offset: int | None


@dataclass(slots=True)
class Counts:
    """Of one partition."""

    first_offset: int = 0
    end_offset: int = 0
    originals: int = 0  # records of the original
    copies: int = 0  # records of what is checked
    keys: int = 0  # and records without a key
    found: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class VerifyResult:
    """What was compared, and what was found. `mode`: view, topic, table, or alone."""

    topic: str
    against: str
    mode: str
    partitions: dict[int, Counts]
    examples: list[Example] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, int]:
        """All that was found, by kind."""
        total: Counter[str] = Counter()
        for counts in self.partitions.values():
            total.update(counts.found)
        return dict(sorted(total.items()))

    @property
    def faults(self) -> int:
        """How many there are."""
        return sum(count for kind, count in self.kinds.items() if kind not in SOUND)

    @property
    def exit_code(self) -> int:
        """See pipeline/exit_codes.py."""
        return exit_codes.UNVERIFIED if self.faults else exit_codes.DONE


def compare(
    original: "DataFrame", served: "DataFrame", rule: Rule, bounds: TopicBounds, examples: int
) -> tuple[dict[int, Counts], list[Example]]:
    """Compare two sets of records: counts by partition, and the first faults.

    `original` and `served` have some of verify_rules.COLUMNS; what one lacks is not to be compared.
    """
    from pyspark.sql import functions as f

    counts = {n: Counts(bounds.first[n], end) for n, end in bounds.end.items()}
    rows = classified(original, served, rule)
    totals = rows.groupBy("partition", "found").agg(
        f.count(f.lit(1)).alias("keys"),
        f.sum("originals").alias("originals"),
        f.sum("copies").alias("copies"),
    )
    for row in totals.collect():
        count = counts.setdefault(row.partition, Counts())
        count.originals += row.originals
        count.copies += row.copies
        count.keys += row["keys"]
        if row.found in SOUND:
            count.found[row.found] += row["keys"]
        else:
            count.found["?"] = 1
    if not any("?" in counts.found for counts in counts.values()):
        return counts, []
    faults = select_faults(rows).persist()  # a second look at the records, where there is a reason
    try:
        return _with_faults(counts, faults, examples)
    finally:
        faults.unpersist()


def _with_faults(
    counts: dict[int, Counts], faults: "DataFrame", examples: int
) -> tuple[dict[int, Counts], list[Example]]:
    for count in counts.values():
        count.found.pop("?", None)
    for row in faults.groupBy("partition", "found").count().collect():
        counts.setdefault(row.partition, Counts()).found[row.found] += row["count"]
    first = faults.orderBy("partition", "wanted_offset", "served_offset", "found").limit(examples)
    return counts, [_example(row) for row in first.collect()]


def _example(row: Any) -> Example:
    key = None if row.key is None else bytes(row.key)
    return Example(row.found, row.partition, key, row.wanted_offset, row.served_offset)


def add_batch_faults(result: VerifyResult, faults: Sequence[BatchFault], examples: int) -> None:
    """Take over what the look at batches has found."""
    for fault in faults:
        result.partitions.setdefault(fault.partition, Counts()).found[fault.found] += 1
        if len(result.examples) < examples:
            result.examples.append(
                Example(
                    fault.found,
                    fault.partition,
                    fault.key,
                    fault.wanted_offset,
                    fault.served_offset,
                )
            )


@dataclass(frozen=True, slots=True)
class Verifier:
    """Where to look."""

    spark: "SparkSession"
    client: ApiClient
    bootstrap: str
    topic: str
    partitions: Sequence[int] | None = None
    examples: int = EXAMPLES

    def _bounds(self, topic: str) -> TopicBounds:
        return fetch_bounds(self.bootstrap, topic, partitions=self.partitions)

    def _read(self, topic: str, first: Bounds, end: Bounds) -> "DataFrame":
        return read_topic(self.spark, self.bootstrap, topic, first, end, columns=COLUMNS)

    # A view against its topic ---------------------------------------------------------------

    def view(self) -> VerifyResult:
        """The view of the topic, up to its horizon. Raises JobError, ApiRefusedError."""
        settings = fetch_settings(self.bootstrap, self.topic)
        for _ in range(TRIES):
            bounds = self._bounds(self.topic)  # first: it refuses partitions that are not there
            views = self._views()
            result = self._view(views, bounds, settings)
            if self._views() == views and self._bounds(self.topic).first == bounds.first:
                return result
        raise JobError(
            f"the view of {self.topic}, or the start of its log, changed whenever it was read",
            exit_codes.STALE,
        )

    def _views(self) -> dict[int, tuple[int, str, str, str, int]]:
        """What matters of the view of each partition: horizon, rule, time."""
        result = {}
        for row in self.client.below(VIEWS).get("", topic=self.topic)["views"]:
            if self.partitions is not None and row["partition"] not in self.partitions:
                continue
            if not row["is_usable"]:
                reason = f"{self.topic}-{row['partition']}: the view is unusable: {row['error']}"
                raise JobError(reason, exit_codes.UNVERIFIED)
            result[row["partition"]] = (
                row["horizon"], row["strategy"], row["version_header"], row["null_key"],
                row["made_ms"],
            )  # fmt: skip
        if not result:
            raise JobError(f"topic {self.topic} has no view", exit_codes.USAGE)
        return result

    def _view(
        self,
        views: dict[int, tuple[int, str, str, str, int]],
        bounds: TopicBounds,
        settings: dict[str, str],
    ) -> VerifyResult:
        result = VerifyResult(self.topic, view_name(self.topic), "view", {})
        kept_ms = int(settings.get("delete.retention.ms", "0"))
        for rule_of, numbers in _by_rule(views).items():
            strategy, header, null_key = rule_of
            made_ms = [made for n in numbers if (made := views[n][4]) >= 0]
            rule = Rule(
                strategy=strategy,
                version_header=header,
                keeps_keyless=null_key == "keep",
                starts={n: bounds.first[n] for n in numbers},
                is_whole="compact" not in settings.get("cleanup.policy", ""),
                forget_before_ms=max(made_ms) - kept_ms if made_ms else None,
            )
            end = {n: max(views[n][0], bounds.first[n]) for n in numbers}
            served_end = {n: views[n][0] for n in numbers}
            original = self._read(self.topic, bounds.first, end)
            served = self._read(view_name(self.topic), dict.fromkeys(numbers, EARLIEST), served_end)
            topic_bounds = TopicBounds({n: bounds.first[n] for n in numbers}, served_end)
            counts, examples = compare(original, served, rule, topic_bounds, self.examples)
            result.partitions |= counts
            result.examples += examples[: self.examples - len(result.examples)]
        walks = [
            BatchWalk(view_name(self.topic), n, 0, view[0]) for n, view in views.items() if view[0]
        ]
        add_batch_faults(result, walk_all(self.spark, self.bootstrap, walks), self.examples)
        if unmade := [n for n, item in sorted(views.items()) if item[0] == 0]:
            result.notes.append(f"nothing was compacted yet of partitions {_listed(unmade)}")
        for n, begin in bounds.first.items():
            if begin > 0:
                result.notes.append(
                    f"the log of partition {n} begins at {begin}: what lies below is served, and"
                    " nothing is left to hold it against"
                )
        return result

    # Two topics, or a table -----------------------------------------------------------------

    def other(self, against: str, as_of: Bounds | None) -> VerifyResult:
        """Another topic with the same partitions: keys and what they stand for.

        Offsets are its own, so these, times and records without a key are not compared.
        """
        bounds, others = self._bounds(self.topic), self._bounds(against)
        ends = _until(bounds, as_of)
        rule = Rule(is_table=False, compares=frozenset(("headers",)))
        original = self._read(self.topic, bounds.first, ends.end)
        served = self._read(against, others.first, others.end)
        counts, examples = compare(original, served, rule, ends, self.examples)
        notes = ["offsets, times and records without a key were not compared: they are its own"]
        return VerifyResult(self.topic, against, "topic", counts, examples, notes)

    def table(
        self, path: str, table_format: str, as_of: Bounds | None, *, keyless: bool
    ) -> VerifyResult:
        """A table with some of the columns of a topic's records: its latest ones by key."""
        from pyspark.sql import functions as f

        served = read_table(self.spark, path, table_format)
        for name in ("key", "partition", "offset"):
            if name not in served.columns:
                raise JobError(f"{path} has no column {name}", exit_codes.USAGE)
        notes = []
        kinds = dict(served.dtypes)
        if kinds.get("value") not in ("binary", "string"):
            served = served.drop("value")
            notes.append("values were not compared: they are not in the table as they were")
        if kinds["key"] not in ("binary", "string"):
            raise JobError(f"keys in {path} are not as they were: {kinds['key']}", exit_codes.USAGE)
        present = [name for name in COLUMNS if name in served.columns]
        served = served.select(*present)
        if self.partitions is not None:
            served = served.where(served["partition"].isin(list(self.partitions)))
        bounds = self._bounds(self.topic)
        if as_of is None:
            as_of = read_reach(path, table_format, self.topic, list(bounds.end))
            if not as_of:
                as_of = dict.fromkeys(bounds.end, 0) | _reach(served)
                notes.append("as far as the table's last record goes: --as-of says otherwise")
        ends = _until(bounds, as_of)
        rule = Rule(
            keeps_keyless=keyless,
            compares=frozenset(_compared(present)),
            starts=bounds.first,
        )
        original = self._read(self.topic, bounds.first, ends.end)
        if "value" not in present:  # which records are deletes is to be known all the same
            original = original.withColumn("value", f.when(f.col("value").isNotNull(), f.lit(b"")))
        original = original.select(*dict.fromkeys((*present, "value")))
        counts, examples = compare(original, served, rule, ends, self.examples)
        return VerifyResult(self.topic, path, "table", counts, examples, notes)

    # A compacted topic alone ----------------------------------------------------------------

    def alone(self) -> VerifyResult:
        """A compacted topic, as far as it was cleaned."""
        for _ in range(TRIES):
            before = self._bounds(self.topic)
            cleaned = self._cleaned(before)
            result = self._alone(cleaned, before)
            if self._bounds(self.topic).first == before.first:
                return result
        raise JobError(f"the start of {self.topic} moved whenever it was read", exit_codes.STALE)

    def _cleaned(self, bounds: TopicBounds) -> dict[int, dict[str, Any]]:
        result = {}
        for n in bounds.end:
            row = self.client.get(partition_path(self.topic, n))
            if "compact" not in row["cleanup_policy"]:
                policy = ",".join(row["cleanup_policy"]) or "empty"
                reason = f"{self.topic} has neither a view nor is it compacted: its policy is"
                raise JobError(f"{reason} {policy}", exit_codes.USAGE)
            result[n] = row
        return result

    def _alone(self, cleaned: dict[int, dict[str, Any]], bounds: TopicBounds) -> VerifyResult:
        from pyspark.sql import functions as f

        ends = {n: int(row.get("first_dirty_offset") or 0) for n, row in cleaned.items()}
        ends = {n: max(min(end, bounds.end[n]), bounds.first[n]) for n, end in ends.items()}
        records = read_topic(
            self.spark, self.bootstrap, self.topic, bounds.first, ends,
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
        add_batch_faults(result, walk_all(self.spark, self.bootstrap, walks), self.examples)
        result.notes += list(_notes(cleaned, ends, bounds))
        return result


def _by_rule(
    views: dict[int, tuple[int, str, str, str, int]],
) -> dict[tuple[str, str, str], list[int]]:
    """Partitions whose ledgers were made by the same rule are compared together."""
    results: dict[tuple[str, str, str], list[int]] = {}
    for n, (_, strategy, header, null_key, _) in sorted(views.items()):
        results.setdefault((strategy, header, null_key), []).append(n)
    return results


def _until(bounds: TopicBounds, as_of: Bounds | None) -> TopicBounds:
    if as_of is None:
        return bounds
    beyond = [n for n, end in as_of.items() if end > bounds.end.get(n, 0)]
    if beyond:
        n = beyond[0]
        raise JobError(f"partition {n} is decided up to {bounds.end.get(n, 0)}, not {as_of[n]}")
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
    """Which delete horizons were over when the last clean went over all that is looked at."""
    job = row.get("last_job")
    if not job or job["outcome"] != "finished" or job["next_dirty_offset"] < end:
        return -1
    return int(job["started_ms"])


def _notes(cleaned: dict[int, dict[str, Any]], ends: Bounds, bounds: TopicBounds) -> Iterator[str]:
    if unclean := [n for n, end in sorted(ends.items()) if end <= bounds.first[n]]:
        yield f"nothing was cleaned yet of partitions {_listed(unclean)}"
    for n, row in sorted(cleaned.items()):
        job = row.get("last_job")
        if job and job["damaged_segments"]:
            yield f"partition {n} has damaged segments, which the cleaner leaves as they are"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def answer(result: VerifyResult) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "topic": result.topic,
        "against": result.against,
        "mode": result.mode,
        "same": result.faults == 0,
        "faults": result.faults,
        "kinds": result.kinds,
        "partitions": [
            {"partition": n, **asdict(counts), "found": dict(counts.found)}
            for n, counts in sorted(result.partitions.items())
        ],
        "examples": [
            {"found": example.found, "partition": example.partition, **key_json(example.key),
             "wanted_offset": example.wanted_offset, "served_offset": example.served_offset}
            for example in result.examples
        ],
        "notes": result.notes,
    }  # fmt: skip


def lines(result: VerifyResult) -> list[str]:
    """A result for people."""
    match = []
    for n, counts in sorted(result.partitions.items()):
        bad = sum(count for kind, count in counts.found.items() if kind not in SOUND)
        message = "all as it has to be" if not bad else f"{bad:,} faults"
        subject = f"{counts.keys:,} keys, {counts.originals:,} records, {counts.copies:,} served"
        match.append(f"{result.topic}-{n} up to offset {counts.end_offset}: {message} ({subject})")
    for kind, count in result.kinds.items():
        if kind != "same":
            match.append(f"  {kind.replace('_', ' ')}: {count:,}")
    for fault in result.examples:
        requested, served = _or_none(fault.wanted_offset), _or_none(fault.served_offset)
        subject = f"{key_text(fault.key)}: {fault.found.replace('_', ' ')}"
        offsets = f"wanted offset {requested}, served {served}"
        match.append(f"  {result.topic}-{fault.partition} {subject}, {offsets}")
    verdict = "is not what it has to be" if result.faults else "is what it has to be"
    return [*match, *(f"note: {note}" for note in result.notes), f"{result.against} {verdict}"]


def _or_none(offset: int | None) -> str:
    return "none" if offset is None else str(offset)


@click.command("verify", short_help="Check a compacted topic, view or table.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@click.option("--against", metavar="VIEW|TOPIC", help="What to check; TOPIC's view if it has one.")
@click.option("--table", metavar="PATH", help="Check a table that was made of the topic instead.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), default="parquet",
              show_default=True, help="Of the table.")  # fmt: skip
@click.option("--null-keys", type=click.Choice(["keep", "drop"]), default="drop",
              show_default=True, help="Whether the table has records without a key.")  # fmt: skip
@click.option("--as-of", metavar="JSON|@FILE", help='End offsets of TOPIC, such as {"0": 12}.')
@with_partitions
@click.option("--examples", type=click.IntRange(0, 10_000), default=EXAMPLES, show_default=True,
              help="Faults to name.")  # fmt: skip
@with_spark_options
@with_broker
@with_bootstrap
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
    bootstrap: str,
    as_json: bool,
) -> None:
    """Check that what is compacted is the latest of what it was compacted from.

    Exit code 4 if it is not. TOPIC alone: its view is checked if it has one, else TOPIC itself as
    far as the cleaner has cleaned it.
    """
    if table is not None and against is not None:
        raise click.UsageError("--table and --against are two different things")
    if table is None and against is None and topic.endswith(RESERVED_SUFFIX):
        base = topic.removesuffix(RESERVED_SUFFIX)
        raise click.UsageError(f"say `verify {base}`: that is what the view is compared with")
    there = reach_topic(bootstrap, topic)
    mode = "table" if table is not None else _mode(client, topic, against)
    if as_of is not None and mode in ("view", "alone"):
        raise click.UsageError("--as-of is for tables and other topics: a view has one state only")
    ends = None if as_of is None else read_offsets(as_of, there)
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve verify", reporter) as spark,
    ):
        reporter.note("reading and comparing")
        verifier = Verifier(spark, client, bootstrap, topic, partitions, examples)
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
    show(answer(result), as_json, lambda _: lines(result))
    if result.exit_code != exit_codes.DONE:
        raise SystemExit(result.exit_code)


def _mode(client: ApiClient, topic: str, against: str | None) -> str:
    """What is to be checked: view, topic or alone."""
    if against == topic:
        return "alone"
    if against is not None:
        return "view" if against == view_name(topic) else "topic"
    try:
        return "view" if client.below(VIEWS).get("", topic=topic)["views"] else "alone"
    except ApiRefusedError as error:
        if error.status != 404:
            raise
        raise JobError(f"there is no topic {topic}") from error
