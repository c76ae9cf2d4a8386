"""A swap loses power, or its process, at every operation, and again in every recovery.

Of what was not synced any subset is lost. What is found after the last recovery must be all old or
all new. The second half leaves barriers out, one at a time, and shows that this is then found out:
that is what tells these tests from tests that cannot fail.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from storage.env import RealEnv, RealFile
from storage.errors import UnfinishedSwapError
from storage.format.filenames import (
    FILE_KINDS,
    INDEX,
    LOG,
    SNAPSHOT,
    TIME_INDEX,
    TXN_INDEX,
    file_name,
)
from storage.swap.swap_journal import execute_swap, plan_swap, recover_swap
from storage.swap.unfinished_kafka_swap import finish_kafka_swap
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash
from tests.support.storage.swaps import (
    FOLDER,
    NEW_LOG,
    OLD_LOGS,
    Source,
    content,
    folder,
    log_of,
    put,
    write_output,
    write_source,
)

INDEXES = (INDEX, TIME_INDEX)
Step = Callable[[MemoryEnv], None]
Ignored = Callable[[str, str], bool]


def segment(tag: str, base: int, *kinds: str) -> dict[str, bytes]:
    return {file_name(base, kind): content(tag, base, kind) for kind in kinds}


@dataclass(frozen=True)
class Scenario:
    """A folder of the segments 0, 100, 200, 300 of which some are replaced."""

    outputs: tuple[int, ...]
    sources: tuple[int, ...] = (0, 100, 200)
    sync_names: bool = True  # the worker syncs the names of what it made
    life_after: Step | None = None
    also_allowed: tuple[dict[str, bytes], ...] = ()

    def start(self, seed: int) -> MemoryEnv:
        env = MemoryEnv(seed)
        env.mkdir(FOLDER)
        for base in (0, 100, 200, 300):
            write_source(env, base, txn=base == 0)
        env.settle()
        env.operations = 0
        return env

    def run(self, env: MemoryEnv) -> None:
        outputs = [
            write_output(env, base, txn=base == 200, sync_names=self.sync_names)
            for base in self.outputs
        ]
        sources = [
            source(base, LOG, *INDEXES, *([TXN_INDEX] if base == 0 else []))
            for base in self.sources
        ]
        execute_swap(env, plan_swap(FOLDER, sources, outputs))
        if self.life_after is not None:
            self.life_after(env)

    @property
    def old(self) -> dict[str, bytes]:
        return {
            **segment("old", 0, *FILE_KINDS),
            **segment("old", 100, LOG, *INDEXES, SNAPSHOT),
            **segment("old", 200, LOG, *INDEXES, SNAPSHOT),
            **segment("old", 300, LOG, *INDEXES, SNAPSHOT),
        }

    @property
    def new(self) -> dict[str, bytes]:
        results = segment("old", 300, LOG, *INDEXES, SNAPSHOT)
        for base in {100, 200} - set(self.sources):
            results |= segment("old", base, LOG, *INDEXES, SNAPSHOT)
        for base in self.outputs:
            results |= segment("new", base, LOG, *INDEXES, *([TXN_INDEX] if base == 200 else []))
            results |= segment("old", base, SNAPSHOT)
        return results

    def judge(self, env: MemoryEnv) -> str:
        results = folder(env)
        if results == self.old:
            return "old"
        if results == self.new:
            return "new"
        return "also allowed" if results in self.also_allowed else "broken"


@dataclass(frozen=True)
class FrontGone(Scenario):
    """Retention has just taken segment 0, of which the output was made, too. Nothing synced that.

    Whether it comes back with a crash before the commit is retention's affair, file by file.
    """

    outputs: tuple[int, ...] = (0,)

    def run(self, env: MemoryEnv) -> None:
        outputs = [write_output(env, 0)]
        for kind in FILE_KINDS:
            path = f"{FOLDER}/{file_name(0, kind)}"
            env.rename(path, f"{path}.deleted")
        sources = [source(base, LOG, *INDEXES) for base in (100, 200)]
        execute_swap(env, plan_swap(FOLDER, sources, outputs, front_is_gone=True))

    def judge(self, env: MemoryEnv) -> str:
        results = {n: data for n, data in folder(env).items() if not n.endswith(".deleted")}
        retained = segment("old", 300, LOG, *INDEXES, SNAPSHOT)
        if results == segment("new", 0, LOG, *INDEXES) | retained:
            return "new"
        front = segment("old", 0, *FILE_KINDS)
        rest = {name: data for name, data in results.items() if name not in front}
        is_front_old = all(results[name] == front[name] for name in results.keys() & front.keys())
        old = {name: data for name, data in self.old.items() if name not in front}
        return "old" if rest == old and is_front_old else "broken"


def source(base: int, *kinds: str) -> Source:
    return Source(base, tuple(file_name(base, kind) for kind in kinds))


@dataclass
class Tally:
    """How many crashes were tried and what was found after them."""

    crashes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, outcome: str, transitions: str) -> None:
        self.outcomes[outcome] += 1
        if outcome == "broken":
            self.broken.append(transitions)


def crashed(
    scenario: Scenario, seed: int, crash_at: int, ignored: Ignored | None = None
) -> tuple[MemoryEnv, bool]:
    """The machine as it stands when the crash strikes, and whether the swap had returned."""
    env = scenario.start(seed)
    env.ignore_sync(ignored)
    env.crash_at = crash_at
    try:
        scenario.run(env)
    except SimulatedCrash:
        return env, False
    return env, True


def operations_of(scenario: Scenario) -> int:
    env = scenario.start(0)
    scenario.run(env)
    return env.operations


def recover_or_crash(env: MemoryEnv, crash_at: int) -> tuple[MemoryEnv, bool]:
    """Recover with a crash at its n-th operation, and what that leaves; True if none came."""
    env.crash_at = crash_at
    try:
        recover_swap(env, FOLDER)
    except SimulatedCrash:
        return env.crash(), False
    env.crash_at = None
    return env, True


def try_everything(
    scenario: Scenario,
    seeds: range,
    *,
    ignored: Callable[[], Ignored] | None = None,
    ignored_in_recovery: Callable[[], Ignored] | None = None,
    until_broken: bool = False,
) -> Tally:
    """Crash at every operation of the swap, then at every operation of the recovery."""
    tally = Tally()
    for seed in seeds:  # the outer loop: a search mostly ends with the first seeds
        for crash_at in range(1, operations_of(scenario) + 2):
            env, returned = crashed(scenario, seed, crash_at, ignored() if ignored else None)
            for fate in ("power", "kill"):
                in_recovery = 0
                done = False
                while not done:
                    if fate == "kill":  # its disk is shared: it must be staged again each time
                        env, returned = crashed(
                            scenario, seed, crash_at, ignored() if ignored else None
                        )
                    after = env.crash() if fate == "power" else env.kill()
                    if ignored_in_recovery:
                        after.ignore_sync(ignored_in_recovery())
                    in_recovery += 1
                    transitions = f"{env!r}, {fate}, recovery crashed at {in_recovery}"
                    tally.crashes += 1
                    try:
                        after, done = recover_or_crash(after, in_recovery)
                        tally.crashes += not done
                        recover_swap(after, FOLDER)
                        outcome = scenario.judge(after)
                        if outcome == "new":  # and it stays so when the power fails once more
                            tally.crashes += 1
                            outcome = scenario.judge(after.crash())
                    except UnfinishedSwapError as error:
                        outcome, transitions = "broken", f"{transitions}: {error}"
                    if returned and outcome == "old":
                        outcome = "broken"  # what was reported as done must not come undone
                    tally.add(outcome, transitions)
                    if until_broken and tally.broken:
                        return tally
    return tally


ONE = Scenario(outputs=(0,))
TWO = Scenario(outputs=(0, 200))
NONE = Scenario(outputs=())
APART = Scenario(outputs=(0, 200), sources=(0, 200))  # what stands between them stays


@pytest.mark.parametrize(
    ("scenario", "seeds", "crashes_of_seed_min"),
    [
        (ONE, range(cases(few=1, many=8)), 750),
        (TWO, range(cases(few=1, many=4)), 1_250),
        (NONE, range(cases(few=3, many=6)), 250),
        (APART, range(cases(few=1, many=4)), 1_250),
    ],
    ids=["one output", "two outputs", "no output", "two groups apart"],
)
def test_a_swap_is_all_old_or_all_new_after_any_crash(
    scenario: Scenario, seeds: range, crashes_of_seed_min: int
) -> None:
    tally = try_everything(scenario, seeds)
    print(f"{tally.crashes} crashes: {dict(tally.outcomes)}")
    assert tally.broken == []
    assert tally.crashes >= crashes_of_seed_min * len(seeds)
    assert tally.outcomes["old"] > 100
    assert tally.outcomes["new"] > 100


def test_a_swap_whose_front_retention_took_is_all_old_or_all_new_after_any_crash() -> None:
    tally = try_everything(FrontGone(), range(cases(few=1, many=4)))
    print(f"{tally.crashes} crashes: {dict(tally.outcomes)}")
    assert tally.broken == []
    assert min(tally.outcomes["old"], tally.outcomes["new"]) > 100


def test_a_worker_that_did_not_sync_its_names_does_no_harm() -> None:
    tally = try_everything(Scenario(outputs=(0,), sync_names=False), range(cases(few=1, many=4)))
    assert tally.broken == []
    assert {"old", "new"} == set(tally.outcomes)


def test_a_segment_made_after_the_swap_is_safe_from_its_journal() -> None:
    def reborn(env: MemoryEnv) -> None:
        put(env, f"{FOLDER}/{file_name(100, LOG)}", b"made after a truncation")

    scenario = Scenario(
        outputs=(0,),
        life_after=reborn,
        also_allowed=(
            {**ONE.new, file_name(100, LOG): b"made after a truncation"},
            # crashed between the creation and the sync of the content
            *({**ONE.new, file_name(100, LOG): b"made after a truncation"[:n]} for n in range(23)),
        ),
    )
    tally = try_everything(scenario, range(cases(few=1, many=4)))
    assert tally.broken == []
    broken = try_everything(
        scenario, range(6), ignored=lambda: only_nth("sync_dir", 6), until_broken=True
    )
    assert broken.broken


class KilledEnv(RealEnv):
    """The real disk, in a process that kills itself instead of doing the n-th of these."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.operations = 0

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> RealFile:
        if create:
            self._count()
        return super().open(path, create=create, write=write, truncate=truncate)

    def rename(self, src: str, dst: str) -> None:
        self._count()
        super().rename(src, dst)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def sync_dir(self, path: str) -> None:
        self._count()
        super().sync_dir(path)


def in_a_process(work: Callable[[], object]) -> bool:
    """Whether `work` was done before the process that did it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def test_a_killed_process_on_a_real_disk_leaves_all_old_or_all_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sync in ("storage.env._sync_data", "os.fsync"):  # a kill takes nothing from the kernel
        monkeypatch.setattr(sync, lambda _: None)
    result = Counter[str]()
    swapped, kill_at = False, 0
    while not swapped:
        kill_at += 1
        recovered, kill_recovery_at = False, 0
        while not recovered:
            kill_recovery_at += cases(few=6, many=2)
            directory = str(tmp_path / f"{kill_at}-{kill_recovery_at}" / "orders-0")
            os.makedirs(directory)
            env = RealEnv()
            sources = [write_source(env, base, directory=directory) for base in (0, 100)]
            output = write_output(env, 0, directory=directory)
            old = folder(env, directory)
            plan = plan_swap(directory, sources, [output])
            killed = KilledEnv(kill_at)
            swapped = in_a_process(partial(execute_swap, killed, plan))
            killed = KilledEnv(kill_recovery_at)
            recovered = in_a_process(partial(recover_swap, killed, directory))
            recover_swap(env, directory)
            after = folder(env, directory)
            new = {**segment("new", 0, LOG, *INDEXES), **segment("old", 0, SNAPSHOT)}
            cleaned = {file.name for file in output.files}
            if after == {name: data for name, data in old.items() if name not in cleaned}:
                result["old"] += 1
            else:
                assert after == new, (kill_at, kill_recovery_at)
                result["new"] += 1
    assert result["old"] > 2
    assert result["new"] > 20


# --- and without its barriers -------------------------------------------------------------------


def only_nth(operation: str, number: int) -> Ignored:
    """Matches the n-th sync of a kind (from 1): the one to be left out."""
    seen = Counter[str]()

    def matches(value: str, path: str) -> bool:
        seen[value] += 1
        return value == operation and seen[value] == number

    return matches


# The worker's own sync of the names is the first; then those of execute_swap, in order.
AFTER_JOURNAL, AFTER_RENAMES, AFTER_DELETES = 3, 4, 5


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("sync_dir", AFTER_JOURNAL),
        ("sync_dir", AFTER_DELETES),
        ("sync", 1),  # content of the cleaned log
        ("sync", 4),  # content of the journal
    ],
)
def test_leaving_out_one_barrier_is_found_out(operation: str, number: int) -> None:
    tally = try_everything(
        ONE, range(10), ignored=lambda: only_nth(operation, number), until_broken=True
    )
    assert tally.broken


def test_leaving_out_both_syncs_of_the_cleaned_names_is_found_out() -> None:
    scenario = Scenario(outputs=(0,), sync_names=False)
    tally = try_everything(  # half of the seeds find it, and 4 is the first one
        scenario, range(4, 14), ignored=lambda: only_nth("sync_dir", 1), until_broken=True
    )
    assert tally.broken


def test_a_recovery_that_trusts_what_a_killed_process_left_is_found_out() -> None:
    tally = try_everything(  # half of the seeds find it, and 1 is the first one
        ONE, range(1, 11), ignored_in_recovery=lambda: only_nth("sync_dir", 1), until_broken=True
    )
    assert tally.broken


def missing_records(env: MemoryEnv) -> list[int]:
    """Sources whose records are neither in their old log nor in the new one."""
    results = folder(env)
    published = results.get(file_name(0, LOG)) == content("new", 0, LOG)
    return [
        base
        for base in (0, 100, 200)
        if not published and results.get(file_name(base, LOG)) != content("old", base, LOG)
    ]


@pytest.mark.parametrize("mutated", [False, True], ids=["with barrier", "without"])
def test_not_even_a_journal_that_rots_costs_a_record(mutated: bool) -> None:
    """What the sync between renames and deletes is for."""
    lost = 0
    tried = 0
    for crash_at in range(1, operations_of(ONE) + 1):
        for seed in range(25):
            ignored = only_nth("sync_dir", AFTER_RENAMES) if mutated else None
            after = crashed(ONE, seed, crash_at, ignored)[0].crash()
            journals = [name for name in after.listdir(FOLDER) if name.endswith(".journal")]
            if not journals:
                continue
            tried += 1
            after.open(f"{FOLDER}/{journals[0]}", write=True).pwrite(b"\0\0\0\0", 30)
            assert recover_swap(after, FOLDER).refused
            lost += bool(missing_records(after))
            # An index beside a log that it does not belong to would be worse than none.
            names = folder(after)
            assert not [name for name in names if name.endswith(INDEXES)], after
    assert tried > 50
    assert (lost > 0) == mutated


# --- a Kafka that was killed, and our recovery of it -----------------------------------------


ACTIVE = {300: OLD_LOGS[300]}  # the segment that Kafka never cleans


def kafka_swap(env: MemoryEnv, old: dict[int, bytes], new: bytes) -> None:
    """Kafka's own steps for one group (reference: UnifiedLog.replaceSegments)."""

    def names(base: int) -> list[str]:
        return [f"{FOLDER}/{file_name(base, kind)}" for kind in (LOG, *INDEXES)]

    log, *indexes = names(0)
    put(env, f"{log}.cleaned", new)
    for index in indexes:
        put(env, f"{index}.cleaned", b"new index")
    for name in names(0):
        env.rename(f"{name}.cleaned", f"{name}.swap")
    for base in old:
        for name in names(base):
            env.rename(name, f"{name}.deleted")
    for name in names(0):
        env.rename(f"{name}.swap", name)
    env.sync_dir(FOLDER)
    for base in old:
        for name in names(base):
            env.unlink(f"{name}.deleted")


def start_kafka(seed: int, old: dict[int, bytes]) -> MemoryEnv:
    env = MemoryEnv(seed)
    env.mkdir(FOLDER)
    for base, data in (old | ACTIVE).items():
        put(env, f"{FOLDER}/{file_name(base, LOG)}", data)
        for kind in INDEXES if base in old else ():
            put(env, f"{FOLDER}/{file_name(base, kind)}", b"old index")
    env.settle()
    env.operations = 0
    return env


def test_a_killed_kafka_is_all_old_or_all_new_after_any_crash_of_our_recovery() -> None:
    old = {base: OLD_LOGS[base] for base in (0, 100, 200)}
    new = NEW_LOG + log_of(290, 300, "new")
    probe = start_kafka(0, old)
    kafka_swap(probe, old, new)
    outcomes: Counter[str] = Counter()
    for crash_at in range(1, probe.operations + 2):
        for seed in range(cases(few=2, many=6)):
            in_recovery, done = 0, False
            while not done:
                in_recovery += 1
                env = start_kafka(seed, old)
                env.crash_at = crash_at
                with suppress(SimulatedCrash):
                    kafka_swap(env, old, new)
                after = env.kill()
                after.settle()
                after, done = recover_or_crash(after, in_recovery)
                recover_swap(after, FOLDER)
                results = folder(after)
                logs = {
                    int(name[:20]): data for name, data in results.items() if name.endswith(LOG)
                }
                states = {"old": old | ACTIVE, "new": {0: new} | ACTIVE}
                outcome = next((name for name in states if logs == states[name]), "broken")
                assert outcome != "broken", (after, crash_at, in_recovery, sorted(results))
                strays = [name for name in results if not name.endswith((LOG, *INDEXES))]
                assert strays == [], after
                # An index may be missing (loading builds it anew) but never belong to the other.
                expected = {"old": b"old index", "new": b"new index"}[outcome]
                assert {results[name] for name in results if name.endswith(INDEXES)} <= {expected}
                outcomes[outcome] += 1
    assert outcomes["old"] > 100
    assert outcomes["new"] > 100


def test_leaving_out_the_sync_between_kafka_s_rules_is_found_out() -> None:
    broken = 0
    for seed in range(300):
        env = MemoryEnv(seed)
        env.mkdir(FOLDER)
        put(env, f"{FOLDER}/{file_name(0, LOG)}.deleted", OLD_LOGS[0])
        for base in (100, 200, 300):
            put(env, f"{FOLDER}/{file_name(base, LOG)}", OLD_LOGS[base])
        put(env, f"{FOLDER}/{file_name(0, LOG)}.swap", NEW_LOG + log_of(290, 300, "new"))
        env.settle()
        env.ignore_sync(lambda operation, path: True)
        finish_kafka_swap(env, FOLDER)
        after = env.crash()
        recover_swap(after, FOLDER)
        bases = [int(name[:20]) for name in folder(after) if name.endswith(LOG)]
        broken += bases != [0, 300]
    assert broken
