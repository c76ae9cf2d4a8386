"""Every test may read the lines about its connections: none is suppressed for those of others."""

import pytest
import structlog

from broker.logging import RateLimitedLogger
from broker.network import connection


@pytest.fixture(autouse=True)
def fresh_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = RateLimitedLogger(structlog.get_logger("broker.connection"))
    monkeypatch.setattr(connection, "logger", limited)
