"""What a broker and whoever compacts outside of it give each other: plan, manifest, outcome. Pure.

Rules
- A plan is the cleaner's own job for each partition of a run, over hard links that the broker has
  made: whoever carries it out needs nothing else.
- A manifest names what was made of one partition's job. It is written last, in one step: without
  it nothing was handed back. The broker believes nothing of it (broker/leases/adoption.py).
- All three are JSON; integers are exact. On the disk a manifest is sealed
  (storage/format/sealed_json.py).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cleaner import typed_json
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.typed_json import MalformedJsonError
from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format import filenames, sealed_json
from storage.model import TopicPartition

COMPACTIONS_PATH: Final = (
    "/api/v1/remote-compactions"  # below it a run's files and manifests travel by HTTP
)
CRC_HEADER: Final = "X-Varve-Crc32c"  # of what travels, in hexadecimal digits
MANIFEST_NAME: Final = "manifest"  # in the folder of a run
MANIFEST_MAGIC: Final = "varve-output-manifest"
MANIFEST_VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = 64 << 20  # of a hundred thousand groups
# What one may take of a job: reading it takes 30 times as much memory, and holds others up.
_MANIFEST_BYTES: Final = 1 << 20
_MANIFEST_SEGMENT_BYTES: Final = 4 << 10  # a group with its files, a horizon, damage
FOLDER_CHARS_MAX: Final = 100
SCRATCH_PREFIX: Final = "scratch-"  # of folders whose files are never handed back

_FOLDER: Final = re.compile(rf"[0-9A-Za-z_-]{{1,{FOLDER_CHARS_MAX}}}", re.ASCII)
_SCRATCH_FILE: Final = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,199}", re.ASCII)


class MalformedHandoffError(ValueError):
    """Bytes that are no plan, manifest or result of ours; says what is wrong."""


class Purpose(StrEnum):
    """What a run is for."""

    COMPACT = "compact"  # its outputs may be adopted; the broker's own cleaner waits meanwhile
    READ = "read"  # its inputs stay where they are; nothing comes back


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One partition of a run. `job.directory` holds the inputs, linked by the broker."""

    job: CleanJob
    topic_id: bytes
    inputs_bytes: int  # of log files


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """A run as it was leased. Times are wall ms of the broker."""

    compaction_id: str
    topic: str
    purpose: Purpose
    created_ms: int
    expires_ms: int  # unless it is renewed before
    token: str  # for files of this run; ends with it
    partitions: tuple[PartitionPlan, ...]


@dataclass(frozen=True, slots=True)
class OutputManifest:
    """What was made of one partition: the files of each group lie in a folder below `out/`."""

    compaction_id: str
    partition: TopicPartition
    topic_id: bytes
    generation: str
    end_offset: int
    folders: tuple[str, ...]  # by group
    groups: tuple[CleanedGroup, ...]
    report: CleanReport
    engine: str = ""  # who made it, for people


class AdoptOutcome(StrEnum):
    """What became of what was handed back."""

    ADOPTED = "adopted"
    STALE = "stale"  # the log went on without the run: nothing was changed
    EXPIRED = "expired"  # the lease was over: nothing was changed
    INVALID = "invalid"  # it is not what the job allows: nothing was changed
    NOTHING = "nothing"  # there is no manifest; the run goes on


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """Of one partition."""

    partition: TopicPartition
    outcome: AdoptOutcome
    reason: str = ""
    groups_published: int = 0
    bytes_before: int = 0  # of log files, of all that the job covers
    bytes_after: int = 0
    verify_seconds: float = 0.0


def manifest_bytes_max(job: CleanJob) -> int:
    """No manifest of this job is larger."""
    segments = sum(len(group) for group in job.groups)
    return min(MANIFEST_BYTES_MAX, _MANIFEST_BYTES + segments * _MANIFEST_SEGMENT_BYTES)


def is_folder(name: str) -> bool:
    """Whether a folder below `out/` may be called so: one plain name."""
    return _FOLDER.fullmatch(name) is not None


def is_scratch_folder(name: str) -> bool:
    """Whether it is one for files that stages leave for each other."""
    return is_folder(name) and name.startswith(SCRATCH_PREFIX)


def is_file_of(folder: str, name: str, compaction_id: str) -> bool:
    """Whether a file in such a folder may be called so: a cleaned file of the run, unless the
    folder is for scratch, where any plain name will do.
    """
    if is_scratch_folder(folder):
        return _SCRATCH_FILE.fullmatch(name) is not None
    return is_folder(folder) and is_cleaned_name(name, compaction_id)


def is_cleaned_name(name: str, compaction_id: str) -> bool:
    """Whether it is the name of a cleaned segment's file of this run."""
    parsed = filenames.parse_file_name(name)
    return (
        parsed is not None
        and parsed.kind in filenames.SEGMENT_KINDS
        and (parsed.temporary, parsed.job_id) == (filenames.CLEANED, compaction_id)
    )


def encode_plan(plan: LeasePlan) -> bytes:
    """A plan as JSON."""
    return typed_json.dumps(plan)


def decode_plan(data: bytes) -> LeasePlan:
    """Raises MalformedHandoffError."""
    try:
        return typed_json.loads(LeasePlan, data)
    except MalformedJsonError as error:
        raise MalformedHandoffError(f"no plan of a run: {error}") from error


def plan_of(value: object) -> LeasePlan:
    """A plan from decoded JSON. Raises MalformedHandoffError."""
    try:
        return typed_json.from_json(LeasePlan, value)
    except MalformedJsonError as error:
        raise MalformedHandoffError(f"no plan of a run: {error}") from error


def encode_manifest(manifest: OutputManifest) -> bytes:
    """A manifest as it stands in its file."""
    return sealed_json.seal_body(MANIFEST_MAGIC, MANIFEST_VERSION, typed_json.dumps(manifest))


def decode_manifest(data: bytes, path: str = MANIFEST_NAME) -> OutputManifest:
    """Raises MalformedHandoffError; also for one that is torn, or of a later version."""
    try:
        results = sealed_json.unseal(MANIFEST_MAGIC, MANIFEST_VERSION, data, path)
        return typed_json.from_json(OutputManifest, results)
    except (CorruptCheckpointError, NewerFormatError) as error:
        raise MalformedHandoffError(str(error)) from error
    except (MalformedJsonError, RecursionError, ValueError) as error:
        raise MalformedHandoffError(f"{path} is no manifest: {error}") from error


def result_json(result: AdoptResult) -> Any:
    """A result for the API."""
    return typed_json.to_json(result)


def result_of(value: object) -> AdoptResult:
    """Raises MalformedHandoffError."""
    try:
        return typed_json.from_json(AdoptResult, value)
    except MalformedJsonError as error:
        raise MalformedHandoffError(f"no result of an adoption: {error}") from error
