"""What `varve erase` prints for people. Pure: the API's answers in, lines out."""

from collections.abc import Iterator

from admin.client import Json
from admin.tables import local_time
from config.units import counted

_STATES = {
    "open": "open",
    "complete": "complete: no value of the key is left",
    "cancelled": "cancelled",
    "void": "void",
}
# Why a partition is expected to miss the deadline.
_RISKS = {
    "overdue": "The deadline has passed.",
    "obstacle": "It will miss the deadline unless that ends in time.",
    "rate": "It will miss the deadline at the present rate (cleaner.read_bytes_per_second).",
}


def erasures_lines(answer: Json) -> list[str]:
    """Describe a list of erasures."""
    lines: list[str] = []
    for erasure in answer["erasures"]:
        lines += [*([""] if lines else []), *erasure_lines(erasure)]
    return lines or ["No erasure of this topic or key is known."]


def erasure_lines(erasure: Json) -> list[str]:
    """Describe one erasure: its state, and what each partition waits for or its receipt."""
    head = f"erasure {erasure['id']} of {erasure['topic']}, key digest {erasure['key_digest']}"
    state = _STATES[erasure["state"]]
    # The broker writes a tombstone wherever it finds a value.
    if erasure["state"] == "complete" and not any(map(_had_value, erasure["partitions"])):
        state = "complete: no value of this key was found, so nothing was erased"
    if erasure["reason"]:
        state += f": {erasure['reason']}"
    times = f"requested {local_time(erasure['requested_ms'])} by {erasure['requested_by']}, "
    times += f"deadline {local_time(erasure['deadline_ms'])}"
    if erasure["ended_ms"] is not None:
        times += f", ended {local_time(erasure['ended_ms'])}"
    return [head, f"  {state}", f"  {times}", *_partition_lines(erasure)]


def progress_text(erasure: Json) -> str:
    """Return one line about an open erasure: what its first unfinished partition waits for."""
    waiting = (
        f"{erasure['topic']}-{part['partition']}: {part['waits_for']}"
        for part in erasure["partitions"]
        if part["waits_for"] is not None
    )
    return f"erasure {erasure['id']}: {next(waiting, 'requested')}"


def _partition_lines(erasure: Json) -> Iterator[str]:
    for part in erasure["partitions"]:
        name, receipt = f"  {erasure['topic']}-{part['partition']}: ", part["receipt"]
        if receipt is not None:
            yield name + _receipt_text(part)
        elif part["waits_for"] is not None:
            left = ""
            if part["records_left"]:
                files = counted(part["files_left"], "file")
                left = f"{counted(part['records_left'], 'value')} in {files}; "
            yield f"{name}{left}{part['waits_for']}"
            if part["risk"] is not None:
                yield f"    {_RISKS[part['risk']]}{_expected(part)}"


def _had_value(part: Json) -> bool:
    return part["tombstone_offset"] is not None


def _expected(part: Json) -> str:
    expected_ms = part["expected_ms"]
    return "" if expected_ms is None else f" It is expected to be done {local_time(expected_ms)}."


def _receipt_text(part: Json) -> str:
    receipt = part["receipt"]
    found = "is left" if _had_value(part) else "was found"
    text = (
        f"no value {found} below offset {part['end_offset']:,}. "
        f"{counted(receipt['files'], 'file')} searched, {local_time(receipt['at_ms'])}."
    )
    if receipt["tombstones"]:
        text += (
            f" The key itself stays in {counted(receipt['tombstones'], 'tombstone')}, at least "
            f"until {local_time(receipt['tombstones_until_ms'])}; a later clean removes it."
        )
    return text
