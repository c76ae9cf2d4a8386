"""What the random tests draw: the same in every run, or something else where that is asked for.

A change must not fail by a draw that has nothing to do with it. So every run of the suite draws the
same, tests with Hypothesis too (tests/conftest.py). `VARVE_DRAWS=fresh` draws others, and prints
what repeats them: a seed, which `VARVE_DRAWS=SEED` takes, or Hypothesis' own words. More cases, and
others each time, have commands and variables of their own: `make compare`, `make soak`,
VARVE_INVARIANT_EXAMPLES, VARVE_SIMULATION_SEEDS.
"""

import os
import random
from typing import Final

VARIABLE: Final = "VARVE_DRAWS"
FRESH: Final = "fresh"


def is_fresh() -> bool:
    """Whether this run shall draw what no other did."""
    return os.environ.get(VARIABLE) == FRESH


def seed_of_test(fixed: int) -> int:
    """The seed a test begins with, printed: `fixed`, if the variable asks for nothing else."""
    asked = os.environ.get(VARIABLE)
    seed = fixed
    if asked is not None:
        seed = random.randrange(1 << 30) if is_fresh() else int(asked)
    print(f"{VARIABLE}={seed}")
    return seed
