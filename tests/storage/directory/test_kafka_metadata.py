"""Kafka's metadata log: which settings of topics are believed, and when nothing is."""

import errno
import struct
from pathlib import Path

import pytest

from storage.directory.cluster_metadata import ClusterMetadata
from storage.directory.kafka_metadata import (
    ABORT_TRANSACTION,
    BEGIN_TRANSACTION,
    CONFIG_RECORD,
    END_TRANSACTION,
    FOLDER,
    TOPIC_RECORD,
    KafkaTopic,
    read_kafka_metadata,
    settings_to_take,
)
from storage.directory.kafka_records import MetadataLogError
from storage.directory.kafka_security import (
    ACL,
    QUOTA,
    REMOVE_ACL,
    REMOVE_USER,
    USER,
    SecurityImage,
)
from storage.directory.log_directory import LogDirectory
from storage.directory.security_entries import AclEntry, ScramEntry
from storage.env import RealEnv, write_file
from storage.errors import LogDirectoryError
from storage.format.batch import CONTROL, ControlType, build_batch, marker_record, walk_headers
from storage.format.checkpoints import decode_topic_id
from storage.manager.kafka_settings import read_image, take_kafka_settings
from storage.model import TopicPartition
from tests.support.storage.kafka_metadata_log import (
    ID,
    batches,
    config,
    frame,
    partition,
    removal,
    snapshot,
    text,
    topic,
    uvarint,
)
from tests.support.storage.log_managers import make_topic, opened
from tests.support.storage.logs import fill
from tests.support.storage.memory_env import MemoryEnv

GOLDEN = Path(__file__).parents[2] / "golden/kafka_metadata"
OTHER_ID = bytes(16)


def read_kafka_topics(env: MemoryEnv, directory: str) -> dict[str, KafkaTopic] | None:
    image = read_kafka_metadata(env, directory)
    return None if image is None else image.topics()


def write(env: MemoryEnv, name: str, data: bytes) -> None:
    env.mkdir(f"/disk1/{FOLDER}")
    file = env.open(f"/disk1/{FOLDER}/{name}", create=True, write=True, truncate=True)
    file.pwrite(data, 0)
    file.close()


def segment(base_offset: int) -> str:
    return f"{base_offset:020}.log"


def read(*values: bytes) -> dict[str, KafkaTopic] | None:
    env = MemoryEnv(seed=1)
    write(env, segment(0), batches(0, *values))
    return read_kafka_topics(env, "/disk1")


@pytest.mark.parametrize("with_snapshots", [True, False])
def test_what_kafka_wrote_is_read_as_kafka_meant_it(with_snapshots: bool) -> None:
    """Kafka 4.3.0: topics were made, one was removed and made again, settings were altered."""
    env = MemoryEnv(seed=1)
    for path in GOLDEN.iterdir():
        if with_snapshots or path.suffix == ".log":
            write(env, path.name, path.read_bytes())
    topics = read_kafka_topics(env, "/disk1")
    assert topics is not None
    configs = {
        name: kafka_topic.configs
        for name, kafka_topic in topics.items()
        if not name.startswith("__")
    }
    assert configs == {
        "customers": {"cleanup.policy": "compact", "delete.retention.ms": "60000"},
        "audit": {"cleanup.policy": "delete", "retention.ms": "-1"},
        "window": {"cleanup.policy": "compact,delete", "retention.ms": "86400000"},
        "plain": {},
        "gone": {},
    }
    assert topics["customers"].topic_id == decode_topic_id("jA2Kr-eCTnWft7wtk9gWYg")


def test_the_last_value_of_a_setting_counts_and_a_removed_one_is_gone() -> None:
    topics = read(
        topic("t"),
        config("t", "cleanup.policy", "delete"),
        config("t", "cleanup.policy", "compact"),
        config("t", "retention.ms", "5"),
        config("t", "retention.ms", None),
        config("1", "log.cleaner.threads", "2", kind=4),  # a broker's
        frame(3, b"\7" * 40),  # a partition
        frame(99, b"whatever", version=7),
    )
    assert topics == {"t": KafkaTopic(ID, {"cleanup.policy": "compact"})}


def test_settings_of_a_removed_topic_do_not_come_back_with_its_name() -> None:
    topics = read(
        topic("t"), config("t", "cleanup.policy", "compact"), removal(), topic("t", OTHER_ID)
    )
    assert topics == {"t": KafkaTopic(OTHER_ID, {})}


@pytest.mark.parametrize(
    ("end", "policy"), [(END_TRANSACTION, "compact"), (ABORT_TRANSACTION, None), (None, None)]
)
def test_only_a_finished_transaction_of_the_controller_counts(
    end: int | None, policy: str | None
) -> None:
    values = [topic("t"), frame(BEGIN_TRANSACTION, b"\0"), config("t", "cleanup.policy", "compact")]
    topics = read(*values, *([] if end is None else [frame(end)]))
    assert topics is not None
    assert topics["t"].configs.get("cleanup.policy") == policy


def test_the_newest_snapshot_is_read_and_then_the_log_behind_it() -> None:
    env = MemoryEnv(seed=1)
    control = build_batch([marker_record(ControlType.COMMIT, 0, 1)], attributes=CONTROL)
    write(env, f"{4:020}-{1:010}.checkpoint", snapshot(topic("old")))
    write(env, f"{9:020}-{2:010}.checkpoint",
          bytes(control) + snapshot(topic("t"), config("t", "retention.ms", "7")))  # fmt: skip
    write(env, segment(6), batches(6, *[config("t", "retention.ms", "1")] * 3))
    write(env, segment(9), batches(9, config("t", "segment.ms", "8")))
    write(env, f"{99:020}-{2:010}.checkpoint.part", b"junk")
    topics = read_kafka_topics(env, "/disk1")
    assert topics == {"t": KafkaTopic(ID, {"retention.ms": "7", "segment.ms": "8"})}


def test_a_snapshot_that_is_cut_between_two_batches_makes_nothing_believed() -> None:
    """What it lost may have been an entry that denies."""
    data = snapshot(*[topic(f"t{number}") for number in range(7)])
    for end in {0, *(position for position, _ in walk_headers(data))}:
        env = MemoryEnv(seed=1)
        write(env, f"{9:020}-{2:010}.checkpoint", data[:end])
        with pytest.raises(MetadataLogError, match="incomplete"):
            read_kafka_topics(env, "/disk1")


def test_a_torn_end_is_left_out_and_any_other_damage_or_gap_makes_nothing_believed() -> None:
    whole = batches(0, topic("t"), config("t", "retention.ms", "1"), config("t", "segment.ms", "2"))
    torn = whole + batches(3, config("t", "retention.ms", "3"))[:-4]
    env = MemoryEnv(seed=1)
    write(env, segment(0), torn)
    topics = read_kafka_topics(env, "/disk1")
    assert topics is not None
    assert topics["t"].configs == {"retention.ms": "1", "segment.ms": "2"}
    write(env, segment(4), batches(4, config("t", "retention.ms", "9")))
    with pytest.raises(MetadataLogError, match=r"00000000000000000000\.log"):
        read_kafka_topics(env, "/disk1")
    write(env, segment(0), whole)
    with pytest.raises(MetadataLogError, match="offset 3 is missing"):
        read_kafka_topics(env, "/disk1")


@pytest.mark.parametrize("at", [11, 16, -3])  # the length, the magic byte, the value
def test_a_damaged_batch_before_others_is_no_torn_end(at: int) -> None:
    """Otherwise a topic, an ACL or a user that was removed later would return."""
    whole = [batches(0, topic("t")), batches(1, topic("u", OTHER_ID)), batches(2, removal())]
    damaged = bytearray(whole[1])
    damaged[at] ^= 1
    env = MemoryEnv(seed=1)
    write(env, segment(0), whole[0] + damaged + whole[2])
    with pytest.raises(MetadataLogError, match=r"00000000000000000000\.log"):
        read_kafka_topics(env, "/disk1")


def test_records_of_another_version_or_cut_short_make_nothing_believed() -> None:
    for value, words in (
        (frame(TOPIC_RECORD, text("t") + ID, version=1), "has version 1"),
        (b"\2" + topic("t")[1:], "another version"),
        (frame(TOPIC_RECORD, text("t"))[:-1], "cut short"),
        (frame(CONFIG_RECORD, b"\2" + text(None)), "null"),
        (frame(CONFIG_RECORD, b"\2" + b"\xff" * 9), "too long"),
    ):
        with pytest.raises(MetadataLogError, match=words):
            read(value)


def test_a_directory_without_kafkas_metadata_has_none() -> None:
    assert read_kafka_topics(MemoryEnv(seed=1), "/disk1") is None


def test_only_settings_that_are_valid_here_are_taken() -> None:
    configs = {"cleanup.policy": "compact", "retention.ms": "never", "new.in.kafka.9": "1"}
    settings = settings_to_take(KafkaTopic(ID, configs))
    assert settings.settings == {"cleanup.policy": "compact"}
    assert [item.partition(":")[0] for item in settings.refused] == [
        "new.in.kafka.9",
        "retention.ms",
    ]


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_policy_that_deletes_is_taken_only_with_a_retention_of_its_own(policy: str) -> None:
    alone = settings_to_take(KafkaTopic(ID, {"cleanup.policy": policy, "segment.ms": "5"}))
    assert alone.settings == {"segment.ms": "5"}
    assert "retention.ms" in alone.refused[0]
    both = settings_to_take(KafkaTopic(ID, {"cleanup.policy": policy, "retention.ms": "-1"}))
    assert both.settings == {"cleanup.policy": policy, "retention.ms": "-1"}


def taken_over() -> tuple[MemoryEnv, bytes]:
    """A disk with a topic `orders` whose metadata of ours is lost, as if Kafka had made it."""
    env = MemoryEnv(seed=6)
    manager, _ = opened(env, "/disk1")
    for log in make_topic(manager, partitions=2):
        fill(log, 3)
    topic_id = manager.metadata.topics["orders"].topic_id
    manager.close()
    env.unlink("/disk1/varve.metadata")
    return env, topic_id


def test_partitions_of_a_topic_taken_over_that_have_no_folder_are_offline() -> None:
    """A group looks for its offsets in partition hash % number of partitions."""
    env, topic_id = taken_over()
    values = [topic("orders", topic_id), *(partition(index, topic_id) for index in (0, 1, 3))]
    write(env, segment(0), batches(0, *values))
    for _ in range(2):
        manager, _ = opened(env, "/disk1")
        assert sorted(manager.table.logs) == [TopicPartition("orders", index) for index in (0, 1)]
        assert {item.partition: why for item, why in manager.table.offline.items()} == {
            3: "its folder is missing in /disk1"
        }
        manager.close()


@pytest.mark.parametrize("newer", ["/disk1", "/disk2"])
def test_of_two_copies_of_the_metadata_each_names_partitions(newer: str) -> None:
    env, topic_id = taken_over()
    values = [topic("orders", topic_id), *(partition(index, topic_id) for index in range(2))]
    for directory in ("/disk1", "/disk2"):
        more = [partition(2, topic_id)] if directory == newer else []
        path = f"{directory}/{FOLDER}/{segment(0)}"
        env.mkdir(f"{directory}/{FOLDER}")
        write_file(env, path, batches(0, *values, *more))
    manager, _ = opened(env, "/disk1", "/disk2")
    assert [item.partition for item in manager.table.offline] == [2]
    manager.close()


def test_a_gap_in_the_numbers_of_folders_taken_over_is_offline() -> None:
    """Without Kafka's metadata; a number beyond all reason is no gap."""
    env, _ = taken_over()
    env.rename("/disk1/orders-1", "/disk1/orders-2")
    manager, _ = opened(env, "/disk1")
    assert [item.partition for item in manager.table.offline] == [1]
    manager.close()
    env.unlink("/disk1/varve.metadata")
    env.rename("/disk1/orders-2", "/disk1/orders-2000000000")
    manager, _ = opened(env, "/disk1")
    assert not manager.table.offline
    manager.close()


def test_folders_of_a_topic_that_kafka_deleted_are_renamed_as_kafka_does() -> None:
    """It was killed between the answer and the change of its folders."""
    env, topic_id = taken_over()
    values = (topic("orders", topic_id), topic("other", OTHER_ID), removal(topic_id))
    write(env, segment(0), batches(0, *values))
    manager, report = opened(env, "/disk1")
    assert not manager.metadata.topics
    strays = [name for name in env.listdir("/disk1") if name.endswith("-stray")]
    assert sorted(name.partition(".")[0] for name in strays) == ["orders-0", "orders-1"]
    assert [event for event, _ in report.settings] == ["stray folders renamed"]
    manager.close()


def test_a_topic_taken_over_has_the_settings_that_kafka_had_for_it() -> None:
    env, topic_id = taken_over()
    settings = [config("orders", "cleanup.policy", "compact"), config("orders", "segment.ms", "5")]
    write(env, segment(0), batches(0, topic("orders", topic_id), *settings))
    manager, report = opened(env, "/disk1")
    expected = {"cleanup.policy": "compact", "segment.ms": "5"}
    assert manager.metadata.topics["orders"].dynamic == expected
    assert report.settings == (
        ("topic settings taken from kafka", {"topics": 1, "names": ["orders"]}),
    )
    manager.close()
    # From now on they are ours: what Kafka's metadata says later changes nothing.
    write(env, segment(0), batches(0, topic("orders", topic_id)))
    manager, report = opened(env, "/disk1")
    assert (manager.metadata.topics["orders"].dynamic, report.settings) == (expected, ())
    manager.close()


def test_settings_of_another_topic_of_that_name_are_not_taken() -> None:
    env, _ = taken_over()
    write(
        env,
        segment(0),
        batches(0, topic("orders", b"\7" * 16), config("orders", "retention.ms", "1")),
    )
    manager, report = opened(env, "/disk1")
    assert (manager.metadata.topics["orders"].dynamic, report.settings) == ({}, ())
    manager.close()


def test_metadata_that_cannot_be_read_is_told_of_and_keeps_nobody_from_starting() -> None:
    env, _ = taken_over()
    write(env, segment(5), batches(5, topic("orders")))
    manager, report = opened(env, "/disk1")
    ((event, fields),) = report.settings
    assert (event, fields["directory"]) == ("kafka metadata not read", "/disk1")
    assert "offset 0 is missing" in str(fields["reason"])
    assert len(manager.table.logs) == 2
    manager.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_metadata_that_a_disk_does_not_give_refuses_the_start(number: int) -> None:
    env, topic_id = taken_over()
    records = batches(0, topic("orders", topic_id), config("orders", "retention.ms", "1"))
    write(env, segment(0), records)
    fault = env.fail_on(lambda _, path: "__cluster_metadata" in path, number)
    with pytest.raises(LogDirectoryError, match="Kafka's metadata in it cannot be read"):
        opened(env, "/disk1")
    fault.remove()
    manager, _ = opened(env, "/disk1")
    assert manager.metadata.topics["orders"].dynamic == {"retention.ms": "1"}
    manager.close()


# Users, access control lists and quotas --------------------------------------------------------

ACL_FRAME = frame(
    ACL, ID + b"\2" + text("orders") + b"\4" + text("User:ann") + text("10.0.0.1") + b"\3\3"
)
ACL_ENTRY = AclEntry(2, 4, "orders", "User:ann", "10.0.0.1", 3, 3)


def blob(data: bytes) -> bytes:
    return uvarint(len(data) + 1) + data


def user(name: str, mechanism: int = 1, salt: bytes = b"salt") -> bytes:
    keys = blob(salt) + blob(b"stored") + blob(b"server")
    return frame(USER, text(name) + bytes((mechanism,)) + keys + (8192).to_bytes(4))


def quota(key: str, value: float, *, removed: bool = False, **entity: str | None) -> bytes:
    parts = b"".join(
        text(kind.replace("_", "-")) + text(name) + b"\0" for kind, name in entity.items()
    )
    data = uvarint(len(entity) + 1) + parts + text(key) + struct.pack(">d", value)
    return frame(QUOTA, data + bytes((removed,)))


def security(*values: bytes) -> SecurityImage:
    env = MemoryEnv(seed=1)
    write(env, segment(0), batches(0, *values))
    image = read_kafka_metadata(env, "/disk1")
    assert image is not None
    return image.security


def test_entries_users_and_quotas_are_those_that_were_not_removed() -> None:
    image = security(
        ACL_FRAME,
        frame(ACL, OTHER_ID + ACL_FRAME[19:-1]),
        frame(REMOVE_ACL, OTHER_ID),
        user("ann", 1, b"old"),
        user("ann", 1),
        user("ann", 2),
        frame(REMOVE_USER, text("ann") + b"\2"),
        user("bob"),
        frame(REMOVE_USER, text("bob") + b"\1"),
        user("of a mechanism of Kafka 9", 9),
        quota("producer_byte_rate", 1e6, user="ann", client_id=None),
        quota("consumer_byte_rate", 2e6, user="ann", client_id=None),
        quota("consumer_byte_rate", 0, removed=True, user="ann", client_id=None),
        quota("request_percentage", 5, client_id="app"),
        quota("request_percentage", 0, removed=True, client_id="app"),
    )
    assert list(image.acls.values()) == [ACL_ENTRY]
    entry = ScramEntry(b"salt", b"stored", b"server", 8192)
    assert image.scram_users == {"ann": {"SCRAM-SHA-256": entry}}
    entity = (("client-id", None), ("user", "ann"))
    assert image.client_quotas == {entity: {"producer_byte_rate": 1e6}}


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_broker_without_users_entries_and_quotas_takes_those_of_kafka(with_topic: bool) -> None:
    """Also if no topic is taken over."""
    env, topic_id = taken_over()
    if not with_topic:
        for index in range(2):
            env.rename(f"/disk1/orders-{index}", f"/disk1/orders-{index}.{'0' * 32}-delete")
    values = (topic("orders", topic_id), ACL_FRAME, user("ann"), quota("x", 1, user="ann"))
    write(env, segment(0), batches(0, *values))
    manager, report = opened(env, "/disk1")
    counts = {"acls": 1, "users": 1, "quotas": 1}
    assert report.settings == (("security settings taken from kafka", counts),)
    manager.close()
    write(env, segment(0), batches(0, topic("orders", topic_id)))
    manager, _ = opened(env, "/disk1")  # they are durable, and ours from now on
    assert manager.metadata.acls == (ACL_ENTRY,)
    assert set(manager.metadata.scram_users) == {"ann"}
    assert manager.metadata.client_quotas == {(("user", "ann"),): {"x": 1.0}}
    manager.close()


def test_a_broker_with_users_of_its_own_takes_none_and_says_so() -> None:
    env, _ = taken_over()
    write(env, segment(0), batches(0, ACL_FRAME))
    own = ClusterMetadata("c", 1, bytes(16), scram_users={"eve": {}})
    image, _ = read_image(env, [LogDirectory(env, "/disk1")])
    metadata, lines = take_kafka_settings(image, own, ())
    assert metadata is own
    ((event, fields),) = lines
    assert (event, fields["acls"]) == ("security settings of kafka not taken", 1)
    assert "kafka-acls" in str(fields["reason"])


@pytest.mark.parametrize("value", [ACL_FRAME, user("ann"), quota("x", 1, user="ann")])
def test_a_security_record_that_is_cut_short_makes_nothing_believed(value: bytes) -> None:
    for end in range(3, len(value) - 1):
        with pytest.raises(MetadataLogError, match=r"cut short|null"):
            security(value[:end])


def test_a_broken_link_in_the_place_of_the_metadata_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / FOLDER).symlink_to(tmp_path / "not-mounted")
    with pytest.raises(FileNotFoundError, match=FOLDER):
        read_kafka_metadata(RealEnv(), str(tmp_path))
