"""Closing the active segment and beginning the next: both, or neither where there is no room."""

from storage.env import Env
from storage.errors import NoRoomError, is_scarcity
from storage.index import IndexLimits
from storage.log_producers import write_snapshot
from storage.producer_state import ProducerStates
from storage.segment import Segment


def begin_behind(
    old: Segment, env: Env, base_offset: int, limits: IndexLimits, states: ProducerStates
) -> Segment:
    """Make the files of a segment at `base_offset`, write the state there, seal the one before.

    Raises NoRoomError with `old` as it was; a snapshot of the state here is true without a roll,
    too. After an OSError only opening the log anew tells what was done.
    """
    new = Segment.begin(env, old.directory, base_offset, limits)
    try:
        write_snapshot(env, old.directory, base_offset, states)
        old.seal()
    except OSError as error:
        if not is_scarcity(error):
            raise
        new.remove()
        old.cut_back(old.size_bytes)
        raise NoRoomError(error, old.directory) from error
    return new
