"""Windowed rates and token buckets."""

import pytest

from broker.quotas.client_quotas import THROTTLE_MS_MAX, ClientQuotas
from broker.quotas.entities import (
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    USER,
    make_entity,
)
from broker.quotas.rates import TokenBucket, WindowedRate


def test_a_burst_below_ten_seconds_of_the_limit_is_not_throttled() -> None:
    rate = WindowedRate()
    rate.record(1000, now=5.0)
    assert rate.throttle_seconds(100, now=5.0) == 0
    rate.record(1, now=5.0)
    assert rate.throttle_seconds(100, now=5.0) == pytest.approx(0.01)


def test_after_the_throttle_time_the_rate_is_back_at_the_limit() -> None:
    rate = WindowedRate()
    for second in range(10):
        rate.record(300, now=float(second))
    pause = rate.throttle_seconds(200, now=9.0)
    assert pause == pytest.approx(5.0)
    assert rate.throttle_seconds(200, now=9.0 + pause) == 0


def test_samples_leave_the_window_after_eleven_seconds() -> None:
    rate = WindowedRate()
    rate.record(5000, now=0.0)
    assert rate.throttle_seconds(100, now=10.9) > 0
    assert rate.throttle_seconds(100, now=11.0) == 0
    assert rate.is_idle(now=11.0)


def test_a_bucket_admits_a_burst_and_refills_at_the_rate() -> None:
    bucket = TokenBucket()
    bucket.record(11, limit=1.0, now=0.0)
    assert bucket.throttle_seconds(1.0, now=0.0) == 0
    bucket.record(4, limit=1.0, now=0.0)
    assert bucket.throttle_seconds(1.0, now=0.0) == 4
    assert bucket.throttle_seconds(1.0, now=3.0) == 1
    assert bucket.throttle_seconds(1.0, now=4.0) == 0
    assert not bucket.is_idle(1.0, now=14.0)
    assert bucket.is_idle(1.0, now=15.0)


def test_a_tiny_quota_pauses_for_the_longest_time_there_is() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    rates = {PRODUCER_BYTE_RATE: 5e-324, CONTROLLER_MUTATION_RATE: 5e-324}
    quotas.update({make_entity({USER: "u"}): rates})
    meters = quotas.meters("u", "c")
    assert quotas.charge_produce(meters, 1) == THROTTLE_MS_MAX
    quotas.charge_mutation(meters, 1)
    assert quotas.check_mutation(meters) == THROTTLE_MS_MAX
