"""Tables in Delta, by delta-rs: no JVM takes part, and none of Delta's jars.

Rules
- How far a topic has been taken in stands in the table itself, in the commit that took it in: an
  application transaction per partition, whose version is the first offset that is not in it.
- These transactions outlive an overwrite of the table. So one more says of which topic the table is
  the state; those of any other topic no longer count.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import JobError
from pipeline.tables.target import Target

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

NOTES_KEY: Final = "varve"

# Else it says of each commit that a column of bytes gets no statistics.
os.environ.setdefault("RUST_LOG", "error")


def version_id(topic: str, partition: int) -> str:
    """The id of the application transaction that says how far a partition has been taken in."""
    return f"varve:{topic}:{partition}"


STATE_ID: Final = "varve-state"
NO_STATE: Final = 0  # the table is not the state of a topic: it holds all records


def state_number(topic: str) -> int:
    """Return the version of the transaction STATE_ID in a table that is the state of a topic."""
    digest = hashlib.sha256(topic.encode()).digest()
    return 1 + int.from_bytes(digest[:7], "big")


def holds_state(table: "DeltaTable", topic: str) -> bool:
    """Return whether the table may be the state of a topic; tables of older releases may."""
    number = table.transaction_version(STATE_ID)
    return number is None or number == state_number(topic)


def commit_properties(notes: Mapping[str, Any], versions: Mapping[str, int]) -> "CommitProperties":
    """What goes into a commit beside the data."""
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        custom_metadata={NOTES_KEY: json.dumps(dict(notes))},
        app_transactions=[Transaction(name, version) for name, version in versions.items()],
    )


def publish_delta(
    data: Path, place: Target, notes: Mapping[str, Any], versions: Mapping[str, int]
) -> None:
    """Make a folder of Parquet the table, or its new content. Raises JobError."""
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
        for path in data.glob("[._]*"):  # Spark's marks; no part of the table
            path.unlink()
        convert_to_deltalake(str(data), commit_properties=commit)
    except (DeltaError, OSError) as error:
        raise JobError(f"{place.path} is not published: {error}") from error
    if place.path.exists():
        place.path.rmdir()  # it was empty
    data.rename(place.path)
