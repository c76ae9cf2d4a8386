"""Sizes, durations and counts as people write and read them: "64MiB", "7d", "250ms", "2 topics".

Sizes have binary units only (KiB = 1024 bytes): a segment of 64,000,000 bytes is rarely what
someone means by "64MB".
"""

import re

_NUMBER = re.compile(r"([+-]?[0-9]+)\s*([A-Za-z]*)", re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_MS_UNITS = {"": 1, "ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_size(text: str) -> int:
    """Return bytes of "512KiB", "64MiB", "1GiB", "2TiB" or a number. Raises ValueError."""
    return _parse(text, _SIZE_UNITS, "a size such as 67108864 or 64MiB (KiB, MiB, GiB, TiB)")


def parse_duration_ms(text: str) -> int:
    """Return milliseconds of "250ms", "30s", "5min", "12h", "7d" or a number. Raises ValueError."""
    return _parse(text, _MS_UNITS, "milliseconds such as 60000, or with a unit: ms, s, min, h, d")


def format_size(size_bytes: int) -> str:
    """Return the shortest exact form of a size: 67108864 -> "64MiB", 100 -> "100"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def about_size(size_bytes: int) -> str:
    """Return a rounded size with one decimal: "2.2 MiB"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


def about_span(ms: int) -> str:
    """Return a duration for people, in its largest unit with one decimal: "1.5 h"."""
    for unit_ms, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= unit_ms:
            return f"{ms / unit_ms:.1f} {unit}"
    return f"{max(0, ms)} ms"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: "1 topic", "2,000 topics", "no topics"."""
    return f"{f'{number:,}' if number else 'no'} {noun}{'' if number == 1 else ending}"


def _parse(text: str, units: dict[str, int], requested: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    # Nineteen digits hold every signed 64-bit number; more would only cost time to convert.
    if match is None or len(match[1]) > 20 or match[2].lower() not in units:
        raise ValueError(f"expected {requested}, not {text[:40]!r}")
    return int(match[1]) * units[match[2].lower()]
