"""The exceptions of the comparison excuse what they are named for, and nothing beside it."""

import pytest

from storage.format.batch import Record
from tests.compare.differences import (
    Batch,
    Observation,
    _begins_hidden,
    _begins_later,
    _tells_the_epoch,
    _was_forgotten,
)
from tests.compare.truth import ClockReading, Written

DATA = "batch 3 3 txn=true control=false horizon=-1 producer=7/1 sequence=0 count=1"
READ = "batch 4 4 txn=true control=true horizon=-1 producer=7/1 sequence=-1 count=1"
EMPTIED = "batch 9 9 txn=true control=true horizon=-1 producer=7/2 sequence=-1 count=0"
EMPTY_DATA = "batch 2 2 txn=true control=false horizon=-1 producer=7/1 sequence=0 count=0"


def batch(line: str) -> Batch:
    records = () if line.endswith("count=0") else ("record 3 0 x00 x00",)
    return Batch(tuple(line.split()), records)


def side(*lines: str, aborted: str = "") -> Observation:
    return Observation([batch(line) for line in lines], [f"aborted {aborted}"] if aborted else [])


def producer(epoch: int, *, sequence: int = -1, offset: int = -1, is_open: int = -1) -> str:
    return (
        f"producer 7 epoch={epoch} sequence={sequence} offset={offset} open={is_open} coordinator=0"
    )


def tells(
    look: Observation, *, value: str = producer(2), remote: str = producer(1), newest: int = 2
) -> bool:
    return _tells_the_epoch(look, value, remote, ClockReading(epochs={7: newest}))


def test_an_emptied_marker_excuses_the_epoch_that_it_says() -> None:
    assert tells(side(READ, EMPTIED))
    assert tells(side(READ, EMPTIED), remote=producer(1, sequence=4, offset=3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"look": side(READ)},
        {"look": side(READ, EMPTIED.replace("count=0", "count=1"))},
        {"look": side(READ, EMPTIED.replace("7/2", "8/2"))},
        {"look": side(READ, EMPTIED.replace("7/2", "7/1"))},
        {"newest": 3},
        {"value": "(none)"},
        {"value": producer(1), "remote": producer(2)},
        {"value": producer(2, sequence=5, offset=8)},
        {"value": producer(2, is_open=3)},
        {"remote": producer(1, is_open=3)},
    ],
    ids=lambda wrong: ", ".join(wrong),
)
def test_it_excuses_no_other_state_of_a_producer(wrong: dict[str, object]) -> None:
    assert not tells(**{"look": side(READ, EMPTIED), **wrong})  # type: ignore[arg-type]


def test_an_aborted_transaction_may_begin_behind_batches_that_kafka_emptied() -> None:
    assert _begins_later(side(EMPTY_DATA, DATA, READ, aborted="7 2 4 5"), "aborted 7 3 4")


@pytest.mark.parametrize(
    "look",
    [
        side(DATA, READ, aborted="7 1 9 10"),
        side(DATA, READ, aborted="8 2 4 5"),
        side(EMPTY_DATA.replace("count=0", "count=1"), DATA, READ, aborted="7 2 4 5"),
        side(EMPTY_DATA.replace("control=false", "control=true"), DATA, READ, aborted="7 2 4 5"),
        side(EMPTY_DATA, DATA, READ),
    ],
    ids=["another marker", "another producer", "data between", "a marker between", "no entry"],
)
def test_it_may_not_begin_behind_anything_else(look: Observation) -> None:
    assert not _begins_later(look, "aborted 7 3 4")


HIDDEN = producer(0, sequence=4, offset=8, is_open=1)  # began at 1, and the log begins at 5


def forgets(*, value: str = HIDDEN, line: str, owner: int = 7) -> bool:
    moment = ClockReading(
        {1: Written(Record(1, 0, b"k", b"v"), 7, None)}, forgotten=frozenset({owner})
    )
    return _was_forgotten(Observation([], ["start 5"]), value, line, moment)


def test_a_producer_that_kafka_forgot_may_have_its_transaction_begin_later() -> None:
    assert forgets(line=HIDDEN.replace("open=1", "open=8"))
    assert forgets(line=HIDDEN.replace("open=1", "open=8").replace("tor=0", "tor=-1"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"line": HIDDEN.replace("open=1", "open=8"), "owner": 8},
        {"line": HIDDEN.replace("open=1", "open=-1")},
        {"line": HIDDEN.replace("offset=8", "offset=7")},
        {"line": HIDDEN.replace("epoch=0 seq", "epoch=1 seq")},
        {"line": HIDDEN.replace("tor=0", "tor=3")},
        {"line": HIDDEN, "value": HIDDEN.replace("open=1", "open=2")},
        {"line": HIDDEN, "value": "(none)"},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_nothing_else_of_it_may_differ(wrong: dict[str, object]) -> None:
    assert not forgets(**wrong)  # type: ignore[arg-type]


AFTER = DATA.replace("batch 3 3", "batch 6 6")


def begins_hidden(look: Observation, entry: str) -> bool:
    return _begins_hidden(Observation(look.batches, [*look.state, "start 5"]), entry)


def test_its_aborted_transaction_begins_with_the_first_visible_batch() -> None:
    assert begins_hidden(side(DATA, AFTER, aborted="7 6 9 10"), "aborted 7 3 9")


def test_it_begins_nowhere_else() -> None:
    assert not begins_hidden(side(DATA, AFTER, aborted="7 8 9 10"), "aborted 7 3 9")
    assert not begins_hidden(side(DATA, AFTER, aborted="7 4 9 10"), "aborted 7 3 9")
    assert not begins_hidden(side(DATA, AFTER, aborted="7 6 8 9"), "aborted 7 3 9")
    assert not begins_hidden(side(DATA, AFTER, aborted="7 8 9 10"), "aborted 7 6 9")
