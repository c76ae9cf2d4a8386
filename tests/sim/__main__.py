"""`make sim`: run seeds, or one seed with its trace; see tests/sim/machine.py."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial
from typing import Final, NamedTuple

from tests.sim.runs import SECONDS_MAX, Seen, broken_rule, report
from tests.sim.script import (
    CLOCK,
    ERASE,
    FULL_DISK,
    IDEMPOTENT,
    LOST_STATE,
    MOVE,
    OPEN,
    REPAIRS,
    SHARED_CLEANS,
    VERSIONS,
    Script,
    make_script,
)

# What the runs of a kind have for sure.
KINDS: Final = (
    (),
    (MOVE,),
    (SHARED_CLEANS,),
    tuple(REPAIRS),
    (VERSIONS, "view"),
    ("delete records", "view", "alter"),
    (FULL_DISK, "view", "fault"),
    (ERASE, MOVE, "view", "lease"),
    (*REPAIRS, ERASE, MOVE, "view"),
    (FULL_DISK, ERASE, MOVE, *REPAIRS),
    (VERSIONS, *REPAIRS, "view", "end at"),
    (FULL_DISK, VERSIONS, MOVE, "view"),
    (LOST_STATE, ERASE, MOVE, "end", "view", "delete records"),
    (IDEMPOTENT, "end", "end at", "alter"),
    (IDEMPOTENT, OPEN, "transaction", MOVE, *REPAIRS, "end"),
    (OPEN, "transaction", "end", "end at", "view", "lease"),
    (CLOCK, "end", "view", "lease", "alter", "delete records"),
    (CLOCK, IDEMPOTENT, OPEN, "transaction", FULL_DISK, "end at"),
    (LOST_STATE, IDEMPOTENT, OPEN, "transaction", MOVE, "end"),
    (LOST_STATE, *REPAIRS, "end", "end at", "transaction"),
    (FULL_DISK, LOST_STATE, *REPAIRS, "end at"),
    (IDEMPOTENT, LOST_STATE, *REPAIRS, MOVE, "end at"),
    (SHARED_CLEANS, *REPAIRS, "end at"),
    (SHARED_CLEANS, VERSIONS, ERASE, "view", "end in swap"),
)
# A run that no watchdog of its process can end, because it is in compiled code.
STUCK_SECONDS: Final = 5 * SECONDS_MAX


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, with its trace")
    parser.add_argument("--keep-going", action="store_true", help="also after one that fails")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _show(arguments.seed)
    return _run(range(arguments.first, arguments.first + arguments.seeds), arguments.keep_going)


def _show(seed: int) -> int:
    error, machine = broken_rule(_script_of(seed))
    print("\n".join(machine.trace))
    print(f"seed {seed}: {error or 'no rule is broken'}")
    return error is not None


def _script_of(seed: int) -> Script:
    """The script of a seed: kinds of runs take turns."""
    return make_script(seed, has=KINDS[seed % len(KINDS)])


class Outcome(NamedTuple):
    """What became of one seed."""

    rule: str | None  # the one it breaks
    text: str
    seen: Seen


def _outcome(seed: int, *, in_full: bool) -> Outcome:
    script = _script_of(seed)
    error, machine = broken_rule(script)
    if error is None:
        return Outcome(None, "", machine.seen)
    text = report(script, error) if in_full else f"seed {seed}: {error}"
    return Outcome(error.rule, text, machine.seen)


def _run(seeds: range, keep_going: bool) -> int:
    """Run the seeds in one process for each CPU, and print what they did in order of seeds."""
    began, seen = time.monotonic(), Counter[str]()
    failed: Seen = Counter()
    outcome = partial(_outcome, in_full=not keep_going)
    with multiprocessing.Pool() as pool:
        outcomes = pool.imap(outcome, seeds)
        for seed in seeds:
            try:
                rule, text, seen_by_one = outcomes.next(STUCK_SECONDS)
            except multiprocessing.TimeoutError:
                print(f"seed {seed}: ends: it is in compiled code for ever", flush=True)
                return 1
            seen.update(seen_by_one)
            if rule is not None:
                failed[rule] += 1
                print(text, flush=True)
                if not keep_going:
                    return 1
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s; broken rules: {dict(failed)}")
    print(", ".join(f"{subject}: {count}" for subject, count in seen.most_common(50)))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
