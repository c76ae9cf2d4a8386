"""Finishing what a Kafka that was killed left half done, by its own rules and towards more data.

That a crash inside this recovery does no harm either is in test_swap_crash.
"""

import struct
import zlib

import pytest

from storage.errors import UnfinishedSwapError
from storage.format.batch import walk_headers
from storage.format.filenames import INDEX, LOG, SNAPSHOT, TIME_INDEX, file_name
from storage.swap.swap_journal import recover_swap
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import FOLDER, NEW_LOG, OLD_LOGS, folder, log_of, put, write_output


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv(seed=3)
    env.mkdir(FOLDER)
    env.settle()
    return env


def put_kafka(env: MemoryEnv, base: int, suffix: str, data: bytes) -> None:
    put(env, f"{FOLDER}/{file_name(base, LOG)}{suffix}", data)
    for kind in (INDEX, TIME_INDEX):
        put(env, f"{FOLDER}/{file_name(base, kind)}{suffix}", f"{kind} of {data[:5]!r}".encode())


def logs(env: MemoryEnv) -> dict[int, bytes]:
    return {int(name[:20]): data for name, data in folder(env).items() if name.endswith(LOG)}


def strays(env: MemoryEnv) -> list[str]:
    return [name for name in folder(env) if name.endswith((".cleaned", ".swap", ".deleted"))]


def test_kafka_stopped_while_renaming_to_swap_is_rolled_back(env: MemoryEnv) -> None:
    for base, data in OLD_LOGS.items():
        put_kafka(env, base, "", data)
    put(env, f"{FOLDER}/{file_name(0, LOG)}.swap", NEW_LOG)
    put(env, f"{FOLDER}/{file_name(0, INDEX)}.cleaned", b"index")
    recover_swap(env, FOLDER)
    assert logs(env) == OLD_LOGS
    assert strays(env) == []


@pytest.mark.parametrize("gone", [[0], [0, 100], [0, 100, 200]])
@pytest.mark.parametrize("how", ["deleted", "unlinked"])
def test_kafka_stopped_with_everything_in_swap_is_completed(
    env: MemoryEnv, gone: list[int], how: str
) -> None:
    for base, data in OLD_LOGS.items():
        put_kafka(env, base, "" if base not in gone else ".deleted", data)
    if how == "unlinked":
        for name in strays(env):
            env.unlink(f"{FOLDER}/{name}")
    put_kafka(env, 0, ".swap", NEW_LOG)
    recovery = recover_swap(env, FOLDER)
    assert logs(env) == {0: NEW_LOG, 300: OLD_LOGS[300]}
    assert strays(env) == []
    assert set(recovery.completed) == {
        f"{name}.swap" for name in {file_name(0, kind) for kind in (LOG, INDEX, TIME_INDEX)}
    }
    assert folder(env)[file_name(0, INDEX)] == f".index of {NEW_LOG[:5]!r}".encode()
    assert not recover_swap(env, FOLDER).changed


@pytest.mark.parametrize("how", ["whole", "empty", "cut", "flipped"])
def test_new_segments_are_left_out_while_all_old_ones_are_in_place(
    env: MemoryEnv, how: str
) -> None:
    """What is damaged in them then costs nothing."""
    half = len(NEW_LOG) // 2
    flipped = NEW_LOG[:half] + bytes([NEW_LOG[half] ^ 1]) + NEW_LOG[half + 1 :]
    contents = {"whole": NEW_LOG, "empty": b"", "cut": NEW_LOG[:half], "flipped": flipped}
    for base, data in OLD_LOGS.items():
        put_kafka(env, base, "", data)
    put_kafka(env, 0, ".swap", contents[how])
    recover_swap(env, FOLDER)
    assert logs(env) == OLD_LOGS
    assert strays(env) == []


@pytest.mark.parametrize("bit", range(64))
def test_a_damaged_offset_of_a_new_segment_does_not_have_later_segments_deleted(
    env: MemoryEnv, bit: int
) -> None:
    """The checksum of a batch does not cover its base offset."""
    put_kafka(env, 0, ".deleted", OLD_LOGS[0])
    for base in (100, 200, 300):
        put_kafka(env, base, "", OLD_LOGS[base])
    position, header = list(walk_headers(NEW_LOG))[-1]
    offset = (header.base_offset ^ 1 << bit).to_bytes(8, "big")
    put_kafka(env, 0, ".swap", NEW_LOG[:position] + offset + NEW_LOG[position + 8 :])
    before = folder(env)
    with pytest.raises(UnfinishedSwapError):
        recover_swap(env, FOLDER)
    assert folder(env) == before


def test_kafka_stopped_while_taking_the_suffix_off_is_completed(env: MemoryEnv) -> None:
    put_kafka(env, 0, "", NEW_LOG)
    env.rename(f"{FOLDER}/{file_name(0, INDEX)}", f"{FOLDER}/{file_name(0, INDEX)}.swap")
    put_kafka(env, 100, ".deleted", OLD_LOGS[100])
    put_kafka(env, 300, "", OLD_LOGS[300])
    recover_swap(env, FOLDER)
    assert logs(env) == {0: NEW_LOG, 300: OLD_LOGS[300]}
    assert file_name(0, INDEX) in folder(env)
    assert strays(env) == []


@pytest.mark.parametrize("phase", range(5))
def test_kafka_stopped_while_splitting_a_segment_keeps_all_records(
    env: MemoryEnv, phase: int
) -> None:
    """Kafka's LogLoaderTest, testRecoveryAfterCrashDuringSplitPhase1 to 5."""
    halves = {0: log_of(0, 50, "old"), 50: log_of(50, 100, "old")}
    put_kafka(env, 0, "" if phase < 3 else ".deleted", OLD_LOGS[0])
    put_kafka(env, 100, "", OLD_LOGS[100])
    if phase == 4:
        env.unlink(f"{FOLDER}/{file_name(0, LOG)}.deleted")
    suffixes = (
        {0: "", 50: ".swap"}
        if phase == 4
        else {
            0: ".cleaned" if phase < 2 else ".swap",
            50: ".cleaned" if phase < 1 else ".swap",
        }
    )
    for base, suffix in suffixes.items():
        put_kafka(env, base, suffix, halves[base])
    recover_swap(env, FOLDER)
    whole = logs(env)
    assert whole in ({0: OLD_LOGS[0], 100: OLD_LOGS[100]}, {**halves, 100: OLD_LOGS[100]})
    assert (50 in whole) == (phase >= 3)
    assert strays(env) == []


def test_a_cleaned_file_that_kafka_forgot_does_not_cost_the_swap_its_only_copy(
    env: MemoryEnv,
) -> None:
    put_kafka(env, 0, "", log_of(0, 100, "old"))
    put_kafka(env, 50, ".cleaned", b"left by an earlier clean that failed")
    put_kafka(env, 100, ".swap", log_of(100, 290, "new"))
    put_kafka(env, 100, ".deleted", OLD_LOGS[100])
    put_kafka(env, 200, ".deleted", OLD_LOGS[200])
    recover_swap(env, FOLDER)
    assert logs(env) == {0: OLD_LOGS[0], 100: log_of(100, 290, "new")}
    assert strays(env) == []


def test_our_own_cleaned_files_do_not_make_kafka_swaps_look_unfinished(env: MemoryEnv) -> None:
    put_kafka(env, 0, "", OLD_LOGS[0])
    write_output(env, 0, run="r9")
    put_kafka(env, 100, ".swap", log_of(100, 290, "new"))
    put_kafka(env, 100, ".deleted", OLD_LOGS[100])
    recover_swap(env, FOLDER)
    assert logs(env) == {0: OLD_LOGS[0], 100: log_of(100, 290, "new")}


def test_files_that_kafka_marked_deleted_do_not_come_back(env: MemoryEnv) -> None:
    put_kafka(env, 0, ".deleted", OLD_LOGS[0])
    put_kafka(env, 100, "", OLD_LOGS[100])
    put(env, f"{FOLDER}/{file_name(50, SNAPSHOT)}.deleted", b"")
    put(env, f"{FOLDER}/00000000000000000100-0000000001.checkpoint.deleted", b"not ours")
    recover_swap(env, FOLDER)
    assert logs(env) == {100: OLD_LOGS[100]}
    assert strays(env) == ["00000000000000000100-0000000001.checkpoint.deleted"]


def test_snapshots_inside_a_completed_swap_go_with_the_old_segments(env: MemoryEnv) -> None:
    put_kafka(env, 0, ".swap", NEW_LOG)
    for base in (0, 100, 290, 300):
        put(env, f"{FOLDER}/{file_name(base, SNAPSHOT)}", b"")
    recover_swap(env, FOLDER)
    assert {name for name in folder(env) if name.endswith(SNAPSHOT)} == {
        file_name(290, SNAPSHOT),
        file_name(300, SNAPSHOT),
    }


def test_a_swap_file_of_kafka_that_is_damaged_deletes_nothing(env: MemoryEnv) -> None:
    damaged = bytearray(NEW_LOG)
    damaged[-3] ^= 1
    put_kafka(env, 0, ".swap", bytes(damaged))
    put_kafka(env, 0, ".deleted", OLD_LOGS[0])
    put_kafka(env, 300, "", OLD_LOGS[300])
    before = folder(env)
    with pytest.raises(UnfinishedSwapError, match="CRC") as caught:
        recover_swap(env, FOLDER)
    assert caught.value.file == f"{file_name(0, LOG)}.swap"
    assert folder(env) == before


def test_a_swap_file_of_old_messages_covers_their_offsets(env: MemoryEnv) -> None:
    body = struct.pack(">bbqiI", 1, 0, 1_000, -1, 0)  # magic 1, a null key, no value
    message = struct.pack(">I", zlib.crc32(body)) + body
    data = b"".join(struct.pack(">qi", offset, len(message)) + message for offset in (3, 29))
    put(env, f"{FOLDER}/{file_name(0, LOG)}.swap", data)
    for base in (29, 30):
        put(env, f"{FOLDER}/{file_name(base, LOG)}", OLD_LOGS[100])
    recover_swap(env, FOLDER)
    assert logs(env) == {0: data, 30: OLD_LOGS[100]}
