"""Linking segments between two swaps: what is tried again, and what an attempt leaves behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from broker.cleaning.segment_links import ATTEMPTS, SegmentsReplacedError, link_between_swaps
from storage.model import TopicPartition

PARTITION: Any = SimpleNamespace(partition=TopicPartition("orders", 0))


@dataclass
class Links:
    """A log with swaps, and what the attempts to link its segments do."""

    failures: list[BaseException] = field(default_factory=list)  # of the attempts, in order
    swaps_meanwhile: int = 0  # attempts during which a swap begins
    is_over: bool = True  # the running swap ends in time
    loads_left: int = 0  # calls that have something to load
    planned: int | None = 1
    events: list[str] = field(default_factory=list)

    async def load_job_inputs(self, _: object) -> bool:
        self.events.append("load")
        self.loads_left -= 1
        return self.loads_left >= 0

    async def wait_for_swap(self, _: object) -> bool:
        self.events.append("wait")
        return self.is_over

    @contextmanager
    def stable_segments(self, _: object) -> Iterator[None]:
        yield
        if self.swaps_meanwhile:
            self.swaps_meanwhile -= 1
            raise SegmentsReplacedError("replaced")

    @asynccontextmanager
    async def attempt(self, is_last: bool) -> AsyncIterator[None]:
        self.events.append("last attempt" if is_last else "attempt")
        yield

    def begin(self) -> int | None:
        self.events.append("begin")
        return self.planned

    async def link(self, _: int) -> None:
        self.events.append("link")
        if self.failures:
            raise self.failures.pop(0)

    async def discard(self, _: int) -> None:
        self.events.append("discard")

    def run(self) -> int | None:
        return asyncio.run(
            link_between_swaps(
                self,
                PARTITION,
                attempt=self.attempt,
                begin=self.begin,
                link=self.link,
                discard=self.discard,
            )
        )


DONE = ["attempt", "wait", "load", "begin", "link"]


def test_segments_are_planned_when_no_swap_runs_and_linked_in_the_same_turn() -> None:
    links = Links()
    assert links.run() == 1
    assert links.events == DONE


def test_nothing_is_linked_without_a_plan() -> None:
    links = Links(planned=None)
    assert links.run() is None
    assert links.events == DONE[:-1]


@pytest.mark.parametrize(
    "links", [Links(swaps_meanwhile=1), Links(failures=[FileNotFoundError("expired")])]
)
def test_a_swap_and_a_removed_segment_make_a_new_plan_and_leave_no_links(links: Links) -> None:
    assert links.run() == 1
    assert links.events == [*DONE, "discard", *DONE]


def test_a_log_that_changes_all_the_time_is_given_up_after_the_last_attempt() -> None:
    links = Links(swaps_meanwhile=ATTEMPTS)
    with pytest.raises(SegmentsReplacedError):
        links.run()
    failed = [*DONE[1:], "discard"]
    expected = ["attempt", *failed] * (ATTEMPTS - 1) + ["last attempt", *failed]
    assert links.events == expected


@pytest.mark.parametrize("failure", [PermissionError("no"), asyncio.CancelledError()])
def test_any_other_failure_ends_it_and_leaves_no_links(failure: BaseException) -> None:
    links = Links(failures=[failure])
    with pytest.raises(type(failure)):
        links.run()
    assert links.events == [*DONE, "discard"]


def test_a_swap_that_does_not_end_is_not_waited_for_again() -> None:
    links = Links(is_over=False)
    with pytest.raises(SegmentsReplacedError, match="orders-0: try again"):
        links.run()
    assert links.events == DONE[:2]


@pytest.mark.parametrize("loads", [1, 2, 100])
def test_inputs_that_were_loaded_are_followed_by_another_look_at_swaps(loads: int) -> None:
    """A swap may begin meanwhile; inputs that cannot be read are given up."""
    links = Links(loads_left=loads)
    assert links.run() == 1
    rounds = ["wait", "load"] * min(loads + 1, ATTEMPTS)
    assert links.events == ["attempt", *rounds, *(["wait"] if loads >= ATTEMPTS else []), *DONE[3:]]
