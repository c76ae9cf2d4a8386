"""Leader epochs: assignment, where an epoch ends, truncation, the checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptCheckpointError
from storage.format.leader_epochs import EpochEntry, LeaderEpochs
from tests.support.formats import golden_bytes

ASSIGNMENTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=12)


def epochs_of(*entries: tuple[int, int]) -> LeaderEpochs:
    epochs = LeaderEpochs()
    for epoch, start in entries:
        assert epochs.assign(epoch, start)
    return epochs


@given(ASSIGNMENTS)
def test_epochs_and_offsets_always_increase_and_the_last_assignment_holds(
    assignments: list[tuple[int, int]],
) -> None:
    epochs = LeaderEpochs()
    for epoch, start in assignments:
        latest = epochs.latest
        changed = epochs.assign(epoch, start)
        assert changed == (latest is None or latest.epoch != epoch or start < latest.start_offset)
        assert epochs.latest is not None
        assert epochs.latest.epoch == epoch
        pairs = list(zip(epochs.entries, epochs.entries[1:], strict=False))
        assert all(a.epoch < b.epoch and a.start_offset < b.start_offset for a, b in pairs)


def test_the_latest_epoch_again_is_no_news() -> None:
    epochs = epochs_of((1, 0))
    assert not epochs.assign(1, 5)
    assert epochs.entries == (EpochEntry(1, 0),)


def test_an_epoch_in_which_nothing_was_written_gives_way() -> None:
    epochs = epochs_of((1, 0), (2, 10))
    assert epochs.assign(3, 10)
    assert epochs.entries == (EpochEntry(1, 0), EpochEntry(3, 10))


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (-1, (-1, -1)),  # not known to the client
        (0, (0, 5)),  # older than all: ends where the oldest known one begins
        (2, (2, 20)),
        (3, (2, 20)),  # never existed: the one before it
        (4, (4, 30)),
        (6, (6, 99)),  # the latest goes on to the end of the log
        (7, (-1, -1)),
    ],
)
def test_where_an_epoch_ends(epoch: int, expected: tuple[int, int]) -> None:
    epochs = epochs_of((2, 5), (4, 20), (6, 30))
    assert epochs.end_offset_for(epoch, 99) == expected


def test_without_epochs_nothing_is_known() -> None:
    epochs = LeaderEpochs()
    assert epochs.end_offset_for(0, 10) == (-1, -1)
    assert epochs.epoch_of(0) == -1
    assert epochs.latest is None
    assert epochs.earliest is None
    assert not epochs.truncate_from_end(0)
    assert not epochs.truncate_from_start(5)


def test_the_epoch_of_an_offset() -> None:
    epochs = epochs_of((2, 5), (4, 20))
    assert [epochs.epoch_of(offset) for offset in (4, 5, 19, 20, 1000)] == [-1, 2, 2, 4, 4]


def test_truncation_from_the_end_forgets_epochs_that_begin_there_or_later() -> None:
    epochs = epochs_of((2, 5), (4, 20), (6, 30))
    assert not epochs.truncate_from_end(31)
    assert epochs.truncate_from_end(20)
    assert epochs.entries == (EpochEntry(2, 5),)


def test_truncation_from_the_start_lets_the_epoch_it_lies_in_begin_there() -> None:
    epochs = epochs_of((2, 5), (4, 20), (6, 30))
    assert not epochs.truncate_from_start(4)
    assert not epochs.truncate_from_start(5)
    assert epochs.truncate_from_start(25)
    assert epochs.entries == (EpochEntry(4, 25), EpochEntry(6, 30))
    assert epochs.truncate_from_start(30)
    assert epochs.entries == (EpochEntry(6, 30),)
    assert epochs.truncate_from_start(1000)
    assert epochs.entries == (EpochEntry(6, 1000),)
    epochs.clear()
    assert len(epochs) == 0


def test_kafkas_checkpoint_is_read_and_written_byte_for_byte() -> None:
    raw = golden_bytes("leader-epoch-checkpoint")
    epochs = LeaderEpochs.decode(raw)
    assert epochs.entries == (EpochEntry(0, 0), EpochEntry(3, 17))
    assert epochs.encode() == raw


@given(ASSIGNMENTS)
def test_epochs_come_back(assignments: list[tuple[int, int]]) -> None:
    epochs = LeaderEpochs()
    for epoch, start in assignments:
        epochs.assign(epoch, start)
    assert LeaderEpochs.decode(epochs.encode()).entries == epochs.entries


@pytest.mark.parametrize(
    "raw", [b"1\n0\n", b"0\n1\n1\n", b"0\n1\n1 2 3\n", b"0\n1\n-1 2\n", b"0\n1\n2147483648 0\n"]
)
def test_checkpoints_that_do_not_follow_the_format_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        LeaderEpochs.decode(raw)
