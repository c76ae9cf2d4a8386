"""The fast share of `make sim`, the same seeds each time; VARVE_SIM_SEEDS=FIRST:END runs others."""

import threading

import pytest

from tests.sim.machine import Machine
from tests.sim.runs import Seen, run_seeds
from tests.sim.script import (
    CLOCK,
    ERASE,
    FULL_DISK,
    IDEMPOTENT,
    OPEN,
    REPAIRS,
    SHARED_CLEANS,
    VERSIONS,
    make_script,
)
from tests.support.draws import cases, only_in_ci, seeds_of_tests

# CI runs two thousand by `make sim`, these among them.
SEEDS = seeds_of_tests("VARVE_SIM_SEEDS", few=20, many=50)
MOVING_SEEDS = seeds_of_tests("VARVE_SIM_MOVING_SEEDS", few=5, many=20)
REPAIR_SEEDS = seeds_of_tests("VARVE_SIM_REPAIR_SEEDS", few=5, many=20)
FULL_SEEDS = seeds_of_tests("VARVE_SIM_FULL_SEEDS", few=5, many=20)
VERSION_SEEDS = seeds_of_tests("VARVE_SIM_VERSION_SEEDS", few=5, many=20)
SHARING_SEEDS = seeds_of_tests("VARVE_SIM_SHARING_SEEDS", few=5, many=20)
PRODUCER_SEEDS = seeds_of_tests("VARVE_SIM_PRODUCER_SEEDS", few=5, many=20)
OPEN_SEEDS = seeds_of_tests("VARVE_SIM_OPEN_SEEDS", few=5, many=20)
CLOCK_SEEDS = seeds_of_tests("VARVE_SIM_CLOCK_SEEDS", few=5, many=20)
ERASING_SEEDS = seeds_of_tests("VARVE_SIM_ERASING_SEEDS", few=5, many=20)
CHUNK = cases(few=5, many=10)
ERASING_CHUNK = 20  # two of the first five seeds end an erasure, and none of the nine after them
# What runs have to reach for their rules to mean anything; far below what they do.
REACHED = (
    "published", "published by a lease", "adoption: adopted", "view compacted", "segments expired",
    "ended: kill", "ended: power", "ended: stop", "topic deleted", "log repaired", "views checked",
)  # fmt: skip
SEEN = Seen()
pytestmark = pytest.mark.xdist_group("simulation")  # all of them add to SEEN


@pytest.mark.parametrize("first", SEEDS[::CHUNK])
def test_whatever_touches_a_partition_at_once_no_rule_of_the_model_is_broken(first: int) -> None:
    SEEN.update(run_seeds(range(first, min(first + CHUNK, SEEDS.stop))))
    SEEN["seeds"] += CHUNK


@only_in_ci("few seeds reach few of them; `make sim` says what it reached")
def test_the_runs_before_reached_what_the_rules_are_about() -> None:
    if SEEN["seeds"] < len(SEEDS):
        pytest.skip("not all of them were run")
    for subject in REACHED:
        assert SEEN[subject] >= len(SEEDS) // 50, (
            f"{subject}: {SEEN[subject]} times in {len(SEEDS)} seeds"
        )


@pytest.mark.parametrize("first", MOVING_SEEDS[::CHUNK])
def test_replicas_move_while_everything_else_happens(first: int) -> None:
    seen = run_seeds(
        range(first, min(first + CHUNK, MOVING_SEEDS.stop)),
        has=("move", "lease", "view", "end at", "replace topic"),
    )
    assert seen["replica moved"] >= CHUNK


@pytest.mark.parametrize("first", ERASING_SEEDS[::ERASING_CHUNK])
def test_keys_are_erased_while_everything_else_happens(first: int) -> None:
    seen = run_seeds(
        range(first, min(first + ERASING_CHUNK, ERASING_SEEDS.stop)),
        has=(ERASE, "lease", "view", "transaction", "end at", "replace topic"),
    )
    assert seen["erasure checked"] >= 1


@pytest.mark.parametrize("first", SHARING_SEEDS[::CHUNK])
def test_workers_share_cleans_while_everything_else_happens(first: int) -> None:
    seen = run_seeds(
        range(first, min(first + CHUNK, SHARING_SEEDS.stop)),
        has=(SHARED_CLEANS, "view", "delete records", "end at", "fault"),
    )
    assert seen["worker joined clean"] >= CHUNK


@pytest.mark.parametrize("first", REPAIR_SEEDS[::CHUNK])
def test_bytes_change_and_operators_repair_logs_while_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, REPAIR_SEEDS.stop))
    seen = run_seeds(seeds, has=(*REPAIRS, "view", "end at"))
    assert seen["flipped"] >= CHUNK // 4
    assert seen["truncated"] >= CHUNK // 4


@pytest.mark.parametrize("first", VERSION_SEEDS[::CHUNK])
def test_views_go_by_timestamp_or_version_while_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, VERSION_SEEDS.stop))
    seen = run_seeds(seeds, has=(VERSIONS, "view", "delete records", "end at"))
    assert seen["ranked views checked"] >= CHUNK


@pytest.mark.parametrize("first", FULL_SEEDS[::CHUNK])
def test_disks_are_full_for_a_while_as_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, FULL_SEEDS.stop))
    seen = run_seeds(seeds, has=(FULL_DISK, "view", "fault", "alter"))
    assert seen["full disk"] >= CHUNK // 2


@pytest.mark.parametrize("first", PRODUCER_SEEDS[::CHUNK])
def test_producers_send_batches_again_while_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, PRODUCER_SEEDS.stop))
    seen = run_seeds(seeds, has=(IDEMPOTENT, "end", "end at", "alter"))
    assert seen["batch sent again"] >= CHUNK


@pytest.mark.parametrize("first", OPEN_SEEDS[::CHUNK])
def test_transactions_stay_open_while_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, OPEN_SEEDS.stop))
    seen = run_seeds(seeds, has=(OPEN, "transaction", "end", "end at", "view"))
    assert seen["open at a start"] >= CHUNK // 4


@pytest.mark.parametrize("first", CLOCK_SEEDS[::CHUNK])
def test_the_wall_clock_is_set_while_everything_else_happens(first: int) -> None:
    seeds = range(first, min(first + CHUNK, CLOCK_SEEDS.stop))
    seen = run_seeds(seeds, has=(CLOCK, "end", "view", "lease"))
    assert seen["retention suspended"] >= CHUNK // 2


@pytest.mark.parametrize("seed", [3, 1855])
def test_a_seed_gives_the_same_run_each_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (started.append(thread), start(thread))
    )
    traces = []
    for _ in range(2):
        machine = Machine(make_script(seed))
        machine.run()
        traces.append([line.split(" seconds=")[0] for line in machine.trace])
    assert traces[0] == traces[1]
    # The seed does not decide how other threads interleave.
    assert {thread.name for thread in started} <= {"fiber"}
