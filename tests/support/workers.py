"""How the tests are divided among the worker processes of pytest-xdist.

Tests that share something expensive form a group, and a group stays in one worker: the tests of the
Spark session, of the Spark cluster, of the killed Kafka, of the console's browser, and of each
module with a fixture or a count of its own. All other tests go to the worker that is free: those
of the long folders one by one, short ones a few at a time. Groups begin first, the longest one at
the very start: then no worker is left with a long group at the end. A run without workers keeps the
order of files.
"""

import fcntl
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, get_cache_dir
from _pytest.nodeid import coerce_node_id
from xdist.scheduler import LoadGroupScheduling

SPARK_SESSION: Final = "spark session"
# Fixtures of the whole run that are expensive, with the group of the tests that ask for them.
SHARED: Final = {
    "spark": SPARK_SESSION,
    "cluster": "spark cluster",
    "killed_kafka": "killed kafka",
    "browser": "browser",
}
# Folders whose tests take seconds each, the longest first. They begin before the short ones.
LONG_FOLDERS: Final = (
    "console", "pipeline", "interop", "deploy", "crash", "sim", "compare", "clients", "soak"
)  # fmt: skip

SHORT_TESTS: Final = 8  # of a module, in one unit of work


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a worker a group, one test of a long folder, or several short tests of a module.

    The scheduler of xdist looks at all tests that a worker has ever had when one of them ends, and
    searches the list of all tests for each that it assigns. This one keeps the tests that have not
    ended, and knows their places.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._units: dict[str, str] = {}
        self._short_tests: Counter[str] = Counter()

    def _split_scope(self, nodeid: str) -> str:
        """Return the unit of a test. The scheduler asks first in the order of the tests."""
        if nodeid not in self._units:
            self._units[nodeid] = self._unit_of(nodeid)
        return self._units[nodeid]

    def _unit_of(self, nodeid: str) -> str:
        group = str(super()._split_scope(nodeid))
        if group != nodeid or _folder(nodeid) in LONG_FOLDERS:
            return group
        module = _module(nodeid)
        self._short_tests[module] += 1
        return f"{module} {self._short_tests[module] // SHORT_TESTS}"

    @cached_property
    def _places(self) -> dict[str, int]:
        """The place of each test in the list, which all workers have alike."""
        return {nodeid: place for place, nodeid in enumerate(self.collection)}

    def _assign_work_unit(self, node: Any) -> None:
        unit, tests = self.workqueue.popitem(last=False)
        self.assigned_work[node][unit] = tests
        node.send_runtest_some([self._places[nodeid] for nodeid in tests])

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.collection[item_index]
        unit = self._split_scope(nodeid)
        tests = self.assigned_work[node][unit]
        del tests[nodeid]
        if not tests:
            del self.assigned_work[node][unit]
        self._reschedule(node)


@contextmanager
def compiled_by_one_worker(last_module: Path) -> Iterator[None]:
    """In the block a worker collects tests; in a new checkout, after one has compiled all modules.

    Each worker would compile them for itself, for twice the time that all else of this block takes.
    `last_module` is collected last: then its compiled file says that there are those of all others.
    """
    compiled = get_cache_dir(last_module) / f"{last_module.stem}{PYC_TAIL}"
    if compiled.exists() or sys.dont_write_bytecode:
        yield
        return
    with last_module.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if compiled.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield


def divide(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the group of each test, and put long tests first where workers are used."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        group = _group_of(item)
        if group is not None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
        _append_group(item)
    items.sort(key=_rank)


def _append_group(item: pytest.Item) -> None:
    """Append the group to the id of a test, which is where the scheduler of xdist looks for it.

    pytest-xdist 3.8 assigns `_nodeid`, which pytest 9.2 no longer reads. Without this function
    every test is a group of its own, and each worker starts every broker and Spark session.
    """
    marker = item.get_closest_marker("xdist_group")
    if marker is not None:
        item._id = coerce_node_id(f"{item.nodeid}@{marker.args[0]}")  # type: ignore[attr-defined]


def _group_of(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    for fixture, group in SHARED.items():
        if fixture in fixtures:
            return group
    if any(_is_of_module(definition) for definition in _definitions(item)):
        return _module(item.nodeid)
    return None


def _definitions(item: pytest.Item) -> list[Any]:
    """The definitions of the fixtures that a test asks for."""
    info = getattr(item, "_fixtureinfo", None)
    return [] if info is None else [result[-1] for result in info.name2fixturedefs.values()]


def _is_of_module(definition: Any) -> bool:
    return str(definition.scope) in ("module", "package") and bool(definition.baseid)


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _folder(nodeid: str) -> str:
    return nodeid.split("/")[1] if "/" in nodeid else ""


def _rank(item: pytest.Item) -> tuple[bool, int, bool]:
    marker = item.get_closest_marker("xdist_group")
    name = None if marker is None else marker.args[0]
    folder = _folder(item.nodeid)
    place = LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)
    return name != SPARK_SESSION, place, name is None
