"""What `varve cleaner status` prints: what matters first, and nothing that does not."""

from typing import Any

from admin.client import Json
from admin.http.cleaner_text import (
    estimate_lines,
    explanation_lines,
    progress_text,
    status_lines,
    survival_lines,
)


def row(topic: str, partition: int = 0, **changes: Any) -> Json:
    return {
        "topic": topic,
        "partition": partition,
        "state": "idle",
        "paused": False,
        "blocked_by": "nothing dirty",
        "job": None,
        "size_bytes": 1000,
        "dirty_bytes": 0,
        "waiting_bytes": 0,
        "dirty_ratio": 0.0,
        "damage": [],
        "to_clean": False,
    } | changes


def status(**partitions: int) -> Json:
    counts = dict.fromkeys(
        ("compacted", "internal", "policy_unknown", "offline", "in_progress", "quarantined",
         "paused", "candidates", "over_max_lag", "damaged"), 0
    )  # fmt: skip
    spark = {"job": None, "unavailable": None, "enabled": False, "waiting": [], "given_up": []}
    return {
        "enabled": True,
        "workers": [],
        "partitions": counts | partitions,
        "cleanable_bytes": 0,
        "read_bytes_per_second": None,
        "write_bytes_per_second": None,
        "spark": spark,
    }


def group(base: int, live_bytes: int, *, rewritten: bool, measured: bool = True) -> Json:
    return {
        "base_offset": base,
        "next_offset": base + 10,
        "segments": 1,
        "size_bytes": 1 << 20,
        "live_bytes": live_bytes,
        "measured": measured,
        "rewritten": rewritten,
    }


def test_an_estimate_names_its_sums_other_slacks_and_each_group() -> None:
    cost = {"read_bytes": 3 << 20, "written_bytes": 1 << 19, "freed_bytes": 1 << 19}
    answer = {
        "topic": "orders", "partition": 3, "selective": True, "slack": 0.5, "seconds": 1.5, **cost,
        "by_slack": [{"slack": 0.25, **cost}, {"slack": 0.5, **cost}],
        "dirty_ratio": 0.5,
        "by_dirty_ratio": [
            {"ratio": 0.2, "log_bytes": 5 << 20, "new_bytes": 1 << 20, "read_bytes": 6 << 20,
             "written_bytes": 4 << 20},
            {"ratio": 0.5, "log_bytes": 8 << 20, "new_bytes": 4 << 20, "read_bytes": None,
             "written_bytes": None},
        ],
        "groups": [
            group(0, 1 << 19, rewritten=True),
            group(10, 1 << 20, rewritten=False),
            group(20, 1 << 19, rewritten=False, measured=False),
        ],
    }  # fmt: skip
    assert estimate_lines(answer, with_groups=True) == [
        "orders-3: the next clean rewrites 1 of 3 segment groups. It reads 3.0 MiB, writes "
        "512.0 KiB, frees 512.0 KiB and takes about 1.5 s.",
        "  No clean has read 1.0 MiB of it yet.",
        "",
        "SLACK    READS     WRITES      FREES",
        "0.25   3.0 MiB  512.0 KiB  512.0 KiB",
        "0.5 *  3.0 MiB  512.0 KiB  512.0 KiB",
        "",
        "DIRTY RATIO  LOG UP TO  CLEAN EVERY    READS   WRITES",
        "0.2            5.0 MiB      1.0 MiB  6.0 MiB  4.0 MiB",
        "0.5 *          8.0 MiB      4.0 MiB        -        -",
        "",
        "OFFSETS   SEGMENTS     SIZE             LIVE  NEXT CLEAN",
        "0 to 9           1  1.0 MiB        512.0 KiB  rewrites it",
        "10 to 19         1  1.0 MiB          1.0 MiB  leaves it",
        "20 to 29         1  1.0 MiB  about 512.0 KiB  leaves it",
    ]


def test_the_records_of_all_partitions_are_added_by_age() -> None:
    day_ms = 86_400_000
    answers = [
        {"survival": [{"age_ms": 0, "written": 1000, "alive": 900}]},
        {
            "survival": [
                {"age_ms": 0, "written": 1000, "alive": 500},
                {"age_ms": day_ms, "written": 5000, "alive": 250},
            ]
        },
        {"survival": []},
    ]
    assert survival_lines("orders", answers) == [
        "",
        "orders: records by age, at the last clean",
        "AGE         WRITTEN  ALIVE  SHARE",
        "younger       2,000  1,400  70.0%",
        "from 1.0 d    5,000    250   5.0%",
    ]
    assert survival_lines("orders", [{"survival": []}])[1:] == [
        "orders: no clean has counted live records yet."
    ]


def test_partitions_of_internal_topics_are_counted_apart() -> None:
    assert status_lines(status(compacted=1, internal=51), [])[0].startswith(
        "1 compacted partition (and 51 of internal topics), 0 due"
    )
    assert status_lines(status(), [])[0].startswith("no compacted partitions, 0 due")


def test_a_clean_log_has_nothing_to_clean() -> None:
    costs = dict.fromkeys(("read_bytes", "written_bytes", "freed_bytes", "seconds"), 0)
    answer = {"topic": "t", "partition": 0, "selective": False, "groups": [], "by_slack": []}
    lines = estimate_lines({**answer, **costs, "by_dirty_ratio": []}, with_groups=False)
    assert lines == ["t-0: there is nothing to clean now."]


def test_a_transition_says_what_happened_and_why() -> None:
    change = {"at_ms": 0, "event": "PauseRequested", "before": "idle", "after": "paused"}
    failure = {"at_ms": 0, "event": "Failed", "before": "cleaning", "after": "quarantined"}
    lines = explanation_lines(
        {
            "sentences": ["t-0 is not being cleaned: quarantined."],
            "transitions": [
                change | {"reason": "cleanup.policy is being changed", "details": {}},
                failure | {"reason": "", "details": {"reason": "disk"}},
                change | {"event": "Resumed", "reason": "", "details": {}},
            ],
        }
    )
    assert lines[3].endswith("  pause requested: idle -> paused (cleanup.policy is being changed)")
    assert [line.partition(": ")[2] for line in lines[3:]] == [
        "idle -> paused (cleanup.policy is being changed)",
        "cleaning -> quarantined (disk)",
        "idle -> paused",
    ]


def first_words(lines: list[str]) -> list[str]:
    """The first column of the table."""
    table = lines[lines.index("") + 1 :]
    return [line.split()[0] for line in table[1:]]


def test_what_matters_comes_first() -> None:
    damage = [{"first_offset": 5, "next_offset": 9}]
    rows = [
        row("clean"),
        row("waiting", waiting_bytes=500),
        row("dirty", dirty_bytes=900, dirty_ratio=0.9),
        row("quarantined", state="quarantined", dirty_ratio=0.1),
        row("damaged", damage=damage),
    ]
    order = ["damaged-0", "quarantined-0", "dirty-0", "waiting-0", "clean-0"]
    assert first_words(status_lines(status(), rows)) == order
    assert first_words(status_lines(status(), rows[::-1])) == order


def test_empty_partitions_of_internal_topics_are_one_line() -> None:
    internal = [row("__consumer_offsets", number, size_bytes=0) for number in range(50)]
    internal[7]["size_bytes"] = 400
    internal[8]["state"] = "quarantined"
    internal[9]["paused"] = internal[10]["paused"] = True
    rows = [*internal, row("customers"), row("empty", size_bytes=0)]
    lines = status_lines(status(), rows)
    assert first_words(lines[:-2]) == [
        "__consumer_offsets-8",
        "__consumer_offsets-7",
        "customers-0",
        "empty-0",
    ]
    listing = "of __consumer_offsets (--topic __consumer_offsets lists them)"
    assert lines[-2:] == [
        f"... and 46 empty partitions {listing}",
        f"... and 2 empty, paused partitions {listing}",
    ]
    listed = status_lines(status(), internal, "__consumer_offsets")
    assert len(first_words(listed)) == 50


def test_a_transition_names_its_event_and_segment_groups_as_such() -> None:
    entry = {"at_ms": 0, "event": "GroupsReady", "before": "cleaning", "after": "publishing"}
    answer = {
        "sentences": ["orders-0 is clean."],
        "transitions": [{**entry, "reason": None, "details": {}}],
    }
    assert explanation_lines(answer)[-1].endswith("  segment groups ready: cleaning -> publishing")


def test_a_wait_says_that_no_worker_has_started_yet() -> None:
    worker = {"index": 0, "pid": 7, "lane": "regular", "job": None, "ready": False}
    waiting = row("orders", state="idle", queue_position=1)
    starting = status() | {"workers": [worker]}
    assert progress_text(starting, waiting).startswith("orders-0: the workers are starting; ")
    ready = status() | {"workers": [worker, worker | {"ready": True}]}
    assert progress_text(ready, waiting) == "orders-0: idle, 1. in the queue"
