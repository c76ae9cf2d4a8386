"""The division of the tests among the workers of pytest-xdist."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, get_cache_dir

from tests.support.workers import Scheduling, compiled_by_one_worker, divide

pytestmark = pytest.mark.xdist_group("division of tests")


def test_a_group_is_named_where_the_scheduler_looks_for_it(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the id of the test: another place is not an error to xdist, which then has no groups."""
    if not hasattr(request.config, "workerinput"):
        monkeypatch.setattr(request.config, "workerinput", {}, raising=False)
        monkeypatch.setattr(request.node, "_id", request.node.id)  # restored
        divide(request.config, [request.node])
    assert request.node.nodeid.endswith("@division of tests")


@dataclass(eq=False)
class Node:
    """A worker, as the scheduler sees it."""

    gateway: Any = field(default_factory=lambda: SimpleNamespace(id="worker"))
    queue: list[int] = field(default_factory=list)
    shutting_down: bool = False

    def send_runtest_some(self, places: list[int]) -> None:
        self.queue += places

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling_of(nodes: list[Node], tests: list[str]) -> Scheduling:
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["popen"] * len(nodes), option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = Scheduling(config, None)
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    return scheduling


TESTS = [f"tests/{name}/test_{name}.py::test_{i}" for name in ("broker", "sim") for i in range(50)]


def test_each_test_runs_once_and_is_kept_until_it_ends() -> None:
    nodes = [Node(), Node()]
    scheduling = scheduling_of(nodes, TESTS)
    ended: list[int] = []
    while any(node.queue for node in nodes):
        for node in nodes:
            if node.queue:
                ended.append(node.queue.pop(0))
                scheduling.mark_test_complete(node, ended[-1])
                kept = [test for unit in scheduling.assigned_work[node].values() for test in unit]
                assert kept == [TESTS[place] for place in node.queue]
    assert sorted(ended) == list(range(len(TESTS)))
    assert scheduling.tests_finished


def test_the_tests_of_a_worker_that_died_go_to_another() -> None:
    nodes = [Node(), Node()]
    scheduling = scheduling_of(nodes, TESTS)
    dead, other = nodes
    ended = [dead.queue.pop(0)]
    scheduling.mark_test_complete(dead, *ended)
    assert scheduling.remove_node(dead) == TESTS[dead.queue[0]]
    while other.queue:
        ended.append(other.queue.pop(0))
        scheduling.mark_test_complete(other, ended[-1])
    assert sorted(ended) == list(range(len(TESTS)))


def test_workers_collect_at_once_when_one_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    last = tmp_path / "test_last.py"
    last.touch()
    compiled = get_cache_dir(last) / f"test_last{PYC_TAIL}"
    seen: list[bool] = []

    def collect() -> None:
        with compiled_by_one_worker(last):
            seen.append(compiled.exists())

    others = [Thread(target=collect) for _ in range(2)]
    with compiled_by_one_worker(last):
        for other in others:
            other.start()
        others[0].join(0.1)
        assert not seen
        compiled.parent.mkdir()
        compiled.touch()
    for other in others:
        other.join()
    assert seen == [True, True]
