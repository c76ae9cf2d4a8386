"""The folder of a leased partition: inputs, uploaded output, and their removal.

    <partition>/varve.leases/<compaction id>/
        lease          the lease, sealed; durable before a client learns about it
        in/            hard links to the closed segments
        out/<folder>/  output, one folder for each attempt of a task
        manifest       lists the output files to adopt
        check/         links to inputs and outputs during verification

Rules
- No file in here is part of a log. Adopted output is renamed into the partition's folder and then
  published like any clean. Until then the broker may sweep all of it at any time.
- At the start and every minute, folders that belong to no lease are swept.
- Functions that create folders run on the event loop, where the caller knows that the partition is
  served: a thread could create the folder of a topic that was just deleted. All others may run in
  a thread.
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
    MalformedPlanError,
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
    """The lease of one partition, as stored on disk."""

    compaction_id: str
    topic: str
    purpose: Purpose
    created_ms: int
    ttl_seconds: int
    token_digest: bytes
    plan: PartitionPlan
    dirty_bytes: int
    log_end_offset: int  # at the time of planning
    checkpoint_offset: int | None
    mtimes_ms: tuple[int, ...]  # of the sources' .log files, in order


def hash_token(token: str) -> bytes:
    """Return the hash that is stored instead of a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def is_token(token: str, digest: bytes) -> bool:
    """Return whether a token has this hash; takes the same time for every token."""
    return hmac.compare_digest(hash_token(token), digest)


def leases_path(partition_directory: str) -> str:
    """Return the folder of all leases of a partition."""
    return f"{partition_directory}/{LEASES_FOLDER}"


def lease_path(partition_directory: str, compaction_id: str) -> str:
    """Return the folder of a lease."""
    return f"{leases_path(partition_directory)}/{compaction_id}"


def sources_of(job: CleanJob) -> list[tuple[int, int]]:
    """Return (base offset, bytes) of every source of a job."""
    return [(source.base_offset, source.size_bytes) for group in job.groups for source in group]


# Staging ------------------------------------------------------------------------------------


def make_folders(env: Env, folder: str) -> None:
    """Create the folders of a lease; on the event loop. Raises OSError."""
    env.mkdir(f"{folder}/{IN}")
    env.mkdir(f"{folder}/{OUT}")


def link_inputs(
    env: Env, partition_directory: str, folder: str, bases: Iterable[int]
) -> tuple[int, ...]:
    """Pin segments by hard links and return the modification times of their .log files.

    Raises FileNotFoundError if retention deleted a segment first, and OSError.
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
    """Write the lease file durably. Raises OSError."""
    env.sync_dir(f"{folder}/{IN}")
    data = sealed_json.seal_body(LEASE_MAGIC, LEASE_VERSION, typed_json.dumps(record))
    write_file_atomically(env, f"{folder}/{LEASE_NAME}", data)
    compactions = os.path.dirname(folder)
    env.sync_dir(compactions)
    env.sync_dir(os.path.dirname(compactions))


def read_lease(env: Env, folder: str) -> LeaseRecord | str:
    """Return the lease, or why it cannot be read. Raises OSError."""
    path = f"{folder}/{LEASE_NAME}"
    if env.is_dir(path):
        return "its lease file is a folder"
    try:
        results = sealed_json.unseal(LEASE_MAGIC, LEASE_VERSION, env.read_file(path), path)
        record = typed_json.from_json(LeaseRecord, results)
    except FileNotFoundError:
        return "it has no lease file"
    except (CorruptCheckpointError, NewerFormatError, MalformedJsonError, ValueError) as error:
        return str(error)
    return record if _is_coherent(record) else "its lease file is inconsistent"


def _is_coherent(record: LeaseRecord) -> bool:
    """Return whether its sources are ordered and complete: other processes can write the file."""
    job = record.plan.job
    bases = [base for base, _ in sources_of(job)]
    return (
        len(bases) == len(record.mtimes_ms) > 0
        and all(job.groups)
        and bases[0] >= 0
        and bases == sorted(set(bases))
    )


def why_changed(env: Env, partition_directory: str, folder: str, record: LeaseRecord) -> str:
    """Return how the leased files have changed; empty if they have not. Raises OSError.

    A source may be missing in the log, but not in the folder of the lease. Offsets are not checked.
    """
    job = record.plan.job
    for (base, size_bytes), mtime_ms in zip(sources_of(job), record.mtimes_ms, strict=True):
        requested = (size_bytes, mtime_ms)
        for directory in (f"{folder}/{IN}", partition_directory):
            path = _log_path(directory, base)
            if directory == partition_directory and not env.exists(path):
                continue
            if not env.exists(path) or (env.size(path), env.mtime_ms(path)) != requested:
                return f"{path} has changed"
    return ""


# Output --------------------------------------------------------------------------------------


def write_manifest(env: Env, folder: str, data: bytes) -> None:
    """Write the manifest durably. Raises OSError."""
    env.sync_dir(f"{folder}/{OUT}")
    write_file_atomically(env, f"{folder}/{MANIFEST_NAME}", data)


def is_manifest(env: Env, folder: str, data: bytes) -> bool:
    """Return whether these bytes are the manifest. Raises FileNotFoundError, OSError."""
    path = f"{folder}/{MANIFEST_NAME}"
    return env.size(path) == len(data) and env.read_file(path) == data


def read_manifest(env: Env, folder: str, job: CleanJob) -> OutputManifest | None:
    """Return the manifest, or None if there is none. Raises MalformedPlanError, OSError."""
    path = f"{folder}/{MANIFEST_NAME}"
    if env.is_link(path):
        raise MalformedPlanError(f"{path} is a link")
    if not env.exists(path):
        return None
    if env.size(path) > manifest_bytes_max(job):
        raise MalformedPlanError(f"{path} is larger than {manifest_bytes_max(job)} bytes")
    return decode_manifest(env.read_file(path), path)


@dataclass(frozen=True, slots=True)
class CheckFolders:
    """Folders of links to the files to verify, which no client can address."""

    sources: str
    outputs: str


def make_check_folders(env: Env, folder: str) -> CheckFolders:
    """Create the folders; on the event loop.

    Raises FileExistsError if an earlier adoption left some, and OSError.
    """
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
    """Link the sources of a job for verification. Raises OSError.

    Sources come from the log. Those that retention deleted come from the folder of the lease,
    which other processes can write to.
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
    """Link the output for verification.

    Raises InvalidOutputError if a file is missing or is not a regular file, and OSError.
    """
    for group, name in zip(groups, folders, strict=True):
        _link_output(env, f"{folder}/{OUT}/{name}", check.outputs, group)


def _link_output(env: Env, source: str, target: str, group: CleanedGroup) -> None:
    for file in group.output.files if group.output is not None else ():
        path = f"{source}/{file.name}"
        if env.is_link(source) or env.is_link(path) or env.is_dir(path):
            raise InvalidOutputError(path, -1, "it is not a regular file in a folder of the lease")
        try:
            env.link(path, f"{target}/{file.name}")
        except FileNotFoundError as error:
            raise InvalidOutputError(path, -1, "the file is missing") from error
        except FileExistsError as error:
            raise InvalidOutputError(path, -1, "two groups have this file") from error


def move_outputs(
    env: Env, outputs: str, partition_directory: str, groups: Sequence[CleanedGroup]
) -> None:
    """Move verified output to where a worker would have written it. Raises OSError."""
    for group in groups:
        for file in group.output.files if group.output is not None else ():
            env.rename(f"{outputs}/{file.name}", f"{partition_directory}/{file.name}")
    env.sync_dir(partition_directory)


# Removal --------------------------------------------------------------------------------------


def list_lease_folders(env: Env, partition_directory: str) -> list[str]:
    """Return the names of all lease folders of a partition. Raises OSError."""
    compactions = leases_path(partition_directory)
    return env.listdir(compactions) if env.is_dir(compactions) else []


def remove_lease_folder(env: Env, folder: str) -> None:
    """Remove the folder of a lease, or a file of that name. Raises OSError.

    The lease file goes first: if we crash midway, the next sweep removes the rest.
    """
    if env.is_dir(folder) and not env.is_link(folder):
        lease = f"{folder}/{LEASE_NAME}"
        if env.exists(lease) and not env.is_dir(lease):
            env.unlink(lease)
        env.remove_tree(folder)
    elif env.exists(folder) or env.is_link(folder):
        env.unlink(folder)


def remove_if_empty(env: Env, partition_directory: str) -> None:
    """Remove the folder of all leases if it is empty; at the start only. Raises OSError."""
    compactions = leases_path(partition_directory)
    if env.is_dir(compactions) and not env.listdir(compactions):
        env.rmdir(compactions)


def discard_check(env: Env, folder: str) -> None:
    """Remove the links of an earlier verification. Raises OSError."""
    check = f"{folder}/{CHECK}"
    if env.is_dir(check):
        env.remove_tree(check)
