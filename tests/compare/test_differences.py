"""The exceptions of the comparison excuse what they are named for, and nothing beside it."""

import pytest

from tests.compare.differences import Batch, Look, _begins_later, _tells_the_epoch
from tests.compare.truth import Moment

DATA = "batch 3 3 txn=true control=false horizon=-1 producer=7/1 sequence=0 count=1"
READ = "batch 4 4 txn=true control=true horizon=-1 producer=7/1 sequence=-1 count=1"
EMPTIED = "batch 9 9 txn=true control=true horizon=-1 producer=7/2 sequence=-1 count=0"
EMPTY_DATA = "batch 2 2 txn=true control=false horizon=-1 producer=7/1 sequence=0 count=0"


def batch(line: str) -> Batch:
    records = () if line.endswith("count=0") else ("record 3 0 x00 x00",)
    return Batch(tuple(line.split()), records)


def side(*lines: str, aborted: str = "") -> Look:
    return Look([batch(line) for line in lines], [f"aborted {aborted}"] if aborted else [])


def producer(epoch: int, *, sequence: int = -1, offset: int = -1, is_open: int = -1) -> str:
    return (
        f"producer 7 epoch={epoch} sequence={sequence} offset={offset} open={is_open} coordinator=0"
    )


def tells(
    ours: Look, *, found: str = producer(2), theirs: str = producer(1), newest: int = 2
) -> bool:
    return _tells_the_epoch(ours, found, theirs, Moment(epochs={7: newest}))


def test_an_emptied_marker_excuses_the_epoch_that_it_says() -> None:
    assert tells(side(READ, EMPTIED))
    assert tells(side(READ, EMPTIED), theirs=producer(1, sequence=4, offset=3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ours": side(READ)},
        {"ours": side(READ, EMPTIED.replace("count=0", "count=1"))},
        {"ours": side(READ, EMPTIED.replace("7/2", "8/2"))},
        {"ours": side(READ, EMPTIED.replace("7/2", "7/1"))},
        {"newest": 3},
        {"found": "(none)"},
        {"found": producer(1), "theirs": producer(2)},
        {"found": producer(2, sequence=5, offset=8)},
        {"found": producer(2, is_open=3)},
        {"theirs": producer(1, is_open=3)},
    ],
    ids=lambda wrong: ", ".join(wrong),
)
def test_it_excuses_no_other_state_of_a_producer(wrong: dict[str, object]) -> None:
    assert not tells(**{"ours": side(READ, EMPTIED), **wrong})  # type: ignore[arg-type]


def test_an_aborted_transaction_may_begin_behind_batches_that_kafka_emptied() -> None:
    assert _begins_later(side(EMPTY_DATA, DATA, READ, aborted="7 2 4 5"), "aborted 7 3 4")


@pytest.mark.parametrize(
    "theirs",
    [
        side(DATA, READ, aborted="7 1 9 10"),
        side(DATA, READ, aborted="8 2 4 5"),
        side(EMPTY_DATA.replace("count=0", "count=1"), DATA, READ, aborted="7 2 4 5"),
        side(EMPTY_DATA.replace("control=false", "control=true"), DATA, READ, aborted="7 2 4 5"),
        side(EMPTY_DATA, DATA, READ),
    ],
    ids=["another marker", "another producer", "data between", "a marker between", "no entry"],
)
def test_it_may_not_begin_behind_anything_else(theirs: Look) -> None:
    assert not _begins_later(theirs, "aborted 7 3 4")
