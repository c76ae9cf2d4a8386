"""How many cases random tests draw, and which ones.

A change must not fail by a draw that has nothing to do with it. So every run of the suite draws the
same cases, tests with Hypothesis too (tests/conftest.py). `VARVE_DRAWS=fresh` draws others, and
prints what repeats them: a seed, which `VARVE_DRAWS=SEED` takes, or Hypothesis' own words.

By default a random test draws few cases, so that the suite takes minutes. Where the environment has
`CI`, as in `.ci/run`, it draws many. Both numbers stand beside each other at the test. A test with
`only_in_ci` names the test that has its rule in each run. Still more
cases, and others each time, have commands and variables of their own: `make compare`, `make soak`,
`make sim`, VARVE_INVARIANT_EXAMPLES, VARVE_SIMULATION_SEEDS.
"""

import os
import random
from typing import Final, TypeVar

import pytest

VARIABLE: Final = "VARVE_DRAWS"
FRESH: Final = "fresh"

T = TypeVar("T")


def is_fresh() -> bool:
    """Whether this run shall draw what no other did."""
    return os.environ.get(VARIABLE) == FRESH


def cases(*, few: T, many: T) -> T:
    """Return the cases of a test, or how many it draws: `many` in CI, otherwise `few`."""
    return many if os.environ.get("CI") else few


def only_in_ci(reason: str) -> pytest.MarkDecorator:
    """Mark a test that repeats a rule in a larger scene; `reason` names the test that has it."""
    return pytest.mark.skipif(not os.environ.get("CI"), reason=f"runs in CI; {reason}")


def seeds_of_tests(variable: str, *, few: int, many: int) -> range:
    """Return the seeds that a test runs: those that `variable` names as FIRST:END, or the first."""
    requested = os.environ.get(variable)
    if requested is None:
        return range(cases(few=few, many=many))
    first, _, end = requested.partition(":")
    return range(int(first), int(end))


def seed_of_test(fixed: int) -> int:
    """The seed a test begins with, printed: `fixed`, if the variable asks for nothing else."""
    requested = os.environ.get(VARIABLE)
    seed = fixed
    if requested is not None:
        seed = random.randrange(1 << 30) if is_fresh() else int(requested)
    print(f"{VARIABLE}={seed}")
    return seed
