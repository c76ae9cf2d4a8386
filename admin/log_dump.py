"""`varve log dump`: show what a file of a partition contains, without a broker.

It reads segments, indexes, transaction indexes and producer snapshots, of Varve or of Kafka: the
formats are the same. The format modules of storage/ read them; each names its source.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from admin.command import fail
from admin.record_text import record_fields, text_of
from admin.tables import local_time
from config import exit_codes
from config.printable import printable
from config.units import about_size

if TYPE_CHECKING:
    from storage.env import File
    from storage.format.batch import BatchHeader
    from storage.segments.batch_scan import ScannedBatch

Row = dict[str, Any]
CONTROL_NAMES: Final = {0: "abort marker", 1: "commit marker", 2: "leader change"}


@click.command(short_help="Show the batches or entries of files, without a broker.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--records", is_flag=True, help="Show the records of each batch of a .log file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def dump(files: tuple[str, ...], *, records: bool, as_json: bool) -> None:
    """Show what each FILE contains: .log, .index, .timeindex, .txnindex or .snapshot.

    The command only reads the files, so it may run beside the broker; the end of the active segment
    may then be incomplete. It verifies the checksum of each batch. The exit code is 4 if a file is
    damaged.
    """
    is_damaged = False
    for path in files:
        if len(files) > 1 and not as_json:
            click.echo(printable(f"{path}:"))
        is_empty = True
        for row in _rows(path, records=records):
            is_empty = False
            is_damaged |= "damage" in row
            click.echo(json.dumps({"file": path, **row}) if as_json else _line(row))
        if is_empty and not as_json:
            click.echo("empty")
    if is_damaged:
        sys.exit(exit_codes.UNVERIFIED)


def _rows(path: str, *, records: bool) -> Iterator[Row]:
    """Yield what a file contains; ends the process if it cannot be read."""
    from storage.env import RealEnv
    from storage.errors import StorageError
    from storage.format import filenames

    if RealEnv().is_dir(path):
        fail(f"{path} is a directory: name files in it, such as {path}/*.log", exit_codes.USAGE)
    if not RealEnv().exists(path):
        fail(f"cannot read {path}: {os.strerror(errno.ENOENT)}")
    parsed = filenames.parse_file_name(os.path.basename(path))
    if parsed is None or parsed.kind == filenames.KEYS:
        kinds = ", ".join(filenames.FILE_KINDS)
        fail(f"{path} is not named as a file of a partition: {kinds}", exit_codes.USAGE)
    try:
        if parsed.kind == filenames.LOG:
            file = RealEnv().open(path)
            try:
                yield from _batches(file, parsed.base_offset, records=records)
            finally:
                file.close()
            return
        data = RealEnv().read_file(path)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    try:
        yield from _ENTRIES[parsed.kind](data, parsed.base_offset)
    except StorageError as error:
        yield {"damage": str(error)}


def _batches(file: "File", base_offset: int, *, records: bool) -> Iterator[Row]:
    """Yield the batches of a segment, and a row for each range that is not a batch."""
    from storage.errors import CorruptBatchError
    from storage.format.index import RELATIVE_OFFSET_MAX
    from storage.segments.batch_scan import find_batch, scan, verify

    position, end, next_offset = 0, file.size(), base_offset
    offsets_end = base_offset + RELATIVE_OFFSET_MAX + 1
    while position < end:
        try:
            for batch in scan(file, position, end, whole=True):
                verify(batch, file.path)
                yield _batch_row(batch.header, batch.position)
                if records:
                    yield from _record_rows(batch)
                position, next_offset = batch.end_position, batch.header.next_offset
        except CorruptBatchError as error:
            first = min(max(next_offset, base_offset), offsets_end - 1)
            whole = find_batch(file, position + 1, end, range(first, offsets_end))
            yield {"position": position, "end_position": whole, "damage": error.reason}
            position = whole


def _batch_row(header: "BatchHeader", position: int) -> Row:
    from storage.format.compression import CODEC_NAMES

    codec = header.codec
    return {
        "position": position,
        "size_bytes": header.size_bytes,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "compression": CODEC_NAMES[codec] if codec < len(CODEC_NAMES) else str(codec),
        "max_timestamp_ms": header.max_timestamp,
        "delete_horizon_ms": header.base_timestamp if header.has_delete_horizon else None,
        "leader_epoch": header.partition_leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
    }


def _record_rows(batch: "ScannedBatch") -> Iterator[Row]:
    from storage.errors import StorageError
    from storage.format.batch import control_type, iterate_records

    try:
        for record in iterate_records(batch.buffer, batch.header, batch.at):
            row: Row = {"offset": record.offset, "timestamp_ms": record.timestamp}
            if batch.header.is_control:
                kind = control_type(record)
                row["control"] = CONTROL_NAMES.get(kind, f"control record of type {kind}")
            row |= record_fields(record.key, record.value, record.headers)
            yield row
    except StorageError as error:
        yield {"position": batch.position, "end_position": batch.end_position, "damage": str(error)}


def _offset_entries(data: bytes, base_offset: int) -> Iterator[Row]:
    from storage.format.index import OFFSET_ENTRY_BYTES, RELATIVE_OFFSET_MAX, OffsetIndex

    data = _without_preallocation(data, OFFSET_ENTRY_BYTES)
    index = OffsetIndex.from_bytes(data, "", RELATIVE_OFFSET_MAX + 1)
    for offset, position in zip(index.offsets, index.positions, strict=True):
        yield {"offset": base_offset + offset, "position": position}


def _time_entries(data: bytes, base_offset: int) -> Iterator[Row]:
    from storage.format.index import TIME_ENTRY_BYTES, TimeIndex

    index = TimeIndex.from_bytes(_without_preallocation(data, TIME_ENTRY_BYTES), "")
    for timestamp, offset in zip(index.timestamps, index.offsets, strict=True):
        yield {"timestamp_ms": timestamp, "offset": base_offset + offset}


def _without_preallocation(data: bytes, entry_bytes: int) -> bytes:
    """Cut the zeros that Kafka allocates after the entries of an active segment's index."""
    used = len(data.rstrip(b"\0"))
    return data[: -(-used // entry_bytes) * entry_bytes]


def _aborted_transactions(data: bytes, _base_offset: int) -> Iterator[Row]:
    from storage.format.txn_index import decode_entries

    for entry in decode_entries(data):
        yield entry._asdict()


def _producers(data: bytes, _base_offset: int) -> Iterator[Row]:
    from storage.format.producer_state import ProducerStates

    for entry in ProducerStates.from_snapshot(data).producers:
        yield {
            "producer_id": entry.producer_id,
            "producer_epoch": entry.epoch,
            "last_sequence": entry.last_sequence,
            "last_offset": entry.last_offset,
            "timestamp_ms": entry.timestamp_ms,
            "coordinator_epoch": entry.coordinator_epoch,
            "transaction_first_offset": entry.transaction_first_offset,
        }


_ENTRIES: Final = {
    ".index": _offset_entries,
    ".timeindex": _time_entries,
    ".txnindex": _aborted_transactions,
    ".snapshot": _producers,
}


def _line(row: Row) -> str:
    """Return a row as a line that is safe on a terminal."""
    if "damage" in row:
        if "position" not in row:
            return printable(f"DAMAGED: {row['damage']}")
        size = about_size(row["end_position"] - row["position"])
        return printable(f"DAMAGED at byte {row['position']}, {size}: {row['damage']}")
    if "size_bytes" in row:
        return _batch_line(row)
    if "key" in row or "key_base64" in row:
        content = row.get("control") or f"{text_of(row, 'key')}\t{text_of(row, 'value')}"
        return f"  {row['offset']}\t{_time(row['timestamp_ms'])}\t{content}"
    return "  ".join(
        f"{name.removesuffix('_ms')}={_time(value) if name.endswith('_ms') else value}"
        for name, value in row.items()
    )


def _batch_line(row: Row) -> str:
    parts = [
        f"offsets {row['base_offset']} to {row['last_offset']}",
        f"{row['records']} {'record' if row['records'] == 1 else 'records'}",
        f"{about_size(row['size_bytes'])} at byte {row['position']}",
        _time(row["max_timestamp_ms"]),
    ]
    if row["compression"] != "none":
        parts.append(row["compression"])
    if row["producer_id"] >= 0:
        parts.append(
            f"producer {row['producer_id']} epoch {row['producer_epoch']} "
            f"sequence {row['base_sequence']}"
        )
    if row["is_control"]:
        parts.append("control")
    elif row["is_transactional"]:
        parts.append("transactional")
    if row["delete_horizon_ms"] is not None:
        parts.append(f"tombstones kept until {_time(row['delete_horizon_ms'])}")
    return ", ".join(parts)


def _time(at_ms: int) -> str:
    return local_time(at_ms) if at_ms >= 0 else "no time"
