"""What the tests of the broker share."""

import sys
from functools import cache

import pytest

import broker.app  # noqa: F401 - loads every module that limits its log lines
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
