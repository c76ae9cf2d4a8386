"""Records of __transaction_state that nobody should have written."""

import pytest

from broker.transactions.model import Status, Transaction
from broker.transactions.state_records import TransactionLoader, encode_key, encode_value
from storage.format.batch import Record, build_batch, read_header


def value(status: int) -> bytes:
    return encode_value(Transaction("t", 7, 0, 60_000, status))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [value(Status.PREPARE_EPOCH_FENCE), value(99), b"\x00\x01", b"\x00\x00\xff"],
    ids=["in memory only", "unknown status", "cut", "garbage"],
)
def test_a_record_that_is_not_valid_leaves_the_last_valid_one(data: bytes) -> None:
    loader = TransactionLoader()
    rows = [
        Record(0, 0, encode_key("t"), value(Status.ONGOING), ()),
        Record(1, 0, encode_key("t"), data, ()),
    ]
    loader.add_records(read_header(build_batch(rows)), rows)
    loaded = loader.finish()
    assert loaded.invalid_records == 1
    assert loaded.transactions["t"].status is Status.ONGOING
