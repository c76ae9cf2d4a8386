"""Explain why a partition is or is not being cleaned, as findings and as sentences.

Pure. The console and the command line print `sentences`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from cleaner.engine.selective.index_size import INDEXED_BYTES
from cleaner.planning.findings import Finding, NextAttempt, Reason, Value
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import WorkerStatus
from cleaner.scheduler.history import JobRecord
from cleaner.scheduler.in_progress_map import TransitionRecord
from cleaner.states import (
    Aborting,
    Adopting,
    Cleaning,
    Publishing,
    Quarantined,
    State,
    is_busy,
)
from config.units import about_size, about_span, counted
from storage.model import TopicPartition

_Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cleaning state of one partition at one moment. Times in wall ms."""

    partition: TopicPartition
    at_ms: int
    state: State
    verdict: Verdict | None  # assessed now; None if its facts contradict each other
    transitions: list[TransitionRecord]  # its last transitions, oldest first
    queue_position: int | None  # 1 is next; None: not waiting for a worker
    next_attempt: NextAttempt | None  # the earliest one; None: unknown
    quarantine: Quarantined | None
    last_job: JobRecord | None
    is_paused: bool  # paused by an operator
    requested_offset: int | None = None  # the end of an operator's clean request
    worker: WorkerStatus | None = None  # that cleans it
    is_enabled: bool = True  # the cleaner: `cleaner.enabled`


def next_attempt(verdict: Verdict, now_ms: int) -> NextAttempt | None:
    """Return the earliest next attempt: now for a candidate, None if no time is known."""
    blocking = {finding.reason for finding in verdict.findings if finding.blocks}
    if not blocking:
        return NextAttempt(now_ms, Reason.RUN_NOW if verdict.run_now else Reason.RATIO)
    if blocking & _UNTIMED:
        return None
    attempts = [] if verdict.next_attempt is None else [verdict.next_attempt]
    if blocking <= _WAITS:
        attempts = []
    elif not attempts:
        return None
    for finding in verdict.findings:
        values = dict(finding.values)
        if finding.blocks and finding.reason in _WAITS and "wait_ms" in values:
            attempts.append(NextAttempt(now_ms + int(values["wait_ms"]), finding.reason))
    return max(attempts, key=lambda attempt: attempt.at_ms, default=None)


def blocked_by(verdict: Verdict | None, state: State, *, is_paused: bool) -> Reason | None:
    """Return why the partition is not cleaned: its state, or the first blocking finding."""
    if is_busy(state):
        return Reason.IN_PROGRESS
    if is_paused:
        return Reason.PAUSED_BY_OPERATOR
    outdated = (
        Reason.IN_PROGRESS,
        Reason.PAUSED_BY_OPERATOR,
    )  # checked above, with the present state
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
    """Return a sentence on why not everything can be cleaned now.

    Return None if nothing is dirty or damaged.
    """
    verdict, at_ms = explanation.verdict, explanation.at_ms
    if verdict is None:
        return _answer(explanation)
    findings = [
        finding for finding in verdict.findings if finding.blocks or finding.reason in _UNCHANGED
    ]
    if all(finding.reason is Reason.NOTHING_DIRTY for finding in findings):
        return None
    # "Nothing is dirty" is no obstacle beside damage.
    first = next(finding for finding in findings if finding.reason is not Reason.NOTHING_DIRTY)
    return describe_finding(first, at_ms, verdict)


# Reasons for which the cleaner leaves a segment unchanged while it cleans the others.
_UNCHANGED = frozenset({Reason.DAMAGED, Reason.UNCLEANABLE})

# Findings that only an event ends, at an unknown time.
_UNTIMED = frozenset(
    {
        Reason.POLICY,
        Reason.POLICY_UNKNOWN,
        Reason.OFFLINE,
        Reason.PAUSED_BY_OPERATOR,
        Reason.PAUSED_BY_BROKER,
        Reason.IN_PROGRESS,
        Reason.OFFLOADED,
    }
)

# Findings that end after `wait_ms`; without it, when the clean of another partition ends.
_WAITS: Final = frozenset({Reason.QUARANTINED, Reason.TOPIC_LIMIT})

# What happens at the time of the next attempt.
_UNTIL: Final[dict[Reason, str]] = {
    Reason.MIN_LAG: "when the next segment is older than min.compaction.lag.ms",
    Reason.MAX_LAG: "when its oldest dirty record reaches max.compaction.lag.ms",
    Reason.ACTIVE_SEGMENT: "when its active segment is rolled because of its age",
    Reason.EXPIRED: "when the first tombstones or markers expire (delete.retention.ms)",
    Reason.QUARANTINED: "when its quarantine ends",
    Reason.TOPIC_LIMIT: "when the rate limit of its topic allows it",
}


# Answers where nothing is wrong.
_NORMAL: Final = {
    Reason.POLICY: "is not compacted",
    Reason.NOTHING_DIRTY: "has nothing to clean now: nothing is dirty",
    Reason.ACTIVE_SEGMENT: "has nothing to clean now: only closed segments are cleaned",
    Reason.MIN_LAG: "has nothing to clean now: its records are younger than min.compaction.lag.ms",
    Reason.RATIO: "needs no clean yet: too little of it is dirty",
}


def sentences(explanation: Explanation) -> list[str]:
    """Return the answer, followed by one sentence for each finding."""
    results = [_answer(explanation)]
    verdict, at_ms = explanation.verdict, explanation.at_ms
    if verdict is not None:
        results += [
            _progress_sentence(explanation.worker)
            if finding.reason is Reason.IN_PROGRESS and explanation.worker is not None
            else describe_finding(finding, at_ms, verdict)
            for finding in verdict.findings
            # Without it, the sentence on the sizes says that nothing is dirty.
            if verdict.section is None or finding.reason is not Reason.NOTHING_DIRTY
        ]
        if verdict.section is not None and not _is_empty(verdict):
            results.append(_sizes(verdict))
    if explanation.queue_position is not None:
        ahead = explanation.queue_position - 1
        results.append(f"It waits for a worker, behind {counted(ahead, 'partition')}.")
    if explanation.last_job is not None:
        results.append(_last(explanation.last_job, at_ms))
    if explanation.requested_offset is not None:
        results.append(
            f"An operator requested a clean below offset {explanation.requested_offset}."
        )
    if not explanation.is_enabled and not _is_uncompacted(verdict):
        results.append(f"{_SWITCHED_OFF} Set `cleaner.enabled: true` and restart the broker.")
    if explanation.next_attempt is not None:
        wait_ms = explanation.next_attempt.at_ms - at_ms
        when = "as soon as a worker is idle"
        if wait_ms > 0:
            when = f"in {about_span(wait_ms)}, {_UNTIL[explanation.next_attempt.cause]}"
        results.append(f"Next attempt: {when}.")
    return results


_SWITCHED_OFF: Final = "The cleaner is switched off."


def _is_uncompacted(verdict: Verdict | None) -> bool:
    findings = () if verdict is None else verdict.findings
    return any(finding.blocks and finding.reason is Reason.POLICY for finding in findings)


def _answer(explanation: Explanation) -> str:
    name, verdict = explanation.partition, explanation.verdict
    if is_busy(explanation.state):
        return f"{name} is being cleaned{_STAGES[type(explanation.state)]}."
    if verdict is None:
        return f"{name} cannot be assessed: its facts contradict each other. See the broker's log."
    if verdict.to_clean and not explanation.is_enabled:
        return f"{name} is not being cleaned: the cleaner is switched off."
    if verdict.to_clean:
        purpose = "to remove expired tombstones" if verdict.expired is not None else "soon"
        return f"{name} will be cleaned {purpose}."
    first = next(finding for finding in verdict.findings if finding.blocks)
    if first.reason is Reason.NOTHING_DIRTY and _is_empty(verdict):
        return f"{name} is empty: there is nothing to clean."
    answer = _NORMAL.get(first.reason, f"is not being cleaned: {first.reason.value}")
    return f"{name} {answer}."


_STAGES: Final[dict[type[State], str]] = {
    Cleaning: "",
    Publishing: ": the new segments replace the old ones",
    Aborting: ": its job is stopping",
    Adopting: ": the output of a remote compaction is being published",
}


def _is_empty(verdict: Verdict) -> bool:
    section = verdict.section
    return section is not None and not (
        section.clean_bytes or section.dirty_bytes or section.waiting_bytes
    )


def describe_finding(finding: Finding, at_ms: int, verdict: Verdict) -> str:
    """Return a finding as a sentence."""
    values = dict(finding.values)
    return _TEXTS[finding.reason](values, finding.blocks, at_ms, verdict)


def _policy(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    policy = v["cleanup.policy"] or "empty (all records are kept)"
    return f"Its cleanup.policy is {policy}."


def _high_watermark(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    return (
        f"{_nothing_from(v)}: the high watermark is {v['undecided_offset']}. Records from there on "
        "are not on the disk yet; the next flush moves it."
    )


def _open_transaction(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    if "producer_id" not in v:
        return f"{_nothing_from(v)}: a transaction is open since offset {v['undecided_offset']}."
    since, producer = int(v["since_ms"]), v["producer_id"]
    open_for = f", silent for {about_span(at_ms - since)}" if since >= 0 else ""
    name, number = verdict.partition
    return (
        f"{_nothing_from(v)}: producer {producer} has had a transaction open since offset "
        f"{v['transaction_first_offset']}{open_for}. If the producer is gone, "
        f"`varve cleaner end-transaction {name} {number} --producer-id {producer}` aborts it."
    )


def _view(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    name, number = verdict.partition
    return (
        f"{_nothing_from(v)}: the topic's compacted view has only the records below offset "
        f"{v['undecided_offset']}. Run `varve view compact {name} {number}`."
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
    ratio, limit = float(v["ratio"]), float(v["limit"])
    setting = float(v["min.cleanable.dirty.ratio"])
    result = "is not exceeded" if blocks else "does not prevent a clean"
    text = (
        f"{ratio:.1%} of its bytes are dirty; min.cleanable.dirty.ratio is {limit:.1%}, "
        f"which {result}."
    )
    if limit < setting:
        text = (
            f"No clean has read {ratio:.1%} of its bytes. A clean starts above {limit:.1%}, "
            f"because min.cleanable.dirty.ratio is {setting:.1%} and cleans leave some garbage; "
            f"this limit {result}."
        )
    if verdict.strategy == "survivorship":
        stays = float(v["survivorship"])
        text = f"{text} In earlier cleans {stays:.0%} of the new bytes survived."
    if "not_indexed" in v:
        text = f"{text} {_NOT_INDEXED[str(v['not_indexed'])]}"
    if verdict.is_selective:
        text = f"{text} The next clean rewrites only the segments with the most garbage."
    return text


# Why a log with the strategy `generational` is cleaned as with `dirty-ratio` (plan.py).
_NOT_INDEXED: Final = {
    "small records": (
        f"Its records take less than {INDEXED_BYTES} bytes each, so key indexes would be large: a "
        "clean rewrites all segments with superseded records."
    ),
    "transactions": (
        "It has transactions, which key indexes do not have: a clean rewrites all segments with "
        "superseded records."
    ),
    "damage": "Because of the damage, a clean rewrites all other segments with superseded records.",
}


def _min_lag(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    lag = about_span(int(v["min.compaction.lag.ms"]))
    text = (
        f"From offset {v['end_offset']} on, records are younger than min.compaction.lag.ms ({lag})"
    )
    if "until_ms" not in v:
        return f"{text}."
    wait = about_span(int(v["until_ms"]) - at_ms)
    return f"{text}; the next segment can be cleaned in {wait}."


def _active(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    active_bytes = int(v["active_bytes"])
    state = f"has {about_size(active_bytes)}" if active_bytes else "is empty"
    text = f"The active segment, from offset {v['end_offset']} on, {state}"
    if blocks:
        text = f"{text}, and no closed segment is dirty"
    if not active_bytes:
        return f"{text}."
    rolls = f"rolled at {about_size(int(v['segment.bytes']))}"
    name, number = verdict.partition
    hint = f" `varve cleaner run {name} {number} --roll` rolls it now."
    if "closes_ms" in v:
        wait_ms = int(v["closes_ms"]) - at_ms
        rolls += f" or in {about_span(wait_ms)}"
        if wait_ms <= 0:
            rolls, hint = "rolled, which is due because of its age", ""
    if "min.compaction.lag.ms" in v:
        hint = ""
        lag = about_span(int(v["min.compaction.lag.ms"]))
        rolls = f"{rolls}, and older than min.compaction.lag.ms ({lag})"
    return f"{text}. It can be cleaned once it is {rolls}.{hint}"


def _quarantined(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    wait_ms = int(v["wait_ms"])
    when = f"the next one is in {about_span(wait_ms)}" if wait_ms else "the next one may start"
    return f"{counted(int(v['failures']), 'attempt')} failed in a row ({v['reason']}); {when}."


def _damaged(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    name, number = verdict.partition
    text = (
        f"{v['file']} is damaged at byte {v['position']} ({v['reason']}). The cleaner leaves that "
        "segment unchanged and cleans the rest."
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
    name, number = verdict.partition
    return (
        f"The batch of offsets {v['first_offset']} to {int(v['next_offset']) - 1} in {v['file']}, "
        f"byte {v['position']}, cannot be cleaned ({v['reason']}). The cleaner leaves that segment "
        "unchanged, consumers can read it, and the rest is cleaned. If the batch is too large, "
        "raise varve.decompressed.batch.bytes of the topic; if its records are malformed, "
        f"`varve log skip {name} {number} --offset {v['first_offset']}` removes it from the log."
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
                f"{counted(int(v['failures']), 'attempt')} on {target} failed in a row "
                f"({v['reason']}). The workers clean the partition for another {wait}."
            )
        case "running":
            return f"A job on {target} is cleaning its {size}."
    text = f"Its {size} are to be cleaned on {target}"
    if int(v.get("wait_ms", 0)):
        return f"{text}; the last attempt failed ({v['reason']}), the next one is in {wait}."
    return f"{text}; the job has not started yet."


def _topic_limit(v: _Values, blocks: bool, at_ms: int, verdict: Verdict) -> str:
    rate = f"{about_size(int(v['bytes_per_second']))}/s"
    text = f"Cleans of its topic may read and write {rate} (varve.cleaner.io.max.bytes.per.second)"
    if "wait_ms" not in v:
        return f"{text}; another partition of it is being cleaned."
    return f"{text}; after the last one, the next may start in {about_span(int(v['wait_ms']))}."


_TEXTS: Final[dict[Reason, Callable[[_Values, bool, int, Verdict], str]]] = {
    Reason.POLICY: _policy,
    Reason.POLICY_UNKNOWN: lambda v, b, at, _: (
        "Its cleanup.policy is unknown: Varve took its directory over from Kafka, or the settings "
        "file no longer names its topic. Set `cleanup.policy` in the settings file or with an "
        "admin client; if the file set only `retention.ms`, set that instead. If the file set "
        "`varve.view`, set that, too. Until then, the broker neither cleans nor expires it."
    ),
    Reason.OFFLINE: lambda v, b, at, _: f"It is offline: {v['why']}.",
    Reason.DAMAGED: _damaged,
    Reason.UNCLEANABLE: _uncleanable,
    Reason.IN_PROGRESS: lambda v, b, at, _: "A job is cleaning it.",
    Reason.PAUSED_BY_OPERATOR: lambda v, b, at, _: (
        f"An operator paused it {about_span(at - int(v['since_ms']))} ago."
    ),
    Reason.PAUSED_BY_BROKER: lambda v, b, at, _: (
        f"The broker has paused it ({counted(int(v['pauses']), 'pause')}): it is being truncated, "
        "deleted or configured, or a remote compaction has leased it."
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
    Reason.RUN_NOW: lambda v, b, at, _: "An operator requested a clean.",
    Reason.RATIO: _ratio,
    Reason.OFFLOADED: _offloaded,
    Reason.TOPIC_LIMIT: _topic_limit,
    Reason.EXPIRED: lambda v, b, at, _: (
        f"Tombstones or markers in {counted(int(v['segments']), 'segment')} may have expired, the "
        f"first {about_span(at - int(v['since_ms']))} ago."
    ),
}


def _sizes(verdict: Verdict) -> str:
    section = verdict.section
    assert section is not None
    if not section.dirty_bytes and not section.waiting_bytes:
        return f"Nothing is dirty: {about_size(section.clean_bytes)} are clean."
    if not section.dirty_bytes:
        clean = f", {about_size(section.clean_bytes)} are clean" if section.clean_bytes else ""
        return f"{about_size(section.waiting_bytes)} are not cleanable yet{clean}."
    waiting = ""
    if section.waiting_bytes:
        waiting = f", {about_size(section.waiting_bytes)} more are not cleanable yet"
    text = (
        f"{about_size(section.dirty_bytes)} in offsets {section.first_dirty_offset} to "
        f"{section.end_offset - 1} are dirty, {about_size(section.clean_bytes)} are clean{waiting}"
    )
    if verdict.live_bytes is None:
        return f"{text}."
    left = about_size(verdict.live_bytes + section.waiting_bytes)
    return f"{text}; a clean would leave a log of about {left}."


def _progress_sentence(worker: WorkerStatus) -> str:
    done = ""
    if worker.total_bytes:
        share = worker.done_bytes / worker.total_bytes
        done = f" {share:.0%} of {about_size(worker.total_bytes)}"
    since = about_span(int(1000 * worker.seconds))
    return f"Worker {worker.index} cleans it: {worker.stage or 'starting'}{done}, for {since}."


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
    "aborted": "was aborted",
    "stale": "was discarded",
}
