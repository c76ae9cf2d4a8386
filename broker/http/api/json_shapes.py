"""The state of the cleaner as JSON. Names end in their unit; times are ms since 1970."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from broker.damage.damaged_reads import damage_fields
from broker.topics.partition import Partition
from cleaner.planning.estimate import Estimate, GroupEstimate
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import PoolStatus, WorkerStatus
from cleaner.scheduler.explain import (
    Explanation,
    blocked_by,
    describe_finding,
    obstacle_text,
    sentences,
)
from cleaner.scheduler.history import JobRecord
from cleaner.scheduler.in_progress_map import TransitionRecord
from cleaner.scheduler.offload import OffloadStatus
from cleaner.states import Quarantined, State, is_busy
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.model import TopicPartition

Json: TypeAlias = dict[str, Any]


def estimate_json(estimate: Estimate, seconds: float) -> Json:
    """Return an estimate without its groups."""
    return {
        "selective": estimate.is_selective,
        "slack": estimate.slack,
        "seconds": round(seconds, 1),
        **asdict(estimate.cost),
        "by_slack": [{"slack": slack, **asdict(cost)} for slack, cost in estimate.by_slack],
        "dirty_ratio": estimate.ratio,
        "by_dirty_ratio": [asdict(row) for row in estimate.by_ratio],
        "survival": [asdict(row) for row in estimate.survival],
    }


def group_json(group: GroupEstimate) -> Json:
    """Return one group of an estimate."""
    return {
        "base_offset": group.base_offset,
        "next_offset": group.next_offset,
        "segments": group.segments,
        "size_bytes": group.size_bytes,
        "live_bytes": group.live_bytes,
        "measured": group.is_measured,
        "rewritten": group.is_rewritten,
    }


def partition_fields(partition: TopicPartition) -> Json:
    """Return the topic and partition fields of a partition."""
    return {"topic": partition.topic, "partition": partition.partition}


def status_json(
    status: PoolStatus, stats: PoolStats, settings: CleanerSettings, counts: Mapping[str, int]
) -> Json:
    """Return the status of the whole cleaner. `counts` counts partitions."""
    return {
        "enabled": settings.enabled,
        "workers": [_worker_json(worker) for worker in status.workers],
        "workers_wanted": settings.workers if settings.enabled else 0,
        "partitions": {
            **counts,
            "in_progress": sum(is_busy(state) for state in status.in_progress.values()),
            "quarantined": len(status.quarantines),
            "paused": len(status.paused),
            "candidates": stats.candidates,
            "over_max_lag": stats.over_lag_partitions,
            "damaged": stats.damaged_partitions,
        },
        "cleanable_bytes": stats.cleanable_bytes,
        "dirty_ratio_max": round(stats.dirty_ratio_max, 4),
        "over_lag_ms_max": stats.over_lag_ms_max,
        "read_bytes_per_second": status.rates[0],
        "write_bytes_per_second": status.rates[1],
        "read_speed_bytes_per_second": round(status.speeds[0]),
        "write_speed_bytes_per_second": round(status.speeds[1]),
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


def spark_json(status: OffloadStatus) -> Json:
    """Return the state of offloading to Spark."""
    job = None
    if status.job is not None:
        job = {
            "topic": status.job.partitions[0].topic,
            "partitions": [partition.partition for partition in status.job.partitions],
            "master": status.job.target,
            "seconds": round(status.seconds, 3),
        }
    return {
        "enabled": status.enabled,
        "master": status.target,
        "min_bytes": status.min_bytes,
        "job": job,
        "waiting": [partition_fields(partition) for partition in status.waiting],
        "given_up": [partition_fields(partition) for partition in status.given_up],
        "unavailable": status.unavailable or None,
        "wait_ms": status.wait_ms if status.unavailable else None,
    }


def _job_json(worker: WorkerStatus | None) -> Json | None:
    """Return the progress of the job of a worker."""
    if worker is None or worker.partition is None:
        return None
    return {
        **partition_fields(worker.partition),
        "job_id": worker.job_id,
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
    is_paused: bool,
    worker: WorkerStatus | None,
) -> Json:
    """Return one row of the list: the result of the last scan, and changes since then."""
    log = partition.log
    section = None if verdict is None else verdict.section
    obstacle = blocked_by(verdict, state, is_paused=is_paused)
    return {
        **partition_fields(partition.partition),
        "cleanup_policy": list(log.config.cleanup_policy),
        "state": state_name(state),
        "paused": is_paused,
        "blocked_by": None if obstacle is None else obstacle.value,
        "to_clean": verdict is not None and obstacle is None,
        "damage": [damage_fields(damage) for damage in log.damage.ranges],
        "job": _job_json(worker),
        "log_start_offset": log.log_start_offset,
        "log_end_offset": log.log_end_offset,
        "size_bytes": log.segments.size_bytes,
        "segments": len(log.segments),
        "first_dirty_offset": None if section is None else section.first_dirty_offset,
        "end_offset": None if section is None else section.end_offset,
        "clean_bytes": None if section is None else section.clean_bytes,
        "dirty_bytes": None if section is None else section.dirty_bytes,
        "waiting_bytes": None if section is None else section.waiting_bytes,
        "dirty_ratio": dirty_ratio_of(verdict),
        "live_bytes": None if verdict is None else verdict.live_bytes,
        "over_lag_ms": 0 if verdict is None else verdict.over_lag_ms,
        "deadline_ms": None if section is None else section.deadline_ms,
    }


def dirty_ratio_of(verdict: Verdict | None) -> float | None:
    """Return the share that no clean has read, with four digits; None without a dirty section."""
    if verdict is None or verdict.section is None:
        return None
    return round(verdict.dirty_ratio, 4)


def state_name(state: State) -> str:
    """Return the name of a state."""
    return type(state).__name__.lower()


def explanation_json(
    partition: Partition, explanation: Explanation, active_base_offset: int
) -> Json:
    """Return the explanation of one partition."""
    verdict, look = explanation.verdict, explanation.next_attempt
    return {
        **partition_json(
            partition,
            verdict,
            explanation.state,
            is_paused=explanation.is_paused,
            worker=explanation.worker,
        ),
        "at_ms": explanation.at_ms,
        "active_base_offset": active_base_offset,
        "sentences": sentences(explanation),
        "findings": _findings_json(explanation),
        "obstacle": obstacle_text(explanation),
        "requested_offset": explanation.requested_offset,
        "strategy": None if verdict is None else verdict.strategy,
        "queue_position": explanation.queue_position,
        "next_attempt_ms": None if look is None else look.at_ms,
        "next_attempt_cause": None if look is None else look.cause.value,
        "quarantine": _quarantine_json(explanation.quarantine),
        "last_job": None if explanation.last_job is None else job_json(explanation.last_job),
        "transitions": [_transition_json(entry) for entry in explanation.transitions],
    }


def offline_partition_json(
    partition: TopicPartition, policy: tuple[str, ...], reason: str, *, is_paused: bool
) -> Json:
    """Return the state of an offline partition."""
    return {
        **partition_fields(partition),
        "cleanup_policy": list(policy),
        "state": "offline",
        "paused": is_paused,
        "blocked_by": "offline",
        "to_clean": False,
        "sentences": [
            f"{partition} is not being cleaned: offline.",
            f"It is offline: {reason}.",
        ],
        "obstacle": f"It is offline: {reason}.",
        "findings": [{"reason": "offline", "blocks": True, "values": {"why": reason}}],
    }


def _findings_json(explanation: Explanation) -> list[Json]:
    verdict = explanation.verdict
    if verdict is None:
        return []
    return [
        {
            "reason": finding.reason.value,
            "blocks": finding.blocks,
            "values": dict(finding.values),
            "sentence": describe_finding(finding, explanation.at_ms, verdict),
        }
        for finding in verdict.findings
    ]


def _quarantine_json(mark: Quarantined | None) -> Json | None:
    return None if mark is None else {"reason": mark.reason, "failures": mark.failures}


def _transition_json(entry: TransitionRecord) -> Json:
    return {
        "at_ms": entry.at_ms,
        "event": type(entry.event).__name__,
        "before": type(entry.before).__name__.lower(),
        "after": type(entry.after).__name__.lower(),
        "reason": entry.reason,
        "details": {key: value for key, value in asdict(entry.event).items() if key != "until_ms"},
    }


def job_json(job: JobRecord) -> Json:
    """Return a finished job."""
    return {
        **job.to_json(),
        "seconds": round(job.seconds, 3),
        "size_reduction_percent": round(100 * job.bytes_saved_share, 1),
        "fewer_records_percent": round(100 * job.records_saved_share, 1),
    }
