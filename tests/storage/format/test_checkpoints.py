"""Kafka's text files: its own bytes, round trips, and everything that is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.env import mkdir_durably
from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format.checkpoints import (
    MetaProperties,
    decode_meta_properties,
    decode_offsets,
    decode_partition_metadata,
    decode_topic_id,
    encode_meta_properties,
    encode_offsets,
    encode_partition_metadata,
    encode_topic_id,
    write_offsets,
)
from storage.model import TopicPartition
from tests.support.formats import golden_bytes
from tests.support.storage.logs import read_offsets
from tests.support.storage.memory_env import MemoryEnv

LARGEST = (1 << 63) - 1
OFFSETS = st.dictionaries(
    st.builds(
        TopicPartition, st.text("ab.-_9", min_size=1, max_size=9), st.integers(0, (1 << 31) - 1)
    ),
    st.integers(0, LARGEST),
    max_size=6,
)
TOPIC_ID = bytes(range(16))


def test_kafkas_offset_checkpoint_is_read_and_written_byte_for_byte() -> None:
    raw = golden_bytes("cleaner-offset-checkpoint")
    offsets = {TopicPartition("a.topic", 0): 5, TopicPartition("b_topic", 12): LARGEST}
    assert decode_offsets(raw) == offsets
    assert encode_offsets(offsets) == raw


@given(OFFSETS)
def test_offsets_come_back(offsets: dict[TopicPartition, int]) -> None:
    assert decode_offsets(encode_offsets(offsets)) == offsets


@pytest.mark.parametrize("raw", [b"", b"0", b"0\n", b"0\n0\n", b"0\n0"])
def test_files_without_lines_hold_no_entries(raw: bytes) -> None:
    assert decode_offsets(raw) == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"1\n0\n",  # version
        b"x\n0\n",
        b"\n0\n",
        b"0\nx\n",
        b"0\n-1\n",
        b"0\n1\n",  # fewer lines than announced
        b"0\n0\nt 0 1\n",  # more
        b"0\n1\nt 0\n",
        b"0\n1\nt 0 1 2\n",
        b"0\n1\nt x 1\n",
        b"0\n1\nt 0 x\n",
        b"0\n1\nt 0 -1\n",
        b"0\n1\nt 0 +1\n",
        b"0\n1\nt 0 1_0\n",
        b"0\n1\nt -1 0\n",
        b"0\n1\nt 2147483648 0\n",
        b"0\n1\nt 0 9223372036854775808\n",
        b"0\n1\nt 0 " + b"9" * 5000 + b"\n",
        "0\n1\nt 0 \u0661\n".encode(),
        b"0\n1\nt\xff 0 1\n",
        b"0\n2\nt 0 1\n\n",
        b"\x00" * 20,
    ],
)
def test_what_does_not_follow_the_format_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_offsets(raw, "folder/file")
    assert caught.value.path == "folder/file"


@given(st.binary(max_size=60) | st.text("0123 t\n-", max_size=30).map(str.encode))
def test_any_bytes_give_offsets_or_an_error_of_ours(raw: bytes) -> None:
    for decode in (decode_offsets, decode_partition_metadata, decode_meta_properties):
        try:
            decode(raw, "file")
        except CorruptCheckpointError:
            continue


def test_of_two_lines_for_a_partition_the_last_counts() -> None:
    assert decode_offsets(b"0\n2\nt 0 1\nt 0 2\n") == {TopicPartition("t", 0): 2}


def test_offsets_are_kept_in_a_file_and_survive_a_crash() -> None:
    env = MemoryEnv(1)
    mkdir_durably(env, "data")
    path = "data/cleaner-offset-checkpoint"
    assert read_offsets(env, path) == {}
    for offset in (3, 4):
        write_offsets(env, path, {TopicPartition("t", 0): offset})
        env = env.crash()
        assert read_offsets(env, path) == {TopicPartition("t", 0): offset}


def test_a_corrupt_file_is_named() -> None:
    env = MemoryEnv(1)
    write_offsets(env, "file", {})
    file = env.open("file", write=True)
    file.pwrite(b"7", 0)
    file.close()
    with pytest.raises(CorruptCheckpointError) as caught:
        read_offsets(env, "file")
    assert caught.value.path == "file"


def test_kafkas_partition_metadata_is_read_and_written_byte_for_byte() -> None:
    raw = golden_bytes("partition.metadata")
    assert decode_partition_metadata(raw) == TOPIC_ID
    assert encode_partition_metadata(TOPIC_ID) == raw


@given(st.binary(min_size=16, max_size=16))
def test_topic_ids_come_back(topic_id: bytes) -> None:
    assert decode_topic_id(encode_topic_id(topic_id)) == topic_id
    assert decode_partition_metadata(encode_partition_metadata(topic_id)) == topic_id


@pytest.mark.parametrize(
    "text", ["", "a", "a" * 21, "a" * 23, "a" * 21 + "+", "a" * 22, "a" * 21 + "\u00e9"]
)
def test_texts_that_are_no_id(text: str) -> None:
    assert decode_topic_id(text) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"version: 0\n",
        b"version: 1\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"topic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version: 0\ntopic_id: AAEC",
        b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw\nmore: 1",
        b"version: 0\nversion: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version 0\ntopic_id AAECAwQFBgcICQoLDA0ODw",
        b"\xff",
    ],
)
def test_partition_metadata_that_does_not_follow_the_format_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_partition_metadata(raw)


def test_kafkas_meta_properties_are_read() -> None:
    properties = decode_meta_properties(golden_bytes("meta.properties"))
    assert properties == MetaProperties("MkU3OEVBNTcwNTJENDM2Qg", 4, encode_topic_id(TOPIC_ID))


@given(
    st.none() | st.text("aZ09-_=:\\ #!", min_size=1, max_size=9).map(str.strip),
    st.none() | st.integers(0, (1 << 31) - 1),
    st.sampled_from([0, 1]),
    st.dictionaries(st.text("k.=:\\", min_size=1, max_size=4), st.text("v=:\\#", max_size=5)),
)
def test_meta_properties_come_back(
    cluster_id: str | None, node_id: int | None, version: int, others: dict[str, str]
) -> None:
    properties = MetaProperties(cluster_id, node_id, None, version, others)
    assert decode_meta_properties(encode_meta_properties(properties)) == properties


def test_the_first_version_calls_the_node_a_broker() -> None:
    raw = b"#\n#Mon Jan 01\n! comment\n\nversion=0\r\nbroker.id = -1\ncluster.id=abc"
    assert decode_meta_properties(raw) == MetaProperties("abc", None, None, 0)


@pytest.mark.parametrize(
    "raw",
    [b"", b"version=x", b"node.id=1", b"version=1\nnode.id=x", b"version=1\nnovalue", b"\xff=1"],
)
def test_meta_properties_that_do_not_follow_the_format_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_meta_properties(raw)


def test_meta_properties_of_a_newer_version_are_not_taken_for_damaged() -> None:
    with pytest.raises(NewerFormatError):
        decode_meta_properties(b"version=2\nnode.id=1")
