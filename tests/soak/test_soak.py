"""A minute of `make soak`."""

from pathlib import Path

import pytest

from tests.soak.soak import run_soak, summary
from tests.support.draws import seed_of_test


@pytest.mark.timeout(400)
def test_a_minute_of_load_and_kills_loses_nothing_and_stays_bounded(tmp_path: Path) -> None:
    seed = seed_of_test(1)
    print(f"make soak ARGS='--minutes 1 --seed {seed}'")
    soak = run_soak(tmp_path, minutes=1, seed=seed, say=print)
    print(summary(soak))
