"""Running seeds, and making the script of one that fails shorter."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tests.sim.machine import Machine
from tests.sim.model import RuleError
from tests.sim.script import Script, make_script

Seen = Counter[str]
SHRINK_RUNS_MAX = 150


def broken_rule(script: Script) -> tuple[RuleError | None, Machine]:
    """The rule that a script breaks, if any."""
    machine = Machine(script)
    try:
        machine.run()
    except RuleError as error:
        return error, machine
    return None, machine


def shrunk(script: Script, rule: str) -> Script:
    """A script with as few operations as still break the rule, as far as that is cheap to find."""
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
