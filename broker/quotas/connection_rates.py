"""The rates at which addresses, and all clients together, may connect (KIP-612). Pure.

A connection above the rate of its address is closed after the throttle time, so that its client
does not come back at once; neither rate counts it. A connection above the rate of the broker has to
wait, and both rates count it.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from broker.quotas.entities import CONNECTION_CREATION_RATE, IP, parse_ip
from broker.quotas.rates import SAMPLE_SECONDS, WindowedRate
from storage.directory.security_entries import QuotaEntries

ADDRESSES_MAX: Final = 10_000  # with a rate; beyond that, those without connections are dropped
THROTTLE_SECONDS_MAX: Final = SAMPLE_SECONDS


class Admission(NamedTuple):
    """What happens to a new connection."""

    is_refused: bool  # close it after `delay_seconds`, instead of serving it then
    delay_seconds: float


ADMITTED: Final = Admission(False, 0.0)


class ConnectionRates:
    """The rates of new connections, and their limits."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns a monotonic time in seconds."""
        self.limit: float | None = None  # of all connections together, in connections per second
        self.delayed = 0  # connections that had to wait
        self.refused = 0
        self._now = now
        self._limits: dict[str | None, float] = {}  # by address; None: of every other address
        self._rates: dict[str, WindowedRate] = {}
        self._all = WindowedRate()

    def update(self, entries: QuotaEntries) -> None:
        """Put new quotas into effect; other entities than addresses are ignored."""
        self._limits = {
            None if name is None else parse_ip(name): values[CONNECTION_CREATION_RATE]
            for ((kind, name), *_), values in entries.items()
            if kind == IP and CONNECTION_CREATION_RATE in values
        }

    def admit(self, host: str) -> Admission:
        """Count a new connection and return what happens to it."""
        if not self._limits and self.limit is None:
            return ADMITTED
        now = self._now()
        if self._limits:
            address = parse_ip(host.partition("%")[0]) or host
            limit = self._limits.get(address, self._limits.get(None))
            if limit is not None:
                rate = self._rate_of(address, now)
                rate.record(1, now)
                delay = rate.throttle_seconds(limit, now)
                if delay > 0:
                    rate.record(-1, now)
                    self.refused += 1
                    return Admission(True, min(delay, THROTTLE_SECONDS_MAX))
        if self.limit is None:
            return ADMITTED
        self._all.record(1, now)
        delay = self._all.throttle_seconds(self.limit, now)
        self.delayed += delay > 0
        return Admission(False, min(delay, THROTTLE_SECONDS_MAX))

    def _rate_of(self, address: str, now: float) -> WindowedRate:
        rate = self._rates.get(address)
        if rate is None:
            if len(self._rates) >= ADDRESSES_MAX:
                busy = {other: rate for other, rate in self._rates.items() if not rate.is_idle(now)}
                excess = len(busy) - ADDRESSES_MAX // 2
                self._rates = dict(list(busy.items())[max(excess, 0) :])
            rate = self._rates[address] = WindowedRate()
        return rate
