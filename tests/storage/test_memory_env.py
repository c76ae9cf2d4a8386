"""The twin in memory must be able to lose what a machine can lose, and nothing else."""

import errno
import random
from collections.abc import Callable

import pytest

from storage.env import Env, write_file_atomically
from tests.support.os_errors import raises_errno
from tests.support.storage.memory_env import SECTOR_BYTES, MemoryEnv, SimulatedCrash

SEEDS = range(200)


def fresh(seed: int) -> MemoryEnv:
    env = MemoryEnv(seed)
    env.mkdir("/d")
    env.settle()
    env.operations = 0
    return env


def put(env: Env, path: str, data: bytes, *, sync: bool = True) -> None:
    file = env.open(path, create=True, write=True, truncate=True)
    file.pwrite(data, 0)
    if sync:
        file.sync()
    file.close()


def only(operation: str) -> Callable[[str, str], bool]:
    return lambda value, path: value == operation


def outcomes(build: Callable[[MemoryEnv], None]) -> set[tuple[tuple[str, bytes], ...]]:
    """What can be found in /d after losing power when `build` was done, over many seeds."""
    result = set()
    for seed in SEEDS:
        env = fresh(seed)
        build(env)
        after = env.crash()
        result.add(tuple((name, after.read_file(f"/d/{name}")) for name in after.listdir("/d")))
    return result


def test_what_was_synced_with_its_name_always_survives() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"x" * 2000)
        env.sync_dir("/d")

    assert outcomes(build) == {(("a", b"x" * 2000),)}


def test_a_synced_file_without_a_synced_name_may_be_gone() -> None:
    assert outcomes(lambda env: put(env, "/d/a", b"x")) == {(), (("a", b"x"),)}


def test_a_synced_name_without_synced_content_may_be_empty() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"x", sync=False)
        env.sync_dir("/d")

    assert outcomes(build) == {(("a", b""),), (("a", b"x"),)}


def test_any_subset_of_unsynced_creations_may_be_lost() -> None:
    def build(env: MemoryEnv) -> None:
        for name in "abc":
            put(env, f"/d/{name}", b"")

    names = {"".join(name for name, _ in results) for results in outcomes(build)}
    assert names == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_the_two_halves_of_a_rename_survive_together() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"new")
        put(env, "/d/b", b"old")
        env.sync_dir("/d")
        env.rename("/d/a", "/d/b")

    assert outcomes(build) == {(("a", b"new"), ("b", b"old")), (("b", b"new"),)}


def test_a_later_deletion_may_survive_an_earlier_rename_that_is_lost() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/new", b"new")
        put(env, "/d/old", b"old")
        env.sync_dir("/d")
        env.rename("/d/new", "/d/live")
        env.unlink("/d/old")

    names = {"+".join(name for name, _ in results) for results in outcomes(build)}
    assert names == {"new+old", "live", "live+old", "new"}


def test_a_rename_between_folders_survives_in_both_or_in_neither() -> None:
    for seed in SEEDS:
        env = fresh(seed)
        env.mkdir("/d/from")
        env.mkdir("/d/to")
        put(env, "/d/from/a", b"x")
        env.settle()
        env.rename("/d/from/a", "/d/to/a")
        if seed % 2:
            env.sync_dir("/d/to" if seed % 4 == 1 else "/d/from")
        after = env.crash()
        results = after.exists("/d/from/a"), after.exists("/d/to/a")
        assert results == (False, True) if seed % 2 else results in {(True, False), (False, True)}


def test_what_a_durable_rename_replaced_does_not_come_back() -> None:
    for seed in SEEDS:
        env = fresh(seed)
        env.mkdir("/d/from")
        env.mkdir("/d/to")
        put(env, "/d/from/a", b"new")
        env.settle()
        put(env, "/d/to/a", b"old")
        env.rename("/d/from/a", "/d/to/a")
        env.sync_dir("/d/from")
        assert env.crash().read_file("/d/to/a") == b"new", env


def test_unsynced_writes_are_lost_torn_or_kept_in_any_combination() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"-" * SECTOR_BYTES * 3)
        env.sync_dir("/d")
        file = env.open("/d/a", write=True)
        file.pwrite(b"1" * SECTOR_BYTES * 2, 0)
        file.pwrite(b"2" * SECTOR_BYTES * 2, SECTOR_BYTES)

    sectors = {
        bytes(data[i * SECTOR_BYTES] for i in range(3)).decode()
        for ((_, data),) in outcomes(build)
        if len(set(data[: SECTOR_BYTES - 1])) == 1
    }
    assert {"---", "122", "1--", "--2", "12-", "112", "-22"} <= sectors
    torn = [data for ((_, data),) in outcomes(build) if len(set(data[:SECTOR_BYTES])) == 2]
    assert torn


def test_lost_bytes_before_kept_ones_are_zeros() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"", sync=True)
        env.sync_dir("/d")
        file = env.open("/d/a", write=True)
        file.pwrite(b"x" * SECTOR_BYTES * 4, 0)

    assert any(b"\0x" in data for ((_, data),) in outcomes(build))


def test_an_unsynced_truncation_may_be_lost() -> None:
    def build(env: MemoryEnv) -> None:
        put(env, "/d/a", b"12345")
        env.sync_dir("/d")
        env.open("/d/a", write=True).truncate(2)

    assert outcomes(build) == {(("a", b"12345"),), (("a", b"12"),)}


def test_a_crash_raises_at_its_operation_and_ever_after() -> None:
    env = fresh(1)
    env.crash_at = 2
    file = env.open("/d/a", create=True)
    for call in (
        lambda: file.pwrite(b"x", 0),
        lambda: file.pread(1, 0),
        lambda: env.listdir("/d"),
        lambda: env.open("/d/a"),
    ):
        with pytest.raises(SimulatedCrash, match="seed=1"):
            call()
    assert env.operations == 2
    assert not issubclass(SimulatedCrash, Exception)
    after = env.crash()
    assert after.operations == 0
    assert after.crashes == 1


def test_a_killed_process_leaves_what_the_machine_may_still_lose() -> None:
    result = set()
    for seed in SEEDS:
        env = fresh(seed)
        lock = env.lock("/d/.lock")
        put(env, "/d/a", b"x")
        after = env.kill()
        with pytest.raises(SimulatedCrash):
            env.listdir("/d")
        assert after.read_file("/d/a") == b"x"
        after.lock("/d/.lock")
        del lock
        result.add(after.crash().exists("/d/a"))
    assert result == {True, False}


def test_the_same_seed_meets_the_same_fate() -> None:
    def fate(seed: int) -> list[tuple[str, bytes]]:
        env = fresh(seed)
        for index in range(20):
            put(env, f"/d/{index}", bytes([index]) * 900, sync=False)
        after = env.crash()
        return [(name, after.read_file(f"/d/{name}")) for name in after.listdir("/d")]

    assert fate(7) == fate(7)
    assert len({repr(fate(seed)) for seed in range(20)}) > 15


def test_a_failed_sync_loses_data_though_the_next_one_succeeds() -> None:
    lost = 0
    for seed in SEEDS:
        env = fresh(seed)
        put(env, "/d/a", b"")
        env.sync_dir("/d")
        file = env.open("/d/a", write=True)
        file.pwrite(b"x" * 5000, 0)
        fault = env.fail_on(lambda op, path: op == "sync" and path == "/d/a", errno.EIO)
        with raises_errno(errno.EIO):
            file.sync()
        fault.remove()
        file.sync()
        assert file.pread(5000, 0) == b"x" * 5000
        lost += env.crash().read_file("/d/a") != b"x" * 5000
    assert 0 < lost < len(SEEDS)


def test_a_write_that_fails_leaves_any_part_of_it() -> None:
    lengths = set()
    for seed in SEEDS:
        env = fresh(seed)
        file = env.open("/d/a", create=True)
        fault = env.fail_on(lambda op, path: op == "pwrite", OSError(errno.ENOSPC, "disk full"))
        with pytest.raises(OSError, match="disk full") as caught:
            file.pwrite(b"12345", 0)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == "/d/a"
        assert fault.hits == 1
        lengths.add(file.size())
    assert lengths == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("open", lambda env: env.open("/d/a")),
        ("read_file", lambda env: env.read_file("/d/a")),
        ("pread", lambda env: env.open("/d/a").pread(1, 0)),
        ("truncate", lambda env: env.open("/d/a", write=True).truncate(0)),
        ("rename", lambda env: env.rename("/d/a", "/d/b")),
        ("unlink", lambda env: env.unlink("/d/a")),
        ("sync_dir", lambda env: env.sync_dir("/d")),
        ("mkdir", lambda env: env.mkdir("/d/x")),
        ("listdir", lambda env: env.listdir("/d")),
    ],
)
def test_a_fault_strikes_its_operation_alone_and_changes_nothing(
    operation: str, call: Callable[[MemoryEnv], object]
) -> None:
    env = fresh(1)
    put(env, "/d/a", b"x")
    env.fail_on(lambda op, path: op == operation and path.startswith("/d"), errno.EIO)
    with raises_errno(errno.EIO):
        call(env)
    env._faults.clear()
    assert env.listdir("/d") == ["a"]
    assert env.read_file("/d/a") == b"x"


def test_clocks_can_be_moved_together_and_apart() -> None:
    env = MemoryEnv(1)
    wall_ms, monotonic = env.wall_ms(), env.monotonic()
    env.advance_ms(1500)
    assert (env.wall_ms() - wall_ms, env.monotonic() - monotonic) == (1500, 1.5)
    env.jump_wall_ms(-10_000)
    assert (env.wall_ms() - wall_ms, env.monotonic() - monotonic) == (-8500, 1.5)


def test_an_atomic_write_is_all_old_or_all_new_at_every_crash() -> None:
    old, new = b"old" * 700, b"newer" * 900
    seen = set()
    crashes = 0
    for seed in range(60):
        for crash_at in range(1, 8):
            env = fresh(seed * 100 + crash_at)
            write_file_atomically(env, "/d/c", old)
            env.operations = 0
            env.crash_at = crash_at
            try:
                write_file_atomically(env, "/d/c", new)
                finished = True
            except SimulatedCrash:
                finished = False
            result = env.crash().read_file("/d/c")
            assert result in (old, new), env
            assert result == new or not finished, env
            seen.add(result)
            crashes += not finished
    assert seen == {old, new}
    assert crashes == 60 * 5  # open, write, sync, rename, sync_dir


def test_leaving_out_any_sync_of_an_atomic_write_is_noticed() -> None:
    for ignored in ("sync", "sync_dir"):
        broken = 0
        for seed in SEEDS:
            env = fresh(seed)
            write_file_atomically(env, "/d/c", b"old" * 700)
            env.ignore_sync(only(ignored))
            write_file_atomically(env, "/d/c", b"newer" * 900)
            broken += env.crash().read_file("/d/c") != b"newer" * 900
        assert broken, ignored


def test_random_work_survives_if_it_was_settled() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        env = fresh(seed)
        expected: dict[str, bytes] = {}
        for _ in range(60):
            name = rng.choice("abcdef")
            action = rng.randrange(3)
            if action == 0 or name not in expected:
                expected[name] = rng.randbytes(rng.randrange(1500))
                put(env, f"/d/{name}", expected[name], sync=rng.random() < 0.5)
            elif action == 1:
                env.unlink(f"/d/{name}")
                del expected[name]
            else:
                target = rng.choice("abcdef")
                env.rename(f"/d/{name}", f"/d/{target}")
                expected[target] = expected.pop(name)
            if rng.random() < 0.2:
                env.sync_dir("/d")
        env.settle()
        after = env.crash()
        results = {name: after.read_file(f"/d/{name}") for name in after.listdir("/d")}
        assert results == expected, env
