"""How many bytes of a log are alive, dead or not yet resolved, from what cleans have learned. Pure.

The three add up to the size of the log. Later records may have superseded more since a clean read a
segment, so live bytes are an upper limit, and dead bytes a lower one.
"""

from typing import NamedTuple

from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.dirty_section import live_segments


class ContentBytes(NamedTuple):
    """The bytes of a log: live, dead and unresolved."""

    live: int  # of the last records of keys, when a clean last read their segments
    dead: int  # of all other records of these segments
    unresolved: int  # of segments that no clean has read, the active one included


def content_bytes(facts: LogFacts, cleaner_state: PartitionCleanerState) -> ContentBytes:
    """Return the bytes of an open log."""
    live = dead = unresolved = 0
    for segment in live_segments(facts):
        live_bytes = cleaner_state.live_bytes_of(segment)
        if live_bytes is None:
            unresolved += segment.size_bytes
        else:
            live += live_bytes
            dead += segment.size_bytes - live_bytes
    return ContentBytes(live, dead, unresolved)
