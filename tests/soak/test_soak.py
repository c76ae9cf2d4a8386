"""A short `make soak`: half a minute in CI, ten seconds otherwise."""

from pathlib import Path

import pytest

from tests.soak.soak import run_soak, summary
from tests.support.draws import cases, only_in_ci, seed_of_test

MINUTES = cases(few=10, many=30) / 60
SEED = 1509  # it kills the broker after five seconds, then a worker


@only_in_ci("tests/crash kills the same processes, and tests/sim has more histories")
@pytest.mark.timeout(400)
def test_load_and_kills_lose_nothing_and_resources_stay_bounded(tmp_path: Path) -> None:
    seed = seed_of_test(SEED)
    print(f"make soak ARGS='--minutes {MINUTES} --seed {seed}'")
    soak = run_soak(tmp_path, minutes=MINUTES, seed=seed, say=print)
    print(summary(soak))
    assert seed != SEED or soak.patient.done["kill broker"] > 0
