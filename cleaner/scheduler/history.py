"""The history of finished jobs, in memory and in a file of JSON lines per log directory.

Rules. Every job adds one record when it ends, however it ends. Memory and files are bounded: the
oldest records are dropped, and the file has one predecessor. The file is for people: a malformed
line is skipped with a warning, and if a directory cannot be written, only history is lost.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

import structlog

from cleaner.job import CleanFigures, CleanJob, CleanReport, Damage, figures_of
from storage.env import Env
from storage.model import TopicPartition

HISTORY_NAME: Final = "varve.cleaner-history"
# A record takes about 900 bytes: both files together hold the last 2,000 jobs of a directory.
HISTORY_BYTES_MAX: Final = 1 << 20
DAMAGED_MAX: Final = 10  # damaged segments named in a record
RECORDS_MAX: Final = 2_000  # in memory, over all partitions: about 2 MB

Outcome: TypeAlias = Literal["finished", "damaged", "failed", "aborted", "stale"]

logger = structlog.get_logger("cleaner")


@dataclass(frozen=True, slots=True)
class JobRecord(CleanFigures):
    """One finished job. Sizes are bytes of log files, times are wall ms unless noted otherwise.

    The figures are 0 if the job did not run to its end.
    """

    partition: TopicPartition
    job_id: str
    started_ms: int
    finished_ms: int
    outcome: Outcome
    reason: str = ""  # of a failure or an early end, or the damage that was found
    expired_only: bool = False
    first_dirty_offset: int = 0
    end_offset: int = 0
    next_dirty_offset: int = 0  # the first dirty offset after the job
    segments: int = 0  # in the job
    groups: int = 0
    groups_published: int = 0
    groups_dropped: int = 0
    bytes_read: int = 0  # charged to the budgets, all passes
    bytes_written: int = 0
    read_wait_seconds: float = 0.0
    write_wait_seconds: float = 0.0
    dirty_bytes: int = 0  # of the dirty section as planned
    damaged: tuple[Damage, ...] = ()  # the first DAMAGED_MAX: a log can have hundreds
    damaged_segments: int = 0
    engine: str = ""  # that did the job; empty for a worker of the pool

    @property
    def seconds(self) -> float:
        """Return the duration of the job."""
        return max(0, self.finished_ms - self.started_ms) / 1000

    @property
    def bytes_saved_share(self) -> float:
        """Return the share of bytes removed, 0..1; Kafka's "size reduction"."""
        return 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0

    @property
    def records_saved_share(self) -> float:
        """Return the share of records removed, 0..1; Kafka's "fewer messages"."""
        return 1 - self.records_after / self.records_before if self.records_before else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON for the file and the API."""
        results = asdict(self)
        results["topic"], results["partition"] = self.partition
        return results

    @classmethod
    def from_json(cls, results: Mapping[str, Any]) -> "JobRecord":
        """Return the record; ignore unknown fields. Raises ValueError."""
        values = {name: results[name] for name in _TYPES if name in results}
        for name, value in values.items():
            if not isinstance(value, _TYPES[name]) or isinstance(value, bool) != (
                _TYPES[name] == (bool,)
            ):
                raise ValueError(f"{name} is {value!r:.100}")
        if values.get("outcome") not in get_args(Outcome):
            raise ValueError(f"outcome is {values.get('outcome')!r:.100}")
        topic, number = results.get("topic"), results.get("partition")
        if not isinstance(topic, str) or not isinstance(number, int):
            raise ValueError("names no partition")
        try:
            values["damaged"] = tuple(
                Damage(str(path), int(position), str(why))
                for path, position, why in values.get("damaged", ())[:DAMAGED_MAX]
            )
            values.setdefault("damaged_segments", len(results.get("damaged", ())))
            return cls(partition=TopicPartition(topic, number), **values)
        except (TypeError, OverflowError) as error:  # an infinite number is JSON to Python
            raise ValueError(str(error)) from error


def build_record(
    job: CleanJob,
    report: CleanReport | None,
    *,
    outcome: Outcome,
    reason: str,
    started_ms: int,
    finished_ms: int,
    published: int,
    dropped: int,
    dirty_bytes: int,
    next_dirty_offset: int,
) -> JobRecord:
    """Return the record of a job; `published` and `dropped` count groups."""
    damaged = () if report is None else report.damaged
    return JobRecord(
        partition=job.partition,
        job_id=job.job_id,
        started_ms=started_ms,
        finished_ms=finished_ms,
        outcome=outcome,
        reason=reason,
        expired_only=job.expired_only,
        first_dirty_offset=job.first_dirty_offset,
        end_offset=job.end_offset,
        next_dirty_offset=next_dirty_offset,
        segments=sum(len(group) for group in job.groups),
        groups=len(job.groups),
        groups_published=published,
        groups_dropped=dropped,
        dirty_bytes=dirty_bytes,
        damaged=damaged[:DAMAGED_MAX],
        damaged_segments=len(damaged),
        **({} if report is None else figures_of(report)),
    )


def describe_damage(damaged: tuple[Damage, ...]) -> str:
    """Return a sentence about the damage that a job found."""
    path, position, reason = damaged[0]
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return f"{path}{more} is damaged at byte {position}: {reason}"


_JSON_TYPES: Final[dict[Any, tuple[type, ...]]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
    Outcome: (str,),
}
_TYPES: Final = {
    field.name: _JSON_TYPES.get(field.type, (list, tuple))
    for field in fields(JobRecord)
    if field.name != "partition"
}


class History:
    """The last jobs of all partitions."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records: deque[JobRecord] = deque(maxlen=records_max)
        self._last: dict[TopicPartition, JobRecord] = {}
        self._observers: list[Callable[[JobRecord], None]] = []

    def observe(self, job_ended: Callable[[JobRecord], None]) -> None:
        """Call `job_ended` with the record of each job that ends from now on."""
        self._observers.append(job_ended)

    def add(self, record: JobRecord) -> None:
        """Add the record of a job that has ended."""
        self._append(record)
        for job_ended in self._observers:
            job_ended(record)

    def _append(self, record: JobRecord) -> None:
        self._records.append(record)
        self._last[record.partition] = record

    def load(self, records: Iterable[JobRecord]) -> None:
        """Add the records that earlier processes wrote."""
        for record in sorted(records, key=lambda record: record.finished_ms):
            self._append(record)

    def keep_only(self, partitions: frozenset[TopicPartition]) -> None:
        """Drop the last job of deleted partitions; their records stay."""
        for partition in self._last.keys() - partitions:
            del self._last[partition]

    def last_of(self, partition: TopicPartition) -> JobRecord | None:
        """Return the last job of the partition."""
        return self._last.get(partition)

    def newest(self, partition: TopicPartition | None = None, limit: int = 100) -> list[JobRecord]:
        """Return up to `limit` jobs of one partition or of all, newest first."""
        records = (r for r in reversed(self._records) if partition in (None, r.partition))
        return [record for record, _ in zip(records, range(limit), strict=False)]


# The file ------------------------------------------------------------------------------


def append_records(env: Env, directory: str, lines: Iterable[bytes]) -> None:
    """Append lines to the file, after renaming a full one. Raises OSError."""
    path = f"{directory}/{HISTORY_NAME}"
    data = b"".join(lines)
    size = env.size(path) if env.exists(path) else 0
    if size and size + len(data) > HISTORY_BYTES_MAX:
        env.rename(path, f"{path}.1")
        size = 0
    file = env.open(path, create=True, write=True)
    try:
        if size and file.pread(1, size - 1) != b"\n":
            data = b"\n" + data  # the last write was torn
        file.pwrite(data, size)
    finally:
        file.close()


def encode_record(record: JobRecord) -> bytes:
    """Return a record as a line."""
    return json.dumps(record.to_json(), separators=(",", ":")).encode() + b"\n"


def load_records(env: Env, directory: str) -> list[JobRecord]:
    """Return the records of a directory, oldest first. Raises OSError."""
    records: list[JobRecord] = []
    for path in (f"{directory}/{HISTORY_NAME}.1", f"{directory}/{HISTORY_NAME}"):
        if not env.exists(path):
            continue
        malformed = 0
        for line in env.read_file(path).splitlines():
            try:
                document = json.loads(line)
                if not isinstance(document, dict):
                    raise ValueError("not an object")
                records.append(JobRecord.from_json(document))
            except (ValueError, RecursionError):
                malformed += 1
        if malformed:
            logger.warning("malformed history lines skipped", path=path, lines=malformed)
    return records
