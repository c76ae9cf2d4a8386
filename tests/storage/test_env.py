"""Rules of every Env, checked with the real one and the one in memory."""

import errno
import gc
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.env import (
    READ_BYTES_MAX,
    Env,
    File,
    RealEnv,
    RealFile,
    mkdir_durably,
    write_file,
    write_file_atomically,
)
from storage.errors import DirectoryLockedError, NoRoomError, is_folder_error
from tests.support.os_errors import raises_errno
from tests.support.storage.memory_env import MemoryEnv


@pytest.fixture(params=["real", "memory"])
def env(request: pytest.FixtureRequest) -> Env:
    return RealEnv() if request.param == "real" else MemoryEnv(seed=1)


@pytest.fixture
def root(env: Env, tmp_path: Path) -> str:
    env.mkdir(str(tmp_path))
    return str(tmp_path)


def put(env: Env, path: str, data: bytes) -> None:
    file = env.open(path, create=True, write=True, truncate=True)
    file.pwrite(data, 0)
    file.close()


@pytest.mark.parametrize("change", ["write", "truncate", "rename", "set the time back"])
def test_every_change_of_a_file_changes_its_stamp(env: Env, root: str, change: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"0123456789")
    file = env.open(path, write=True)
    mtime_ms, before = env.mtime_ms(path), file.stamp()
    deadline = time.monotonic() + 10
    # The clock of a file system has ticks of some ms; within one, a change does not show.
    while file.stamp() == before and time.monotonic() < deadline:
        match change:
            case "write":
                file.pwrite(b"0", 0)
            case "truncate":
                file.truncate(10)
            case "rename":
                env.rename(path, f"{path}-moved")
                env.rename(f"{path}-moved", path)
            case _:
                file.pwrite(b"0", 0)
                env.set_mtime_ms(path, mtime_ms)
    after = file.stamp()
    assert after != before
    assert after.inode == before.inode
    assert file.pread(10, 0) == b"0123456789"


def test_reading_a_file_and_making_it_durable_leave_its_stamp(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"0123456789")
    file = env.open(path, write=True)
    before = file.stamp()
    file.pread(10, 0)
    file.sync()
    env.sync_dir(root)
    assert env.open(path).stamp() == file.stamp() == before


def test_another_file_of_the_name_has_another_stamp(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"0123456789")
    file = env.open(path)
    put(env, f"{path}-copy", b"0123456789")
    env.rename(f"{path}-copy", path)
    assert env.open(path).stamp() != file.stamp()


def test_reading_stops_where_the_file_ends(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"0123456789")
    file = env.open(path)
    assert file.pread(4, 2) == b"2345"
    assert file.pread(100, 8) == b"89"
    assert file.pread(4, 10) == b""
    buffer = bytearray(6)
    assert file.pread_into(buffer, 7) == 3
    assert buffer == b"789\0\0\0"
    assert file.pread_into(memoryview(buffer)[2:4], 0) == 2
    assert buffer == b"7801\0\0"
    assert file.size() == env.size(path) == 10
    file.close()


def test_writing_takes_any_buffer_and_goes_where_it_is_told(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    file = env.open(path, create=True)
    file.pwrite(bytearray(b"world"), 6)
    file.pwrite(memoryview(b"hello "), 0)
    file.pwrite(b"", 3)
    assert env.read_file(path) == b"hello world"
    file.truncate(5)
    assert env.read_file(path) == b"hello"
    file.truncate(7)
    assert env.read_file(path) == b"hello\0\0"
    file.sync()
    file.close()


def test_opening_needs_the_file_unless_told_to_create_it(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    with pytest.raises(FileNotFoundError):
        env.open(path)
    with pytest.raises(FileNotFoundError):
        env.open(path, write=True)
    with pytest.raises(FileNotFoundError):
        env.open(os.path.join(root, "no-folder", "a"), create=True)
    env.open(path, create=True).close()
    put(env, path, b"xyz")
    file = env.open(path, create=True, write=True)
    assert file.size() == 3
    assert isinstance(file, File)
    env.open(path, truncate=True).close()
    assert file.size() == 0
    file.close()


def test_a_file_opened_for_reading_cannot_be_written(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"xyz")
    file = env.open(path)
    with raises_errno(errno.EBADF):
        file.pwrite(b"!", 0)
    file.close()
    assert env.read_file(path) == b"xyz"


def test_a_closed_file_cannot_be_read_and_closing_twice_is_allowed(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"xyz")
    file = env.open(path)
    file.close()
    file.close()
    with raises_errno(errno.EBADF):
        file.pread(1, 0)


@pytest.mark.parametrize("how", ["unlink", "replace"])
def test_an_open_file_outlives_its_name(env: Env, root: str, how: str) -> None:
    path, other = os.path.join(root, "a"), os.path.join(root, "b")
    put(env, path, b"old")
    put(env, other, b"new")
    file = env.open(path)
    env.rename(other, path) if how == "replace" else env.unlink(path)
    assert file.pread(3, 0) == b"old"
    assert env.exists(path) == (how == "replace")
    assert not env.exists(other) or how == "unlink"
    file.close()


def test_a_link_is_a_second_name_of_one_file(env: Env, root: str) -> None:
    env.open(f"{root}/a", create=True).pwrite(b"one", 0)
    env.link(f"{root}/a", f"{root}/b")
    with pytest.raises(FileExistsError):
        env.link(f"{root}/a", f"{root}/b")
    with pytest.raises(FileNotFoundError):
        env.link(f"{root}/none", f"{root}/c")
    env.open(f"{root}/b", write=True).pwrite(b"two", 0)
    assert env.read_file(f"{root}/a") == b"two"
    env.unlink(f"{root}/a")
    assert env.read_file(f"{root}/b") == b"two"


def test_a_folder_is_renamed_with_all_in_it(env: Env, root: str) -> None:
    before, after = os.path.join(root, "p-0"), os.path.join(root, "p-0.x-delete")
    env.mkdir(before)
    put(env, os.path.join(before, "a"), b"1")
    file = env.open(os.path.join(before, "a"), write=True)
    env.rename(before, after)
    file.pwrite(b"2", 0)
    assert env.read_file(os.path.join(after, "a")) == b"2"
    assert not env.exists(before)
    assert env.is_dir(after)
    file.close()


def test_renaming_what_is_absent_fails_and_changes_nothing(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"1")
    with pytest.raises(FileNotFoundError):
        env.rename(os.path.join(root, "absent"), path)
    assert env.read_file(path) == b"1"


def test_a_folder_that_is_a_link_is_removed_without_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    RealEnv().remove_tree(str(tmp_path / "link"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_folders_are_listed_sorted_and_removed_when_empty(env: Env, root: str) -> None:
    env.mkdir(os.path.join(root, "x", "y"))
    env.mkdir(os.path.join(root, "x", "y"))
    for name in ("b", "a", "C"):
        put(env, os.path.join(root, "x", name), b"")
    assert env.listdir(os.path.join(root, "x")) == ["C", "a", "b", "y"]
    with raises_errno(errno.ENOTEMPTY):
        env.rmdir(os.path.join(root, "x"))
    env.rmdir(os.path.join(root, "x", "y"))
    env.remove_tree(os.path.join(root, "x"))
    assert env.listdir(root) == []
    for call in (env.listdir, env.remove_tree, env.unlink, env.size, env.read_file, env.sync_dir):
        with pytest.raises(FileNotFoundError):
            call(os.path.join(root, "x"))


def test_files_and_folders_are_not_taken_for_each_other(env: Env, root: str) -> None:
    folder, path = os.path.join(root, "folder"), os.path.join(root, "file")
    env.mkdir(folder)
    put(env, path, b"")
    assert (env.is_dir(folder), env.is_dir(path)) == (True, False)
    calls: list[Callable[[], object]] = [
        lambda: env.open(folder, write=True),
        lambda: env.listdir(path),
        lambda: env.sync_dir(path),
        lambda: env.mkdir(os.path.join(path, "below")),
        lambda: env.rename(path, folder),
        lambda: env.rename(folder, path),
    ]
    for call in calls:
        with raises_errno(errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
            call()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_path_whose_disk_does_not_answer_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def stat(path: str, **_: bool) -> os.stat_result:
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        for call in (RealEnv().exists, RealEnv().is_dir, RealEnv().is_link):
            with raises_errno(number):
                call(str(tmp_path))


def test_a_path_that_leads_nowhere_is_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("absent", "file/below", "broken", "loop", "long" * 1000):
        path = str(tmp_path / name)
        assert not RealEnv().exists(path)
        assert not RealEnv().is_dir(path)
        assert RealEnv().is_link(path) == (name in {"broken", "loop"})


def test_the_modification_time_can_be_set(env: Env, root: str) -> None:
    path = os.path.join(root, "a")
    put(env, path, b"1")
    env.set_mtime_ms(path, 1_234_567_890_123)
    assert env.mtime_ms(path) == 1_234_567_890_123


def test_clocks_go_forward_and_random_bytes_differ(env: Env, root: str) -> None:
    assert env.wall_ms() > 1_600_000_000_000
    first = env.monotonic()
    assert env.monotonic() >= first
    assert len(env.random_bytes(16)) == 16
    assert env.random_bytes(16) != env.random_bytes(16)
    assert env.free_bytes(root) > 0


def test_a_lock_is_refused_to_a_second_asker_in_the_same_process(env: Env, root: str) -> None:
    path = os.path.join(root, ".lock")
    lock = env.lock(path)
    for _ in range(2):  # being refused must not give the first one's lock away
        with pytest.raises(DirectoryLockedError) as caught:
            env.lock(path)
        assert caught.value.directory == root
    lock.release()
    lock.release()
    again = env.lock(path)
    with pytest.raises(DirectoryLockedError):
        env.lock(path)
    again.release()


def test_a_file_is_replaced_atomically_and_leaves_no_temporary(env: Env, root: str) -> None:
    path = os.path.join(root, "checkpoint")
    for data in (b"one", b"", b"three"):
        write_file_atomically(env, path, data)
        assert env.read_file(path) == data
    assert env.listdir(root) == ["checkpoint"]


def test_a_file_is_not_replaced_if_there_is_no_room_for_its_name() -> None:
    env = MemoryEnv(seed=1)
    env.mkdir("/d")
    full = env.fail_on(lambda operation, path: operation == "rename", errno.ENOSPC)
    with pytest.raises(NoRoomError):
        write_file_atomically(env, "/d/a", b"new")
    assert env.listdir("/d") == []
    full.remove()
    write_file_atomically(env, "/d/a", b"new")
    assert env.listdir("/d") == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("failing", ["pwrite", "rename"])
def test_a_full_disk_that_deletes_nothing_either_is_full_and_has_not_failed(
    failing: str, code: int
) -> None:
    """ZFS over its quota, btrfs without metadata space."""
    env = MemoryEnv(seed=1)
    env.mkdir("/d")
    full = env.fail_on(lambda operation, path: operation in (failing, "unlink"), code)
    with pytest.raises(NoRoomError):
        write_file_atomically(env, "/d/a", b"a longer one")
    assert not env.exists("/d/a")
    full.remove()
    write_file_atomically(env, "/d/a", b"new")
    assert env.listdir("/d") == ["a"]
    assert env.read_file("/d/a") == b"new"


def test_a_deletion_that_fails_otherwise_is_no_lack_of_room() -> None:
    env = MemoryEnv(seed=1)
    env.mkdir("/d")
    env.fail_on(lambda operation, path: operation == "pwrite", errno.ENOSPC)
    env.fail_on(lambda operation, path: operation == "unlink", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write_file_atomically(env, "/d/a", b"new")


@pytest.mark.parametrize(
    ("write", "left"), [(write_file_atomically, "/d/a.tmp"), (write_file, "/d/a")]
)
def test_a_file_that_another_user_has_left_is_replaced(
    write: Callable[[Env, str, bytes], None], left: str
) -> None:
    env = MemoryEnv(seed=1)
    env.mkdir("/d")
    env.open(left, create=True).close()
    env.fail_on(
        lambda operation, path: operation == "open" and path == left and env.exists(path),
        errno.EACCES,
    )
    write(env, "/d/a", b"new")
    assert env.listdir("/d") == ["a"]


def test_a_folder_without_its_parent_is_not_made_if_that_is_wanted(env: Env, root: str) -> None:
    parent = os.path.join(root, "a")
    path = os.path.join(parent, "b")
    with pytest.raises(FileNotFoundError):
        env.mkdir(path, parents=False)
    assert not env.is_dir(parent)
    env.mkdir(parent)
    env.mkdir(path, parents=False)
    env.mkdir(path, parents=False)
    assert env.is_dir(path)


def test_making_folders_durably_makes_all_of_them(env: Env, root: str) -> None:
    path = os.path.join(root, "a", "b", "c")
    mkdir_durably(env, path)
    mkdir_durably(env, path)
    assert env.is_dir(path)


# --- the real one alone -------------------------------------------------------------------------


def test_a_folder_that_another_process_makes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def second(path: str) -> None:
        mkdir(path)
        mkdir(path)

    monkeypatch.setattr(os, "mkdir", second)
    RealEnv().mkdir(str(tmp_path / "a"), parents=False)
    assert (tmp_path / "a").is_dir()


def test_short_reads_and_writes_of_the_system_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a")
    file = RealEnv().open(path, create=True)
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:3], at))
    file.pwrite(b"0123456789", 5)
    assert file.pread(100, 5) == b"0123456789"
    assert file.pread(7, 5) == b"0123456"
    buffer = bytearray(10)
    assert file.pread_into(buffer, 5) == 10
    assert buffer == b"0123456789"
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: min(2, 2 * (at == 0)))
    with pytest.raises(OSError, match="no progress"):
        file.pwrite(b"0123456789", 0)
    file.close()


def test_a_forgotten_file_gives_its_descriptor_back_without_a_warning(tmp_path: Path) -> None:
    file = RealEnv().open(str(tmp_path / "a"), create=True)
    fd = file.fileno()
    assert fd >= 0
    os.fstat(fd)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del file
        gc.collect()
    with raises_errno(errno.EBADF):
        os.fstat(fd)


def test_a_lock_names_its_owner_to_another_process_and_falls_with_it(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / ".lock")
    program = (
        "import sys; from storage.env import RealEnv; from storage.errors import *\n"
        "try:\n    lock = RealEnv().lock(sys.argv[1]); print('locked')\n"
        "except DirectoryLockedError as error: print(error)"
    )

    def other_process() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, path],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.strip()

    assert other_process() == "locked"
    lock = RealEnv().lock(path)
    assert f"in use by another broker (process {os.getpid()}). Stop it" in other_process()
    with pytest.raises(DirectoryLockedError):
        RealEnv().lock(path)
    assert "in use" in other_process()
    lock.release()
    assert other_process() == "locked"


def test_a_lock_is_seen_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    lock = RealEnv().lock(str(tmp_path / "real" / ".lock"))
    with pytest.raises(DirectoryLockedError):
        RealEnv().lock(str(tmp_path / "link" / ".lock"))
    lock.release()


def test_a_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    env = RealEnv()
    monkeypatch.setattr(RealFile, "sync", lambda self: done.append(f"sync {Path(self.path).name}"))
    monkeypatch.setattr(
        RealEnv,
        "rename",
        lambda self, src, dst: done.append(f"rename {Path(src).name} {Path(dst).name}"),
    )
    monkeypatch.setattr(RealEnv, "sync_dir", lambda self, path: done.append("sync_dir"))
    write_file_atomically(env, str(tmp_path / "a"), b"x")
    assert done == ["sync a.tmp", "rename a.tmp a", "sync_dir"]


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    pipe, device = str(tmp_path / "pipe"), str(tmp_path / "device")
    os.mkfifo(pipe)
    os.symlink("/dev/zero", device)
    env = RealEnv()
    for path in (pipe, device, str(tmp_path)):
        with raises_errno(errno.EISDIR) as caught:
            env.open(path)
        assert is_folder_error(caught.value)
        with raises_errno(errno.EISDIR):
            env.read_file(path)
    for path in (pipe, device):
        with raises_errno(errno.EISDIR):
            env.open(path, write=True, create=True, truncate=True)


def test_a_file_that_is_too_large_for_memory_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, READ_BYTES_MAX + 1)
    with pytest.raises(OSError, match="Larger than") as caught:
        RealEnv().read_file(str(path))
    assert is_folder_error(caught.value)  # the fault of this file, not of the disk


@pytest.mark.parametrize(
    ("limit", "lowest", "for_new_log", "is_spare"),
    [
        (20_000, 18_999, False, True),
        (20_000, 19_000, False, False),
        (20_000, 19_000, True, True),
        (20_000, 19_500, True, False),
        (1024, 921, False, True),
        (1024, 922, False, False),
    ],
)
def test_a_reserve_of_descriptors_is_not_to_spare(
    monkeypatch: pytest.MonkeyPatch, limit: int, lowest: int, for_new_log: bool, is_spare: bool
) -> None:
    monkeypatch.setattr(os, "open", lambda *_: lowest)
    monkeypatch.setattr(os, "close", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert RealEnv().has_spare_descriptors(for_new_log=for_new_log) is is_spare


@pytest.mark.parametrize(("lowest", "is_spare"), [(9_999, True), (10_000, False)])
def test_small_segments_leave_half_of_the_descriptors_to_others(
    monkeypatch: pytest.MonkeyPatch, lowest: int, is_spare: bool
) -> None:
    monkeypatch.setattr(os, "open", lambda *_: lowest)
    monkeypatch.setattr(os, "close", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20_000, 20_000))
    assert RealEnv().has_spare_descriptors(for_small_segment=True) is is_spare


def test_without_any_descriptor_none_is_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuse)
    assert not RealEnv().has_spare_descriptors()
