"""Decide whether a lease of an earlier process is still valid.

leases.py resumes the valid ones at the start, and removes the folders of all others.

A generation is valid within one process only. After a restart a lease is valid if
- the topic id is the same,
- every planned segment has its size and modification time, in the log and in the lease's folder;
  retention may have removed segments from the front of the log,
- no clean has been published since, and
- the log does not end earlier than it did, so that no planned record was lost.

This must be decided before clients append. A first dirty offset below the recorded one is allowed:
the checkpoint was not on disk yet, but the cleaned segments are.
"""

from dataclasses import dataclass

from broker.leases.lease_folder import (
    OUT,
    LeaseRecord,
    discard_check,
    leases_path,
    list_lease_folders,
    read_lease,
    remove_lease_folder,
    why_changed,
)
from cleaner.host import LogFacts
from cleaner.remote_compaction import MANIFEST_NAME, Purpose
from storage.env import Env


@dataclass(frozen=True, slots=True)
class StagedLease:
    """One folder below the leases of a partition."""

    folder: str
    record: LeaseRecord | None
    reason: str  # why its files rule out a resumption; empty if they do not
    has_manifest: bool
    staged_bytes: int


def find_staged_leases(env: Env, partition_directory: str) -> list[StagedLease]:
    """Read the leases of a partition; remove links and files between them, and check folders.

    Runs in a thread. Raises OSError.
    """
    result = []
    for name in list_lease_folders(env, partition_directory):
        folder = f"{leases_path(partition_directory)}/{name}"
        if env.is_link(folder) or not env.is_dir(folder):
            remove_lease_folder(env, folder)
            continue
        record = read_lease(env, folder)
        if isinstance(record, str):
            result.append(StagedLease(folder, None, record, has_manifest=False, staged_bytes=0))
            continue
        reason = why_changed(env, partition_directory, folder, record)
        if record.compaction_id != name:
            reason = f"its lease belongs to {record.compaction_id[:100]}"
        discard_check(env, folder)
        has_manifest = env.exists(f"{folder}/{MANIFEST_NAME}")
        staged_bytes = _bytes_below(env, f"{folder}/{OUT}")
        result.append(
            StagedLease(
                folder, record, reason, has_manifest=has_manifest, staged_bytes=staged_bytes
            )
        )
    return result


def _bytes_below(env: Env, directory: str) -> int:
    """Return the total size of the files in the folders of a folder."""
    total = 0
    for name in env.listdir(directory) if env.is_dir(directory) else ():
        folder = f"{directory}/{name}"
        if env.is_dir(folder) and not env.is_link(folder):
            paths = (f"{folder}/{file}" for file in env.listdir(folder))
            total += sum(env.size(p) for p in paths if not env.is_link(p) and not env.is_dir(p))
    return total


def why_not_resumed(staged: StagedLease, facts: LogFacts | None) -> str:
    """Return why a lease cannot be resumed; empty if it can. Pure."""
    record = staged.record
    if record is None or staged.reason:
        return staged.reason
    if facts is None or not facts.segments:
        return "its partition is not served"
    job = record.plan.job
    if (job.partition, record.plan.topic_id) != (facts.partition, facts.topic_id):
        return "it belongs to another topic"
    if record.purpose is Purpose.COMPACT and not facts.config.compacts:
        return "its topic is no longer compacted"
    if facts.log_end_offset < record.log_end_offset:
        return f"the log end offset went from {record.log_end_offset} to {facts.log_end_offset}"
    if facts.log_start_offset < job.log_start_offset:
        return "the log start offset has decreased"
    if (facts.checkpoint_offset or 0) > (record.checkpoint_offset or 0):
        return "the log was cleaned since"
    present = {s.base_offset: s for s in facts.segments[:-1]}
    first = facts.segments[0].base_offset
    for group in job.groups:
        for source in group:
            now = present.get(source.base_offset)
            if now is None and source.base_offset < first:
                continue  # deleted by retention
            requested = source.next_base_offset, source.size_bytes
            if now is None or (now.next_base_offset, now.size_bytes) != requested:
                return f"segment {source.base_offset} has changed since it was leased"
    return ""
