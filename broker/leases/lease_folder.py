"""The folder of a leased partition: its inputs, what comes back, and how both go away.

    <partition>/varve.leases/<run id>/
        lease          what was leased, sealed; durable before anybody is told
        in/            hard links of the closed segments
        out/<folder>/  what comes back, a folder for each attempt
        manifest       which of it counts
        check/         while it is looked at: links that only we know

Rules
- Nothing in here is part of a log. What is adopted is renamed into the partition's folder and goes
  the way of every clean from there on; until then all of it may be swept at any time.
- A folder without a lease of a live run is swept: at the start, and every minute.
- All of it may run in a thread, but for what makes folders. That is for whoever is on the loop and
  knows that the partition is served: its folder is not to be made anew under the name of a topic
  that was just deleted.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cleaner import typed_json
from cleaner.job import CleanedGroup, CleanJob
from cleaner.remote_compaction import (
    MANIFEST_NAME,
    MalformedHandoffError,
    OutputManifest,
    PartitionPlan,
    Purpose,
    decode_manifest,
    manifest_bytes_max,
)
from cleaner.typed_json import MalformedJsonError
from cleaner.verification import InvalidOutputError
from storage.env import Env, write_file_atomically
from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format import filenames, sealed_json

LEASES_FOLDER: Final = "varve.leases"
LEASE_NAME: Final = "lease"
LEASE_MAGIC: Final = "varve-lease"
LEASE_VERSION: Final = 1
IN: Final = "in"
OUT: Final = "out"
CHECK: Final = "check"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One partition of a leased run, as it stands on the disk."""

    compaction_id: str
    topic: str
    purpose: Purpose
    created_ms: int
    ttl_seconds: int
    token_digest: bytes
    plan: PartitionPlan
    dirty_bytes: int
    log_end_offset: int  # when it was planned
    checkpoint_offset: int | None
    mtimes_ms: tuple[int, ...]  # of the log files of the sources, in order


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def is_token(token: str, digest: bytes) -> bool:
    """Whether it is the token of that digest, in a time that does not depend on it."""
    return hmac.compare_digest(digest_of(token), digest)


def leases_path(partition_directory: str) -> str:
    """The folder of all runs of a partition."""
    return f"{partition_directory}/{LEASES_FOLDER}"


def lease_path(partition_directory: str, compaction_id: str) -> str:
    """The folder of a run."""
    return f"{leases_path(partition_directory)}/{compaction_id}"


def sources_of(job: CleanJob) -> list[tuple[int, int]]:
    """(base offset, bytes) of every source of a job."""
    return [(source.base_offset, source.size_bytes) for group in job.groups for source in group]


# Staging ------------------------------------------------------------------------------------


def make_folders(env: Env, folder: str) -> None:
    """Make the folders of a run. On the loop. Raises OSError."""
    env.mkdir(f"{folder}/{IN}")
    env.mkdir(f"{folder}/{OUT}")


def link_inputs(
    env: Env, partition_directory: str, folder: str, bases: Iterable[int]
) -> tuple[int, ...]:
    """Pin segments; the modification times of their log files. Raises OSError: FileNotFoundError
    where retention was faster.
    """
    for base in bases:
        _link_segment(env, partition_directory, f"{folder}/{IN}", base)
    return tuple(env.mtime_ms(_log_path(f"{folder}/{IN}", base)) for base in bases)


def _link_segment(env: Env, source: str, target: str, base: int) -> None:
    for kind in filenames.SEGMENT_KINDS:
        name = filenames.file_name(base, kind)
        try:
            env.link(f"{source}/{name}", f"{target}/{name}")
        except FileNotFoundError:
            if kind == filenames.LOG:
                raise


def _log_path(directory: str, base: int) -> str:
    return f"{directory}/{filenames.file_name(base, filenames.LOG)}"


def write_lease(env: Env, folder: str, record: LeaseRecord) -> None:
    """Make a staged partition a lease, durably. Raises OSError."""
    env.sync_dir(f"{folder}/{IN}")
    data = sealed_json.seal_body(LEASE_MAGIC, LEASE_VERSION, typed_json.dumps(record))
    write_file_atomically(env, f"{folder}/{LEASE_NAME}", data)
    compactions = os.path.dirname(folder)
    env.sync_dir(compactions)
    env.sync_dir(os.path.dirname(compactions))


def read_lease(env: Env, folder: str) -> LeaseRecord | str:
    """What was leased, or why that cannot be told. Raises OSError."""
    path = f"{folder}/{LEASE_NAME}"
    if env.is_dir(path):
        return "its lease is a folder"
    try:
        results = sealed_json.unseal(LEASE_MAGIC, LEASE_VERSION, env.read_file(path), path)
        record = typed_json.from_json(LeaseRecord, results)
    except FileNotFoundError:
        return "it has no lease"
    except (CorruptCheckpointError, NewerFormatError, MalformedJsonError, ValueError) as error:
        return str(error)
    return record if _is_coherent(record) else "its lease contradicts itself"


def _is_coherent(record: LeaseRecord) -> bool:
    """Whether it tells of segments as every plan does. It lay in reach of others."""
    job = record.plan.job
    bases = [base for base, _ in sources_of(job)]
    return (
        len(bases) == len(record.mtimes_ms) > 0
        and all(job.groups)
        and bases[0] >= 0
        and bases == sorted(set(bases))
    )


def why_changed(env: Env, partition_directory: str, folder: str, record: LeaseRecord) -> str:
    """Why what was leased is not what stands there; empty if it is. Raises OSError.

    A source may have gone from the log, but not from the run. Says nothing of offsets.
    """
    job = record.plan.job
    for (base, size_bytes), mtime_ms in zip(sources_of(job), record.mtimes_ms, strict=True):
        requested = (size_bytes, mtime_ms)
        for directory in (f"{folder}/{IN}", partition_directory):
            path = _log_path(directory, base)
            if directory == partition_directory and not env.exists(path):
                continue
            if not env.exists(path) or (env.size(path), env.mtime_ms(path)) != requested:
                return f"{path} is not as it was"
    return ""


# What comes back ------------------------------------------------------------------------------


def write_manifest(env: Env, folder: str, data: bytes) -> None:
    """Put a manifest in its place, durably. Raises OSError."""
    env.sync_dir(f"{folder}/{OUT}")
    write_file_atomically(env, f"{folder}/{MANIFEST_NAME}", data)


def read_manifest(env: Env, folder: str, job: CleanJob) -> OutputManifest | None:
    """What was handed back; None if nothing was. Raises MalformedHandoffError, OSError."""
    path = f"{folder}/{MANIFEST_NAME}"
    if env.is_link(path):
        raise MalformedHandoffError(f"{path} is a link")
    if not env.exists(path):
        return None
    if env.size(path) > manifest_bytes_max(job):
        raise MalformedHandoffError(f"{path} is larger than {manifest_bytes_max(job)} bytes")
    return decode_manifest(env.read_file(path), path)


@dataclass(frozen=True, slots=True)
class CheckFolders:
    """Links of all that is to be compared, under names that nobody else was told."""

    sources: str
    outputs: str


def make_check_folders(env: Env, folder: str) -> CheckFolders:
    """Make them. On the loop. Raises OSError: FileExistsError where an adoption left some."""
    check = f"{folder}/{CHECK}"
    if env.exists(check):
        raise FileExistsError(check)
    folders = CheckFolders(f"{check}/{IN}", f"{check}/{OUT}")
    env.mkdir(folders.sources)
    env.mkdir(folders.outputs)
    return folders


def link_sources(
    env: Env, partition_directory: str, folder: str, check: CheckFolders, job: CleanJob
) -> None:
    """Link the sources of a job to where they are read once more. Raises OSError.

    They come from the log itself, and from the run only where retention took them: what lies in
    the run was in reach of others.
    """
    for base, _ in sources_of(job):
        try:
            _link_segment(env, partition_directory, check.sources, base)
        except FileNotFoundError:
            _link_segment(env, f"{folder}/{IN}", check.sources, base)


def link_outputs(
    env: Env,
    folder: str,
    check: CheckFolders,
    groups: Sequence[CleanedGroup],
    folders: Sequence[str],
) -> None:
    """Link what was handed back to where it is compared.

    Raises InvalidOutputError for an output that is not there or is no plain file, OSError.
    """
    for group, name in zip(groups, folders, strict=True):
        _link_output(env, f"{folder}/{OUT}/{name}", check.outputs, group)


def _link_output(env: Env, source: str, target: str, group: CleanedGroup) -> None:
    for file in group.output.files if group.output is not None else ():
        path = f"{source}/{file.name}"
        if env.is_link(source) or env.is_link(path) or env.is_dir(path):
            raise InvalidOutputError(path, -1, "it is no plain file in a folder of the run")
        try:
            env.link(path, f"{target}/{file.name}")
        except FileNotFoundError as error:
            raise InvalidOutputError(path, -1, "there is no such file") from error
        except FileExistsError as error:
            raise InvalidOutputError(path, -1, "two groups have this file") from error


def move_outputs(
    env: Env, outputs: str, partition_directory: str, groups: Sequence[CleanedGroup]
) -> None:
    """Put compared outputs where a worker would have left them. Raises OSError."""
    for group in groups:
        for file in group.output.files if group.output is not None else ():
            env.rename(f"{outputs}/{file.name}", f"{partition_directory}/{file.name}")
    env.sync_dir(partition_directory)


# Going away -----------------------------------------------------------------------------------


def list_lease_folders(env: Env, partition_directory: str) -> list[str]:
    """Names of what stands among the runs of a partition. Raises OSError."""
    compactions = leases_path(partition_directory)
    return env.listdir(compactions) if env.is_dir(compactions) else []


def remove_run(env: Env, folder: str) -> None:
    """Remove the folder of a run, or whatever is called so. Raises OSError.

    The lease goes first: what is left of a run that was half removed is nobody's.
    """
    if env.is_dir(folder) and not env.is_link(folder):
        lease = f"{folder}/{LEASE_NAME}"
        if env.exists(lease) and not env.is_dir(lease):
            env.unlink(lease)
        env.remove_tree(folder)
    elif env.exists(folder) or env.is_link(folder):
        env.unlink(folder)


def remove_if_empty(env: Env, partition_directory: str) -> None:
    """Remove the folder of all runs if there is none. At the start only. Raises OSError."""
    compactions = leases_path(partition_directory)
    if env.is_dir(compactions) and not env.listdir(compactions):
        env.rmdir(compactions)


def discard_check(env: Env, folder: str) -> None:
    """Remove what an adoption that came to nothing has left. Raises OSError."""
    check = f"{folder}/{CHECK}"
    if env.is_dir(check):
        env.remove_tree(check)
