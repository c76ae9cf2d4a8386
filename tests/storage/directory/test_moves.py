"""Where a replica is after a move that was interrupted: a table of folders and directories."""

import pytest

from storage.directory.cluster_metadata import (
    ClusterMetadata,
    MetadataEncoder,
    TopicEntry,
    decode_metadata,
)
from storage.directory.partition_placement import FoundFolder, place_partitions
from storage.model import TopicPartition

TOPIC_ID = bytes(range(16))
NAME = TopicPartition("t", 0)


def moving(home: str) -> ClusterMetadata:
    entry = TopicEntry(TOPIC_ID, {0: home})
    metadata = ClusterMetadata("cluster", 1, bytes(16), topics={"t": entry})
    return metadata.with_move("t", 0, "source", "target")


def folder(directory_id: str) -> FoundFolder:
    return FoundFolder(NAME, directory_id, TOPIC_ID, has_records=True)


def test_moves_survive_in_the_metadata_file() -> None:
    metadata = moving("source")
    assert decode_metadata(MetadataEncoder().encode(metadata)) == metadata
    assert metadata.without_topics(["t"]).deleted_topic_ids[TOPIC_ID] == ("source", "target")


@pytest.mark.parametrize(
    ("home", "folders", "online", "serve", "remove", "is_offline", "is_over"),
    [
        ("source", "source", "source target", "source", "", False, True),
        ("source", "source target", "source target", "target", "source", False, True),
        ("source", "target", "target", "target", "", False, False),
        ("source", "source", "source", "", "", True, False),
        ("target", "source target", "source target", "target", "source", False, True),
        ("target", "target", "source target", "target", "", False, True),
        ("target", "source", "source", "", "", True, False),
        ("target", "source", "source target", "", "", True, False),
    ],
)
def test_the_replica_after_an_interrupted_move(
    *,
    home: str,
    folders: str,
    online: str,
    serve: str,
    remove: str,
    is_offline: bool,
    is_over: bool,
) -> None:
    placement = place_partitions(
        [folder(name) for name in folders.split()],
        moving(home),
        {name: f"/{name}" for name in online.split()},
        [],
        0,
    )
    entry = placement.metadata.topics["t"]
    assert [item.directory_id for item in placement.serve] == serve.split()
    assert [item.directory_id for item in placement.remove] == remove.split()
    assert (NAME in placement.offline) == is_offline
    assert (entry.moves == {}) == is_over
    if serve:
        assert entry.partitions == {0: serve}
