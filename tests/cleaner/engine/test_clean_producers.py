"""What a clean keeps in mind of producers and their transactions, beside plain sets and lists."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import new_state
from cleaner.engine.kernels.passes.producer_set import add_producer, remove_producer
from cleaner.engine.kernels.passes.walk import aborted_row
from cleaner.engine.transactions import Transactions
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaner_jobs import job
from tests.support.draws import cases

PROPERTY = settings(max_examples=cases(few=30, many=300), deadline=None)
LARGEST = (1 << 63) - 1
# Few numbers, so that some come and go; neighbours in the table, and the ends of the range.
PRODUCERS = st.integers(0, 12) | st.sampled_from([LARGEST, LARGEST - 1, 1 << 32, 1 << 62])


@PROPERTY
@given(st.lists(st.tuples(st.booleans(), PRODUCERS), max_size=60))
def test_the_set_of_producers_is_a_set(steps: list[tuple[bool, int]]) -> None:
    state = new_state()
    transactions = Transactions(job())
    transactions.open_producers = np.zeros(4, dtype=np.int64)
    model: set[int] = set()
    for adds, producer in steps:
        if adds:
            while not add_producer(transactions.open_producers, state, producer):
                transactions.widen(state)
            model.add(producer)
        else:
            removed = remove_producer(transactions.open_producers, state, producer)
            assert removed == (producer in model)
            model.discard(producer)
        slots = transactions.open_producers
        assert {~int(slot) for slot in slots if slot} == model
        assert state[fields.OPEN_COUNT] == len(model)
    assert all(remove_producer(transactions.open_producers, state, producer) for producer in model)


def test_the_set_of_producers_is_as_large_as_what_is_open_at_a_time() -> None:
    state = new_state()
    transactions = Transactions(job())
    for producer in range(10_000):
        assert add_producer(transactions.open_producers, state, producer)
        assert remove_producer(transactions.open_producers, state, producer)
    assert len(transactions.open_producers) == 64


@st.composite
def aborted(draw: st.DrawFn) -> list[TxnIndexEntry]:
    """Transactions of three producers that interleave; those of one producer do not overlap."""
    entries = []
    for producer in (3, 5, LARGEST):
        offset = 0
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)))):
            first = offset + gap
            entries.append(TxnIndexEntry(producer, first, first + length, first))
            offset = first + length + 1
    return sorted(entries, key=lambda entry: entry.last_offset)


@PROPERTY
@given(aborted(), st.sampled_from([0, 3, 4, 5, LARGEST]), st.integers(0, 40), st.integers(0, 2))
def test_a_batch_belongs_to_the_aborted_transaction_around_it(
    entries: list[TxnIndexEntry], producer: int, first: int, more: int
) -> None:
    transactions = Transactions(job(aborted=tuple(entries)))
    around = [
        entry
        for entry in entries
        if entry.producer_id == producer
        and entry.first_offset <= first + more
        and first <= entry.last_offset
    ]
    row = aborted_row(transactions.aborted, producer, first, first + more)
    assert (row >= 0) == bool(around)
    if row >= 0:
        transactions.kept[row] = 1
        assert transactions.kept_entries() == around[-1:]


def test_kept_entries_come_in_the_order_of_their_markers() -> None:
    entries = (TxnIndexEntry(9, 0, 5, 0), TxnIndexEntry(1, 2, 7, 2), TxnIndexEntry(1, 8, 9, 10))
    transactions = Transactions(job(aborted=entries))
    transactions.kept.fill(1)
    assert transactions.kept_entries() == list(entries)
