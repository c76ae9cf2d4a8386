"""Whether a run of an earlier process can go on: only where nothing has changed, provably.

A generation is of one process. What takes its place after a restart: the same topic id; every
segment of the plan with the size and time it had, in the log and in the run, but for those that
retention took from the front; no clean since; and a log that ends no earlier than it did, so that
nothing is lost of what the plan went by. To be asked before anybody appends.

A first dirty offset that is lower than it was is one that was not on the disk yet: what had been
cleaned up to there is durable all the same, and stands in the segments.
"""

from dataclasses import dataclass

from broker.leases.lease_folder import (
    OUT,
    LeaseRecord,
    discard_check,
    leases_path,
    list_lease_folders,
    read_lease,
    remove_run,
    why_changed,
)
from cleaner.host import LogFacts
from cleaner.remote_compaction import MANIFEST_NAME, Purpose
from storage.env import Env


@dataclass(frozen=True, slots=True)
class StagedLease:
    """What stands among the runs of a partition."""

    folder: str
    record: LeaseRecord | None
    reason: str  # why it cannot go on, as far as its files tell
    has_manifest: bool
    staged_bytes: int


def find_staged_leases(env: Env, partition_directory: str) -> list[StagedLease]:
    """Look at every run of a partition; in a thread. Raises OSError."""
    result = []
    for name in list_lease_folders(env, partition_directory):
        folder = f"{leases_path(partition_directory)}/{name}"
        if env.is_link(folder) or not env.is_dir(folder):
            remove_run(env, folder)
            continue
        record = read_lease(env, folder)
        if isinstance(record, str):
            result.append(StagedLease(folder, None, record, has_manifest=False, staged_bytes=0))
            continue
        reason = why_changed(env, partition_directory, folder, record)
        if record.compaction_id != name:
            reason = f"its lease is that of run {record.compaction_id[:100]}"
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
    """Of all files in the folders of a folder."""
    total = 0
    for name in env.listdir(directory) if env.is_dir(directory) else ():
        folder = f"{directory}/{name}"
        if env.is_dir(folder) and not env.is_link(folder):
            paths = (f"{folder}/{file}" for file in env.listdir(folder))
            total += sum(env.size(p) for p in paths if not env.is_link(p) and not env.is_dir(p))
    return total


def why_not_resumed(staged: StagedLease, facts: LogFacts | None) -> str:
    """Why a run cannot go on; empty if it can. Pure."""
    record = staged.record
    if record is None or staged.reason:
        return staged.reason
    if facts is None or not facts.segments:
        return "its partition is not served"
    job = record.plan.job
    if (job.partition, record.plan.topic_id) != (facts.partition, facts.topic_id):
        return "it is of another topic"
    if record.purpose is Purpose.COMPACT and not facts.config.compacts:
        return "its topic is not compacted any more"
    if facts.log_end_offset < record.log_end_offset:
        return f"the log ended at {record.log_end_offset}, and ends at {facts.log_end_offset} now"
    if facts.log_start_offset < job.log_start_offset:
        return "the log begins earlier than it did"
    if (facts.checkpoint_offset or 0) > (record.checkpoint_offset or 0):
        return "the log was cleaned meanwhile"
    present = {s.base_offset: s for s in facts.segments[:-1]}
    first = facts.segments[0].base_offset
    for group in job.groups:
        for source in group:
            now = present.get(source.base_offset)
            if now is None and source.base_offset < first:
                continue  # retention took it
            requested = source.next_base_offset, source.size_bytes
            if now is None or (now.next_base_offset, now.size_bytes) != requested:
                return f"segment {source.base_offset} is not the one that was leased"
    return ""
