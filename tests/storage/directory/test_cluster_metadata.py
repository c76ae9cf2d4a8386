"""The broker's durable state: what is saved is found again, or nothing is started."""

import errno
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from storage.directory import cluster_metadata
from storage.directory.cluster_metadata import (
    ENTRIES_AT_ONCE,
    FILE_NAME,
    HASH_KEY_BYTES,
    MAGIC,
    VERSION,
    ClusterMetadata,
    MetadataEncoder,
    MetadataStore,
    TopicEntry,
    decode_metadata,
    new_metadata,
)
from storage.directory.security_entries import AclEntry, ScramEntry
from storage.env import RealEnv
from storage.errors import (
    CorruptCheckpointError,
    InconsistentDirectoryError,
    LogDirectoryError,
    NewerFormatError,
    NoRoomError,
)
from storage.format import sealed_json
from tests.support.storage.logs import NOW_MS
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

DIRECTORIES = ("/a", "/b", "/c")
TOPIC_ID = bytes(range(16))
OTHER_ID = bytes(range(1, 17))

SAMPLE = ClusterMetadata(
    cluster_id="MkU3OEVBNTcwNTJENDM2Qg",
    node_id=1,
    hash_key=bytes(range(100, 116)),
    epoch=7,
    topics={
        "orders": TopicEntry(
            TOPIC_ID,
            {0: "dir-a", 1: "dir-b"},
            {"cleanup.policy": "compact", "retention.ms": "-1"},
            "client",
            1_700_000_000_123,
        ),
        "empty": TopicEntry(OTHER_ID, {}),
    },
    deleted_topic_ids={bytes(15) + b"\x01": ("dir-a", "dir-c")},
    broker_dynamic={"log.cleaner.threads": "2"},
    next_producer_id=3000,
    last_wall_ms=1_700_000_000_456,
    scram_users={"anna": {"SCRAM-SHA-256": ScramEntry(b"salt", b"stored", b"server", 4096)}},
    acls=(AclEntry(2, 4, "orders-", "User:anna", "*", 3, 3),),
    client_quotas={(("user", None), ("client-id", "app")): {"producer_byte_rate": 1024.0}},
)


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv(seed=5)
    for directory in DIRECTORIES:
        env.mkdir(directory)
    env.settle()
    return env


def store_of(env: MemoryEnv) -> MetadataStore:
    return MetadataStore(env, DIRECTORIES)


def spoil(env: MemoryEnv, directory: str) -> None:
    env.open(f"{directory}/{FILE_NAME}", write=True).pwrite(b"\0\0\0\0", 50)


def write_copy(env: MemoryEnv, directory: str, data: bytes) -> None:
    env.open(f"{directory}/{FILE_NAME}", create=True, truncate=True).pwrite(data, 0)


def test_a_state_reads_as_it_was_written() -> None:
    assert decode_metadata(MetadataEncoder().encode(SAMPLE)) == SAMPLE
    bare = ClusterMetadata("c", 0, bytes(HASH_KEY_BYTES))
    assert decode_metadata(MetadataEncoder().encode(bare)) == bare


def test_a_topic_is_encoded_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The encoder of JSON holds the loop: a save of 10,000 topics must not encode them all."""
    topics = {f"t{number}": TopicEntry(bytes(16), {0: "a"}) for number in range(10)}
    metadata, encoder = replace(SAMPLE, topics=topics), MetadataEncoder()
    encoder.encode(metadata)
    encoded: list[str] = []
    encode_topic = cluster_metadata._encode_topic

    def note(name: str, entry: TopicEntry) -> bytes:
        encoded.append(name)
        return encode_topic(name, entry)

    monkeypatch.setattr(cluster_metadata, "_encode_topic", note)
    changed = metadata.with_topic("t3", replace(topics["t3"], dynamic={"retention.ms": "1"}))
    changed = changed.without_topics(["t5"]).with_topic("new", topics["t5"])
    assert decode_metadata(encoder.encode(changed)) == changed
    assert encoded == ["t3", "new"]


def test_users_acls_and_quotas_are_encoded_a_few_at_a_time_and_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any producer that asks for an id may cause a save: it must not encode 20,000 ACLs."""
    sizes: list[int] = []
    to_json = sealed_json.to_json

    def note(payload: Mapping[str, object] | Sequence[object]) -> bytes:
        encoded = to_json(payload)
        sizes.append(len(encoded))
        return encoded

    monkeypatch.setattr(sealed_json, "to_json", note)
    acl, quota = SAMPLE.acls[0], {"producer_byte_rate": 1024.0}
    metadata = replace(
        SAMPLE,
        acls=tuple(replace(acl, resource_name=f"t{number}") for number in range(5000)),
        scram_users={f"u{number}": SAMPLE.scram_users["anna"] for number in range(5000)},
        client_quotas={(("user", f"u{number}"),): quota for number in range(5000)},
    )
    encoder = MetadataEncoder()
    assert decode_metadata(encoder.encode(metadata)) == metadata
    assert max(sizes) <= 150 * ENTRIES_AT_ONCE
    sizes.clear()
    _, later = metadata.take_producer_ids(7, 0)
    assert decode_metadata(encoder.encode(later)) == later
    assert sum(sizes) < 1000
    changed = replace(later, acls=metadata.acls[1:])
    assert decode_metadata(encoder.encode(changed)) == changed


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"topics": []},
        {"topics": {"t": {"topic_id": "short"}}},
        {"topics": {"t": None}},
        {"hash_key": "00"},
        {"hash_key": "zz" * 16},
        {"deleted_topic_ids": {"!": []}},
        {"epoch": "x"},
        {"scram_users": {"anna": {"SCRAM-SHA-256": {}}}},
        {"acls": [[1, 2, 3]]},
        {"client_quotas": [{"entity": [["user"]], "values": {}}]},
    ],
)
def test_a_payload_that_is_no_state_is_refused(payload: dict[str, object]) -> None:
    whole = sealed_json.unseal(MAGIC, VERSION, MetadataEncoder().encode(SAMPLE), "")
    data = sealed_json.seal(MAGIC, VERSION, {**whole, **payload} if payload else {})
    with pytest.raises(CorruptCheckpointError):
        decode_metadata(data, "p")


def test_a_file_without_users_acls_and_quotas_has_none() -> None:
    whole = sealed_json.unseal(MAGIC, VERSION, MetadataEncoder().encode(SAMPLE), "")
    for key in ("scram_users", "acls", "client_quotas"):
        del whole[key]
    metadata = decode_metadata(sealed_json.seal(MAGIC, VERSION, whole))
    assert (metadata.scram_users, metadata.acls, metadata.client_quotas) == ({}, (), {})


def test_a_save_is_found_again_with_the_next_epoch_in_every_directory(env: MemoryEnv) -> None:
    saved = store_of(env).save(SAMPLE)
    assert saved == replace(SAMPLE, epoch=SAMPLE.epoch + 1)
    assert store_of(env.crash()).load() == saved
    for directory in DIRECTORIES:
        store = MetadataStore(env.crash(), [directory])
        assert store.load() == saved
        assert store.stale == ()


def test_no_copy_anywhere_is_a_new_broker(env: MemoryEnv) -> None:
    assert store_of(env).load() is None
    first, second = (new_metadata(env, "cluster", 1) for _ in range(2))
    assert len(first.hash_key) == HASH_KEY_BYTES
    assert first.hash_key != second.hash_key
    assert (first.topics, first.epoch, first.last_wall_ms) == ({}, 0, env.wall_ms())


def test_the_copy_with_the_highest_epoch_wins_and_the_next_save_repairs_the_others(
    env: MemoryEnv,
) -> None:
    old = store_of(env).save(SAMPLE)
    newest = MetadataStore(env, ["/b"]).save(replace(old, next_producer_id=9))
    store = store_of(env)
    assert store.load() == newest
    assert store.stale == ("/a", "/c")
    store.save(newest)
    assert len(store.stale) == 0
    assert {env.read_file(f"{directory}/{FILE_NAME}") for directory in DIRECTORIES} == {
        MetadataEncoder().encode(replace(newest, epoch=newest.epoch + 1))
    }


@pytest.mark.parametrize("spoiled", [("/a",), ("/a", "/c"), ("/b", "/c")])
def test_a_corrupt_copy_loses_to_a_valid_one_and_is_repaired_by_the_next_save(
    env: MemoryEnv, spoiled: tuple[str, ...]
) -> None:
    saved = store_of(env).save(SAMPLE)
    for directory in spoiled:
        spoil(env, directory)
    store = store_of(env)
    assert store.load() == saved
    assert tuple(store.corrupt) == store.stale == spoiled
    store.save(saved)
    again = store_of(env)
    assert again.load() is not None
    assert (again.corrupt, again.stale) == ({}, ())


@pytest.mark.parametrize("missing", [(), ("/a",), ("/b", "/c")])
def test_corrupt_copies_without_a_valid_one_are_never_an_empty_start(
    env: MemoryEnv, missing: tuple[str, ...]
) -> None:
    store_of(env).save(SAMPLE)
    for directory in DIRECTORIES:
        spoil(env, directory)
        if directory in missing:
            env.unlink(f"{directory}/{FILE_NAME}")
    with pytest.raises(CorruptCheckpointError) as caught:
        store_of(env).load()
    first = next(directory for directory in DIRECTORIES if directory not in missing)
    assert caught.value.path == f"{first}/{FILE_NAME}"


def test_a_newer_version_in_any_directory_is_refused_and_left_alone(env: MemoryEnv) -> None:
    store_of(env).save(SAMPLE)
    newer = sealed_json.seal(MAGIC, VERSION + 1, {"something": "else"})
    write_copy(env, "/b", newer)
    with pytest.raises(NewerFormatError) as caught:
        store_of(env).load()
    assert caught.value.path == f"/b/{FILE_NAME}"
    assert env.read_file(f"/b/{FILE_NAME}") == newer


def test_an_empty_start_needs_every_configured_directory(env: MemoryEnv) -> None:
    with pytest.raises(LogDirectoryError) as caught:
        MetadataStore(env, ["/a"]).load(unopened=["/gone"])
    assert caught.value.directory == "/gone"
    fault = env.fail_on(lambda op, path: op == "read_file" and path.startswith("/c"), errno.EIO)
    write_copy(env, "/c", MetadataEncoder().encode(SAMPLE))
    with pytest.raises(LogDirectoryError) as caught:
        store_of(env).load()
    assert caught.value.directory == "/c"
    fault.remove()
    saved = store_of(env).save(SAMPLE)
    assert MetadataStore(env, ["/a"]).load(unopened=["/gone"]) == saved


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES])
def test_a_copy_whose_disk_does_not_answer_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = MetadataStore(RealEnv(), [str(tmp_path)])
    store.save(SAMPLE)
    status_of = os.stat

    def stat(path: str, **options: bool) -> os.stat_result:
        if str(path).endswith(FILE_NAME):
            raise OSError(number, os.strerror(number), path)
        return status_of(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with pytest.raises(LogDirectoryError, match=os.strerror(number)):
            store.load()
    assert store.load() == replace(SAMPLE, epoch=SAMPLE.epoch + 1)


def test_a_copy_that_is_a_broken_link_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "not-mounted" / FILE_NAME)
    with pytest.raises(LogDirectoryError, match="No such file"):
        MetadataStore(RealEnv(), [str(tmp_path)]).load()


@pytest.mark.parametrize(
    ("change", "name"), [({"cluster_id": "other"}, "cluster"), ({"node_id": 2}, "node")]
)
def test_copies_of_different_owners_are_refused(
    env: MemoryEnv, change: dict[str, object], name: str
) -> None:
    store_of(env).save(SAMPLE)
    write_copy(env, "/c", MetadataEncoder().encode(replace(SAMPLE, **change)))  # type: ignore[arg-type]
    with pytest.raises(InconsistentDirectoryError, match=name) as caught:
        store_of(env).load()
    assert caught.value.directory == "/c"


def test_equal_epochs_that_differ_are_decided_by_time(env: MemoryEnv) -> None:
    later = replace(SAMPLE, last_wall_ms=SAMPLE.last_wall_ms + 1, next_producer_id=1)
    for order in (("/a", "/b"), ("/b", "/a")):
        write_copy(env, order[0], MetadataEncoder().encode(SAMPLE))
        write_copy(env, order[1], MetadataEncoder().encode(later))
        assert store_of(env).load() == later


@pytest.mark.parametrize("operation", ["open", "pwrite", "sync", "rename", "sync_dir"])
def test_a_directory_that_cannot_be_written_is_dropped_and_reported(
    env: MemoryEnv, operation: str
) -> None:
    reports: list[tuple[str, str]] = []
    store = MetadataStore(env, DIRECTORIES, lambda where, why: reports.append((where, why)))
    env.fail_on(lambda op, path: op == operation and path.startswith("/b"), errno.EIO)
    saved = store.save(SAMPLE)
    assert store.directories == ("/a", "/c")
    ((directory, reason),) = reports
    assert directory == "/b"
    assert "Input/output error" in reason
    assert store.failed == {"/b": reason}
    operations = env.operations
    assert store.save(saved).epoch == saved.epoch + 1
    assert env.operations == operations + 2 * 5
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("open", errno.EDQUOT),
        ("pwrite", errno.EDQUOT),
        ("open", errno.EMFILE),
        ("open_folder", errno.EMFILE),
    ],
)
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_a_directory_without_room_refuses_a_save_for_all_and_stays(
    env: MemoryEnv, operation: str, error: int, directory: str
) -> None:
    store = store_of(env)
    saved = store.save(SAMPLE)
    full = env.fail_on(lambda op, path: op == operation and path.startswith(directory), error)
    with pytest.raises(NoRoomError):
        store.save(replace(saved, next_producer_id=7_000))
    full.remove()
    assert store.directories == DIRECTORIES
    assert store_of(env).load() == saved
    assert not [name for item in DIRECTORIES for name in env.listdir(item) if name.endswith(".tmp")]
    assert store.save(saved).epoch == saved.epoch + 1


def test_a_start_saves_where_there_is_room_and_keeps_the_other_directories(env: MemoryEnv) -> None:
    store = store_of(env)
    saved = store.save(SAMPLE)
    full = env.fail_on(lambda op, path: op == "pwrite" and path.startswith("/b"), errno.ENOSPC)
    newer = store.save(replace(saved, next_producer_id=7_000), with_all=False)
    assert (store.directories, store.stale, store.failed) == (DIRECTORIES, ("/b",), {})
    again = store_of(env)
    assert (again.load(), again.stale) == (newer, ("/b",))
    everywhere = env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
    with pytest.raises(NoRoomError):
        store.save(newer, with_all=False)
    everywhere.remove()
    full.remove()
    store.save(newer)
    assert store.stale == ()


@pytest.mark.parametrize("full", [("/a",), ("/b", "/c"), tuple(DIRECTORIES)])
def test_a_directory_without_room_for_the_name_keeps_its_copy_and_stays(
    env: MemoryEnv, full: tuple[str, ...]
) -> None:
    store = store_of(env)
    saved = store.save(SAMPLE)
    newer = replace(saved, next_producer_id=7_000)
    fault = env.fail_on(lambda op, path: op == "rename" and path.startswith(full), errno.ENOSPC)
    if len(full) < len(DIRECTORIES):
        newer = store.save(newer)
        assert store.stale == full
    else:
        with pytest.raises(NoRoomError):
            store.save(newer)
        newer = saved
    assert (store.directories, store.failed) == (DIRECTORIES, {})
    assert store_of(env).load() == newer
    assert not [name for item in DIRECTORIES for name in env.listdir(item) if name.endswith(".tmp")]
    fault.remove()
    store.save(newer)
    assert store.stale == ()


@pytest.mark.parametrize("failing", ["pwrite", "rename"])
def test_a_full_directory_stays_even_if_a_deletion_finds_no_room(
    env: MemoryEnv, failing: str
) -> None:
    store = store_of(env)
    saved = store.save(SAMPLE)
    full = env.fail_on(lambda op, _: op in (failing, "unlink"), errno.EDQUOT)
    with pytest.raises(NoRoomError):
        store.save(replace(saved, next_producer_id=7_000))
    assert (store.directories, store.failed) == (DIRECTORIES, {})
    full.remove()
    assert store_of(env).load() == saved
    newer = store.save(replace(saved, next_producer_id=8_000))
    assert store_of(env).load() == newer
    assert not [name for item in DIRECTORIES for name in env.listdir(item) if name.endswith(".tmp")]


def test_a_directory_that_fails_after_it_had_no_room_for_the_name_goes_offline(
    env: MemoryEnv,
) -> None:
    store = store_of(env)
    saved = store.save(SAMPLE)
    env.fail_on(lambda op, path: op == "rename" and path.startswith("/b"), errno.ENOSPC)
    env.fail_on(lambda op, path: op == "unlink" and path.startswith("/b"), errno.EIO)
    newer = store.save(replace(saved, next_producer_id=7_000))
    assert (store.failed.keys(), store.stale) == ({"/b"}, ())
    assert MetadataStore(env, ["/a", "/c"]).load() == newer


def test_a_save_that_has_begun_to_rename_needs_no_further_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lack of descriptors would take a directory offline."""
    directories = [str(tmp_path / name) for name in "ab"]
    for directory in directories:
        os.mkdir(directory)
    store = MetadataStore(RealEnv(), directories)
    saved = store.save(SAMPLE)
    rename = RealEnv.rename

    def rename_without_descriptors(env: RealEnv, source: str, target: str) -> None:
        rename(env, source, target)
        monkeypatch.setattr(os, "open", refuse)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(RealEnv, "rename", rename_without_descriptors)
        patched.setattr(os, "open", os.open)  # restored with the context
        assert store.save(saved).epoch == saved.epoch + 1
    assert list(store.directories) == directories


def test_a_save_that_no_directory_took_is_an_error(env: MemoryEnv) -> None:
    store = store_of(env)
    env.fail_on(lambda op, path: op == "sync", errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        store.save(SAMPLE)
    assert caught.value.directory == "/a"
    assert store.directories == ()
    with pytest.raises(LogDirectoryError):
        store.save(SAMPLE)


@pytest.mark.parametrize("operation", ["pwrite", "rename"])
def test_a_save_is_an_error_if_only_directories_with_an_old_copy_are_left(
    env: MemoryEnv, operation: str
) -> None:
    store = MetadataStore(env, ["/a", "/b"])
    saved = store.save(SAMPLE)
    env.fail_on(lambda op, path: op == operation and path.startswith("/b"), errno.EIO)
    for _ in range(2):  # with "/b", and when only the one that hangs is left
        with pytest.raises(LogDirectoryError) as caught:
            store.save(replace(saved, next_producer_id=7_000), without=["/a"])
        assert caught.value.directory == "/b"
    assert store.directories == ("/a",)


def test_a_directory_that_went_offline_is_left_out(env: MemoryEnv) -> None:
    store = store_of(env)
    store.drop("/a", "it failed")
    store.drop("/a", "it failed")
    store.save(SAMPLE)
    assert not env.exists(f"/a/{FILE_NAME}")
    assert env.exists(f"/c/{FILE_NAME}")


def test_a_crash_at_any_step_of_a_save_gives_the_old_state_or_the_new() -> None:
    seen = set()
    for seed in range(60):
        for crash_at in range(1, 17):
            env = MemoryEnv(seed * 100 + crash_at)
            for directory in DIRECTORIES:
                env.mkdir(directory)
            env.settle()
            old = store_of(env).save(SAMPLE)
            env.settle()
            env.operations, env.crash_at = 0, crash_at
            changed = old.with_topic("new", TopicEntry(OTHER_ID, {0: "dir-a"}))
            saved = None
            try:
                saved = store_of(env).save(changed)
            except SimulatedCrash:
                assert crash_at <= 15, env
            metadata = store_of(env.crash()).load()
            assert metadata is not None
            assert metadata in (old, replace(changed, epoch=old.epoch + 1)), env
            assert saved is None or metadata == saved, env
            seen.add(metadata.epoch)
    assert len(seen) == 2


def test_topics_are_added_and_their_ids_kept_until_all_directories_confirm() -> None:
    state = SAMPLE.without_topics(["orders"])
    assert set(state.topics) == {"empty"}
    assert state.deleted_topic_ids[TOPIC_ID] == ("dir-a", "dir-b")
    assert "orders" in SAMPLE.topics  # values are never changed in place
    state = state.confirm_deleted(TOPIC_ID, "dir-b").confirm_deleted(TOPIC_ID, "dir-b")
    assert state.deleted_topic_ids[TOPIC_ID] == ("dir-a",)
    state = state.confirm_deleted(TOPIC_ID, "dir-a").confirm_deleted(TOPIC_ID, "dir-a")
    assert TOPIC_ID not in state.deleted_topic_ids
    again = state.with_topic("orders", TopicEntry(OTHER_ID, {0: "dir-c"}))
    assert again.topics["orders"].topic_id == OTHER_ID
    with pytest.raises(KeyError):
        again.without_topics(["absent"])


def test_a_topic_without_folders_needs_no_confirmation() -> None:
    assert OTHER_ID not in SAMPLE.without_topics(["empty"]).deleted_topic_ids


def test_producer_ids_begin_where_kafka_does_not_come() -> None:
    """A folder that both have written must not know two producers by one id."""
    env = MemoryEnv(seed=1)
    first, _ = new_metadata(env, "cluster", 1).take_producer_ids(1000, 0)
    assert first >= 1 << 40


def test_producer_ids_are_given_once() -> None:
    taken: list[int] = []
    state = SAMPLE
    for now_ms in (0, NOW_MS, NOW_MS, NOW_MS + 1000, 0):  # the clock may be set back
        first, state = state.take_producer_ids(1000, now_ms)
        assert not taken or first > taken[-1]
        taken += range(first, state.next_producer_id)
    assert len(taken) == 5000


def test_producer_ids_are_given_once_even_if_the_metadata_was_lost() -> None:
    """Of two blocks that are taken one second apart, and know nothing of each other."""
    env = MemoryEnv(seed=1)
    first, _ = new_metadata(env, "cluster", 1).take_producer_ids(100_000, NOW_MS)
    second, _ = new_metadata(env, "cluster", 1).take_producer_ids(100_000, NOW_MS + 1000)
    assert first + 100_000 <= second < 1 << 53


def test_ids_and_keys_of_the_wrong_length_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        TopicEntry(b"short", {})
    with pytest.raises(AssertionError):
        ClusterMetadata("c", 1, b"short")


def test_random_states_come_back_whole() -> None:
    for seed in range(50):
        rng = random.Random(seed)

        def text(rng: random.Random = rng) -> str:
            return "".join(
                rng.choice('ab"\\\n\u00e9\U0001f600 .-') for _ in range(rng.randrange(9))
            )

        state = ClusterMetadata(
            text(),
            rng.randrange(1 << 31),
            rng.randbytes(16),
            rng.randrange(1 << 62),
            {
                text() + str(index): TopicEntry(
                    rng.randbytes(16),
                    {rng.randrange(1 << 31): text() for _ in range(rng.randrange(5))},
                    {text(): text() for _ in range(rng.randrange(5))},
                    text(),
                    rng.randrange(1 << 50),
                )
                for index in range(rng.randrange(6))
            },
            {rng.randbytes(16): (text(),) for _ in range(rng.randrange(4))},
            {text(): text()},
            rng.randrange(1 << 62),
            rng.randrange(1 << 50),
        )
        assert decode_metadata(MetadataEncoder().encode(state)) == state, f"seed {seed}"
