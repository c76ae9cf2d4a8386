"""Files written by Apache Kafka 4.3.0 itself, and Kafka as a reader of ours.

tests/golden/kafka_formats was written by `java -cp '.kafka/lib/*' tests/support/java/
KafkaFormats.java write tests/golden/kafka_formats`.
"""

import subprocess
import warnings
from pathlib import Path

import pytest

from storage.format.batch import BatchHeader, Record
from tests.support.peers import kafka
from tests.support.peers.java_programs import java_command

with warnings.catch_warnings():
    # kafka-python reads its schemas with importlib.resources.read_text, which Python deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.record import default_records as kafka_python_records

PyBatch = kafka_python_records.DefaultRecordBatch
PyBuilder = kafka_python_records.DefaultRecordBatchBuilder

GOLDEN = Path(__file__).parents[1] / "golden" / "kafka_formats"
START_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

# The records of every batch-<codec>.bin.
RECORDS = [
    Record(42, START_MS, b"key", b"value", (("name", b"text"), ("", None))),
    Record(43, START_MS - 5, b"tombstone", None),
    Record(44, START_MS + 70_000, None, b"no key"),
    Record(45, START_MS, b"", b""),
    Record(46, START_MS, b"large", b"0123456789" * 3000),
]

# The bytes of one record of a batch of one, each wrong in one way.
MALFORMED = [
    b"",  # no length
    b"\x0c",  # nothing after the length
    b"\x0b\x00\x00\x00\x01\x01\x00",  # negative length
    b"\x0c\x00\x00\x02\x01\x01\x00",  # offset delta beyond the batch
    b"\x0c\x00\x00\x01\x01\x01\x00",  # negative offset delta
    b"\x0c\x00\x00\x00\x03\x01\x00",  # key length -2
    b"\x0c\x00\x00\x00\x02\x01\x00",  # key runs past the record
    b"\x0c\x00\x00\x00\x01\x03\x00",  # value length -2
    b"\x0c\x00\x00\x00\x01\x01\x01",  # header count -1
    b"\x0c\x00\x00\x00\x01\x01\x04",  # headers past the record
    b"\x10\x00\x00\x00\x01\x01\x02\x01\x00",  # null header key
    b"\x0e\x00\x00\x00\x01\x01\x00\x00",  # bytes after the headers
    b"\x0c\x00\x00\x00\x01\x01\x00\x00",  # bytes after the last record
    b"\x80\x80\x80\x80\x80\x00" + bytes(10),  # length of six bytes
    b"\x80\x80\x80\x80\x10" + bytes(10),  # length of more than 32 bits
]


def golden_bytes(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def ask_kafka(mode: str, path: Path) -> str:
    """Run the Java side on a file; skips the test, with the reason, where Kafka is missing."""
    reason = kafka.unavailable()
    if reason is not None:
        pytest.skip(f"no Kafka to compare with: {reason}")
    command = java_command(kafka.LIB, "KafkaFormats", mode, str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def as_kafka_prints(header: BatchHeader, records: list[Record]) -> list[str]:
    """The lines of KafkaFormats `read` for one batch."""
    kind = "LogAppendTime" if header.is_log_append_time else "CreateTime"
    flags = f"{str(header.is_transactional).lower()} {str(header.is_control).lower()}"
    horizon = header.base_timestamp if header.has_delete_horizon else -1
    lines = [
        f"batch {header.base_offset} {header.last_offset} {header.max_timestamp} "
        f"{header.producer_id} {header.producer_epoch} {header.base_sequence} "
        f"{CODECS[header.codec]} {kind} {flags} {header.partition_leader_epoch} {horizon}"
    ]
    for record in records:
        words = [f"record {record.offset} {record.timestamp}", _hex(record.key), _hex(record.value)]
        for key, value in record.headers:
            assert isinstance(key, str)
            words.append(f"{_hex(key.encode())}={_hex(value)}")
        lines.append(" ".join(words))
    return lines


def _hex(data: bytes | None) -> str:
    return "null" if data is None else f"x{data.hex()}"
