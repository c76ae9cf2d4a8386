"""The cleaner's own files: written together, read back, done without where they are bad."""

import asyncio
import json
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from cleaner.job import Damage
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.scheduler.cleaner_state_store import (
    ANSWER_SECONDS,
    CLOSE_SECONDS,
    SAVE_SECONDS,
    STATE_NAME,
    CleanerStateStore,
    decode_cleaner_state,
    encode_cleaner_state,
)
from cleaner.scheduler.history import (
    HISTORY_BYTES_MAX,
    HISTORY_NAME,
    History,
    JobRecord,
    load_records,
)
from config.topics.keys import TopicConfig
from storage.env import Env
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import even, facts
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.storage.memory_env import MemoryEnv

T0, T1 = TopicPartition("t-x", 0), TopicPartition("t-x", 1)
KNOWN = PartitionCleanerState(b"i" * 16, "boot-1", 5, ((30, 50),), {(30, 100): 77}, 3, 0.25, 4, 9)
RECORD = JobRecord(T0, "run-1", 1000, 3500, "finished", bytes_before=400, bytes_after=100)


def log_in(directory: str, partition: TopicPartition = T0):
    return facts(even(6), partition=partition, topic_id=b"i" * 16, data_directory=directory)


def folders() -> MemoryEnv:
    env = MemoryEnv(1)
    env.mkdir("/a")
    env.mkdir("/b")
    env.sync_dir("/")
    return env


class OneBadDisk:
    """An Env whose folder /b cannot be written."""

    def __init__(self, env: Env) -> None:
        self._env = env

    def __getattr__(self, name: str):
        return getattr(self._env, name)

    def open(self, path: str, **how: bool):
        if path.startswith("/b"):
            raise OSError(5, "Input/output error", path)
        return self._env.open(path, **how)


def test_the_state_of_each_directory_survives_a_restart() -> None:
    env = folders()

    async def first() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN)
        memory.put(log_in("/b", T1), replace(KNOWN, survivorship=0.5))
        memory.record("/a", RECORD)
        assert not env.exists(f"/a/{STATE_NAME}")
        await asyncio.sleep(SAVE_SECONDS + 1)
        assert env.exists(f"/a/{STATE_NAME}")
        memory.record("/b", replace(RECORD, partition=T1))
        await memory.close()

    async def second() -> None:
        memory = CleanerStateStore(env)
        records = await memory.load(["/a", "/b"])
        assert {record.partition for record in records} == {T0, T1}
        assert records[0] == RECORD
        assert memory.state_of(log_in("/a"), 99) == KNOWN
        assert memory.state_of(log_in("/b", T1), 99).survivorship == 0.5
        assert memory.paused_partitions() == {T0, T1}

    run_virtually(first())
    run_virtually(second())


@pytest.mark.parametrize("home", ["/a", "/b"])
def test_of_two_states_of_a_moved_log_the_one_beside_it_counts(home: str) -> None:
    """A kill left the other one in the file of the directory from which it was moved."""
    env = folders()

    async def moved() -> None:
        for directory, first_dirty_offset in (("/a", 1), ("/b", 2)):
            memory = CleanerStateStore(env)
            memory.put(log_in(directory), replace(KNOWN, first_dirty_offset=first_dirty_offset))
            await memory.close()

    async def restarted() -> None:
        memory = CleanerStateStore(env)
        await memory.load(["/a", "/b"], {T0: home}.get)
        entry = memory.entry(T0)
        assert entry is not None
        assert entry.first_dirty_offset == (1 if home == "/a" else 2)

    run_virtually(moved())
    run_virtually(restarted())


def test_a_pause_is_written_at_once_and_durably() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN, at_once=True)
        await asyncio.sleep(0.01)
        after = env.crash()
        assert (
            decode_cleaner_state(after.read_file(f"/a/{STATE_NAME}"), "x")[T0].paused_since_ms == 9
        )

    run_virtually(scenario())


def test_a_write_encodes_only_the_entries_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most cleans write the file: with all of n entries, n cleans would encode n * n."""
    encoded: list[float] = []
    to_json = PartitionCleanerState.to_json

    def counted(cleaner_state: PartitionCleanerState):
        encoded.append(cleaner_state.survivorship)
        return to_json(cleaner_state)

    monkeypatch.setattr(PartitionCleanerState, "to_json", counted)
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN)
        memory.put(log_in("/a", T1), replace(KNOWN, survivorship=0.5))
        assert await memory.saved(T0)
        assert encoded == [0.25, 0.5]
        memory.put(log_in("/a", T1), replace(KNOWN, survivorship=0.75))
        assert await memory.saved(T1)
        assert encoded == [0.25, 0.5, 0.75]
        memory.keep_only(frozenset({T1}), lambda _: False)
        assert await memory.saved(T1)
        states = decode_cleaner_state(env.read_file(f"/a/{STATE_NAME}"), "x")
        assert states.keys() == {T1}
        assert states[T1].survivorship == 0.75
        await memory.close()

    run_virtually(scenario())


@pytest.mark.parametrize("cut", [0, 1, 10, 40, -1])
def test_a_torn_file_is_ignored_with_one_log_line(cut: int) -> None:
    env = folders()
    data = encode_cleaner_state({T0: KNOWN})
    file = env.open(f"/a/{STATE_NAME}", create=True)
    file.pwrite(data[:cut] + b"\0", 0)

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        await memory.load(["/a"])
        assert memory.state_of(log_in("/a"), 99).first_seen_ms == 99
        await memory.close()

    with capture_logs() as logs:
        run_virtually(scenario())
    assert [line["event"] for line in logs] == ["cleaner state not read"]


@pytest.mark.parametrize("entry", [["t", 0, {}], ["t", 0], [1, 2, KNOWN.to_json()], 7])
def test_a_valid_file_with_malformed_content_is_ignored(entry: object) -> None:
    from storage.format.sealed_json import seal

    env = folders()
    file = env.open(f"/a/{STATE_NAME}", create=True)
    file.pwrite(seal("varve-cleaner", 1, {"partitions": [entry]}), 0)

    with capture_logs() as logs:
        run_virtually(_load(env))
    assert [line["event"] for line in logs] == ["cleaner state not read"]


async def _load(env: Env) -> None:
    await CleanerStateStore(env).load(["/a"])


def test_a_failed_directory_is_logged_once_and_others_are_written() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(OneBadDisk(env))
        for number in range(3):
            memory.put(log_in("/b", T1), replace(KNOWN, observations=number))
            memory.put(log_in("/a"), replace(KNOWN, observations=number))
            await asyncio.sleep(SAVE_SECONDS + 1)
        await memory.close()
        assert decode_cleaner_state(env.read_file(f"/a/{STATE_NAME}"), "x")[T0].observations == 2

    with capture_logs() as logs:
        run_virtually(scenario())
    assert [(line["event"], line["directory"]) for line in logs] == [
        ("cleaner state not saved", "/b")
    ]


def test_a_log_that_is_not_compacted_has_state_only_if_it_is_paused() -> None:
    env = folders()
    plain = replace(log_in("/a"), config=TopicConfig(cleanup_policy=("delete",)))

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        assert memory.state_of(plain, 5).first_seen_ms == 5
        assert memory.state_of(plain, 6).first_seen_ms == 6
        await memory.close()
        assert not env.exists(f"/a/{STATE_NAME}")
        memory.put(plain, KNOWN, at_once=True)
        assert memory.state_of(plain, 10) == KNOWN
        await memory.close()

    run_virtually(scenario())


def test_state_of_deleted_partitions_is_dropped_and_of_offline_ones_kept() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN)
        memory.put(log_in("/a", T1), KNOWN)
        memory.put(log_in("/b", TopicPartition("other", 0)), KNOWN)
        await asyncio.sleep(SAVE_SECONDS + 1)
        memory.keep_only(frozenset({T1}), lambda partition: partition == T1)
        assert memory.paused_partitions() == {T1}
        await memory.close()
        assert set(decode_cleaner_state(env.read_file(f"/a/{STATE_NAME}"), "x")) == {T1}
        assert len(decode_cleaner_state(env.read_file(f"/b/{STATE_NAME}"), "x")) == 1

    run_virtually(scenario())


def test_closing_waits_for_a_hanging_disk_only_so_long() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN)
        writer = memory._writers["/a"]

        async def hang(*_: object) -> bool:
            return await asyncio.Event().wait()

        writer._write = hang  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await memory.close()
        assert asyncio.get_running_loop().time() - began == pytest.approx(CLOSE_SECONDS)

    run_virtually(scenario())


# --- history


def test_a_record_comes_back_from_json() -> None:
    full = replace(RECORD, damaged=(Damage("/a/0.log", 17, "bad CRC"),), map_full=True, passes=2)
    assert JobRecord.from_json(json.loads(json.dumps(full.to_json()))) == full


def test_a_record_names_ten_damaged_segments_and_counts_the_rest() -> None:
    reported = [[f"/a/{n}.log", 17, "bad CRC"] for n in range(300)]
    old = RECORD.to_json() | {"damaged": reported}
    del old["damaged_segments"]
    record = JobRecord.from_json(old)
    assert (len(record.damaged), record.damaged_segments) == (10, 300)
    assert JobRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "lost"},
        {"topic": 5},
        {"partition": "0"},
        {"bytes_read": "many"},
        {"bytes_read": True},
        {"map_full": 1},
        {"damaged": [[1, "x", 2]]},
        {"job_id": None},
    ],
)
def test_a_foreign_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        JobRecord.from_json(RECORD.to_json() | change)


def test_fields_of_a_later_version_are_ignored() -> None:
    assert JobRecord.from_json(RECORD.to_json() | {"colour": "red"}) == RECORD


def test_a_record_has_kafkas_shares_also_of_an_empty_log() -> None:
    assert (RECORD.bytes_saved_share, RECORD.seconds) == (0.75, 2.5)
    assert RECORD.records_saved_share == 0.0


def test_torn_and_foreign_lines_are_skipped_with_one_warning() -> None:
    env = folders()

    async def write(*records: JobRecord) -> None:
        memory = CleanerStateStore(env)
        for record in records:
            memory.record("/a", record)
        await memory.close()

    run_virtually(write(RECORD))
    file = env.open(f"/a/{HISTORY_NAME}", write=True)
    file.pwrite(b"[1]\n\xff\xfe\n" + b"[" * 100_000 + b'\n{"topic": "t', file.size())
    run_virtually(write(replace(RECORD, job_id="run-2")))
    with capture_logs() as logs:
        records = load_records(env, "/a")
    assert [record.job_id for record in records] == ["run-1", "run-2"]
    assert [(line["event"], line["lines"]) for line in logs] == [
        ("malformed history lines skipped", 4)
    ]


def test_a_full_history_file_is_rotated() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        for number in range(60):
            long = replace(RECORD, job_id=f"run-{number}", reason="x" * (HISTORY_BYTES_MAX // 20))
            memory.record("/a", long)
            await asyncio.sleep(SAVE_SECONDS + 1)
        await memory.close()

    run_virtually(scenario())
    assert env.size(f"/a/{HISTORY_NAME}") <= HISTORY_BYTES_MAX
    results = [record.job_id for record in load_records(env, "/a")]
    assert results == [f"run-{number}" for number in range(60 - len(results), 60)]
    assert 19 < len(results) < 40


def test_the_history_in_memory_is_bounded_and_newest_first() -> None:
    history = History(records_max=5)
    history.load([replace(RECORD, job_id=str(n), finished_ms=n) for n in (3, 1, 2)])
    for number in range(4, 8):
        history.add(replace(RECORD, partition=T1, job_id=str(number), finished_ms=number))
    assert [record.job_id for record in history.newest(limit=3)] == ["7", "6", "5"]
    assert [record.job_id for record in history.newest(T0)] == ["3"]
    assert history.newest(T0, limit=0) == []
    last = history.last_of(T0)
    assert last is not None
    assert last.job_id == "3"
    history.keep_only(frozenset({T1}))
    assert history.last_of(T0) is None


class FullDisk:
    """An Env on which nothing can be written until `room`."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.room = False
        self.attempts = 0

    def __getattr__(self, name: str):
        return getattr(self._env, name)

    def open(self, path: str, **how: bool):
        if not self.room and how.get("write"):
            self.attempts += 1
            raise OSError(28, "No space left on device", path)
        return self._env.open(path, **how)


def test_a_change_that_could_not_be_written_is_written_when_the_disk_has_room_again() -> None:
    env = folders()

    async def scenario() -> None:
        disk = FullDisk(env)
        memory = CleanerStateStore(disk)
        memory.put(log_in("/a"), KNOWN, at_once=True)
        assert await memory.saved(T0) is False
        await asyncio.sleep(3 * SAVE_SECONDS)
        assert disk.attempts >= 3  # without another change
        assert not env.exists(f"/a/{STATE_NAME}")
        disk.room = True
        await asyncio.sleep(SAVE_SECONDS + 1)
        assert decode_cleaner_state(env.read_file(f"/a/{STATE_NAME}"), "x")[T0].paused_since_ms == 9
        assert await memory.saved(T0) is True
        attempts = disk.attempts
        await asyncio.sleep(3 * SAVE_SECONDS)
        assert disk.attempts == attempts
        await memory.close()

    with capture_logs() as logs:
        run_virtually(scenario())
    assert [line["log_level"] for line in logs] == ["warning", "info"]


@pytest.mark.parametrize("room", [True, False])
def test_a_change_that_could_not_be_written_is_tried_once_more_at_the_stop(room: bool) -> None:
    env = folders()

    async def scenario() -> None:
        disk = FullDisk(env)
        memory = CleanerStateStore(disk)
        memory.put(log_in("/a"), KNOWN, at_once=True)
        assert await memory.saved(T0) is False
        disk.room, before = room, disk.attempts
        began = asyncio.get_running_loop().time()
        await memory.close()
        assert asyncio.get_running_loop().time() - began < 1
        assert disk.attempts == before + (not room)
        assert env.exists(f"/a/{STATE_NAME}") is room

    run_virtually(scenario())


def test_is_saved_returns_in_bounded_time() -> None:
    env = folders()

    async def scenario() -> None:
        memory = CleanerStateStore(env)
        memory.put(log_in("/a"), KNOWN)
        memory.put(log_in("", T1), KNOWN)  # a log without a data directory: kept nowhere
        assert await memory.saved(T1) is False
        hang = asyncio.Event()

        async def never(*_: object) -> bool:
            return await hang.wait()

        memory._writers["/a"]._write = never  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        assert await memory.saved(T0) is False
        assert asyncio.get_running_loop().time() - began == pytest.approx(ANSWER_SECONDS)
        hang.set()
        await memory.close()

    run_virtually(scenario())
