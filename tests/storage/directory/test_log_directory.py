"""Opening data directories: whose they are, whether they were left in order."""

import base64
import errno
import json
from pathlib import Path

import pytest

from storage.directory.log_directory import OpenedDirectories, agree, open_directories, random_id
from storage.env import RealEnv
from storage.errors import (
    DirectoryLockedError,
    InconsistentDirectoryError,
    LogDirectoryError,
    LostIdentityError,
    NewerFormatError,
)
from storage.format.checkpoints import MetaProperties, decode_meta_properties
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

KAFKA = (
    "#\n#Fri Nov 21 03:54:00 UTC 2025\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\n"
    "directory.id=hxqjZsnAT9qS9yE0DqmN0g\nnode.id=4\nversion=1\n"
)


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=11)


def write(env: MemoryEnv, path: str, data: str) -> None:
    env.mkdir(path.rsplit("/", 1)[0])
    file = env.open(path, create=True, truncate=True)
    file.pwrite(data.encode(), 0)


def properties(env: MemoryEnv, directory: str) -> MetaProperties:
    return decode_meta_properties(env.read_file(f"{directory}/meta.properties"))


def after_power_loss(env: MemoryEnv, opened: OpenedDirectories) -> MemoryEnv:
    opened.release()
    return env.crash()


def test_new_directories_get_one_cluster_and_ids_of_their_own(env: MemoryEnv) -> None:
    opened = open_directories(env, ["/x/a", "/x/b"])
    first, second = (properties(env, directory.path) for directory in opened.directories)
    assert first.cluster_id == second.cluster_id == opened.cluster_id
    assert (first.node_id, first.version) == (opened.node_id, 1) == (1, 1)
    assert first.directory_id != second.directory_id
    assert [directory.directory_id for directory in opened.directories] == [
        first.directory_id,
        second.directory_id,
    ]
    assert len(opened.cluster_id) == 22
    assert not any(directory.was_clean for directory in opened.directories)
    assert opened.online == opened.directories
    again = open_directories(after_power_loss(env, opened), ["/x/b", "/x/a"])
    assert again.cluster_id == opened.cluster_id
    assert [directory.directory_id for directory in again.directories] == [
        second.directory_id,
        first.directory_id,
    ]


def test_ids_are_version_4_uuids_that_never_begin_with_a_dash(env: MemoryEnv) -> None:
    ids = [random_id(env) for _ in range(2000)]
    assert len(set(ids)) == 2000
    for text in ids:
        raw = base64.urlsafe_b64decode(text + "==")
        assert (len(text), len(raw)) == (22, 16)
        assert (raw[6] >> 4, raw[8] >> 6) == (4, 2)
        assert text[0] != "-"


def test_meta_properties_of_kafka_are_taken_over_byte_for_byte(env: MemoryEnv) -> None:
    write(env, "/a/meta.properties", KAFKA)
    opened = open_directories(env, ["/a"])
    assert (opened.cluster_id, opened.node_id) == ("MkU3OEVBNTcwNTJENDM2Qg", 4)
    assert opened.directories[0].directory_id == "hxqjZsnAT9qS9yE0DqmN0g"
    assert env.read_file("/a/meta.properties") == KAFKA.encode()


def test_an_old_meta_properties_is_completed_and_keeps_keys_that_are_not_ours(
    env: MemoryEnv,
) -> None:
    write(env, "/a/meta.properties", "broker.id=7\ncluster.id=old\nversion=0\nx.y=z\n")
    opened = open_directories(env, ["/a"])
    result = properties(env, "/a")
    assert (result.version, result.node_id, result.cluster_id) == (1, 7, "old")
    assert result.directory_id == opened.directories[0].directory_id
    assert result.others == {"x.y": "z"}


def test_a_directory_that_is_added_joins_the_cluster_of_the_others(env: MemoryEnv) -> None:
    write(env, "/a/meta.properties", KAFKA)
    opened = open_directories(env, ["/new", "/a"])
    assert properties(env, "/new").cluster_id == opened.cluster_id == "MkU3OEVBNTcwNTJENDM2Qg"
    assert properties(env, "/new").node_id == 4


def meta(cluster: str = "c", node: int = 1, directory: str = "d") -> str:
    return f"version=1\ncluster.id={cluster}\nnode.id={node}\ndirectory.id={directory}\n"


@pytest.mark.parametrize(
    ("other", "field", "value"),
    [
        (meta(cluster="c2", directory="d2"), "cluster.id", "c2"),
        (meta(node=2, directory="d2"), "node.id", "2"),
        (meta(), "directory.id", "d"),
    ],
)
def test_directories_that_disagree_are_refused_and_nothing_is_changed(
    env: MemoryEnv, other: str, field: str, value: str
) -> None:
    write(env, "/a/meta.properties", meta())
    write(env, "/b/meta.properties", other)
    write(env, "/a/.kafka_cleanshutdown", "")
    with pytest.raises(InconsistentDirectoryError) as caught:
        open_directories(env, ["/a", "/b", "/c"])
    assert (caught.value.directory, caught.value.field) == ("/b", field)
    assert caught.value.found == value
    assert env.exists("/a/.kafka_cleanshutdown")
    assert not env.exists("/c/meta.properties")
    open_directories(env, ["/a"])  # the locks were given back


def test_agreement_needs_no_property_at_all() -> None:
    none = MetaProperties(None, None, None)
    assert agree({"/a": none, "/b": none}) == (None, None)


def test_an_unreadable_meta_properties_is_no_new_directory(env: MemoryEnv) -> None:
    for text, error in (("version=9\n", NewerFormatError), ("no properties", LostIdentityError)):
        write(env, "/a/meta.properties", text)
        with pytest.raises(error) as caught:
            open_directories(env, ["/a"])
        assert getattr(caught.value, "path", None) == "/a/meta.properties"
        assert env.read_file("/a/meta.properties") == text.encode()


@pytest.mark.parametrize("marker", ["", '{"version":0,"brokerEpoch":12}', "not json"])
def test_the_marker_of_a_clean_stop_is_read_and_taken_away_durably(
    env: MemoryEnv, marker: str
) -> None:
    write(env, "/a/meta.properties", meta(directory="d1"))
    write(env, "/b/meta.properties", meta(directory="d2"))
    write(env, "/a/.kafka_cleanshutdown", marker)
    env.settle()
    opened = open_directories(env, ["/a", "/b"])
    assert [directory.was_clean for directory in opened.directories] == [True, False]
    again = open_directories(after_power_loss(env, opened), ["/a", "/b"])
    assert [directory.was_clean for directory in again.directories] == [False, False]


def test_a_marked_directory_opens_clean_once(env: MemoryEnv) -> None:
    opened = open_directories(env, ["/a"])
    opened.directories[0].mark_clean()
    assert json.loads(env.read_file("/a/.kafka_cleanshutdown")) == {"version": 0, "brokerEpoch": -1}
    after = after_power_loss(env, opened)
    assert open_directories(after, ["/a"]).directories[0].was_clean


def test_a_marker_that_may_come_back_is_found_out() -> None:
    """The removal is synced before anything is appended: else a crash could look like a stop."""
    came_back = {False: 0, True: 0}
    for mutated in came_back:
        for seed in range(40):
            env = MemoryEnv(seed)
            opened = open_directories(env, ["/a"])
            opened.directories[0].mark_clean()
            opened.release()
            env.ignore_sync((lambda op, path: op == "sync_dir") if mutated else None)
            opened = open_directories(env, ["/a"])
            came_back[mutated] += env.crash().exists("/a/.kafka_cleanshutdown")
    assert came_back[False] == 0
    assert came_back[True] > 0


def test_a_second_opening_is_refused_until_the_first_releases(env: MemoryEnv) -> None:
    opened = open_directories(env, ["/a"])
    with pytest.raises(DirectoryLockedError) as caught:
        open_directories(env, ["/b", "/a"])
    assert caught.value.directory == "/a"
    opened.release()
    open_directories(env, ["/b", "/a"])


def test_one_directory_named_twice_is_refused(env: MemoryEnv) -> None:
    with pytest.raises(DirectoryLockedError):
        open_directories(env, ["/a", "/x/../a/"])


@pytest.mark.parametrize("operation", ["mkdir", "lock", "read_file", "rename", "exists"])
def test_a_directory_that_fails_is_offline_and_the_others_go_on(
    env: MemoryEnv, operation: str
) -> None:
    write(env, "/bad/meta.properties" if operation == "read_file" else "/ok/x", meta())
    env.fail_on(lambda op, path: op == operation and path.startswith("/bad"), errno.EROFS)
    opened = open_directories(env, ["/bad", "/ok"])
    bad, good = opened.directories
    assert not bad.is_online
    assert "Read-only file system" in (bad.offline_reason or "")
    assert opened.online == (good,)
    assert good.fail("later") is True
    assert good.fail("again") is False
    assert good.offline_reason == "later"


def test_no_usable_directory_is_an_error_with_a_reason(env: MemoryEnv) -> None:
    env.fail_on(lambda op, path: op == "lock", errno.EACCES)
    with pytest.raises(LogDirectoryError, match="Permission denied") as caught:
        open_directories(env, ["/a", "/b"])
    assert caught.value.directory == "/a"


def test_a_crash_at_any_step_of_the_first_opening_leaves_what_can_be_opened() -> None:
    crashes = 0
    for seed in range(40):
        for crash_at in range(1, 40):
            env = MemoryEnv(seed)
            env.crash_at = crash_at
            try:
                open_directories(env, ["/x/a", "/x/b"])
                break
            except SimulatedCrash:
                crashes += 1
            opened = open_directories(env.crash(), ["/x/a", "/x/b"])
            assert len(opened.online) == 2, env
        else:
            pytest.fail("the opening never ended")
    assert crashes > 500


def test_directories_on_a_real_disk(tmp_path: Path) -> None:
    env = RealEnv()
    paths = [str(tmp_path / "deep" / "a"), f"{tmp_path}/b/"]
    opened = open_directories(env, paths)
    with pytest.raises(DirectoryLockedError):
        open_directories(env, paths)
    assert opened.directories[1].path == str(tmp_path / "b")
    opened.directories[0].mark_clean()
    opened.release()
    again = open_directories(env, paths)
    assert [directory.was_clean for directory in again.directories] == [True, False]
    assert again.cluster_id == opened.cluster_id
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [".lock", "meta.properties"]
    again.release()
