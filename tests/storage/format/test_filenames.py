"""Names in a data directory: what is ours, what it means, and what is left alone."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.format.filenames import (
    CLEANED,
    DELETED,
    FILE_KINDS,
    LARGEST_OFFSET,
    LOG,
    NAME_CHARS_MAX,
    SNAPSHOT,
    SWAP,
    TXN_INDEX,
    DirectoryKind,
    SegmentFile,
    classify,
    cleaned_name,
    deleted_dir_name,
    file_name,
    future_dir_name,
    is_legal_topic,
    kind_of_dir,
    may_be_copy_of,
    parse_file_name,
    parse_partition_dir,
    partition_dir_name,
)
from storage.model import TopicPartition

OFFSETS = st.integers(0, LARGEST_OFFSET)
TOPICS = st.text("abcXYZ019._-", min_size=1, max_size=249).filter(lambda t: t not in (".", ".."))
HEX = "0123456789abcdef" * 2


@given(OFFSETS, st.sampled_from(FILE_KINDS))
def test_a_file_in_place_is_named_by_offset_and_kind(offset: int, kind: str) -> None:
    name = file_name(offset, kind)
    assert name == str(offset).zfill(20) + kind
    assert parse_file_name(name) == SegmentFile(offset, kind)


@given(OFFSETS, st.sampled_from(FILE_KINDS), st.from_regex(r"[0-9A-Za-z_-]{1,64}", fullmatch=True))
def test_a_cleaned_file_carries_its_run(offset: int, kind: str, job_id: str) -> None:
    name = cleaned_name(offset, kind, job_id)
    assert parse_file_name(name) == SegmentFile(offset, kind, CLEANED, job_id)


@given(OFFSETS, st.sampled_from(FILE_KINDS), st.sampled_from([CLEANED, SWAP, DELETED]))
def test_kafkas_temporary_names_are_understood(offset: int, kind: str, suffix: str) -> None:
    parsed = parse_file_name(file_name(offset, kind) + suffix)
    assert parsed == SegmentFile(offset, kind, suffix)


@given(st.text("0129.logindextmsap-clrdw", max_size=40))
def test_a_name_is_ours_only_if_it_prints_back_to_itself(name: str) -> None:
    parsed = parse_file_name(name)
    assert parsed is None or parsed.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0.log",
        "00000000000000000000",
        "00000000000000000000.txt",
        "00000000000000000000.log.tmp",
        "00000000000000000000.log.swap.swap",
        "00000000000000000000.log.run.swap",
        "00000000000000000000.log.a.b.cleaned",
        "00000000000000000000.log..cleaned",
        "99999999999999999999.log",
        "000000000000000000000.log",
        "0000000000000000000\u0660.log",
        "-0000000000000000001.log",
        "00000000000000000000.log\n",
        "00000000000000000042-0000000003.checkpoint",
    ],
)
def test_other_names_are_left_alone(name: str) -> None:
    assert parse_file_name(name) is None


def test_a_folder_is_sorted_by_what_its_files_are() -> None:
    names = [
        file_name(10, LOG),
        file_name(2, LOG),
        file_name(2, TXN_INDEX),
        file_name(10, SNAPSHOT),
        file_name(2, LOG) + SWAP,
        cleaned_name(2, LOG, "run"),
        file_name(0, LOG) + DELETED,
        "partition.metadata",
        "leader-epoch-checkpoint",
    ]
    files = classify(names)
    assert files.logs == (2, 10)
    assert (files.indexes, files.time_indexes) == ((), ())
    assert (files.txn_indexes, files.snapshots) == ((2,), (10,))
    assert files.swaps == (SegmentFile(2, LOG, SWAP),)
    assert files.cleaned == (SegmentFile(2, LOG, CLEANED, "run"),)
    assert files.deleted == (SegmentFile(0, LOG, DELETED),)
    assert files.others == ("leader-epoch-checkpoint", "partition.metadata")


@given(TOPICS, st.integers(0, (1 << 31) - 1))
def test_a_partition_folder_names_its_partition(topic: str, partition: int) -> None:
    name = partition_dir_name(TopicPartition(topic, partition))
    assert parse_partition_dir(name) == TopicPartition(topic, partition)
    assert kind_of_dir(name) is DirectoryKind.PARTITION


@pytest.mark.parametrize(
    "name",
    [
        "topic",
        "topic-",
        "-0",
        "topic-00",
        "topic-+1",
        "topic--",
        "topic-2147483648",
        "topic-99999999999",
        "to pic-0",
        "tópic-0",
        "..-0",
        ".-0",
        "topic-0\n",
        "topic-\u0661",
        "x" * 250 + "-0",
    ],
)
def test_a_folder_that_is_no_partitions_is_unknown(name: str) -> None:
    assert parse_partition_dir(name) is None
    assert kind_of_dir(name) is DirectoryKind.UNKNOWN


@pytest.mark.parametrize("kind", [DirectoryKind.DELETED, DirectoryKind.FUTURE, DirectoryKind.STRAY])
def test_folders_on_their_way_are_told_apart_and_not_served(kind: DirectoryKind) -> None:
    name = f"topic-0.{HEX}-{kind.value}"
    assert kind_of_dir(name) is kind
    assert parse_partition_dir(name) is None


def test_kafkas_own_metadata_log_is_not_served() -> None:
    assert parse_partition_dir("__cluster_metadata-0") is None
    assert kind_of_dir("__cluster_metadata-0") is DirectoryKind.CLUSTER_METADATA


@given(TOPICS, st.integers(0, (1 << 31) - 1))
def test_a_folder_to_delete_fits_a_file_name(topic: str, partition: int) -> None:
    name = deleted_dir_name(TopicPartition(topic, partition), HEX)
    assert len(name) <= NAME_CHARS_MAX
    assert kind_of_dir(name) is DirectoryKind.DELETED
    assert parse_partition_dir(name) is None


@given(TOPICS, st.integers(0, (1 << 31) - 1))
@example("x" * 249, 0)
@pytest.mark.parametrize("dir_name", [deleted_dir_name, future_dir_name])
def test_a_folder_on_its_way_is_known_as_a_copy_of_its_partition(
    dir_name: Callable[[TopicPartition, str], str], topic: str, partition: int
) -> None:
    name = dir_name(TopicPartition(topic, partition), HEX)
    assert may_be_copy_of(name, TopicPartition(topic, partition))
    assert not may_be_copy_of(name, TopicPartition(topic, partition + 1))
    assert not may_be_copy_of(name, TopicPartition("other", partition))


def test_a_folder_with_a_whole_name_is_no_copy_of_a_longer_topic() -> None:
    name = deleted_dir_name(TopicPartition("orders", 0), HEX)
    assert not may_be_copy_of(name, TopicPartition("orders-old", 0))
    assert not may_be_copy_of("orders-0", TopicPartition("orders", 0))


def test_topic_names_follow_kafka() -> None:
    assert all(is_legal_topic(name) for name in ("a", "A.b_c-9", "x" * 249, "...", "__own"))
    assert not any(is_legal_topic(name) for name in ("", ".", "..", "x" * 250, "a/b", "a b", "a\n"))
