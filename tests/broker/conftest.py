"""What the tests of the broker share."""

import sys
from functools import cache
from itertools import count

import pytest

import broker.app  # noqa: F401 - loads every module that limits its log lines
from broker.event_loop import loop_turns
from broker.logging import RateLimitedLogger


@cache
def limited_loggers() -> tuple[RateLimitedLogger, ...]:
    """The loggers of the broker's modules that limit the rate of lines."""
    modules = [module for name, module in sys.modules.items() if name.startswith("broker.")]
    values = [value for module in modules for value in vars(module).values()]
    return tuple(value for value in values if isinstance(value, RateLimitedLogger))


@pytest.fixture(autouse=True)
def full_allowances() -> None:
    """Log lines that earlier tests of this process caused do not count against the limits."""
    for limited in limited_loggers():
        limited._events.clear()
        limited._subjects.clear()
        limited._repeated.clear()


@pytest.fixture
def every_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of work takes as long as a turn may be."""
    moments = count()
    monkeypatch.setattr(
        loop_turns, "perf_counter", lambda: next(moments) * loop_turns.TURN_SECONDS * 2
    )
