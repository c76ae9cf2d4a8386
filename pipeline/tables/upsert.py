"""Merge batches of records into a Delta table, exactly once.

Rules
- The table's commits store the end offset of each partition (pipeline/tables/delta.py), so merging
  a batch again changes nothing.
- A batch begins at or below the end offset of the table. Otherwise another job has replaced the
  table, and the records between would be missing.
- A merge also commits the transaction that each overwrite commits (STATE_ID): delta-rs lets an
  overwrite and a merge commit past each other if they share no transaction, and the table would
  have rows of both.
- Only a record with a larger offset replaces or deletes a row.
- The last record of each key in a batch counts. One commit merges the whole batch, even a batch
  without rows, because transaction markers also have offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from config import exit_codes
from pipeline.client.kafka_client import EndOffset
from pipeline.client.lease import with_retries
from pipeline.errors import JobError
from pipeline.tables.columns import Forms
from pipeline.tables.delete_guard import UNKNOWN_MS, DeleteGuard, safe_time_id
from pipeline.tables.delta import (
    STATE_ID,
    check_topic_id,
    commit_properties,
    delta_reason,
    epoch_id,
    holds_state,
    read_end_offset,
    state_number,
    topic_id_number,
    topic_id_transaction,
    version_id,
)
from pipeline.tables.publish import write_beside
from pipeline.tables.state import last_by_key
from storage.model import TopicPartition

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

DELETED: Final = "_deleted"
_SAME_ROW: Final = "t.`partition` = s.`partition` AND t.`key` = s.`key`"
_IS_NEWER: Final = "s.`offset` > t.`offset`"


def read_versions(table: "DeltaTable", topic: str, partitions: Sequence[int]) -> dict[int, int]:
    """Return the end offsets of these partitions in a table, without unknown partitions."""
    if not holds_state(table, topic):
        return {}
    results = {number: read_end_offset(table, topic, number) for number in partitions}
    return {number: end for number, end in results.items() if end is not None}


def read_reached(
    table: "DeltaTable", topic: str, versions: Mapping[int, int]
) -> dict[TopicPartition, EndOffset]:
    """Return the end offsets of a table with their leader epochs, -1 before its first batch."""
    epochs = {number: table.transaction_version(epoch_id(topic, number)) for number in versions}
    return {
        TopicPartition(topic, number): EndOffset(end, -1 if epoch is None else int(epoch))
        for number, end in versions.items()
        for epoch in (epochs[number],)
    }


def check_no_gap(
    cause: str, topic: str, read: Mapping[int, int], versions: Mapping[int, int]
) -> None:
    """Check that a table has all records that a query has read. Raises JobError with `cause`.

    `read` and `versions` are the end offsets of the query and of the table, by partition.
    """
    for number, end in sorted(read.items()):
        if end > versions.get(number, 0):
            raise JobError(
                f"{cause}: {topic}-{number} was read up to {end}, but the table has it up to"
                f" {versions.get(number, 0)}. Use --overwrite to recreate both"
            )


class Upserts:
    """Merges batches of one topic into one table."""

    def __init__(
        self,
        path: Path,
        topic: str,
        forms: Forms,
        columns: Sequence[str],
        *,
        guard: DeleteGuard | None = None,
        read_topic_id: Callable[[], bytes] = lambda: b"",
    ) -> None:
        """Before each commit, `guard` checks that no delete went unread, and the id from
        `read_topic_id` is compared with that of the table; empty: unknown."""
        self.path = path
        self._guard = guard
        self.batches = 0  # merged
        self.updated = self.inserted = self.deleted = 0  # rows
        self._topic = topic
        self._read_topic_id = read_topic_id
        self._forms = forms
        self._columns = tuple(columns)

    def merge_batch(
        self,
        batch: "DataFrame",
        starts: Mapping[int, int],
        ends: Mapping[int, EndOffset],
        planned_ms: int = UNKNOWN_MS,
    ) -> bool:
        """Merge a batch with the offsets from `starts` to `ends`.

        Return False if it was merged before. Partitions without a start are read from the start of
        their logs. `planned_ms` is a time before the ends were fetched. Raises JobError,
        PySparkException, ApiRefusedError, UnreachableError, and what `read_topic_id` raises.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        table = DeltaTable(str(self.path))
        if not holds_state(table, self._topic):
            raise JobError(f"another job has replaced {self.path}. Use --overwrite to recreate it")
        before = read_versions(table, self._topic, sorted({*starts, *ends}))
        check_no_gap(f"another job has replaced {self.path}", self._topic, starts, before)
        new = {n: end for n, end in ends.items() if n not in before or end.offset > before[n]}
        if not new:
            return False
        rows = self._last(batch, before)
        reach = {number: max(end.offset, before.get(number, 0)) for number, end in ends.items()}
        versions = {version_id(self._topic, number): end for number, end in reach.items()}
        versions |= {epoch_id(self._topic, n): end.leader_epoch for n, end in new.items()}
        versions[STATE_ID] = state_number(self._topic)
        notes = {"job": "latest --stream", "topic": self._topic}
        try:
            with write_beside(rows, self.path) as data:
                # The batch is read and not yet committed.
                topic_id = self._read_topic_id()
                check_topic_id(table, self._topic, topic_id)
                if any(topic_id):
                    versions[topic_id_transaction(self._topic)] = topic_id_number(topic_id)
                guard = self._guard
                if guard is not None:
                    safe_ms = with_retries(lambda: guard.checked_safe_ms(reach, planned_ms))
                    versions[safe_time_id(self._topic)] = safe_ms
                self._merge(table, data, commit_properties(notes, versions))
        except DeltaError as error:
            raise JobError(f"{self.path}: {delta_reason(error)}", exit_codes.FAILED) from error
        if self._guard is not None:
            self._guard.committed(reach, versions[safe_time_id(self._topic)])
        self.batches += 1
        return True

    def _last(self, batch: "DataFrame", before: Mapping[int, int]) -> "DataFrame":
        from pyspark.sql import functions as sql

        # Partitions unknown to the table are merged from their start.
        existing = [
            (sql.col("partition") != number) | (sql.col("offset") >= version)
            for number, version in sorted(before.items())
        ]
        if existing:
            batch = batch.where(reduce(lambda item, other: item & other, existing))
        last = last_by_key(batch, self._columns)
        marked = last.withColumn(DELETED, sql.col("value").isNull())
        return self._forms.applied(marked)

    def _merge(self, table: "DeltaTable", data: Path, commit: Any) -> None:
        import pyarrow.dataset as ds
        from deltalake import write_deltalake

        result = ds.dataset(str(data), format="parquet")
        if result.count_rows() == 0:
            empty = result.schema.empty_table().drop_columns([DELETED])
            write_deltalake(table, empty, mode="append", commit_properties=commit)
            return
        values = {f"`{name}`": f"s.`{name}`" for name in self._columns}
        merging = table.merge(
            result.scanner().to_reader(),
            predicate=_SAME_ROW,
            source_alias="s",
            target_alias="t",
            commit_properties=commit,
        )
        reported = (
            merging.when_matched_delete(f"s.{DELETED} AND {_IS_NEWER}")
            .when_matched_update(values, predicate=f"NOT s.{DELETED} AND {_IS_NEWER}")
            .when_not_matched_insert(values, predicate=f"NOT s.{DELETED}")
            .execute()
        )
        self.inserted += int(reported["num_target_rows_inserted"])
        self.updated += int(reported["num_target_rows_updated"])
        self.deleted += int(reported["num_target_rows_deleted"])
