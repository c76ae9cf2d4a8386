import inspect

import pytest
from kio.schema.errors import ErrorCode as KafkaErrorCode

from protocol.errors import ErrorCode, ProtocolError, code_of
from storage import errors as storage


def test_a_code_has_kafkas_number_and_says_whether_to_retry() -> None:
    for code in ErrorCode:
        error = KafkaErrorCode(code.value)
        assert (error.name, error.retriable) == (code.name.lower(), code.retriable)


STORAGE_ERRORS = [
    kind
    for _, kind in inspect.getmembers(storage, inspect.isclass)
    if issubclass(kind, storage.StorageError) and kind is not storage.StorageError
]


def test_every_storage_error_has_a_code() -> None:
    codes = {kind: code_of(kind.__new__(kind)) for kind in STORAGE_ERRORS}
    assert [kind for kind in codes if codes[kind] is ErrorCode.UNKNOWN_SERVER_ERROR] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (storage.CorruptBatchError("bad crc"), ErrorCode.CORRUPT_MESSAGE),
        (storage.UnsupportedMagicError(1), ErrorCode.INVALID_RECORD),
        (storage.InvalidRecordError("null key", [3]), ErrorCode.INVALID_RECORD),
        (storage.InvalidTimestampError("too old"), ErrorCode.INVALID_TIMESTAMP),
        (storage.MessageTooLargeError(2, 1), ErrorCode.MESSAGE_TOO_LARGE),
        (storage.OutOfOrderSequenceError(1, 2, 3), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (storage.InvalidProducerEpochError(1, 2, 3), ErrorCode.INVALID_PRODUCER_EPOCH),
        (storage.OffsetOutOfRangeError(1, 2, 3), ErrorCode.OFFSET_OUT_OF_RANGE),
        (storage.LogDirectoryError("d", "gone"), ErrorCode.KAFKA_STORAGE_ERROR),
        (OSError(28, "No space left on device"), ErrorCode.KAFKA_STORAGE_ERROR),
        (ValueError("a mistake of ours"), ErrorCode.UNKNOWN_SERVER_ERROR),
        (storage.StorageError("nameless"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
def test_an_error_becomes_the_code_clients_expect(error: Exception, code: ErrorCode) -> None:
    assert code_of(error) is code


def test_a_class_without_a_row_has_the_code_of_its_base() -> None:
    class OtherCorruptionError(storage.CorruptBatchError):
        pass

    assert code_of(OtherCorruptionError("x")) is ErrorCode.CORRUPT_MESSAGE


def test_a_protocol_error_carries_where_it_happened() -> None:
    error = ProtocolError("cut short", 3, 12, 40)
    assert str(error) == "api 3 version 12: cut short at byte 40"
    assert (error.api_key, error.version, error.position) == (3, 12, 40)
