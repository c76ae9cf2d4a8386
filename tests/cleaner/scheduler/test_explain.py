"""Why is this not compacting, in words: every obstacle has a sentence with its numbers."""

from dataclasses import replace
from typing import get_args

import pytest

from cleaner import states as s
from cleaner.host import LogFacts, OpenTransaction, Undecided
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.findings import ClockReading, NextAttempt, Reason
from cleaner.planning.plan import assess
from cleaner.scheduler.clean_attempt import WorkerStatus
from cleaner.scheduler.explain import (
    _OUTCOMES,
    _TEXTS,
    Explanation,
    next_attempt,
    obstacle_text,
    sentences,
)
from cleaner.scheduler.history import JobRecord, Outcome
from config.topics.keys import TopicConfig
from storage.segments.damage import DamagedSegment
from tests.support.cleaner.log_facts import COMPACTED, T0, even, facts, segment

NOW = ClockReading(wall_ms=10_000_000_000, monotonic_ms=5_000)
HOUR = 3_600_000
FRESH = PartitionCleanerState(first_seen_ms=NOW.wall_ms)


def explained(
    log: LogFacts,
    state: s.State = s.IDLE,
    cleaner_state: PartitionCleanerState = FRESH,
    *,
    run_now: bool = False,
    **more: object,
) -> list[str]:
    return sentences(explanation(log, state, cleaner_state, run_now=run_now, **more))


def explanation(
    log: LogFacts,
    state: s.State = s.IDLE,
    cleaner_state: PartitionCleanerState = FRESH,
    *,
    run_now: bool = False,
    **more: object,
) -> Explanation:
    verdict = assess(log, state, NOW, cleaner_state, run_now=run_now)
    made = Explanation(
        partition=log.partition,
        at_ms=NOW.wall_ms,
        state=state,
        verdict=verdict,
        transitions=[],
        queue_position=None,
        next_attempt=next_attempt(verdict, NOW.wall_ms),
        quarantine=s.past_of(state),
        last_job=None,
        is_paused=False,
    )
    return replace(made, **more)  # type: ignore[arg-type]


OLD = replace(COMPACTED, min_compaction_lag_ms=NOW.wall_ms)
LATE = replace(COMPACTED, max_compaction_lag_ms=NOW.wall_ms - 2 * HOUR)
SEEN_LONG_AGO = PartitionCleanerState(first_seen_ms=1)
UNIQUE = replace(COMPACTED, varve_cleaner_strategy="survivorship")
GENERATIONAL = replace(COMPACTED, varve_cleaner_strategy="generational")
LARGE = even(4, size_bytes=4_000)
PENDING = OpenTransaction(77, 12, NOW.wall_ms - 90_000)
HOLE = DamagedSegment("/data/t-0/10.log", 10, 61, 100, "bad CRC", 15, 18)
BIG = HOLE._replace(reason="batch unpacks to more than 67108864 bytes", is_served=True)


@pytest.mark.parametrize(
    ("log", "state", "cleaner_state", "answer", "reason"),
    [
        (facts(even(4)), s.IDLE, FRESH, "t-0 will be cleaned soon.",
         "100.0% of its bytes are dirty; min.cleanable.dirty.ratio is 50.0%, which does not"),
        (facts(even(4), checkpoint=30), s.IDLE, FRESH, "too little of it is dirty.",
         "25.0% of its bytes are dirty; min.cleanable.dirty.ratio is 50.0%, which is not exceeded"),
        (facts(even(4), config=UNIQUE), s.IDLE, replace(FRESH, survivorship=0.9), "cleaned soon.",
         "which does not prevent a clean. In earlier cleans 90% of the new bytes survived."),
        (facts(LARGE, config=GENERATIONAL), s.IDLE, replace(FRESH, records=40), "cleaned soon.",
         "No clean has read 100.0% of its bytes. A clean starts above 25.0%, because "
         "min.cleanable.dirty.ratio is 50.0% and cleans leave some garbage; this limit does not "
         "prevent a clean. The next clean rewrites only the segments with the most garbage."),
        (facts(even(4), config=GENERATIONAL), s.IDLE, replace(FRESH, records=40), "cleaned soon.",
         "which does not prevent a clean. Its records take less than 320 bytes each, so key "
         "indexes would be large: a clean rewrites all segments with superseded records."),
        (facts(LARGE, config=GENERATIONAL, damaged=(HOLE,)), s.IDLE, FRESH, "cleaned soon.",
         "Because of the damage, a clean rewrites all other segments with superseded records."),
        (facts([LARGE[0]._replace(has_transactions=True), *LARGE[1:]], config=GENERATIONAL), s.IDLE,
         FRESH, "cleaned soon.", "It has transactions, which key indexes do not have: a clean"),
        (facts(even(4), config=TopicConfig()), s.IDLE, FRESH, "t-0 is not compacted.",
         "Its cleanup.policy is delete."),
        (facts(even(4), config=TopicConfig(cleanup_policy=())), s.IDLE, FRESH, "not compacted.",
         "Its cleanup.policy is empty (all records are kept)."),
        (facts(even(4), config=replace(COMPACTED, policy_known=False)), s.IDLE, FRESH, "unknown.",
         "Its cleanup.policy is unknown: Varve took its directory over from Kafka, or"),
        (facts([], offline="EIO on /data"), s.IDLE, FRESH, "offline.",
         "It is offline: EIO on /data."),
        (facts([segment(0, 20)]), s.IDLE, FRESH,
         "t-0 has nothing to clean now: only closed segments are cleaned.",
         "from offset 0 on, has 100 B, and no closed segment is dirty. It can be cleaned once it "
         "is rolled at 1.0 GiB. `varve cleaner run t 0 --roll` rolls it now."),
        (facts(even(4), undecided=12, checkpoint=10, open_transaction=PENDING,
               undecided_by=Undecided.OPEN_TRANSACTION), s.IDLE, FRESH,
         "open transaction.",
         "from offset 10 on can be cleaned yet: producer 77 has had a transaction open since "
         "offset 12, silent for 1.5 min. If the producer is gone, "
         "`varve cleaner end-transaction t 0 --producer-id 77` aborts it."),
        (facts(even(4), undecided=12, checkpoint=10, undecided_by=Undecided.VIEW), s.IDLE, FRESH,
         "compacted view.", "has only the records below offset 12. Run"),
        (facts(even(4), undecided=0, undecided_by=Undecided.VIEW_UNKNOWN), s.IDLE, FRESH,
         "compacted view unreadable.", "files of the topic's compacted view cannot be read"),
        (facts(even(4), undecided=12, checkpoint=10), s.IDLE, FRESH, "high watermark.",
         "the high watermark is 12. Records from"),
        (facts(even(4), config=OLD), s.IDLE, FRESH, "min.compaction.lag.ms.",
         "min.compaction.lag.ms (115.7 d); the next segment can be cleaned in 1.0 s."),
        (facts([segment(0, 10), segment(10, 10, 0)], checkpoint=10), s.IDLE, FRESH,
         "nothing is dirty.", "Nothing is dirty: 100 B are clean."),
        (facts(even(4), checkpoint=30, config=LATE), s.IDLE, SEEN_LONG_AGO, "cleaned soon.",
         "Its oldest dirty record is 2.0 h past max.compaction.lag.ms."),
        (facts(even(4), damaged=(HOLE,)), s.IDLE, FRESH, "cleaned soon.",
         "/data/t-0/10.log is damaged at byte 61 (bad CRC). The cleaner leaves that segment "
         "unchanged and cleans the rest. Offsets 15 to 17 cannot be read: fetches there return "
         "CORRUPT_MESSAGE. `varve log skip t 0 --offset 15` removes them"),
        (facts(even(4), damaged=(BIG,)), s.IDLE, FRESH, "cleaned soon.",
         "The batch of offsets 15 to 17 in /data/t-0/10.log, byte 61, cannot be cleaned (batch "
         "unpacks to more than 67108864 bytes). The cleaner leaves that segment unchanged, "),
        (facts(even(4)), s.Publishing(), FRESH,
         "t-0 is being cleaned: the new segments replace the old ones.", "A job is cleaning it."),
        (facts(even(4)), s.Paused(1), replace(FRESH, paused_since_ms=NOW.wall_ms - 2 * HOUR),
         "paused by an operator.", "An operator paused it 2.0 h ago."),
        (facts(even(4)), s.Paused(2), FRESH, "paused by the broker.",
         "The broker has paused it (2 pauses)"),
        (facts(even(4)), s.Quarantined(20_000, "OSError: disk", 3), FRESH, "quarantined.",
         "3 attempts failed in a row (OSError: disk); the next one is in 15.0 s."),
        (facts(even(2), checkpoint=20), s.IDLE,
         PartitionCleanerState(horizons={(0, 100): NOW.wall_ms - HOUR}, first_seen_ms=NOW.wall_ms),
         "t-0 will be cleaned to remove expired tombstones.",
         "Tombstones or markers in 1 segment may have expired, the first 1.0 h ago."),
    ],
)  # fmt: skip
def test_every_obstacle_is_explained_with_its_figures(
    log: LogFacts, state: s.State, cleaner_state: PartitionCleanerState, answer: str, reason: str
) -> None:
    text = explained(log, state, cleaner_state)
    assert text[0].endswith(answer)
    assert any(reason in line for line in text), text
    assert all(line.endswith(".") for line in text)


def test_a_cleaner_that_is_switched_off_promises_no_clean() -> None:
    switched_off = (
        "The cleaner is switched off. Set `cleaner.enabled: true` and restart the broker."
    )
    text = explained(facts(even(4)), is_enabled=False, next_attempt=None)
    assert text[0] == "t-0 is not being cleaned: the cleaner is switched off."
    assert text[-1] == switched_off
    assert switched_off in explained(facts(even(4), checkpoint=30), is_enabled=False)
    uncompacted = facts(even(4), config=TopicConfig())
    assert explained(uncompacted, is_enabled=False) == explained(uncompacted)


def test_every_reason_and_every_outcome_has_a_text() -> None:
    assert set(_TEXTS) == set(Reason)
    assert set(_OUTCOMES) == set(get_args(Outcome)) - {"finished", "damaged"}


def test_a_request_the_queue_the_last_job_and_the_next_attempt_are_explained() -> None:
    job = JobRecord(
        facts(even(1)).partition, "r", 0, NOW.wall_ms - HOUR, "failed", reason="OSError: disk"
    )
    text = explained(facts(even(4), checkpoint=30), run_now=True, queue_position=3, last_job=job)
    assert "An operator requested a clean." in text
    assert "It waits for a worker, behind 2 partitions." in text
    assert "Its last job failed 1.0 h ago (OSError: disk)." in text
    assert text[-1] == "Next attempt: as soon as a worker is idle."
    done = replace(job, outcome="finished", reason="", bytes_before=3 << 30, bytes_after=1 << 20)
    assert "Its last job finished 1.0 h ago, after 115.7 d: 3.0 GiB became 1.0 MiB." in explained(
        facts(even(4)), last_job=done
    )


@pytest.mark.parametrize(
    ("log", "state", "wait_ms", "cause"),
    [
        (facts(even(4)), s.IDLE, 0, Reason.RATIO),
        (facts(even(4)), s.Paused(1), None, None),
        (facts(even(4)), s.Cleaning(), None, None),
        (facts(even(4)), s.Quarantined(9_000, "disk", 1), 4_000, Reason.QUARANTINED),
        (facts(even(4), config=OLD), s.IDLE, 1_000, Reason.MIN_LAG),
        (facts(even(4), config=OLD), s.Quarantined(9_000, "disk", 1), 4_000, Reason.QUARANTINED),
        (facts(even(4), checkpoint=30), s.IDLE, 24 * HOUR, Reason.EXPIRED),
        (facts(even(4), checkpoint=30, config=replace(
            COMPACTED, max_compaction_lag_ms=1_500)), s.IDLE, 1_500, Reason.MAX_LAG),
        (facts(even(4), undecided=5), s.IDLE, None, None),
        (facts(even(4), config=TopicConfig()), s.IDLE, None, None),
    ],
)  # fmt: skip
def test_the_next_attempt_has_a_time_if_only_time_is_the_obstacle(
    log: LogFacts, state: s.State, wait_ms: int | None, cause: Reason | None
) -> None:
    attempt = next_attempt(assess(log, state, NOW, FRESH), NOW.wall_ms)
    assert attempt == (None if wait_ms is None else NextAttempt(NOW.wall_ms + wait_ms, cause))


def test_a_log_without_a_verdict_is_explained() -> None:
    text = explained(facts(even(4)), verdict=None, next_attempt=None)
    assert text == [
        "t-0 cannot be assessed: its facts contradict each other. See the broker's log."
    ]


def test_an_active_segment_whose_roll_is_due_names_no_time() -> None:
    log = facts([segment(0, 20, 2_300_000)], active_closes_ms=NOW.wall_ms)
    (text,) = (item for item in explained(log) if item.startswith("The active segment"))
    assert text.endswith("It can be cleaned once it is rolled, which is due because of its age.")


def test_the_active_segment_is_explained_with_its_size_and_its_roll() -> None:
    config = replace(COMPACTED, segment_bytes=64 << 20)
    log = facts([segment(0, 20, 2_300_000)], config=config, active_closes_ms=NOW.wall_ms + HOUR)
    text = explained(log)
    assert any(
        "has 2.2 MiB, and no closed segment is dirty. It can be cleaned once it is rolled at 64.0 "
        "MiB or in 1.0 h" in item
        for item in text
    )
    assert "2.2 MiB are not cleanable yet." in text
    assert (
        text[-1] == "Next attempt: in 1.0 h, when its active segment is rolled because of its age."
    )


def test_the_roll_of_a_segment_promises_no_clean_before_the_minimum_lag_is_over() -> None:
    config = replace(COMPACTED, min_compaction_lag_ms=HOUR)
    rolls = {"config": config, "active_closes_ms": NOW.wall_ms + 2000}
    closed, active = (segment(*span, first_ms=NOW.wall_ms) for span in ((0, 20), (20, 30)))
    for log in (
        facts([segment(0, 20, first_ms=NOW.wall_ms)], **rolls),
        facts([closed, active], **rolls),
    ):
        text = explained(log)
        assert text[-1] == (
            "Next attempt: in 1.0 h, when the next segment is older than min.compaction.lag.ms."
        )
        assert not any("Nothing is dirty" in sentence for sentence in text)
    old = explained(facts([segment(0, 20)], **rolls))
    assert "or in 2.0 s, and older than min.compaction.lag.ms (1.0 h)." in old[2]
    assert "Next attempt: in 2.0 s, when its active segment is rolled" in old[-1]


def test_what_only_waits_is_not_called_dirty_and_what_is_clean_is_named_beside_it() -> None:
    log = facts([segment(0, 10), segment(10, 20, 50)], checkpoint=10)
    assert "50 B are not cleanable yet, 100 B are clean." in explained(log)


def test_an_empty_partition_is_said_to_be_empty() -> None:
    text = explained(facts([segment(0, 0, 0)]))
    assert text[0] == "t-0 is empty: there is nothing to clean."
    assert not any("dirty" in sentence for sentence in text)


def test_the_expected_size_is_that_of_the_whole_log_and_unknown_before_the_first_clean() -> None:
    assert not any("would leave" in line for line in explained(facts(even(4))))
    taught = replace(FRESH, observations=1, survivorship=0.25)
    (sizes,) = [item for item in explained(facts(even(4)), cleaner_state=taught) if "leave" in item]
    assert sizes.startswith(
        "400 B in offsets 0 to 39 are dirty, 0 B are clean, 50 B more are not cleanable yet"
    )
    assert sizes.endswith("; a clean would leave a log of about 150 B.")


def test_the_next_attempt_names_its_cause() -> None:
    result = explained(facts(even(4), checkpoint=30))[-1]
    assert result == (
        "Next attempt: in 1.0 d, when the first tombstones or markers expire (delete.retention.ms)."
    )


def test_a_running_job_shows_its_progress_and_a_request_its_end() -> None:
    worker = WorkerStatus(1, 77, True, T0, "r", "rewrite", 1 << 20, 4 << 20, 12.0)
    text = explained(facts(even(4)), s.Cleaning(), worker=worker, requested_offset=40)
    assert "Worker 1 cleans it: rewrite 25% of 4.0 MiB, for 12.0 s." in text
    assert "An operator requested a clean below offset 40." in text


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (facts([segment(0, 10), segment(10, 10, 0)], checkpoint=10), None),
        (facts([segment(0, 10), segment(10, 10, 0)], checkpoint=10, damaged=(
            HOLE._replace(base_offset=0),)), "is damaged at byte 61"),
        (facts(even(4), config=OLD), "records are younger than min.compaction.lag.ms"),
        (facts(even(4), undecided=5, undecided_by=Undecided.VIEW), "varve view compact t 0"),
    ],
)  # fmt: skip
def test_there_is_no_obstacle_only_if_everything_is_clean_and_undamaged(
    log: LogFacts, words: str | None
) -> None:
    result = obstacle_text(explanation(log))
    assert result is None if words is None else words in str(result)
