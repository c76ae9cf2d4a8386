"""Running seeds, and making the script of one that fails shorter."""

import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from tests.sim.interleaving import EndlessError
from tests.sim.machine import Machine
from tests.sim.model import ENDS, RuleError
from tests.sim.script import Script, make_script

Seen = Counter[str]
SHRINK_RUNS_MAX = 150
# Of one run, which takes some tenths of a second. A loop that takes no steps which a run counts
# (see interleaving.py) ends after it.
SECONDS_MAX = 60.0


def broken_rule(script: Script) -> tuple[RuleError | None, Machine]:
    """The rule that a script breaks, if any."""
    machine = Machine(script)
    try:
        with _watchdog(machine):
            machine.run()
    except RuleError as error:
        return error, machine
    return None, machine


@contextmanager
def _watchdog(machine: Machine) -> Iterator[None]:
    """End a run that takes longer than SECONDS_MAX; its rule error has the stacks."""
    began = time.monotonic()

    def end_run(_signal: int, _frame: FrameType | None) -> None:
        stacks = {"".join(traceback.format_stack(f)) for f in sys._current_frames().values()}
        reason = "\n".join([f"takes longer than {SECONDS_MAX:.0f} s:", *sorted(stacks)])
        machine.world.env.endless = machine.world.env.endless or reason
        raise EndlessError(reason)

    handler = signal.signal(signal.SIGALRM, end_run)
    # Again each second: a handler of errors may have gone on with the loop.
    left, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # of pytest's own limit
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001))


def shrunk(script: Script, rule: str) -> Script:
    """A script with as few operations as still break the rule, as far as that is cheap to find.

    A run that does not end stays as it is: a shorter one would take as long.
    """
    if rule == ENDS:
        return script
    runs, size = 0, max(1, len(script.operations) // 2)
    while runs < SHRINK_RUNS_MAX:
        at, shorter = 0, False
        while at < len(script.operations) and runs < SHRINK_RUNS_MAX:
            operations = script.operations[:at] + script.operations[at + size :]
            runs += 1
            error, _ = broken_rule(replace(script, operations=operations))
            if error is not None and error.rule == rule:
                script, shorter = replace(script, operations=operations), True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return script


def run_seeds(seeds: Iterable[int], has: tuple[str, ...] = ()) -> Seen:
    """Run seeds; the first that breaks a rule is an AssertionError that shows how.

    `has`: kinds of operations that every run has.
    """
    seen: Seen = Counter()
    for seed in seeds:
        script = make_script(seed, has=has)
        error, machine = broken_rule(script)
        if error is not None:
            raise AssertionError(report(script, error))
        seen.update(machine.seen)
    return seen


def report(script: Script, error: RuleError) -> str:
    """The rule that was broken, and the trace of the shortest script that breaks it."""
    short = shrunk(script, error.rule)
    rule_error, machine = broken_rule(short)
    trace = "\n".join(machine.trace)
    return (
        f"seed {script.seed} breaks a rule: {error}\n"
        f"{len(short.operations)} of {len(script.operations)} operations still break it: "
        f"{rule_error}\n"
        f"{trace}\nmake sim SEED={script.seed} shows all of it"
    )
