"""Why is this not compacting? One partition's chain of verdicts, and what it means in words.

Pure: numbers in, an answer out. The console and the command line print `sentences`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cleaner.planning.findings import Finding, Reason, Value
from cleaner.planning.plan import Verdict
from cleaner.pool.history import JobRecord
from cleaner.pool.registry import StoryEntry
from cleaner.states import Quarantined, State, held
from storage.model import TopicPartition

_Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one partition at this moment. Times in wall ms."""

    partition: TopicPartition
    at_ms: int
    state: State
    verdict: Verdict | None  # judged now; None where its numbers make no sense
    story: list[StoryEntry]  # its last transitions, oldest first
    queue_position: int | None  # 1 is next; None: it does not wait for a worker
    next_attempt_ms: int | None  # not before that; None: nothing is planned
    quarantine: Quarantined | None
    last_job: JobRecord | None
    held: bool  # paused by an operator


def next_attempt_ms(verdict: Verdict, now_ms: int) -> int | None:
    """Wall time before which nothing will be tried; now for a candidate; None: no time is known."""
    blocking = {finding.reason for finding in verdict.findings if finding.blocks}
    if not blocking:
        return now_ms
    if blocking & _UNTIMED:
        return None
    times = [now_ms]
    for finding in verdict.findings:
        values = dict(finding.values)
        if finding.blocks and finding.reason is Reason.QUARANTINED:
            times.append(now_ms + int(values["wait_ms"]))
    if blocking == {Reason.QUARANTINED}:
        return max(times)
    return None if verdict.next_ms is None else max(*times, verdict.next_ms)


# What only an event ends: nobody knows when that will be.
_UNTIMED = frozenset(
    {
        Reason.POLICY,
        Reason.POLICY_UNKNOWN,
        Reason.OFFLINE,
        Reason.HELD,
        Reason.PAUSED,
        Reason.IN_PROGRESS,
    }
)


def sentences(explanation: Explanation) -> list[str]:
    """The chain in plain words, one sentence a link, the answer first."""
    found = [_answer(explanation)]
    verdict, at_ms = explanation.verdict, explanation.at_ms
    if verdict is not None:
        found += [_said(finding, at_ms, verdict) for finding in verdict.findings]
        if verdict.section is not None:
            found.append(_sizes(verdict))
    if explanation.queue_position is not None:
        ahead = explanation.queue_position - 1
        found.append(f"It waits for a worker, with {_count(ahead, 'partition')} before it.")
    if explanation.last_job is not None:
        found.append(_last(explanation.last_job, at_ms))
    if explanation.next_attempt_ms is not None:
        wait_ms = explanation.next_attempt_ms - at_ms
        when = "as soon as a worker is free" if wait_ms <= 0 else f"in {_span(wait_ms)}"
        found.append(f"Next attempt: {when}.")
    return found


def _answer(explanation: Explanation) -> str:
    name, verdict = explanation.partition, explanation.verdict
    if held(explanation.state):
        return f"{name} is being cleaned ({type(explanation.state).__name__.lower()})."
    if verdict is None:
        return f"{name} cannot be judged: its numbers make no sense. The broker's log says more."
    if verdict.to_clean:
        what = "to lose what has expired" if verdict.expired is not None else "to be cleaned"
        return f"{name} is {what}."
    first = next(finding for finding in verdict.findings if finding.blocks)
    return f"{name} is not being cleaned: {first.reason.value}."


def _said(finding: Finding, at_ms: int, verdict: Verdict) -> str:
    values = dict(finding.values)
    return _TEXTS[finding.reason](values, finding.blocks, at_ms, verdict)


def _policy(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    policy = v["cleanup.policy"] or "empty (everything is kept)"
    return f"Its cleanup.policy is {policy}{': it is not compacted' if blocks else ''}."


def _undecided(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    where = f"Nothing from offset {v['end_offset']} on can be cleaned yet"
    if "producer_id" in v:
        since = int(v["since_ms"])
        open_for = f", silent for {_span(at_ms - since)}" if since >= 0 else ""
        return (
            f"{where}: producer {v['producer_id']} has had a transaction open since offset "
            f"{v['transaction_first_offset']}{open_for}."
        )
    return f"{where}: the high watermark is {v['undecided_offset']}."


def _ratio(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    ratio, limit = float(v["ratio"]), float(v["needs more than"])
    what = "dirty"
    if verdict.strategy == "survivorship":
        stays = float(v["survivorship"])
        what = f"expected to be garbage ({stays:.0%} of what was new stayed in earlier cleans)"
    then = "is not exceeded" if blocks else "does not stand in the way"
    return (
        f"{ratio:.1%} of its bytes are {what}; min.cleanable.dirty.ratio is {limit:.1%}, "
        f"which {then}."
    )


def _min_lag(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    wait = f" for another {_span(int(v['until_ms']) - at_ms)}" if "until_ms" in v else ""
    return f"From offset {v['end_offset']} on it is younger than min.compaction.lag.ms{wait}."


def _active(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    text = f"From offset {v['end_offset']} on it is the active segment, which is never cleaned"
    return f"{text}; nothing else is dirty." if blocks else f"{text}."


def _quarantined(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    wait_ms = int(v["wait_ms"])
    when = f"it is left alone for another {_span(wait_ms)}" if wait_ms else "it may be tried again"
    return f"{_count(int(v['failures']), 'attempt')} failed in a row ({v['reason']}); {when}."


def _damaged(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    return (
        f"{v['file']} is damaged at byte {v['position']} ({v['reason']}): that segment stays as "
        "it is, the rest is cleaned."
    )


_TEXTS: Final[dict[Reason, Callable[[_Values, bool, int, Verdict], str]]] = {
    Reason.POLICY: _policy,
    Reason.POLICY_UNKNOWN: lambda v, b, at, _: (
        "Its cleanup.policy is not known: the folder was found on disk, and nobody has said yet."
    ),
    Reason.OFFLINE: lambda v, b, at, _: f"It is offline: {v['why']}.",
    Reason.DAMAGED: _damaged,
    Reason.IN_PROGRESS: lambda v, b, at, _: f"A job has it ({str(v['state']).lower()}).",
    Reason.HELD: lambda v, b, at, _: f"An operator paused it {_span(at - int(v['since_ms']))} ago.",
    Reason.PAUSED: lambda v, b, at, _: (
        f"The broker itself keeps the cleaner off ({_count(int(v['pauses']), 'pause')}): it is "
        "being truncated, deleted or configured."
    ),
    Reason.QUARANTINED: _quarantined,
    Reason.ACTIVE_SEGMENT: _active,
    Reason.UNDECIDED: _undecided,
    Reason.MIN_LAG: _min_lag,
    Reason.NOTHING_DIRTY: lambda v, b, at, _: "Nothing is dirty.",
    Reason.MAX_LAG: lambda v, b, at, _: (
        f"Its oldest dirty record is {_span(int(v['over_ms']))} past max.compaction.lag.ms."
    ),
    Reason.RUN_NOW: lambda v, b, at, _: "An operator asked for a clean.",
    Reason.RATIO: _ratio,
    Reason.EXPIRED: lambda v, b, at, _: (
        f"Tombstones or markers in {_count(int(v['segments']), 'segment')} may have expired, the "
        f"first {_span(at - int(v['since_ms']))} ago."
    ),
}


def _sizes(verdict: Verdict) -> str:
    section = verdict.section
    assert section is not None
    return (
        f"{_size(section.dirty_bytes)} from offset {section.first_dirty_offset} to "
        f"{section.end_offset} are dirty, {_size(section.clean_bytes)} are clean; about "
        f"{_size(verdict.live_bytes)} would be left."
    )


def _last(job: JobRecord, at_ms: int) -> str:
    when = f"{_span(max(0, at_ms - job.finished_ms))} ago"
    if job.outcome == "finished":
        text = (
            f"Its last job finished {when}, after {_span(job.finished_ms - job.started_ms)}: "
            f"{_size(job.bytes_before)} became {_size(job.bytes_after)}"
        )
    else:
        text = f"Its last job {_OUTCOMES[job.outcome]} {when}"
    return f"{text} ({job.reason})." if job.reason else f"{text}."


_OUTCOMES: Final = {
    "failed": "failed",
    "aborted": "was given up",
    "stale": "became void",
}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number or 'no'} {noun}s"


def _span(ms: int) -> str:
    """A duration in its largest unit, with one digit behind the point."""
    for unit_ms, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= unit_ms:
            return f"{ms / unit_ms:.1f} {unit}"
    return f"{max(0, ms)} ms"


def _size(size_bytes: int) -> str:
    """Bytes in their largest unit, with one digit behind the point."""
    for unit_bytes, unit in (
        (1 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} bytes"
