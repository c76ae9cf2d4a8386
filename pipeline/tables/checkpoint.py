"""Read the checkpoint of a streaming query, as Spark writes it.

Rules
- Spark writes a file to `offsets` before it reads a batch, and one to `commits` after it. It syncs
  neither, so the last ones may be empty or cut after a power failure.
- The table of a query has the offsets that it reached. So a query needs no checkpoint to continue,
  and every error of a damaged one says so.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pipeline.client.kafka_client import TIMEOUT_SECONDS, EndOffset
from pipeline.errors import JobError

T = TypeVar("T")

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"
METADATA: Final = "metadata"
# Fetching the end of a batch takes at most three requests, each with this time limit.
PLANNING_MS_MAX: Final = 3 * round(1000 * TIMEOUT_SECONDS)


def read_batch_ends(checkpoint: Path, topic: str, batch_id: int) -> dict[int, EndOffset]:
    """Return the end offsets of a micro-batch. Raises JobError."""

    def parse(lines: list[str]) -> dict[int, EndOffset]:
        # Lines: version, settings of the query, offsets of its only source.
        document = json.loads(lines[2])[topic]
        return {int(number): EndOffset.parse(end) for number, end in document.items()}

    return _parsed(checkpoint, f"{OFFSETS}/{batch_id}", f"offsets of {topic}", parse)


def read_planned_ms(checkpoint: Path, batch_id: int) -> int:
    """Return a time before the end offsets of a micro-batch were fetched. Raises JobError."""

    def parse(lines: list[str]) -> int:
        # Spark records the time of the answer.
        return int(json.loads(lines[1])["batchTimestampMs"])

    noted_ms = _parsed(checkpoint, f"{OFFSETS}/{batch_id}", "time of its batch", parse)
    return noted_ms - PLANNING_MS_MAX


def last_ends(checkpoint: Path, topic: str) -> dict[int, EndOffset]:
    """Return the end offsets of the last completed micro-batch, or {}. Raises JobError."""
    done = _batch_ids(checkpoint / COMMITS)
    return read_batch_ends(checkpoint, topic, done[-1]) if done else {}


def check_checkpoint(checkpoint: Path, topic: str) -> None:
    """Check the files that Spark reads before a query continues. Raises JobError.

    Spark's own errors name neither all of them nor what to do.
    """
    planned, done = _batch_ids(checkpoint / OFFSETS), _batch_ids(checkpoint / COMMITS)
    for batch_id in planned[-2:]:
        read_batch_ends(checkpoint, topic, batch_id)
        read_planned_ms(checkpoint, batch_id)
    for batch_id in done[-1:]:
        read_batch_ends(checkpoint, topic, batch_id)
        _parsed(checkpoint, f"{COMMITS}/{batch_id}", "JSON", lambda lines: json.loads(lines[1]))
    if planned or done or (checkpoint / METADATA).exists():
        _parsed(checkpoint, METADATA, "id", lambda lines: json.loads(lines[0])["id"])


def _batch_ids(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())


def _parsed(checkpoint: Path, name: str, subject: str, parse: Callable[[list[str]], T]) -> T:
    path = checkpoint / name
    try:
        return parse(path.read_text().splitlines())
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise JobError(
            f"{path} has no {subject}: {error!r}. If this is the checkpoint of the table, remove"
            f" {checkpoint}: the query then continues from the offsets in the table"
        ) from error
