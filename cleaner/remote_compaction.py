"""The exchange between the broker and a remote compaction: plan, manifest, result. Pure.

Rules
- A plan contains a cleaner job for each leased partition, over hard links that the broker made. The
  remote side needs nothing else.
- A manifest lists the outputs of one partition's job. It is written last and atomically: without it
  the remote compaction has returned nothing. The broker trusts none of it
  (broker/leases/adoption.py).
- All three are JSON. On disk a manifest is sealed (storage/format/sealed_json.py).
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

COMPACTIONS_PATH: Final = "/api/v1/remote-compactions"
CRC_HEADER: Final = "X-Varve-Crc32c"  # of a transferred file, in hexadecimal digits
MANIFEST_NAME: Final = "manifest"  # in the folder of the lease
MANIFEST_MAGIC: Final = "varve-output-manifest"
MANIFEST_VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = 64 << 20  # about a hundred thousand groups
# The limit for one job: decoding takes 30 times as much memory, and blocks the event loop.
_MANIFEST_BYTES: Final = 1 << 20
_MANIFEST_SEGMENT_BYTES: Final = 4 << 10  # a group with its files, a horizon, damage
_MANIFEST_PARTS: Final = 5_000
_MANIFEST_SEGMENT_PARTS: Final = 40
FOLDER_CHARS_MAX: Final = 100
SCRATCH_PREFIX: Final = "scratch-"  # of folders whose files are never returned

_FOLDER: Final = re.compile(rf"[0-9A-Za-z_-]{{1,{FOLDER_CHARS_MAX}}}", re.ASCII)
_SCRATCH_FILE: Final = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,199}", re.ASCII)


class MalformedPlanError(ValueError):
    """A malformed plan, manifest or result."""


class Purpose(StrEnum):
    """The purpose of a lease."""

    COMPACT = "compact"  # its outputs may be adopted; the broker's cleaner is paused
    READ = "read"  # it only reads; nothing is returned


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """One leased partition. `job.directory` has hard links to the inputs."""

    job: CleanJob
    topic_id: bytes
    inputs_bytes: int  # of log files


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """The plan of a remote compaction. Times are wall ms of the broker."""

    compaction_id: str
    topic: str
    purpose: Purpose
    created_ms: int
    expires_ms: int  # unless it is renewed
    token: str  # for the files of this compaction, valid until it ends
    partitions: tuple[PartitionPlan, ...]


@dataclass(frozen=True, slots=True)
class OutputManifest:
    """The outputs of one partition; the files of each group are in a folder below `out/`."""

    compaction_id: str
    partition: TopicPartition
    topic_id: bytes
    generation: str
    end_offset: int
    folders: tuple[str, ...]  # by group
    groups: tuple[CleanedGroup, ...]
    report: CleanReport
    engine: str = ""  # for operators


class AdoptOutcome(StrEnum):
    """The result of an adoption."""

    ADOPTED = "adopted"
    STALE = "stale"  # the log has changed; nothing was published
    EXPIRED = "expired"  # the lease had ended; nothing was published
    INVALID = "invalid"  # the outputs are wrong; nothing was published
    NOTHING = "nothing"  # there is no manifest; the lease continues


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """The result of adopting one partition."""

    partition: TopicPartition
    outcome: AdoptOutcome
    reason: str = ""
    groups_published: int = 0
    bytes_before: int = 0  # of all log files in the job
    bytes_after: int = 0
    verify_seconds: float = 0.0


def manifest_bytes_max(job: CleanJob) -> int:
    """Return the size limit for a manifest of this job."""
    segments = sum(len(group) for group in job.groups)
    return min(MANIFEST_BYTES_MAX, _MANIFEST_BYTES + segments * _MANIFEST_SEGMENT_BYTES)


def manifest_parts_max(job: CleanJob) -> int:
    """Return the limit for the JSON objects and lists in a manifest of this job.

    To parse a megabyte of empty lists takes 60 ms, and to free them as much again.
    """
    segments = sum(len(group) for group in job.groups)
    return _MANIFEST_PARTS + segments * _MANIFEST_SEGMENT_PARTS


def is_folder(name: str) -> bool:
    """Return whether the name is allowed for a folder below `out/`."""
    return _FOLDER.fullmatch(name) is not None


def is_scratch_folder(name: str) -> bool:
    """Return whether the name is that of a folder for temporary files between stages."""
    return is_folder(name) and name.startswith(SCRATCH_PREFIX)


def is_file_of(folder: str, name: str, compaction_id: str) -> bool:
    """Return whether the name is allowed in the folder.

    A scratch folder allows any plain name, others only cleaned files of the compaction.
    """
    if is_scratch_folder(folder):
        return _SCRATCH_FILE.fullmatch(name) is not None
    return is_folder(folder) and is_cleaned_name(name, compaction_id)


def is_cleaned_name(name: str, compaction_id: str) -> bool:
    """Return whether the name is that of a cleaned file of this compaction."""
    parsed = filenames.parse_file_name(name)
    return (
        parsed is not None
        and parsed.kind in filenames.SEGMENT_KINDS
        and (parsed.temporary, parsed.job_id) == (filenames.CLEANED, compaction_id)
    )


def encode_plan(plan: LeasePlan) -> bytes:
    """Return a plan as JSON."""
    return typed_json.dumps(plan)


def parse_plan(value: object) -> LeasePlan:
    """Read a plan from decoded JSON. Raises MalformedPlanError."""
    try:
        return typed_json.from_json(LeasePlan, value)
    except MalformedJsonError as error:
        raise MalformedPlanError(f"malformed plan: {error}") from error


def encode_manifest(manifest: OutputManifest) -> bytes:
    """Return the contents of a manifest file."""
    return sealed_json.seal_body(MANIFEST_MAGIC, MANIFEST_VERSION, typed_json.dumps(manifest))


def decode_manifest(data: bytes, path: str = MANIFEST_NAME) -> OutputManifest:
    """Read a manifest file. Raises MalformedPlanError, also for a torn or newer one."""
    try:
        results = sealed_json.unseal(MANIFEST_MAGIC, MANIFEST_VERSION, data, path)
        return typed_json.from_json(OutputManifest, results)
    except (CorruptCheckpointError, NewerFormatError) as error:
        raise MalformedPlanError(str(error)) from error
    except (MalformedJsonError, RecursionError, ValueError) as error:
        raise MalformedPlanError(f"{path} is malformed: {error}") from error


def result_json(result: AdoptResult) -> Any:
    """Return a result as JSON."""
    return typed_json.to_json(result)


def parse_result(value: object) -> AdoptResult:
    """Read a result. Raises MalformedPlanError."""
    try:
        return typed_json.from_json(AdoptResult, value)
    except MalformedJsonError as error:
        raise MalformedPlanError(f"malformed result: {error}") from error
