"""A transaction index that contradicts the log costs a clean, never a committed record."""

import pytest

from cleaner.engine.clean import run_clean
from storage.errors import TransactionIndexError
from storage.format import filenames
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.storage.logs import FOLDER, open_log


def made() -> CompactedLog:
    log = CompactedLog()
    producer, other = Producer(1), Producer(2)
    log.put(("k", "good"), by=producer)
    log.commit(producer)
    log.put(("x", "x1"), by=producer)
    log.put(("y", "y1"), by=other)
    log.commit(producer)
    log.commit(other)
    log.put(("k", "ABORTED"), ("m", "ABORTED"), by=producer)
    log.put(("n", "ABORTED"), by=producer)
    log.abort(producer)
    log.put(("x", "x2"), by=producer)
    log.commit(producer)
    log.roll()
    log.write("z")
    log.roll()
    return log


def refused(log: CompactedLog, **changes: object) -> bool:
    """Whether a clean is refused before it hands anything over."""
    control = Recorder()
    try:
        run_clean(log.env, log.job(**changes), control)  # type: ignore[arg-type]
    except TransactionIndexError:
        assert control.groups == []
        return True
    return False


def test_every_flipped_bit_of_an_entry_is_found_or_does_no_harm() -> None:
    (entry,) = made().aborted()
    result = 0
    for name in ("producer_id", "first_offset", "last_offset"):
        for bit in range(16):
            log = made()
            want = log.latest()
            changed = entry._replace(**{name: getattr(entry, name) ^ 1 << bit})
            if refused(log, aborted=(changed,)):
                result += 1
                continue
            log.clean(aborted=(changed,))
            assert log.reopened().latest() == want, changed
    assert result >= 40


def test_a_missing_entry_and_one_too_many_are_found() -> None:
    log = made()
    assert refused(log, aborted=())
    more = (*log.aborted(), TxnIndexEntry(1, 0, 1, 2))
    assert refused(log, aborted=more), "its marker says commit"
    assert not refused(log)


def test_a_marker_without_data_needs_no_entry() -> None:
    log = CompactedLog()
    log.abort(Producer(1))
    log.write("a")
    log.roll()
    assert not refused(log, aborted=())


def test_what_lies_below_the_section_does_not_go_by_the_index() -> None:
    log = made()
    want = log.latest()
    wide = TxnIndexEntry(1, 0, 1, 2)  # takes the first transaction for aborted
    log.clean(first_dirty_offset=10, aborted=(wide, *log.aborted()))
    assert log.reopened().latest() == want


@pytest.mark.parametrize(
    "kinds", [(".txnindex",), (".index",), (".index", ".timeindex", ".txnindex")]
)
def test_removed_index_files_are_made_anew_from_the_log(kinds: tuple[str, ...]) -> None:
    log = made()
    want, entries = log.latest(), log.aborted()
    log.log.flush()
    log.log.close()
    for name in list(log.env.listdir(FOLDER)):
        if name.endswith(kinds):
            log.env.unlink(f"{FOLDER}/{name}")
    log.log = open_log(log.env, log.config, was_clean=True)
    if kinds == (".txnindex",):
        assert refused(log)
        assert log.log.damage.repair_txn_indexes() == [
            f"{FOLDER}/{filenames.file_name(0, filenames.TXN_INDEX)}"
        ]
    assert [entry[:3] for entry in log.aborted()] == [entry[:3] for entry in entries]
    assert log.log.damage.repair_txn_indexes() == []
    log.clean()
    assert log.latest() == want
    assert log.reopened().latest() == want
