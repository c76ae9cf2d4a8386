"""Faults that the broker once had, planted again: the simulation finds each of them.

This tells a simulation from one that cannot fail. The search begins shortly before a seed that is
known to find the fault; where the broker has changed since, it goes on for as long as it takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from broker.view_making import ViewMaker
from broker.views import Views
from cleaner.host import Undecided
from cleaner.job import CleanJob
from storage import recovery
from storage.batch import BatchHeader
from storage.errors import CorruptBatchError, LogDirectoryError
from storage.log_flush import FlushTask
from storage.segment import Segment
from tests.sim.runs import broken_rule
from tests.sim.script import make_script

SEEDS = 300


def a_view_bounds_no_clean(patch: pytest.MonkeyPatch) -> None:
    """The cleaner removed tombstones that the compaction of a view had not seen."""
    patch.setattr(Views, "limit_of", lambda self, base: (base.log.log_end_offset, Undecided.VIEW))


def an_overlap_is_taken_for_damage(patch: pytest.MonkeyPatch) -> None:
    """Without a swap's journal recovery cut there, and removed all later segments."""
    take = recovery._take

    def cut(loading: Any, segment: Segment, batch: Any, following: int | None) -> Any:
        try:
            return take(loading, segment, batch, following)
        except recovery._OverlapError as error:
            raise CorruptBatchError("belongs elsewhere", batch.position, segment.path) from error

    patch.setattr(recovery, "_take", cut)


def a_missing_folder_fails_its_directory(patch: pytest.MonkeyPatch) -> None:
    """A flush synced the folder of a partition that was just deleted."""

    def run(self: FlushTask) -> None:
        try:
            for file in self.files:
                file.sync()
            if self.with_names:
                self.env.sync_dir(self.directory)
        except OSError as error:
            self.home.fail(f"sync of {self.directory}: {error}")
            raise LogDirectoryError(self.home.path, str(error)) from error

    patch.setattr(FlushTask, "run", run)


def offsets_that_go_back_are_asserted(patch: pytest.MonkeyPatch) -> None:
    """One closed segment stopped the start of the broker."""

    def why_misplaced(self: Segment, header: BatchHeader, position: int, next_offset: int) -> str:
        assert header.base_offset >= next_offset
        return ""

    patch.setattr(Segment, "why_misplaced", why_misplaced)


def leased_work_is_stamped_from_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Its tombstones were published with horizons that had passed."""
    horizon = property(lambda job: job.now_ms + job.delete_retention_ms)
    patch.setattr(CleanJob, "horizon_ms", horizon)


def staging_a_view_holds_the_cleaner(patch: pytest.MonkeyPatch) -> None:
    """Each compaction of a view gave up the clean of its topic."""
    staged = ViewMaker._staged

    async def held(self: ViewMaker, view: Any, *args: Any, **kwargs: Any) -> Any:
        async with self._tools.hold(view.base.partition):
            return await staged(self, view, *args, **kwargs)

    patch.setattr(ViewMaker, "_staged", held)


@dataclass(frozen=True)
class Planted:
    fault: Callable[[pytest.MonkeyPatch], None]
    rules: tuple[str, ...]  # one of these is broken
    has: tuple[str, ...] = ()
    config: tuple[tuple[str, str], ...] = ()
    first: int = 0  # seed


COMPACT = ("cleanup_policy", "compact")
VIEW = ("varve_view", "compacted")
AT_ONCE = ("delete_retention_ms", "0")
PLANTED = [
    Planted(
        a_view_bounds_no_clean,
        ("latest-view",),
        ("view",),
        (COMPACT, VIEW, AT_ONCE),
    ),
    Planted(
        an_overlap_is_taken_for_damage,
        ("acknowledged", "latest-log"),
        ("end in swap",),
        (COMPACT, ("segment_bytes", "1048576")),
        first=12,
    ),
    Planted(a_missing_folder_fails_its_directory, ("directory",), ("replace topic",), first=60),
    Planted(offsets_that_go_back_are_asserted, ("no mistakes",), ("end",), first=10),
    Planted(
        leased_work_is_stamped_from_its_lease, ("tombstone",), ("lease",), (COMPACT,), first=188
    ),
    Planted(staging_a_view_holds_the_cleaner, ("undisturbed",), ("view",), (COMPACT, VIEW)),
]


def seeds_to_find(planted: Planted, seeds: int) -> int | None:
    """How many seeds it took."""
    for seed in range(planted.first, planted.first + seeds):
        script = make_script(seed, has=planted.has, **dict(planted.config))
        error, _ = broken_rule(script)
        if error is not None and error.rule in planted.rules:
            return seed - planted.first + 1
    return None


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault.__name__)
def test_a_planted_fault_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fault(monkeypatch)
    found = seeds_to_find(planted, SEEDS)
    print(f"{planted.fault.__name__}: after {found} seeds")
    assert found is not None
