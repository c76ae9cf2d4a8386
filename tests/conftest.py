"""What every test may ask for."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from structlog.dev import ConsoleRenderer, plain_traceback

from tests.support.draws import cases, is_fresh
from tests.support.processes.forked_worker import ForkedWorker
from tests.support.workers import Scheduling, compiled_by_one_worker, divide

# The same draws in every run (tests/support/draws.py), and nothing fails for being slow: a machine
# that has other things to do is no fault of what is tested.
settings.register_profile(
    "varve",
    settings.get_profile("default"),
    max_examples=cases(few=20, many=100),
    derandomize=not is_fresh(),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("varve")
if not is_fresh():
    # Hypothesis also draws constants that it finds in the modules imported so far. Which ones
    # these are depends on the tests that the process ran before.
    providers.is_local_module_file = lambda path: False

# Where `rich` is installed, as with our development tools, structlog draws each exception with the
# code and the variables of all frames: 0.6 s of processor time for an exception.
ConsoleRenderer.get_active().exception_formatter = plain_traceback

# A shell starts background commands without SIGINT. Tests send it to the programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN_FOLDER = Path(__file__).with_name("golden")
LAST_MODULE = Path(__file__).with_name("test_workers.py")  # of all modules of tests, by name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the text tables in tests/golden anew, to be reviewed line by line",
    )


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are CPUs, because many tests wait for a process or a clock; at most 4."""
    return min(4, (os.cpu_count() or 1) + 2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, bool | None, bool | None]:
    """Collect no garbage until all tests are known, and then never look at modules and tests again.

    Nothing of that is garbage: half of the time would be spent on collections.
    """
    gc.disable()
    try:
        if not hasattr(session.config, "workerinput"):
            return (yield)
        with compiled_by_one_worker(LAST_MODULE):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    divide(config, items)


class Golden:
    """Compares a text with a reviewed file of tests/golden, or rewrites the file."""

    def __init__(self, *, rewrite: bool) -> None:
        self._rewrite = rewrite

    def check(self, name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if self._rewrite:
            path.write_text(text)
        assert path.exists(), f"{name} is missing: run with --rewrite and review it"
        assert text == path.read_text(), f"{name} differs: run with --rewrite and review the diff"


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the cleaner's workers from this process; tests/cleaner/workers starts them for real."""
    from cleaner.engine.kernels import warm_up

    warm_up()
    monkeypatch.setattr("cleaner.workers.process._start", ForkedWorker)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(rewrite=request.config.getoption("--rewrite"))
