"""How the cleaner's state looks as JSON. Names end in their unit; times are ms since 1970."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from broker.damage import damage_fields
from broker.partition import Partition
from cleaner.planning.plan import Verdict
from cleaner.pool.explain import Explanation, blocked_by, hindrance, said, sentences
from cleaner.pool.handover import HandoverStatus
from cleaner.pool.history import JobRecord
from cleaner.pool.job_run import PoolStatus, WorkerStatus
from cleaner.pool.registry import StoryEntry
from cleaner.states import Quarantined, State, held
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.model import TopicPartition

Json: TypeAlias = dict[str, Any]


def named(partition: TopicPartition) -> Json:
    """A partition's two names."""
    return {"topic": partition.topic, "partition": partition.partition}


def status_json(
    status: PoolStatus, stats: PoolStats, settings: CleanerSettings, counts: Mapping[str, int]
) -> Json:
    """The cleaner as a whole. `counts` are of partitions."""
    return {
        "enabled": settings.enabled,
        "workers": [_worker_json(worker) for worker in status.workers],
        "workers_wanted": settings.workers if settings.enabled else 0,
        "partitions": {
            **counts,
            "in_progress": sum(held(state) for state in status.in_progress.values()),
            "quarantined": len(status.quarantines),
            "paused": len(status.held),
            "candidates": stats.candidates,
            "over_max_lag": stats.over_lag_partitions,
            "damaged": stats.damaged_partitions,
        },
        "cleanable_bytes": stats.cleanable_bytes,
        "dirty_ratio_max": round(stats.dirty_ratio_max, 4),
        "over_lag_ms_max": stats.over_lag_ms_max,
        "read_bytes_per_second": status.rates[0],
        "write_bytes_per_second": status.rates[1],
        "totals": {
            "cleans": stats.cleans,
            "failures": stats.failures,
            "aborted": stats.aborted,
            "read_bytes": stats.read_bytes,
            "written_bytes": stats.written_bytes,
            "bytes_before": stats.bytes_before,
            "bytes_after": stats.bytes_after,
            "worker_deaths": stats.worker_deaths,
        },
        "settings": settings.model_dump(mode="json"),
    }


def spark_json(status: HandoverStatus) -> Json:
    """What is cleaned on Spark, and what was to be."""
    job = None
    if status.job is not None:
        job = {
            "topic": status.job.partitions[0].topic,
            "partitions": [one.partition for one in status.job.partitions],
            "master": status.job.master,
            "seconds": round(status.seconds, 3),
        }
    return {
        "enabled": status.wanted,
        "master": status.master,
        "min_bytes": status.min_bytes,
        "job": job,
        "waiting": [named(one) for one in status.waiting],
        "given_up": [named(one) for one in status.given_up],
        "unavailable": status.unavailable or None,
        "wait_ms": status.wait_ms if status.unavailable else None,
    }


def _job_json(worker: WorkerStatus | None) -> Json | None:
    """How far the job is that a worker has."""
    if worker is None or worker.partition is None:
        return None
    return {
        **named(worker.partition),
        "run_id": worker.run_id,
        "stage": worker.stage,
        "done_bytes": worker.done_bytes,
        "total_bytes": worker.total_bytes,
        "seconds": round(worker.seconds, 3),
    }


def _worker_json(worker: WorkerStatus) -> Json:
    job = _job_json(worker)
    return {
        "index": worker.index,
        "lane": worker.lane.value,
        "pid": worker.pid,
        "ready": worker.ready,
        "job": job,
    }


def partition_json(
    partition: Partition,
    verdict: Verdict | None,
    state: State,
    *,
    is_held: bool,
    worker: WorkerStatus | None,
) -> Json:
    """One row of the list: what the last look found, and what has happened since."""
    one = partition.log
    section = None if verdict is None else verdict.section
    obstacle = blocked_by(verdict, state, is_held=is_held)
    return {
        **named(partition.partition),
        "cleanup_policy": list(one.config.cleanup_policy),
        "state": state_name(state),
        "paused": is_held,
        "blocked_by": None if obstacle is None else obstacle.value,
        "to_clean": verdict is not None and obstacle is None,
        "damage": [damage_fields(damage) for damage in one.damaged],
        "job": _job_json(worker),
        "log_start_offset": one.log_start_offset,
        "log_end_offset": one.log_end_offset,
        "size_bytes": one.size_bytes,
        "segments": one.segment_count,
        "first_dirty_offset": None if section is None else section.first_dirty_offset,
        "end_offset": None if section is None else section.end_offset,
        "clean_bytes": None if section is None else section.clean_bytes,
        "dirty_bytes": None if section is None else section.dirty_bytes,
        "waiting_bytes": None if section is None else section.waiting_bytes,
        "dirty_ratio": None if section is None else round(section.ratio, 4),
        "live_bytes": None if verdict is None else verdict.live_bytes,
        "over_lag_ms": 0 if verdict is None else verdict.over_lag_ms,
        "deadline_ms": None if section is None else section.deadline_ms,
    }


def state_name(state: State) -> str:
    """A word for a state."""
    return type(state).__name__.lower()


def explanation_json(partition: Partition, found: Explanation, active_base_offset: int) -> Json:
    """All that is known of one partition."""
    verdict, look = found.verdict, found.next_attempt
    return {
        **partition_json(partition, verdict, found.state, is_held=found.held, worker=found.worker),
        "at_ms": found.at_ms,
        "active_base_offset": active_base_offset,
        "sentences": sentences(found),
        "findings": _findings_json(found),
        "hindrance": hindrance(found),
        "wanted_offset": found.wanted_offset,
        "strategy": None if verdict is None else verdict.strategy,
        "queue_position": found.queue_position,
        "next_attempt_ms": None if look is None else look.at_ms,
        "next_attempt_cause": None if look is None else look.cause.value,
        "quarantine": _quarantine_json(found.quarantine),
        "last_job": None if found.last_job is None else job_json(found.last_job),
        "story": [_story_json(entry) for entry in found.story],
    }


def offline_json(
    partition: TopicPartition, policy: tuple[str, ...], reason: str, *, is_held: bool
) -> Json:
    """What is known of a partition that is not served."""
    return {
        **named(partition),
        "cleanup_policy": list(policy),
        "state": "offline",
        "paused": is_held,
        "blocked_by": "offline",
        "to_clean": False,
        "sentences": [
            f"{partition} is not being cleaned: offline.",
            f"It is offline: {reason}.",
        ],
        "hindrance": f"It is offline: {reason}.",
        "findings": [{"reason": "offline", "blocks": True, "values": {"why": reason}}],
    }


def _findings_json(found: Explanation) -> list[Json]:
    verdict = found.verdict
    if verdict is None:
        return []
    return [
        {
            "reason": finding.reason.value,
            "blocks": finding.blocks,
            "values": dict(finding.values),
            "sentence": said(finding, found.at_ms, verdict),
        }
        for finding in verdict.findings
    ]


def _quarantine_json(mark: Quarantined | None) -> Json | None:
    return None if mark is None else {"reason": mark.reason, "failures": mark.failures}


def _story_json(entry: StoryEntry) -> Json:
    return {
        "at_ms": entry.at_ms,
        "event": type(entry.event).__name__,
        "before": type(entry.before).__name__.lower(),
        "after": type(entry.after).__name__.lower(),
        "details": {key: value for key, value in asdict(entry.event).items() if key != "until_ms"},
    }


def job_json(job: JobRecord) -> Json:
    """A job that is over."""
    return {
        **job.to_json(),
        "seconds": round(job.seconds, 3),
        "size_reduction_percent": round(100 * job.bytes_saved_share, 1),
        "fewer_records_percent": round(100 * job.records_saved_share, 1),
    }
