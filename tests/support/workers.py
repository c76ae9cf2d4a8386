"""How the tests are divided among the worker processes of pytest-xdist.

Tests that share something expensive form a group, and a group stays in one worker: the tests of the
Spark session, of the Spark cluster, of the killed Kafka, of the console's browser, and of each
module with a fixture or a count of its own. All other tests go to the worker that is free. Groups
begin first, the longest one at the very start: then no worker is left with a long group at the end.
A run without workers keeps the order of files.
"""

from typing import Any, Final

import pytest
from _pytest.nodeid import coerce_node_id

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
        return _module(item)
    return None


def _definitions(item: pytest.Item) -> list[Any]:
    """The definitions of the fixtures that a test asks for."""
    info = getattr(item, "_fixtureinfo", None)
    return [] if info is None else [result[-1] for result in info.name2fixturedefs.values()]


def _is_of_module(definition: Any) -> bool:
    return str(definition.scope) in ("module", "package") and bool(definition.baseid)


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _rank(item: pytest.Item) -> tuple[bool, int, bool]:
    marker = item.get_closest_marker("xdist_group")
    name = None if marker is None else marker.args[0]
    folder = item.nodeid.split("/")[1] if "/" in item.nodeid else ""
    place = LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS)
    return name != SPARK_SESSION, place, name is None
