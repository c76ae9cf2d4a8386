"""The quotas of clients: which one applies to a client, and how far the client is above it.

Rules. The most specific entry with the key decides (Kafka's order, `_precedence`). Clients to which
an entry with a user applies share one rate per user, or per user and client id if the entry names
one; the others share one per client id. A change of a quota keeps the measured rates. No answer is
delayed: handlers mute the connection after it (KIP-219, RequestContext.throttle). This module does
not know connections.

Rates are kept in memory. Only idle rates are dropped, so nobody gets a new burst by inventing
client ids. For each new client, the oldest few rates are looked at: idle ones are dropped, busy
ones become the newest. When the client ids of a user have the user's share of METERS_MAX
(broker/quotas/shares.py), all further client ids share one rate, until some of the user's rates are
dropped. If a connection still uses a dropped rate, its next request puts the rate back.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from broker.quotas.connection_rates import ConnectionRates
from broker.quotas.entities import (
    CLIENT_ID,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    USER,
    make_entity,
)
from broker.quotas.rates import SAMPLE_SECONDS, SAMPLES, TokenBucket, WindowedRate
from broker.quotas.shares import Shares
from storage.directory.security_entries import QuotaEntity, QuotaEntries

# Rates: those of 10,000 clients that have all four quotas. About 1 KB each.
METERS_MAX: Final = 40_000
CLIENTS_MAX: Final = 10_000  # in memory with their meters; others are looked up again
# Twice as many as a new client adds, so the number of meters falls while the oldest are idle.
SWEPT_AT_ONCE: Final = 8
# An entity with a quota of its own has a shorter name. Client ids that begin alike share a rate.
CLIENT_ID_CHARS_MAX: Final = 1_000
THROTTLED_ENTITIES_MAX: Final = 100  # with time series of their own; the others share one
OTHER: Final = "(other)"
# A client pauses for a window at most because of its request time: the next request measures again.
REQUEST_THROTTLE_SECONDS_MAX: Final = SAMPLE_SECONDS
THROTTLE_MS_MAX: Final = 2**31 - 1
_PERCENT_PER_NANOSECOND: Final = 100 / 1e9


class QuotaType(StrEnum):
    """What a quota limits; the names are those of Kafka's metrics."""

    PRODUCE = "Produce"
    FETCH = "Fetch"
    REQUEST = "Request"
    CONTROLLER_MUTATION = "ControllerMutation"


_KEYS: Final[Mapping[QuotaType, str]] = {
    QuotaType.PRODUCE: PRODUCER_BYTE_RATE,
    QuotaType.FETCH: CONSUMER_BYTE_RATE,
    QuotaType.REQUEST: REQUEST_PERCENTAGE,
    QuotaType.CONTROLLER_MUTATION: CONTROLLER_MUTATION_RATE,
}


class ThrottleKey(NamedTuple):
    """The labels of throttle metrics. An empty text means that the quota has no such part."""

    type: str
    user: str
    client_id: str


@dataclass(slots=True)
class ThrottleCount:
    """How often, and for how long in sum, responses were throttled."""

    responses: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Meter:
    """The measured use of one entity, and its limit."""

    key: ThrottleKey
    limit: float
    use: WindowedRate | TokenBucket
    user: str | None  # who chose the client id; None if the meter counts for no user's share
    is_dropped: bool = False

    def is_idle(self, now: float) -> bool:
        """Return whether dropping the meter changes nothing."""
        if isinstance(self.use, TokenBucket):
            return self.use.is_idle(self.limit, now)
        return self.use.is_idle(now)


@dataclass(frozen=True, slots=True)
class ClientMeters:
    """The meters that a client's requests count for; None where it has no quota."""

    produce: Meter | None
    fetch: Meter | None
    request: Meter | None
    mutation: Meter | None


class ClientQuotas:
    """The quotas in effect, and the rates of the clients that they limit."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns a monotonic time in seconds."""
        self.enforced = False  # any quota of users or client ids exists
        self.connections = ConnectionRates(now)
        self.throttles: dict[ThrottleKey, ThrottleCount] = {}
        self._now = now
        self._entries: QuotaEntries = {}
        self._meters = OrderedDict[ThrottleKey, Meter]()
        self._shares = Shares(METERS_MAX)
        # Of the present entries, oldest first.
        self._clients = OrderedDict[tuple[str, str], ClientMeters]()

    @property
    def entries(self) -> QuotaEntries:
        """Return the quotas by entity."""
        return self._entries

    def update(self, entries: QuotaEntries) -> None:
        """Put new quotas into effect."""
        self._entries = entries
        self._clients.clear()
        self.connections.update(entries)
        self.enforced = any(
            kind in (USER, CLIENT_ID)
            for entity, values in entries.items()
            if values
            for kind, _ in entity
        )

    def meters(self, user: str, client_id: str) -> ClientMeters:
        """Return the meters of a client."""
        if len(client_id) > CLIENT_ID_CHARS_MAX:
            client_id = client_id[:CLIENT_ID_CHARS_MAX]
        client = (user, client_id)
        meters = self._clients.get(client)
        if meters is None:
            meters = self._find_meters(user, client_id)
        return meters

    # Each returns how long the client must pause, in ms, for its response.

    def charge_produce(self, meters: ClientMeters, request_bytes: int) -> int:
        """Count the bytes of a produce request."""
        meter = meters.produce
        if meter is None:
            return 0
        now = self._now()
        self._rate(meter).record(request_bytes, now)
        return self._throttle_ms(meter, self._rate(meter).throttle_seconds(meter.limit, now))

    def charge_fetch(
        self, meters: ClientMeters, record_bytes: int, *, is_sent: bool = False
    ) -> int:
        """Count the bytes of a fetch response, unless it has to be sent without records.

        `is_sent`: the records are sent anyway.
        """
        meter = meters.fetch
        if meter is None:
            return 0
        now, rate = self._now(), self._rate(meter)
        rate.record(record_bytes, now)
        throttle_ms = self._throttle_ms(meter, rate.throttle_seconds(meter.limit, now))
        if throttle_ms and not is_sent:
            rate.record(-record_bytes, now)
        return throttle_ms

    def return_fetch(self, meters: ClientMeters, record_bytes: int) -> None:
        """Take back the bytes of a response that has to be sent without records after all."""
        if meters.fetch is not None:
            self._rate(meters.fetch).record(-record_bytes, self._now())

    def fetch_bytes_max(self, meters: ClientMeters) -> int | None:
        """Return how many bytes of records a response may have: those of a whole window."""
        meter = meters.fetch
        return None if meter is None else int(meter.limit * (SAMPLES - 1) * SAMPLE_SECONDS)

    def check_request(self, meters: ClientMeters) -> int:
        """Compare the time that the client's requests took with its quota."""
        meter = meters.request
        if meter is None:
            return 0
        seconds = self._rate(meter).throttle_seconds(meter.limit, self._now())
        return self._throttle_ms(meter, min(seconds, REQUEST_THROTTLE_SECONDS_MAX))

    def charge_request(self, meters: ClientMeters, nanoseconds: int) -> None:
        """Count the time that a request blocked the event loop, in percent of a second."""
        if meters.request is not None:
            self._rate(meters.request).record(nanoseconds * _PERCENT_PER_NANOSECOND, self._now())

    def charge_thread(self, meters: ClientMeters | None, nanoseconds: int) -> None:
        """Count the processor time of a thread that works for a request."""
        if meters is not None:
            self.charge_request(meters, nanoseconds)

    def check_mutation(self, meters: ClientMeters) -> int:
        """Compare the partitions that the client changed with its quota."""
        meter = meters.mutation
        if meter is None:
            return 0
        return self._throttle_ms(
            meter, self._bucket(meter).throttle_seconds(meter.limit, self._now())
        )

    def is_mutation_exceeded(self, meters: ClientMeters) -> bool:
        """Return whether the client must wait until it may change topics again."""
        meter = meters.mutation
        return (
            meter is not None and self._bucket(meter).throttle_seconds(meter.limit, self._now()) > 0
        )

    def charge_mutation(self, meters: ClientMeters, partitions: int) -> None:
        """Count partitions that a client creates or deletes."""
        meter = meters.mutation
        if meter is not None:
            self._bucket(meter).record(partitions, meter.limit, self._now())

    def _throttle_ms(self, meter: Meter, seconds: float) -> int:
        # A tiny quota makes the time infinite, which cannot be rounded.
        throttle_ms = round(min(seconds * 1000, THROTTLE_MS_MAX))
        if throttle_ms:
            key = meter.key
            if key not in self.throttles and len(self.throttles) >= THROTTLED_ENTITIES_MAX:
                key = ThrottleKey(key.type, OTHER, OTHER)
            count = self.throttles.setdefault(key, ThrottleCount())
            count.responses += 1
            count.seconds += throttle_ms / 1000
        return throttle_ms

    def _find_meters(self, user: str, client_id: str) -> ClientMeters:
        self._sweep()
        precedence = _precedence(user, client_id)
        by_type = [self._find_meter(quota_type, user, precedence) for quota_type in QuotaType]
        meters = ClientMeters(*by_type)
        if not any(meter is not None and meter.key.client_id == OTHER for meter in by_type):
            if len(self._clients) >= CLIENTS_MAX:
                self._clients.popitem(last=False)
            self._clients[user, client_id] = meters
        return meters

    def _find_meter(
        self,
        quota_type: QuotaType,
        user: str,
        precedence: Sequence[tuple[QuotaEntity, str, str]],
    ) -> Meter | None:
        for entity, shared_user, shared_client_id in precedence:
            limit = self._entries.get(entity, {}).get(_KEYS[quota_type])
            if limit is not None:
                key = ThrottleKey(quota_type.value, shared_user, shared_client_id)
                is_invented = (CLIENT_ID, None) in entity
                meter = self._meters.get(key) or self._add_meter(key, limit, user, is_invented)
                meter.limit = limit
                return meter
        return None

    def _add_meter(self, key: ThrottleKey, limit: float, user: str, is_invented: bool) -> Meter:
        if is_invented and not self._shares.admits(user, len(self._meters)):
            key, is_invented = ThrottleKey(key.type, user, OTHER), False
            if key in self._meters:
                return self._meters[key]
        is_mutation = key.type == QuotaType.CONTROLLER_MUTATION
        use = TokenBucket() if is_mutation else WindowedRate()
        meter = Meter(key, limit, use, user if is_invented else None)
        self._keep(meter)
        return meter

    def _keep(self, meter: Meter) -> None:
        meter.is_dropped = False
        self._meters[meter.key] = meter
        self._shares.add(meter.key, meter.user)

    def _sweep(self) -> None:
        """Drop the oldest meters if they are idle."""
        now = self._now()
        for _ in range(min(SWEPT_AT_ONCE, len(self._meters))):
            key, meter = next(iter(self._meters.items()))
            if meter.is_idle(now):
                meter.is_dropped = True
                del self._meters[key]
                self._shares.remove(key)
            else:
                self._meters.move_to_end(key)

    def _present(self, meter: Meter) -> Meter:
        """Return the meter that counts for the key of `meter`; put a dropped one back if needed."""
        if meter.is_dropped:
            present = self._meters.get(meter.key)
            if present is not None:
                return present
            self._keep(meter)
        return meter

    def _rate(self, meter: Meter) -> WindowedRate:
        use = self._present(meter).use
        assert isinstance(use, WindowedRate), meter.key
        return use

    def _bucket(self, meter: Meter) -> TokenBucket:
        use = self._present(meter).use
        assert isinstance(use, TokenBucket), meter.key
        return use


def _precedence(user: str, client_id: str) -> tuple[tuple[QuotaEntity, str, str], ...]:
    """Return the entities that may have a client's quota, and the user and client id it shares."""
    return (
        (make_entity({USER: user, CLIENT_ID: client_id}), user, client_id),
        (make_entity({USER: user, CLIENT_ID: None}), user, client_id),
        (make_entity({USER: user}), user, ""),
        (make_entity({USER: None, CLIENT_ID: client_id}), user, client_id),
        (make_entity({USER: None, CLIENT_ID: None}), user, client_id),
        (make_entity({USER: None}), user, ""),
        (make_entity({CLIENT_ID: client_id}), "", client_id),
        (make_entity({CLIENT_ID: None}), "", client_id),
    )
