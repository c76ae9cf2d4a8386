"""`varve pipeline erase`: remove all records of some keys from a compacted topic.

Rules
- Keys are erased in the partitions that have their records, in the log (committed or not) or in the
  view. The job appends a tombstone there, with a rank above them if the view's strategy is not
  `offset`.
- The broker compacts as usual, first the view, then the log. The job then reads everything again;
  the receipt states only what this second read shows.
- Records that a producer writes after the first search may stay; the receipt counts those that do.
- The job is idempotent: run it again to continue.
"""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from admin.client import ApiClient
from admin.rangeless_option import RangelessOption
from config import exit_codes
from config.security.clients import Cluster
from config.topics.names import view_name
from config.units import counted
from pipeline.atomic_write import write_atomically
from pipeline.client.kafka_client import Isolation
from pipeline.client.producer import BulkProducer
from pipeline.client.topics import (
    TopicBounds,
    as_job_errors,
    cluster_errors,
    fetch_bounds,
    fetch_settings,
    now_ms,
    reach_topic,
    read_topic,
    with_cluster,
)
from pipeline.command import (
    SparkOptions,
    exit_on_error,
    json_option,
    show,
    with_broker,
    with_spark_options,
)
from pipeline.erasure.cleaning import TombstoneClean, pinned_leases
from pipeline.erasure.files import has_partition, partition_folder, scan_files
from pipeline.erasure.keys import (
    COLUMNS,
    ENCODINGS,
    KeyRecords,
    find_key_records,
    merge_key_records,
    read_keys_from_file,
    read_keys_from_table,
)
from pipeline.erasure.receipt import (
    COMPLETE,
    DRY_RUN,
    PENDING,
    Copy,
    PartitionErased,
    Receipt,
    lines,
    records_text,
)
from pipeline.errors import JobError
from pipeline.progress import ProgressReporter, progress_bars
from pipeline.tables.table_reading import FORMATS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT_SECONDS: Final = 600
FILES_POLL_SECONDS: Final = 1.0
VERSION_BYTES: Final = 8

Offsets = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """The topic settings that erasure depends on."""

    has_view: bool
    strategy: str
    version_header: str
    delete_retention_ms: int
    file_delete_delay_ms: int

    @classmethod
    def of(cls, topic: str, settings: Mapping[str, str]) -> "Rules":
        """Read them from the topic's settings. Raises JobError if it is not compacted."""
        policy = settings.get("cleanup.policy", "")
        if "compact" not in policy.split(","):
            raise JobError(
                f"{topic} is not compacted (cleanup.policy is {policy or 'empty'}): only retention"
                " or DeleteRecords can remove its records",
                exit_codes.USAGE,
            )
        has_view = settings.get("varve.view") == "compacted"
        strategy = settings.get("varve.view.strategy", "offset") if has_view else "offset"
        header = settings.get("varve.view.version.header", "") if strategy == "header" else ""
        return cls(
            has_view=has_view,
            strategy=strategy,
            version_header=header,
            delete_retention_ms=int(settings.get("delete.retention.ms", "0")),
            file_delete_delay_ms=int(settings.get("file.delete.delay.ms", "0")),
        )


class Eraser:
    """Erases keys from one topic."""

    def __init__(
        self,
        spark: "SparkSession",
        client: ApiClient,
        cluster: Cluster,
        topic: str,
        *,
        reporter: ProgressReporter,
        data: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """`data` is the broker's data directory, if this process can read it. Raises JobError."""
        self._spark = spark
        self._client = client
        self._cluster = cluster
        self._topic = topic
        self._reporter = reporter
        self._data = data
        self._timeout_seconds = timeout_seconds
        self._rules = Rules.of(topic, fetch_settings(cluster, topic))

    def run(self, keys: Sequence[bytes], *, dry_run: bool = False) -> Receipt:
        """Erase the keys, or count their records. Raises JobError, UnreachableError."""
        receipt = Receipt(self._topic, keys, DRY_RUN if dry_run else COMPLETE, now_ms())
        with as_job_errors():
            self._reporter.note("searching for the keys")
            bounds = self._bounds()
            if self._data is not None:
                self._check_data(self._data, bounds.end)
            in_log, in_view = self._log(keys, bounds), self._view(keys)
            results = merge_key_records(in_log, in_view)
            self._count_found(receipt, in_log, in_view)
            if not dry_run and keys:
                if self._data is not None:  # fail before anything is written
                    for partition, _ in results:
                        partition_folder(self._data, self._topic, partition)
                try:
                    self._erase(receipt, keys, list(results.values()), bounds.end)
                except KeyboardInterrupt as error:
                    raise JobError(
                        "interrupted; tombstones written so far stay in the topic, and there is no"
                        " receipt. Run the command again with the same keys",
                        exit_codes.INTERRUPTED,
                    ) from error
        receipt.finished_ms = now_ms()
        return receipt

    def _check_data(self, data: str, partitions: Collection[int]) -> None:
        """Check that some partition of the topic is in the data directory. Raises JobError."""
        if not any(has_partition(data, self._topic, n) for n in partitions):
            partition_folder(data, self._topic, min(partitions))

    def _count_found(
        self, receipt: Receipt, in_log: Sequence[KeyRecords], in_view: Sequence[KeyRecords]
    ) -> None:
        present = set()
        for key_records in in_log:
            part = receipt.partitions.setdefault(key_records.partition, PartitionErased())
            part.records_found += key_records.values
            part.tombstones_found += key_records.tombstones
            present.add((key_records.partition, key_records.key))
        for key_records in in_view:
            part = receipt.partitions.setdefault(key_records.partition, PartitionErased())
            part.view_records_found += key_records.values
            present.add((key_records.partition, key_records.key))
        for partition, _ in present:
            receipt.partitions[partition].keys += 1
        receipt.absent = len(receipt.keys) - len({key for _, key in present})

    # Search --------------------------------------------------------------------------------

    def _bounds(self) -> TopicBounds:
        return fetch_bounds(self._cluster, self._topic, isolation=Isolation.READ_UNCOMMITTED)

    def _log(
        self, keys: Sequence[bytes], bounds: TopicBounds, below: Offsets | None = None
    ) -> list[KeyRecords]:
        return self._search(self._topic, bounds.first, bounds.end, keys, below)

    def _view(self, keys: Sequence[bytes], below: Offsets | None = None) -> list[KeyRecords]:
        """Search the view below its horizon; past it the view is the log, which is searched too."""
        if not self._rules.has_view:
            return []
        rows = self._client.below("/api/v1/view").get("", topic=self._topic)["views"]
        name = view_name(self._topic)
        bounds = fetch_bounds(self._cluster, name, isolation=Isolation.READ_UNCOMMITTED)
        end = {row["partition"]: row["horizon"] for row in rows}
        return self._search(name, bounds.first, end, keys, below)

    def _search(
        self,
        topic: str,
        first: Offsets,
        end: Offsets,
        keys: Sequence[bytes],
        below: Offsets | None,
    ) -> list[KeyRecords]:
        header = self._rules.version_header
        columns = (*COLUMNS, "headers") if header else COLUMNS
        records = read_topic(
            self._spark, self._cluster, topic, first, end,
            columns=columns, isolation=Isolation.READ_UNCOMMITTED,
        )  # fmt: skip
        return find_key_records(records, keys, below, header)

    # Erasure --------------------------------------------------------------------------------

    def _erase(
        self,
        receipt: Receipt,
        keys: Sequence[bytes],
        found_keys: Sequence[KeyRecords],
        ends: Offsets,
    ) -> None:
        until = time.monotonic() + self._timeout_seconds
        owned = [key_records for key_records in found_keys if key_records.values]
        requested = self._write_tombstones(receipt, owned)
        cleaning = TombstoneClean(
            self._client, self._topic, has_view=self._rules.has_view, until=until
        )
        for n, cleaned in cleaning.up_to(requested, self._reporter).items():
            part = receipt.partitions[n]
            part.cleaned_offset, part.view_horizon = cleaned.cleaned_offset, cleaned.view_horizon
            part.reason = cleaned.reason
        self._reporter.note("checking that the records are gone")
        self._check_erased(receipt, keys, ends)
        covers_all = False
        if self._data is not None:
            covers_all = self._wait_for_files(receipt, keys, ends, until)
        receipt.copies += self._copies(receipt, were_searched=covers_all and not receipt.reasons)
        receipt.state = PENDING if receipt.reasons else COMPLETE

    def _write_tombstones(
        self, receipt: Receipt, found_keys: Sequence[KeyRecords]
    ) -> dict[int, int]:
        """Write a tombstone for each key; return the end offset of each partition."""
        if not found_keys:
            return {}
        numbers = sorted({key_records.partition for key_records in found_keys})

        def ends() -> dict[int, int]:
            return fetch_bounds(
                self._cluster, self._topic, partitions=numbers,
                isolation=Isolation.READ_UNCOMMITTED,
            ).end  # fmt: skip

        before = ends()
        with BulkProducer(self._cluster) as producer:
            for key_records in sorted(
                found_keys, key=lambda key_records: (key_records.partition, key_records.key)
            ):
                producer.send(
                    self._topic,
                    key_records.key,
                    None,
                    partition=key_records.partition,
                    headers=self._version_of(key_records),
                    timestamp_ms=self._time_of(key_records),
                )
                receipt.partitions[key_records.partition].tombstones_written += 1
        after = ends()
        for n in numbers:
            receipt.partitions[n].tombstone_offsets = (before[n], after[n])
        return after

    def _version_of(self, key_records: KeyRecords) -> list[tuple[str, bytes | None]] | None:
        """Return the largest version of the key: among equal versions the later offset wins."""
        if key_records.version is None:
            return None
        version = key_records.version.to_bytes(VERSION_BYTES, "big", signed=True)
        return [(self._rules.version_header, version)]

    def _time_of(self, key_records: KeyRecords) -> int | None:
        if self._rules.strategy != "timestamp":
            return None
        return max(key_records.latest_ms, now_ms())

    # Proof --------------------------------------------------------------------------------

    def _check_erased(self, receipt: Receipt, keys: Sequence[bytes], ends: Offsets) -> None:
        """Search again. `ends` of the first search are the limit, not those of the tombstones:
        between them, producers may have written keys that were not found, or keys whose tombstone
        was already there."""
        for key_records in self._log(keys, self._bounds(), ends):
            part = receipt.partitions.setdefault(key_records.partition, PartitionErased())
            part.records_left += key_records.older
            part.written_since += key_records.values - key_records.older
            part.tombstones_left += key_records.tombstones
        for key_records in self._view(keys, ends):
            part = receipt.partitions.setdefault(key_records.partition, PartitionErased())
            part.view_records_left += key_records.older
        for n, part in sorted(receipt.partitions.items()):
            if part.records_left or part.view_records_left or part.reason:
                why = part.reason or "compaction kept them; check the log for damaged segments"
                remaining = records_text(part.records_left, part.view_records_left)
                receipt.reasons.append(f"partition {n}: {remaining} left: {why}")

    def _wait_for_files(
        self, receipt: Receipt, keys: Sequence[bytes], below: Offsets, until: float
    ) -> bool:
        """Scan the files until no record of the keys is left in them, or the time is up.

        An earlier run may have removed the records from the log and not from its replaced files,
        so all partitions are searched. Return whether all of them are in the data directory.
        """
        assert self._data is not None
        self._reporter.note("waiting for replaced files to be deleted")
        here = {n: end for n, end in below.items() if has_partition(self._data, self._topic, n)}
        searched = here
        while True:
            try:
                count, findings = scan_files(self._data, self._topic, searched, keys)
            except JobError as error:  # the erasure has happened and needs its receipt
                receipt.reasons.append(str(error))
                return False
            if receipt.files_scanned is None:
                receipt.files_scanned = count
            # If records are left in the log, they are left in its files.
            if not findings or receipt.reasons or time.monotonic() >= until:
                break
            searched = {finding.partition: here[finding.partition] for finding in findings}
            time.sleep(FILES_POLL_SECONDS)
        for finding in findings:
            records = counted(finding.records, "record")
            receipt.reasons.append(f"{finding.path} has {records} of the keys")
        return here.keys() == below.keys()

    def _copies(self, receipt: Receipt, *, were_searched: bool) -> list[Copy]:
        """Return what may hold copies; replaced files do not if they `were_searched`."""
        result = []
        now, rules = now_ms(), self._rules
        if not were_searched:
            until = now + rules.file_delete_delay_ms
            text = "replaced segment files, for file.delete.delay.ms"
            result.append(Copy("replaced_files", text, until))
        if any(part.tombstones_left for part in receipt.partitions.values()):
            until = now + rules.delete_retention_ms
            text = "tombstones with the keys, until a clean after delete.retention.ms"
            result.append(Copy("tombstones", text, until))
        leases = pinned_leases(self._client, self._topic)
        if leases is None:
            text = "files of remote compactions, if there are any: the broker did not answer"
            result.append(Copy("leases", text))
        elif leases:
            text = f"files that remote compactions have leased: {', '.join(leases)}"
            result.append(Copy("leases", text))
        if rules.has_view:
            text = "earlier versions of the view, while a consumer still reads one"
            result.append(Copy("retired_views", text))
        text = "consumers, tables and backups that read the topic"
        return [*result, Copy("elsewhere", text)]


# The command --------------------------------------------------------------------------------


@click.command("erase", short_help="Erase keys from a topic, with a receipt.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@click.option("--keys", "table", metavar="PATH", help="Table with the keys.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), default="parquet",
              show_default=True, help="Format of the table.")  # fmt: skip
@click.option("--key", "column", metavar="COL", default="key", show_default=True,
              help="Column of the table.")  # fmt: skip
@click.option("--key-file", metavar="FILE", help="File with one key per line, instead of a table.")
@click.option("--key-encoding", type=click.Choice(ENCODINGS), default="utf8", show_default=True,
              help="Encoding of the keys in --key-file.")  # fmt: skip
@click.option("--receipt", "receipt_path", metavar="FILE", help="Write the receipt to this file.")
@click.option("--data", metavar="DIR", help="The broker's data directory: also scan its files.")
@click.option("--timeout", cls=RangelessOption, type=click.FloatRange(0), default=TIMEOUT_SECONDS,
              show_default=True, metavar="SECONDS",
              help="Maximum time to wait for the clean; after it, the exit code is 4.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Erase nothing; count the records.")
@with_spark_options
@with_broker
@with_cluster
@json_option
def command(
    *,
    topic: str,
    table: str | None,
    table_format: str,
    column: str,
    key_file: str | None,
    key_encoding: str,
    receipt_path: str | None,
    data: str | None,
    timeout: float,
    dry_run: bool,
    spark_options: SparkOptions,
    client: ApiClient,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Erase every record of some keys from a compacted topic and its view.

    The exit code is 4 if some records are left: run the command again later with the same keys.
    """
    if (table is None) == (key_file is None):
        raise click.UsageError("give the keys as a table (--keys) or as a file (--key-file)")
    if receipt_path is not None:
        _check_place(Path(receipt_path))
    reach_topic(cluster, topic)
    Rules.of(topic, fetch_settings(cluster, topic))  # raises before Spark starts
    keys = [] if key_file is None else read_keys_from_file(key_file, key_encoding)
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve erase", reporter) as spark,
    ):
        if key_file is None:
            keys = read_keys_from_table(spark, str(table), table_format, column)
        eraser = Eraser(
            spark, client, cluster, topic, reporter=reporter, data=data, timeout_seconds=timeout
        )
        receipt = eraser.run(keys, dry_run=dry_run)
    document: dict[str, Any] = receipt.to_json()
    show(document, as_json, lambda _: lines(receipt))  # first: writing the file may fail
    if receipt_path is not None:
        _write(receipt_path, document)
    if receipt.state == PENDING:
        raise SystemExit(exit_codes.UNVERIFIED)


def _check_place(path: Path) -> None:
    """Check that the receipt can be written, because it cannot be produced again."""
    folder = path.absolute().parent
    while not folder.exists():  # write_atomically creates it
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise JobError(f"cannot write a receipt to {path}", exit_codes.USAGE)


def _write(path: str, document: dict[str, Any]) -> None:
    import json

    try:
        write_atomically(Path(path), json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise JobError(f"cannot write the receipt to {path}: {error.strerror}") from error
