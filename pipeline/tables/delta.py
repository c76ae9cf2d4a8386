"""Delta tables, through delta-rs: without a JVM and without Delta's jars.

Rules
- The table's commits store how far it has read a topic: one application transaction per partition,
  whose version is the first offset that is not in the table.
- A second transaction per partition has the leader epoch at that offset, if it is known: a
  truncation of the log begins another epoch.
- These transactions survive an overwrite of the table. One more transaction therefore names the
  topic whose state the table holds; transactions of other topics are ignored. An overwrite by fewer
  partitions sets the end offsets of the others to NO_OFFSETS.
- A further transaction has the topic id, because offsets of a topic say nothing about another one
  that was created later under its name.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from config import exit_codes
from pipeline.engines.spark_session import first_line
from pipeline.errors import JobError
from pipeline.tables.target import Target, created_meanwhile

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

NOTES_KEY: Final = "varve"
_COLOR: Final = re.compile("\x1b\\[[0-9;]*m")  # of a terminal
_CAUSE: Final = "↳ "  # before each cause, on a line of its own

# Without this, each commit warns that binary columns have no statistics.
os.environ.setdefault("RUST_LOG", "error")


def delta_reason(error: Exception) -> str:
    """Return the message of delta-rs in one line: the error and its causes, without a backtrace."""
    lines = [_COLOR.sub("", line).strip() for line in str(error).splitlines()]
    causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
    return ": ".join((first_line(error), *causes))


def version_id(topic: str, partition: int) -> str:
    """Return the id of the application transaction with the end offset of a partition."""
    return f"varve:{topic}:{partition}"


def epoch_id(topic: str, partition: int) -> str:
    """Return the id of the application transaction with the leader epoch at that end offset."""
    return f"varve-epoch:{topic}:{partition}"


UNKNOWN_EPOCH: Final = -1
NO_OFFSETS: Final = -1  # instead of an end offset: the table has nothing of the partition
STATE_ID: Final = "varve-state"
NO_STATE: Final = 0  # the table is not the state of a topic: it holds all records


def state_number(topic: str) -> int:
    """Return the version of the transaction STATE_ID in a table that is the state of a topic."""
    digest = hashlib.sha256(topic.encode()).digest()
    return 1 + int.from_bytes(digest[:7], "big")


def topic_id_transaction(topic: str) -> str:
    """Return the id of the application transaction whose version stands for the topic id."""
    return f"varve-topic-id:{topic}"


def topic_id_number(topic_id: bytes) -> int:
    """Return the version that stands for a topic id; 0 if the id is unknown."""
    return int.from_bytes(topic_id[:7], "big")


def check_topic_id(table: "DeltaTable", topic: str, topic_id: bytes) -> None:
    """Check that a table was made from this topic, as far as it says. Raises JobError (STALE)."""
    number = table.transaction_version(topic_id_transaction(topic))
    if number and any(topic_id) and number != topic_id_number(topic_id):
        raise JobError(
            f"{topic} was deleted and created again after the table was written, so the table has"
            " rows of the deleted topic. Create the table again with --overwrite",
            exit_codes.STALE,
        )


def holds_state(table: "DeltaTable", topic: str) -> bool:
    """Return whether the table may be the state of a topic; tables of older releases may."""
    number = table.transaction_version(STATE_ID)
    return number is None or number == state_number(topic)


def read_end_offset(table: "DeltaTable", topic: str, partition: int) -> int | None:
    """Return the end offset of a partition in a table; None if the table does not have it."""
    version = table.transaction_version(version_id(topic, partition))
    return None if version is None or version == NO_OFFSETS else int(version)


def removed_versions(
    place: Target, topic: str, present: Collection[int], partitions: Collection[int]
) -> dict[str, int]:
    """Return transactions for an overwrite of the table at `place` by the partitions `present`:
    they remove the end offsets of all other partitions.

    `partitions` are those of the topic. The former table may have more of them, if the topic was
    created again. Raises JobError.
    """
    if place.format != "delta" or not place.exists:
        return {}
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    def may_have(number: int) -> bool:
        return number in partitions or read_end_offset(table, topic, number) is not None

    try:
        table = DeltaTable(str(place.path))
        numbers = list(takewhile(may_have, count()))
    except DeltaError as error:
        raise JobError(f"cannot publish {place.path}: {delta_reason(error)}") from error
    return {version_id(topic, n): NO_OFFSETS for n in numbers if n not in present}


def commit_properties(notes: Mapping[str, Any], versions: Mapping[str, int]) -> "CommitProperties":
    """Return the metadata and application transactions of a commit."""
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        custom_metadata={NOTES_KEY: json.dumps(dict(notes))},
        app_transactions=[Transaction(name, version) for name, version in versions.items()],
    )


def publish_delta(
    data: Path, place: Target, notes: Mapping[str, Any], versions: Mapping[str, int]
) -> None:
    """Turn a Parquet directory into the table, or into its new content. Raises JobError."""
    from deltalake import convert_to_deltalake, write_deltalake
    from deltalake.exceptions import DeltaError

    commit = commit_properties(notes, versions)
    try:
        if place.exists:
            import pyarrow.dataset as ds

            result = ds.dataset(str(data), format="parquet")
            write_deltalake(
                str(place.path),
                result.scanner().to_reader(),
                mode="overwrite",
                schema_mode="overwrite",
                commit_properties=commit,
            )
            return
        for path in data.glob("[._]*"):  # Spark's marker files
            path.unlink()
        convert_to_deltalake(str(data), commit_properties=commit)
    except (DeltaError, OSError) as error:
        raise JobError(f"cannot publish {place.path}: {delta_reason(error)}") from error
    try:
        data.rename(place.path)  # replaces an empty directory, but nothing else
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise created_meanwhile(place.path) from error
        raise
