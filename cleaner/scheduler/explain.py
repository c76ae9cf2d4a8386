"""Why is this not compacting? One partition's chain of verdicts, and what it means in words.

Pure: numbers in, an answer out. The console and the command line print `sentences`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cleaner.planning.findings import Finding, NextAttempt, Reason, Value
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import WorkerStatus
from cleaner.scheduler.history import JobRecord
from cleaner.scheduler.in_progress import TransitionRecord
from cleaner.states import Quarantined, State, is_busy
from config.units import about_size, about_span
from storage.model import TopicPartition

_Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one partition at this moment. Times in wall ms."""

    partition: TopicPartition
    at_ms: int
    state: State
    verdict: Verdict | None  # judged now; None where its numbers make no sense
    transitions: list[TransitionRecord]  # its last transitions, oldest first
    queue_position: int | None  # 1 is next; None: it does not wait for a worker
    next_attempt: NextAttempt | None  # not before that, and why; None: no time is known
    quarantine: Quarantined | None
    last_job: JobRecord | None
    is_paused: bool  # paused by an operator
    requested_offset: int | None = None  # an operator asked for a clean up to here
    worker: WorkerStatus | None = None  # that has it


def next_attempt(verdict: Verdict, now_ms: int) -> NextAttempt | None:
    """Before which nothing will be tried, and why; now for a candidate; None: no time is known."""
    blocking = {finding.reason for finding in verdict.findings if finding.blocks}
    if not blocking:
        return NextAttempt(now_ms, Reason.RUN_NOW if verdict.run_now else Reason.RATIO)
    if blocking & _UNTIMED:
        return None
    looks = [] if verdict.next_attempt is None else [verdict.next_attempt]
    if blocking == {Reason.QUARANTINED}:
        looks = []
    elif not looks:
        return None
    for finding in verdict.findings:
        if finding.blocks and finding.reason is Reason.QUARANTINED:
            wait_ms = int(dict(finding.values)["wait_ms"])
            looks.append(NextAttempt(now_ms + wait_ms, Reason.QUARANTINED))
    return max(looks, key=lambda look: look.at_ms)


def blocked_by(verdict: Verdict | None, state: State, *, is_paused: bool) -> Reason | None:
    """Return why it is not cleaned now: its state, else the last scan's first obstacle."""
    if is_busy(state):
        return Reason.IN_PROGRESS
    if is_paused:
        return Reason.HELD
    outdated = (Reason.IN_PROGRESS, Reason.HELD)  # no longer true: checked above
    findings = () if verdict is None else verdict.findings
    return next(
        (
            finding.reason
            for finding in findings
            if finding.blocks and finding.reason not in outdated
        ),
        None,
    )


def obstacle_text(explanation: Explanation) -> str | None:
    """Why not all of it can be cleaned now, in words; None where nothing is dirty, nor damaged."""
    verdict, at_ms = explanation.verdict, explanation.at_ms
    if verdict is None:
        return _answer(explanation)
    findings = [
        finding
        for finding in verdict.findings
        if finding.blocks or finding.reason in _LEFT_AS_IT_IS
    ]
    if all(finding.reason is Reason.NOTHING_DIRTY for finding in findings):
        return None
    # Nothing is dirty beside a damage: that is not in the way of anything.
    first = next(finding for finding in findings if finding.reason is not Reason.NOTHING_DIRTY)
    return sentence_of(first, at_ms, verdict)


# Reasons for which the cleaner leaves a segment unchanged while it cleans the others.
_LEFT_AS_IT_IS = frozenset({Reason.DAMAGED, Reason.UNCLEANABLE})

# What only an event ends: nobody knows when that will be.
_UNTIMED = frozenset(
    {
        Reason.POLICY,
        Reason.POLICY_UNKNOWN,
        Reason.OFFLINE,
        Reason.HELD,
        Reason.PAUSED,
        Reason.IN_PROGRESS,
        Reason.OFFLOADED,
    }
)

# What comes to its end at the time of the next attempt.
_UNTIL: Final[dict[Reason, str]] = {
    Reason.MIN_LAG: "when the next segment is older than min.compaction.lag.ms",
    Reason.MAX_LAG: "when max.compaction.lag.ms is over for its oldest dirty record",
    Reason.ACTIVE_SEGMENT: "when its active segment closes by its age",
    Reason.EXPIRED: "when the first tombstones or markers may go (delete.retention.ms)",
    Reason.QUARANTINED: "when its quarantine is over",
}


def sentences(explanation: Explanation) -> list[str]:
    """The chain in plain words, one sentence a link, the answer first."""
    results = [_answer(explanation)]
    verdict, at_ms = explanation.verdict, explanation.at_ms
    if verdict is not None:
        results += [
            _progress_sentence(explanation.worker)
            if finding.reason is Reason.IN_PROGRESS and explanation.worker is not None
            else sentence_of(finding, at_ms, verdict)
            for finding in verdict.findings
        ]
        if verdict.section is not None:
            results.append(_sizes(verdict))
    if explanation.queue_position is not None:
        ahead = explanation.queue_position - 1
        results.append(f"It waits for a worker, with {_count(ahead, 'partition')} before it.")
    if explanation.last_job is not None:
        results.append(_last(explanation.last_job, at_ms))
    if explanation.requested_offset is not None:
        results.append(f"An operator wants it clean up to offset {explanation.requested_offset}.")
    if explanation.next_attempt is not None:
        wait_ms = explanation.next_attempt.at_ms - at_ms
        when = "as soon as a worker is free"
        if wait_ms > 0:
            when = f"in {about_span(wait_ms)}, {_UNTIL[explanation.next_attempt.cause]}"
        results.append(f"Next attempt: {when}.")
    return results


def _answer(explanation: Explanation) -> str:
    name, verdict = explanation.partition, explanation.verdict
    if is_busy(explanation.state):
        return f"{name} is being cleaned ({type(explanation.state).__name__.lower()})."
    if verdict is None:
        return f"{name} cannot be judged: its numbers make no sense. The broker's log says more."
    if verdict.to_clean:
        subject = "to lose what has expired" if verdict.expired is not None else "to be cleaned"
        return f"{name} is {subject}."
    first = next(finding for finding in verdict.findings if finding.blocks)
    return f"{name} is not being cleaned: {first.reason.value}."


def sentence_of(finding: Finding, at_ms: int, verdict: Verdict) -> str:
    """A finding in words."""
    values = dict(finding.values)
    return _TEXTS[finding.reason](values, finding.blocks, at_ms, verdict)


def _policy(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    policy = v["cleanup.policy"] or "empty (everything is kept)"
    return f"Its cleanup.policy is {policy}{': it is not compacted' if blocks else ''}."


def _high_watermark(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    return (
        f"{_nothing_from(v)}: the high watermark is {v['undecided_offset']}. What is above it is "
        "not on the disk yet; it goes on with the next flush."
    )


def _open_transaction(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    if "producer_id" not in v:
        return f"{_nothing_from(v)}: a transaction is open since offset {v['undecided_offset']}."
    since, producer = int(v["since_ms"]), v["producer_id"]
    open_for = f", silent for {about_span(at_ms - since)}" if since >= 0 else ""
    name, number = verdict.partition
    return (
        f"{_nothing_from(v)}: producer {producer} has had a transaction open since offset "
        f"{v['transaction_first_offset']}{open_for}. If it will never end it, "
        f"`varve cleaner end-transaction {name} {number} {producer}` aborts it."
    )


def _view(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    name, number = verdict.partition
    return (
        f"{_nothing_from(v)}: the topic's compacted view has taken what is below offset "
        f"{v['undecided_offset']} only. `varve view compact {name} {number}` takes it further."
    )


def _view_unknown(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    return (
        f"{_nothing_from(v)}: the files of the topic's compacted view cannot be read or removed, "
        "so the broker does not know which records the view still needs. It retries every few "
        f"seconds; `varve view status {verdict.partition.topic}` and the log give the error."
    )


def _nothing_from(v: _Values) -> str:
    return f"Nothing from offset {v['end_offset']} on can be cleaned yet"


def _ratio(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    ratio, limit = float(v["ratio"]), float(v["needs more than"])
    then = "is not exceeded" if blocks else "does not stand in the way"
    text = (
        f"{ratio:.1%} of its bytes are dirty; min.cleanable.dirty.ratio is {limit:.1%}, "
        f"which {then}."
    )
    if verdict.strategy == "survivorship":
        stays = float(v["survivorship"])
        text = f"{text} In earlier cleans {stays:.0%} of the new bytes survived."
    return text


def _min_lag(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    wait = f" for another {about_span(int(v['until_ms']) - at_ms)}" if "until_ms" in v else ""
    return f"From offset {v['end_offset']} on it is younger than min.compaction.lag.ms{wait}."


def _active(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    text = f"From offset {v['end_offset']} on it is the active segment, which is never cleaned"
    if blocks:
        text = f"{text}; nothing else is dirty"
    reserved_bytes = int(v["active_bytes"])
    if not reserved_bytes:
        return f"{text}."
    closes = f"it closes at {about_size(int(v['segment.bytes']))}"
    if "closes_ms" in v:
        closes = f"{closes} or in {about_span(int(v['closes_ms']) - at_ms)}"
    return f"{text}. {about_size(reserved_bytes)} are in it; {closes}, and can be cleaned then."


def _quarantined(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    wait_ms = int(v["wait_ms"])
    when = (
        f"it is left alone for another {about_span(wait_ms)}"
        if wait_ms
        else "it may be tried again"
    )
    return f"{_count(int(v['failures']), 'attempt')} failed in a row ({v['reason']}); {when}."


def _damaged(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    name, number = verdict.partition
    text = (
        f"{v['file']} is damaged at byte {v['position']} ({v['reason']}): that segment stays as "
        "it is, the rest is cleaned."
    )
    first, end = int(v["first_offset"]), int(v["next_offset"])
    if first < 0:
        return text
    return (
        f"{text} Offsets {first} to {end - 1} cannot be read: fetches there return "
        f"CORRUPT_MESSAGE. `varve log skip {name} {number} --offset {first}` removes them from the "
        "log so that readers can continue."
    )


def _uncleanable(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    return (
        f"The batch of offsets {v['first_offset']} to {int(v['next_offset']) - 1} in {v['file']}, "
        f"byte {v['position']}, cannot be cleaned ({v['reason']}): that segment stays as it is "
        "and consumers can read it; the rest is cleaned."
    )


def _offloaded(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    size, target = about_size(int(v["bytes"])), f"{v['system']} ({v['target']})"
    wait = about_span(int(v.get("wait_ms", 0)))
    match v["state"]:
        case "unavailable":
            return (
                f"It is large enough for {target} ({size}), but no job can be started there: "
                f"{v['reason']}. The workers clean it; the next try is in {wait}."
            )
        case "given up":
            return (
                f"{_count(int(v['failures']), 'attempt')} on {target} failed in a row "
                f"({v['reason']}). The workers clean the partition for another {wait}."
            )
        case "running":
            return f"A job on {target} is cleaning its {size}."
    text = f"Its {size} are to be cleaned on {target}"
    if int(v.get("wait_ms", 0)):
        return f"{text}; the last attempt failed ({v['reason']}), the next one is in {wait}."
    return f"{text}; the job has not started yet."


_TEXTS: Final[dict[Reason, Callable[[_Values, bool, int, Verdict], str]]] = {
    Reason.POLICY: _policy,
    Reason.POLICY_UNKNOWN: lambda v, b, at, _: (
        "Its cleanup.policy is not known: the folder was found on disk, and nobody has said yet."
    ),
    Reason.OFFLINE: lambda v, b, at, _: f"It is offline: {v['why']}.",
    Reason.DAMAGED: _damaged,
    Reason.UNCLEANABLE: _uncleanable,
    Reason.IN_PROGRESS: lambda v, b, at, _: f"A job has it ({str(v['state']).lower()}).",
    Reason.HELD: lambda v, b, at, _: (
        f"An operator paused it {about_span(at - int(v['since_ms']))} ago."
    ),
    Reason.PAUSED: lambda v, b, at, _: (
        f"The broker itself keeps the cleaner off ({_count(int(v['pauses']), 'pause')}): it is "
        "being truncated, deleted or configured, or a run outside of the broker compacts it."
    ),
    Reason.QUARANTINED: _quarantined,
    Reason.ACTIVE_SEGMENT: _active,
    Reason.HIGH_WATERMARK: _high_watermark,
    Reason.OPEN_TRANSACTION: _open_transaction,
    Reason.VIEW: _view,
    Reason.VIEW_UNKNOWN: _view_unknown,
    Reason.MIN_LAG: _min_lag,
    Reason.NOTHING_DIRTY: lambda v, b, at, _: "Nothing is dirty.",
    Reason.MAX_LAG: lambda v, b, at, _: (
        f"Its oldest dirty record is {about_span(int(v['over_ms']))} past max.compaction.lag.ms."
    ),
    Reason.RUN_NOW: lambda v, b, at, _: "An operator asked for a clean.",
    Reason.RATIO: _ratio,
    Reason.OFFLOADED: _offloaded,
    Reason.EXPIRED: lambda v, b, at, _: (
        f"Tombstones or markers in {_count(int(v['segments']), 'segment')} may have expired, the "
        f"first {about_span(at - int(v['since_ms']))} ago."
    ),
}


def _sizes(verdict: Verdict) -> str:
    section = verdict.section
    assert section is not None
    text = (
        f"{about_size(section.dirty_bytes)} from offset {section.first_dirty_offset} to "
        f"{section.end_offset} are dirty, {about_size(section.clean_bytes)} are clean"
    )
    if section.waiting_bytes:
        text += f", {about_size(section.waiting_bytes)} behind them wait"
    if verdict.live_bytes is None:
        return f"{text}."
    return f"{text}; about {about_size(verdict.live_bytes)} would be left."


def _progress_sentence(worker: WorkerStatus) -> str:
    done = ""
    if worker.total_bytes:
        share = worker.done_bytes / worker.total_bytes
        done = f" {share:.0%} of {about_size(worker.total_bytes)}"
    since = about_span(int(1000 * worker.seconds))
    return f"Worker {worker.index} has it: {worker.stage or 'starting'}{done}, for {since}."


def _last(job: JobRecord, at_ms: int) -> str:
    when = f"{about_span(max(0, at_ms - job.finished_ms))} ago"
    if job.outcome in ("finished", "damaged"):
        text = (
            f"Its last job finished {when}, after {about_span(job.finished_ms - job.started_ms)}: "
            f"{about_size(job.bytes_before)} became {about_size(job.bytes_after)}"
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
