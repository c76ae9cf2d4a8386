"""The fast share of `make sim`, the same seeds each time; VARVE_SIM_SEEDS=FIRST:END runs others."""

import os

from tests.sim.runs import Seen, run_seeds

SEEDS = range(*map(int, os.environ.get("VARVE_SIM_SEEDS", "0:100").split(":")))
# What a run has to reach for its rules to mean anything; far below what they do.
REACHED = (
    "published", "published by a lease", "adoption: adopted", "view compacted", "segments expired",
    "ended: kill", "ended: power", "ended: stop", "topic deleted", "mended", "views checked",
)  # fmt: skip


def test_whatever_touches_a_partition_at_once_no_rule_of_the_model_is_broken() -> None:
    seen: Seen = run_seeds(SEEDS)
    for what in REACHED:
        assert seen[what] >= len(SEEDS) // 50, f"{what}: {seen[what]} times in {len(SEEDS)} seeds"


def test_a_seed_gives_the_same_run_each_time() -> None:
    from tests.sim.machine import Machine
    from tests.sim.script import make_script

    traces = []
    for _ in range(2):
        machine = Machine(make_script(3))
        machine.run()
        traces.append([line.split(" seconds=")[0] for line in machine.trace])
    assert traces[0] == traces[1]
