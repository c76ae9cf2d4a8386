"""Planning and carrying out the replacement of segments by cleaned ones, without crashes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.env import RealEnv
from storage.errors import (
    CorruptCheckpointError,
    NewerFormatError,
    NoRoomError,
    SwapInterruptedError,
    SwapRefusedError,
    UnfinishedSwapError,
)
from storage.format import sealed_json
from storage.format.filenames import INDEX, LOG, SNAPSHOT, TIME_INDEX, TXN_INDEX, file_name
from storage.swap.swap_journal import (
    JOURNAL_MAGIC,
    JOURNAL_VERSION,
    CleanedFile,
    CleanedSegment,
    Delete,
    Journal,
    Rename,
    SwapPlan,
    SwapRecovery,
    crc_of_file,
    decode_journal,
    discard_outputs,
    encode_journal,
    execute_swap,
    finish_swap,
    plan_swap,
    recover_swap,
)
from tests.support.os_errors import raises_errno
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import (
    FOLDER,
    RUN,
    Source,
    content,
    folder,
    put,
    write_output,
    write_source,
)

JOURNAL = f"varve-swap.{RUN}.journal"


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv(seed=3)
    env.mkdir(FOLDER)
    env.settle()
    return env


def names_of(base: int, *kinds: str) -> set[str]:
    return {file_name(base, kind) for kind in kinds}


def prepared(env: MemoryEnv) -> SwapPlan:
    """Segments 0, 100, 200 are to become one; 300 is not touched."""
    sources = [write_source(env, base, txn=base == 100) for base in (0, 100, 200)]
    write_source(env, 300)
    env.settle()
    return plan_swap(FOLDER, sources, [write_output(env, 0)])


# --- no room ---


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (("open", ".tmp"), errno.ENOSPC),
        (("open", ".tmp"), errno.EMFILE),
        (("open", ".cleaned"), errno.ENFILE),
        (("pwrite", ".tmp"), errno.ENOSPC),
        (("pwrite", ".tmp"), errno.EDQUOT),
        (("listdir", ""), errno.EMFILE),
        (("sync_dir", ""), errno.EMFILE),
        (("rename", ".journal"), errno.ENOSPC),
    ],
)
def test_a_swap_that_finds_no_room_for_its_journal_is_refused_and_changes_nothing(
    env: MemoryEnv, step: tuple[str, str], error: int
) -> None:
    plan = prepared(env)
    before = {name: env.read_file(f"{FOLDER}/{name}") for name in env.listdir(FOLDER)}
    full = env.fail_on(lambda op, path: op == step[0] and path.endswith(step[1]), error)
    with pytest.raises(SwapRefusedError):
        execute_swap(env, plan)
    full.remove()
    assert {name: env.read_file(f"{FOLDER}/{name}") for name in env.listdir(FOLDER)} == before
    execute_swap(env, plan)
    assert not recover_swap(env, FOLDER).changed


@pytest.mark.parametrize("operation", ["sync", "sync_dir"])
def test_a_sync_that_failed_for_want_of_room_is_no_refusal(env: MemoryEnv, operation: str) -> None:
    plan = prepared(env)
    env.fail_on(lambda op, path: op == operation, errno.ENOSPC)
    with raises_errno(errno.ENOSPC) as caught:
        execute_swap(env, plan)
    assert not isinstance(caught.value, NoRoomError)


# --- plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize("call", range(1, 6))
def test_a_swap_that_runs_out_of_descriptors_is_finished_when_there_are_some(
    env: MemoryEnv, call: int, again: int
) -> None:
    plan = prepared(env)
    calls = 0

    def fails(operation: str, path: str) -> bool:
        nonlocal calls
        calls += path == FOLDER and operation in ("listdir", "sync_dir")
        return path == FOLDER and operation in ("listdir", "sync_dir") and calls > call + 1

    short = env.fail_on(fails, errno.EMFILE)
    with pytest.raises(SwapInterruptedError):
        execute_swap(env, plan)
    for _ in range(again):
        calls = call - 1
        with pytest.raises(NoRoomError):
            finish_swap(env, plan)
    short.remove()
    finish_swap(env, plan)
    results = folder(env)
    assert results[file_name(0, LOG)] == content("new", 0, LOG)
    assert not names_of(100, LOG, INDEX) & set(results)
    assert not recover_swap(env.crash(), FOLDER).changed


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("renamed", range(3))
def test_a_swap_without_room_for_a_new_name_is_finished_when_there_is_some(
    env: MemoryEnv, renamed: int, is_restarted: bool
) -> None:
    plan = prepared(env)
    full = env.fail_on(
        lambda op, path: op == "rename" and path.endswith(plan.renames[renamed].target),
        errno.ENOSPC,
    )
    with pytest.raises(SwapInterruptedError):
        execute_swap(env, plan)
    with pytest.raises(NoRoomError):
        finish_swap(env, plan)
    if is_restarted:
        env = env.crash()
        assert recover_swap(env, FOLDER).redone == (RUN,)
    else:
        full.remove()
        finish_swap(env, plan)
    assert folder(env)[file_name(0, LOG)] == content("new", 0, LOG)
    assert not names_of(100, LOG, INDEX) & set(folder(env))


def test_a_plan_renames_outputs_and_deletes_sources_that_no_output_overwrites() -> None:
    source = Source(0, (file_name(0, LOG), file_name(0, INDEX), file_name(0, TXN_INDEX)))
    other = Source(50, (file_name(50, LOG),))
    log = CleanedFile("00000000000000000000.log.r1.cleaned", 10, 1)
    index = CleanedFile("00000000000000000000.index.r1.cleaned", 20, 2)
    plan = plan_swap("/d", [source, other], [CleanedSegment(0, "r1", (log, index))])
    assert plan == SwapPlan(
        directory="/d",
        job_id="r1",
        source_base_offsets=(0, 50),
        outputs=(CleanedSegment(0, "r1", (log, index)),),
        renames=(
            Rename(log.name, "00000000000000000000.log", 10, 1),
            Rename(index.name, "00000000000000000000.index", 20, 2),
        ),
        deletes=(
            "00000000000000000000.txnindex",
            "00000000000000000050.log",
            "00000000000000000050.snapshot",
        ),
    )


def test_a_producer_snapshot_is_kept_where_its_base_stays_and_goes_where_it_vanishes() -> None:
    sources = [Source(base, tuple(names_of(base, LOG, SNAPSHOT))) for base in (0, 50, 90)]
    outputs = [CleanedSegment(base, "r", ()) for base in (0, 90)]
    plan = plan_swap("/d", sources, outputs)
    assert {name for name in plan.deletes if name.endswith(SNAPSHOT)} == names_of(50, SNAPSHOT)


def test_a_plan_without_outputs_deletes_all_of_its_sources() -> None:
    plan = plan_swap("/d", [Source(7, tuple(names_of(7, LOG, INDEX)))], [])
    assert set(plan.deletes) == names_of(7, LOG, INDEX, SNAPSHOT)
    assert plan.renames == ()
    assert plan.job_id


@pytest.mark.parametrize(
    ("bases", "outputs"),
    [
        ([], []),
        ([5, 5], []),
        ([9, 5], []),
        ([5], [CleanedSegment(4, "r", ())]),
        ([5], [CleanedSegment(6, "r", ()), CleanedSegment(5, "r", ())]),
        ([5], [CleanedSegment(5, "r", ()), CleanedSegment(6, "other", ())]),
        ([5], [CleanedSegment(5, "r", (CleanedFile(file_name(5, LOG), 1, 1),))]),
        ([5], [CleanedSegment(5, "r", (CleanedFile("5.log.r.cleaned", 1, 1),))]),
    ],
)
def test_a_plan_that_makes_no_sense_is_our_own_mistake(
    bases: list[int], outputs: list[CleanedSegment]
) -> None:
    with pytest.raises(AssertionError):
        plan_swap("/d", [Source(base, (file_name(base, LOG),)) for base in bases], outputs)


def test_an_output_may_begin_where_retention_took_its_first_source() -> None:
    outputs = [CleanedSegment(4, "r", ())]
    plan = plan_swap("/d", [Source(9, ())], outputs, front_is_gone=True)
    assert plan.source_base_offsets == (9,)
    assert file_name(9, LOG) in plan.deletes


# --- execute ------------------------------------------------------------------------------------


def test_a_swap_leaves_the_outputs_and_what_was_not_its_own(env: MemoryEnv) -> None:
    plan = prepared(env)
    put(env, f"{FOLDER}/leader-epoch-checkpoint", b"0\n0\n")
    execute_swap(env, plan)
    results = folder(env)
    assert set(results) == (
        names_of(0, LOG, INDEX, TIME_INDEX, SNAPSHOT)
        | names_of(300, LOG, INDEX, TIME_INDEX, SNAPSHOT)
        | {"leader-epoch-checkpoint"}
    )
    for kind in (LOG, INDEX, TIME_INDEX):
        assert results[file_name(0, kind)] == content("new", 0, kind)
        assert results[file_name(300, kind)] == content("old", 300, kind)
    assert results[file_name(0, SNAPSHOT)] == content("old", 0, SNAPSHOT)
    assert recover_swap(env, FOLDER) == SwapRecovery()


def test_the_steps_of_a_swap_and_their_barriers_are_these(env: MemoryEnv) -> None:
    source = Source(0, (file_name(0, LOG),))
    for base in (0, 5):
        put(env, f"{FOLDER}/{file_name(base, LOG)}", b"old")
    plan = plan_swap(FOLDER, [source, Source(5, (file_name(5, LOG),))], [write_output(env, 0)])
    env.history.clear()
    execute_swap(env, plan)
    assert [f"{operation} {os.path.basename(path)}" for operation, path in env.history] == [
        f"open {JOURNAL}.tmp",
        f"pwrite {JOURNAL}.tmp",
        f"sync {JOURNAL}.tmp",
        "sync_dir orders-0",
        f"rename {JOURNAL}",
        "sync_dir orders-0",
        "rename 00000000000000000000.log",
        "rename 00000000000000000000.index",
        "rename 00000000000000000000.timeindex",
        "sync_dir orders-0",
        "unlink 00000000000000000005.log",
        "sync_dir orders-0",
        f"unlink {JOURNAL}",
        "sync_dir orders-0",
    ]


def test_a_swap_without_outputs_takes_the_sources_away(env: MemoryEnv) -> None:
    source = write_source(env, 0)
    write_source(env, 100)
    execute_swap(env, plan_swap(FOLDER, [source], []))
    assert set(folder(env)) == names_of(100, LOG, INDEX, TIME_INDEX, SNAPSHOT)


def test_several_outputs_are_published_by_one_journal(env: MemoryEnv) -> None:
    sources = [write_source(env, base) for base in (0, 100, 200, 300)]
    plan = plan_swap(FOLDER, sources, [write_output(env, 0), write_output(env, 200)])
    execute_swap(env, plan)
    assert {name: data for name, data in folder(env).items() if name.endswith(LOG)} == {
        file_name(base, LOG): content("new", base, LOG) for base in (0, 200)
    }


def test_readers_of_a_replaced_segment_go_on(env: MemoryEnv) -> None:
    plan = prepared(env)
    readers = [env.open(f"{FOLDER}/{file_name(base, LOG)}") for base in (0, 100)]
    execute_swap(env, plan)
    for reader, base in zip(readers, (0, 100), strict=True):
        assert reader.pread(10_000, 0) == content("old", base, LOG)


def spoil_output(env: MemoryEnv) -> None:
    file = env.open(f"{FOLDER}/00000000000000000000.log.{RUN}.cleaned", write=True)
    file.pwrite(b"X", 17)


def cut_output(env: MemoryEnv) -> None:
    env.open(f"{FOLDER}/00000000000000000000.index.{RUN}.cleaned", write=True).truncate(5)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda env: env.unlink(f"{FOLDER}/{file_name(100, LOG)}"), "100.log is gone"),
        (lambda env: discard_outputs(env, FOLDER, RUN), "cleaned is missing"),
        (spoil_output, "has checksum"),
        (cut_output, "has 5 bytes"),
        (lambda env: put(env, f"{FOLDER}/varve-swap.r0.journal", b""), "r0.journal is unfinished"),
    ],
)
def test_a_swap_that_cannot_be_right_is_refused_before_anything_changes(
    env: MemoryEnv, harm: Callable[[MemoryEnv], object], reason: str
) -> None:
    plan = prepared(env)
    harm(env)
    before, operations = folder(env), env.operations
    with pytest.raises(SwapRefusedError, match=reason):
        execute_swap(env, plan)
    assert folder(env) == before
    assert env.operations == operations


def test_an_output_never_overwrites_a_segment_that_is_not_its_source(env: MemoryEnv) -> None:
    source = write_source(env, 0)
    write_source(env, 100)
    plan = plan_swap(FOLDER, [source], [write_output(env, 0), write_output(env, 100)])
    with pytest.raises(SwapRefusedError, match="not among the sources"):
        execute_swap(env, plan)
    assert folder(env)[file_name(100, LOG)] == content("old", 100, LOG)


def test_sources_may_lack_their_indexes(env: MemoryEnv) -> None:
    plan = prepared(env)
    env.unlink(f"{FOLDER}/{file_name(0, INDEX)}")
    env.unlink(f"{FOLDER}/{file_name(100, TIME_INDEX)}")
    execute_swap(env, plan)
    assert file_name(0, INDEX) in folder(env)


@pytest.mark.parametrize("operation", ["open", "pwrite", "sync", "rename", "unlink", "sync_dir"])
def test_a_failing_disk_comes_through_and_the_next_start_makes_it_whole(
    env: MemoryEnv, operation: str
) -> None:
    plan = prepared(env)
    old = {name for name in folder(env) if "cleaned" not in name}
    fault = env.fail_on(lambda op, path: op == operation and "cleaned" not in path, errno.EIO)
    with raises_errno(errno.EIO):
        execute_swap(env, plan)
    fault.remove()
    recover_swap(env, FOLDER)
    if operation == "unlink":  # only then had it been committed
        assert file_name(100, LOG) not in folder(env)
    else:
        assert set(folder(env)) == old


def test_the_outputs_of_a_dropped_run_are_deleted_and_no_others(env: MemoryEnv) -> None:
    write_source(env, 0)
    write_output(env, 0, run="r1")
    write_output(env, 0, run="r2")
    assert len(discard_outputs(env, FOLDER, "r1")) == 3
    assert {name for name in folder(env) if name.endswith("cleaned")} == {
        f"{name}.r2.cleaned" for name in names_of(0, LOG, INDEX, TIME_INDEX)
    }
    assert discard_outputs(env, FOLDER, "r1") == ()


def test_a_swap_on_a_real_disk(tmp_path: Path) -> None:
    env = RealEnv()
    directory = str(tmp_path)
    old = {base: bytes([base]) * 3_000_000 for base in (0, 1)}
    for base, data in old.items():
        put(env, os.path.join(directory, file_name(base, LOG)), data)
    new = b"\x07" * 2_500_000
    cleaned = os.path.join(directory, "00000000000000000000.log.r1.cleaned")
    put(env, cleaned, new)
    file = CleanedFile(os.path.basename(cleaned), len(new), crc_of_file(env, cleaned))
    reader = env.open(os.path.join(directory, file_name(1, LOG)))
    sources = [Source(base, (file_name(base, LOG),)) for base in old]
    execute_swap(env, plan_swap(directory, sources, [CleanedSegment(0, "r1", (file,))]))
    assert env.listdir(directory) == [file_name(0, LOG)]
    assert env.read_file(os.path.join(directory, file_name(0, LOG))) == new
    assert reader.pread(10, 2_999_990) == bytes([1]) * 10
    assert recover_swap(env, directory) == SwapRecovery()


# --- journal ------------------------------------------------------------------------------------

SAMPLE = Journal(
    "r1",
    (
        Rename(
            "00000000000000000000.log.r1.cleaned", "00000000000000000000.log", 1 << 40, 0xFFFFFFFF
        ),
    ),
    (Delete("00000000000000000005.log", 0), Delete("00000000000000000005.snapshot", 46)),
)


def test_a_journal_reads_as_it_was_written() -> None:
    assert decode_journal(encode_journal(SAMPLE), f"/d/{SAMPLE.file_name}") == SAMPLE


def test_a_journal_is_refused_at_every_cut_and_at_every_changed_byte() -> None:
    data = encode_journal(SAMPLE)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_journal(data[:length], f"/d/{SAMPLE.file_name}")
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x20
        with pytest.raises(CorruptCheckpointError):
            decode_journal(bytes(changed), f"/d/{SAMPLE.file_name}")


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"job_id": "r1", "renames": 5, "deletes": []},
        {"job_id": "r1", "renames": [["a", "b"]], "deletes": []},
        {"job_id": "r1", "renames": [], "deletes": [["../../etc/passwd", 1]]},
        {"job_id": "r1", "renames": [["x/y.log", "00000000000000000000.log", 1, 1]], "deletes": []},
        {"job_id": "another", "renames": [], "deletes": []},
    ],
)
def test_a_journal_names_nothing_but_segment_files_of_its_folder(
    payload: dict[str, object],
) -> None:
    data = sealed_json.seal(JOURNAL_MAGIC, JOURNAL_VERSION, payload)
    with pytest.raises(CorruptCheckpointError):
        decode_journal(data, f"/d/{JOURNAL}")


def test_a_journal_of_a_newer_version_stops_the_opening_and_is_kept(env: MemoryEnv) -> None:
    data = sealed_json.seal(JOURNAL_MAGIC, JOURNAL_VERSION + 1, {"job_id": "r1"})
    put(env, f"{FOLDER}/{JOURNAL}", data)
    before = folder(env)
    with pytest.raises(NewerFormatError) as caught:
        recover_swap(env, FOLDER)
    assert (caught.value.version, caught.value.known) == (JOURNAL_VERSION + 1, JOURNAL_VERSION)
    assert folder(env) == before


# --- recovery -----------------------------------------------------------------------------------


def test_without_a_journal_cleaned_files_are_deleted(env: MemoryEnv) -> None:
    prepared(env)
    put(env, f"{FOLDER}/{JOURNAL}.tmp", b"half a jour")
    recovery = recover_swap(env, FOLDER)
    cleaned = sorted(f"{name}.{RUN}.cleaned" for name in names_of(0, LOG, INDEX, TIME_INDEX))
    assert recovery.removed == (*cleaned, f"{JOURNAL}.tmp")
    assert recovery.changed
    assert {base for base in (0, 100, 200, 300) if file_name(base, LOG) in folder(env)} == {
        0,
        100,
        200,
        300,
    }
    assert not recover_swap(env, FOLDER).changed


def committed(env: MemoryEnv, plan: SwapPlan) -> None:
    """Stop right after the commit."""
    fault = env.fail_on(
        lambda op, path: op in ("rename", "unlink") and "varve-swap" not in path, errno.EIO
    )
    with raises_errno(errno.EIO):
        execute_swap(env, plan)
    fault.remove()
    assert JOURNAL in folder(env)


def test_a_journal_is_carried_out(env: MemoryEnv) -> None:
    plan = prepared(env)
    committed(env, plan)
    recovery = recover_swap(env, FOLDER)
    assert recovery == SwapRecovery(redone=(RUN,))
    assert {name for name in folder(env) if name.endswith(LOG)} == names_of(0, LOG) | names_of(
        300, LOG
    )
    assert folder(env)[file_name(0, LOG)] == content("new", 0, LOG)


def test_a_torn_journal_counts_as_absent_and_costs_the_indexes_alone(env: MemoryEnv) -> None:
    plan = prepared(env)
    committed(env, plan)
    env.open(f"{FOLDER}/{JOURNAL}", write=True).truncate(40)
    env.rename(f"{FOLDER}/{plan.renames[0].source}", f"{FOLDER}/{plan.renames[0].target}")
    recovery = recover_swap(env, FOLDER)
    assert [name for name, _ in recovery.refused] == [JOURNAL]
    assert recovery.redone == ()
    results = folder(env)
    assert {name for name in results if name.endswith(LOG)} == {
        file_name(base, LOG) for base in (0, 100, 200, 300)
    }
    assert not [
        name for name in results if name.endswith((INDEX, TIME_INDEX, "cleaned", "journal"))
    ]
    assert names_of(100, TXN_INDEX) <= set(results)
    assert not recover_swap(env, FOLDER).changed


def test_a_cleaned_file_that_rotted_before_the_first_rename_brings_the_old_back(
    env: MemoryEnv,
) -> None:
    plan = prepared(env)
    committed(env, plan)
    spoil_output(env)
    recovery = recover_swap(env, FOLDER)
    ((run, reason),) = recovery.rolled_back
    assert run == RUN
    assert "checksum" in reason
    results = folder(env)
    for base in (0, 100, 200):
        assert results[file_name(base, LOG)] == content("old", base, LOG)
    assert not [name for name in results if name.endswith(("cleaned", "journal"))]


def test_a_swap_that_can_be_neither_finished_nor_undone_is_left_as_it_is(env: MemoryEnv) -> None:
    plan = prepared(env)
    committed(env, plan)
    env.rename(f"{FOLDER}/{plan.renames[1].source}", f"{FOLDER}/{plan.renames[1].target}")
    spoil_output(env)
    before = folder(env)
    with pytest.raises(UnfinishedSwapError, match="checksum") as caught:
        recover_swap(env, FOLDER)
    assert (caught.value.directory, caught.value.file) == (FOLDER, plan.renames[0].source)
    assert folder(env) == before


@pytest.mark.parametrize("kind", [INDEX, TIME_INDEX, TXN_INDEX])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_damaged_index_does_not_keep_a_swap_from_being_finished(
    env: MemoryEnv, kind: str, damage: str, is_renamed: bool
) -> None:
    sources = [write_source(env, base, txn=base == 100) for base in (0, 100, 200)]
    plan = plan_swap(FOLDER, sources, [write_output(env, 0, txn=True)])
    committed(env, plan)
    (spoiled,) = [rename for rename in plan.renames if rename.target == file_name(0, kind)]
    for rename in plan.renames:
        if (rename is spoiled) == is_renamed:
            env.rename(f"{FOLDER}/{rename.source}", f"{FOLDER}/{rename.target}")
    path = f"{FOLDER}/{spoiled.target if is_renamed else spoiled.source}"
    match damage:
        case "truncated":
            put(env, path, content("new", 0, kind)[:12])
        case "changed":
            put(env, path, bytes(len(content("new", 0, kind))))
        case "missing":
            env.unlink(path)
    recovery = recover_swap(env, FOLDER)
    assert recovery.redone == (RUN,)
    ((name, reason),) = recovery.distrusted
    assert name == spoiled.target
    assert reason in str(recovery)
    results = folder(env)
    assert spoiled.target not in results  # whoever opens the log builds it again
    assert results[file_name(0, LOG)] == content("new", 0, LOG)
    assert not [name for name in results if name.endswith(("cleaned", "journal"))]
    assert not recover_swap(env, FOLDER).changed


def test_a_log_that_is_not_the_one_to_be_deleted_is_not_deleted(env: MemoryEnv) -> None:
    plan = prepared(env)
    committed(env, plan)
    put(env, f"{FOLDER}/{file_name(100, LOG)}", b"another log")
    before = folder(env)
    with pytest.raises(UnfinishedSwapError, match="has 11 bytes"):
        recover_swap(env, FOLDER)
    assert folder(env) == before


def test_a_journal_that_came_back_after_all_was_done_harms_nothing(env: MemoryEnv) -> None:
    plan = prepared(env)
    committed(env, plan)
    journal = env.read_file(f"{FOLDER}/{JOURNAL}")
    recover_swap(env, FOLDER)
    for kind in (LOG, INDEX, TIME_INDEX):  # retention takes the new segment away
        env.unlink(f"{FOLDER}/{file_name(0, kind)}")
    expected = folder(env)
    put(env, f"{FOLDER}/{JOURNAL}", journal)
    assert recover_swap(env, FOLDER).redone == (RUN,)
    assert folder(env) == expected


def test_an_ordinary_folder_costs_one_listing_and_one_sync(env: MemoryEnv) -> None:
    write_source(env, 0)
    operations = env.operations
    assert recover_swap(env, FOLDER) == SwapRecovery()
    assert env.operations == operations + 1


def test_a_recovery_says_in_words_what_it_did() -> None:
    done = SwapRecovery(redone=("r1",), refused=(("j", "torn"),), removed=("a", "b"))
    assert str(done) == "swap of job r1 completed; j ignored, torn; 2 left-over files removed"
    assert str(SwapRecovery()) == "nothing"


def test_a_folder_that_was_closed_cleanly_is_synced_only_for_an_interrupted_swap(
    env: MemoryEnv,
) -> None:
    prepared(env)
    env.history.clear()
    assert recover_swap(env, FOLDER, was_clean=True).removed  # the files of the plan
    assert ("sync_dir", FOLDER) in env.history
    env.history.clear()
    assert recover_swap(env, FOLDER, was_clean=True) == SwapRecovery()
    assert env.history == []
    recover_swap(env, FOLDER)  # after a kill, what is visible may not be durable
    assert env.history == [("sync_dir", FOLDER)]
