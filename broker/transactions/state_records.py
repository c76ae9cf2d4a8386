"""Keys and values of the records in __transaction_state, byte for byte as Kafka's.

Values are written as version 1, which Kafka reads since 3.5; a null value deletes the
transactional id. Bytes are not trusted: whatever does not follow its format is an
InvalidTransactionRecordError.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.transactions.model import Status, Transaction, TransactionVersion
from protocol import record_codec
from protocol.errors import ProtocolError
from protocol.messages import TransactionLogKey, TransactionLogValue, TransactionLogValueTopic
from storage.format.batch import BatchHeader, Record
from storage.model import TopicPartition

TRANSACTION_TOPIC = "__transaction_state"

KEY_VERSION = 0
VALUE_VERSION = 1


class InvalidTransactionRecordError(Exception):
    """The bytes of a record are no key or value of this topic."""


def encode_key(transactional_id: str) -> bytes:
    """Return the key of a transactional id."""
    return record_codec.encode(TransactionLogKey(transactional_id=transactional_id), KEY_VERSION)


def encode_value(transaction: Transaction) -> bytes:
    """Return the value of a transaction."""
    topics: defaultdict[str, list[int]] = defaultdict(list)
    for topic, partition in transaction.partitions:
        topics[topic].append(partition)
    # Strings and numbers are compared faster than 10,000 named tuples.
    for ids in topics.values():
        ids.sort()
    partitions = [
        TransactionLogValueTopic(topic=topic, partition_ids=topics[topic])
        for topic in sorted(topics)
    ]
    # Kafka writes null for a transaction that has no partitions to end.
    message = TransactionLogValue(
        producer_id=transaction.producer_id,
        previous_producer_id=transaction.previous_producer_id,
        next_producer_id=transaction.next_producer_id,
        producer_epoch=transaction.producer_epoch,
        transaction_timeout_ms=transaction.timeout_ms,
        transaction_status=transaction.status,
        transaction_partitions=None if transaction.status is Status.EMPTY else partitions,
        transaction_last_update_timestamp_ms=transaction.last_update_ms,
        transaction_start_timestamp_ms=transaction.start_ms,
        client_transaction_version=transaction.client_version,
    )
    return record_codec.encode(message, VALUE_VERSION)


def decode_key(data: bytes) -> str | None:
    """Return the transactional id, None if the version is unknown.

    Raises InvalidTransactionRecordError.
    """
    try:
        key = record_codec.decode(TransactionLogKey, data)
    except ProtocolError as error:
        raise InvalidTransactionRecordError(error.reason) from error
    return None if key is None else key.transactional_id


def decode_value(transactional_id: str, data: bytes) -> Transaction | None:
    """Return the transaction, None if the version is unknown.

    Raises InvalidTransactionRecordError.
    """
    try:
        value = record_codec.decode(TransactionLogValue, data)
        if value is None:
            return None
        return Transaction(
            transactional_id=transactional_id,
            producer_id=value.producer_id,
            producer_epoch=value.producer_epoch,
            timeout_ms=value.transaction_timeout_ms,
            status=Status(value.transaction_status),
            partitions=frozenset(
                TopicPartition(row.topic, partition)
                for row in value.transaction_partitions or ()
                for partition in row.partition_ids
            ),
            last_update_ms=value.transaction_last_update_timestamp_ms,
            start_ms=value.transaction_start_timestamp_ms,
            previous_producer_id=value.previous_producer_id,
            next_producer_id=value.next_producer_id,
            client_version=TransactionVersion(value.client_transaction_version),
        )
    except ProtocolError as error:
        raise InvalidTransactionRecordError(error.reason) from error
    except ValueError as error:  # a status or a version that nobody defined
        raise InvalidTransactionRecordError(str(error)) from error


@dataclass(slots=True)
class LoadedTransactions:
    """The content of a partition of __transaction_state."""

    transactions: dict[str, Transaction] = field(default_factory=dict)
    unknown_records: int = 0  # with an unsupported version of the key or value
    invalid_records: int = 0  # in no known format


class TransactionLoader:
    """Keeps the last value of each transactional id."""

    def __init__(self) -> None:
        self.loaded = LoadedTransactions()

    def add_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Add the records of one batch."""
        if header.is_control:
            return
        for record in records:
            try:
                self._add(record)
            except InvalidTransactionRecordError:
                self.loaded.invalid_records += 1

    def finish(self) -> LoadedTransactions:
        """Return the content after the last batch."""
        return self.loaded

    def _add(self, record: Record) -> None:
        if record.key is None:
            raise InvalidTransactionRecordError("a record without a key")
        transactional_id = decode_key(record.key)
        if transactional_id is None:
            self.loaded.unknown_records += 1
            return
        if record.value is None:
            self.loaded.transactions.pop(transactional_id, None)
            return
        transaction = decode_value(transactional_id, record.value)
        if transaction is None:
            self.loaded.unknown_records += 1
        elif transaction.status is Status.DEAD:  # its tombstone follows
            self.loaded.transactions.pop(transactional_id, None)
        elif transaction.status is Status.PREPARE_EPOCH_FENCE:
            raise InvalidTransactionRecordError("a status that Kafka keeps in memory only")
        else:
            self.loaded.transactions[transactional_id] = transaction
