"""The rates of clients that choose many client ids: bounded, and none is forgotten."""

import pytest

from broker.quotas import client_quotas
from broker.quotas.client_quotas import ClientQuotas, Meter
from broker.quotas.entities import make_entity

EVERY_CLIENT = make_entity({"user": None, "client-id": None})


def throttle_ms(quotas: ClientQuotas, user: str, client_id: str = "app") -> int:
    return quotas.charge_produce(quotas.meters(user, client_id), 1)


def invent_clients(quotas: ClientQuotas, user: str, count: int) -> None:
    for number in range(count):
        quotas.charge_request(quotas.meters(user, f"invented-{number}"), 20_000)


def test_a_user_keeps_its_rate_however_many_client_ids_it_invents() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update(
        {
            make_entity({"user": "eve"}): {"producer_byte_rate": 100.0},
            EVERY_CLIENT: {"request_percentage": 1_000.0},
        }
    )
    assert quotas.charge_produce(quotas.meters("eve", "app"), 5_000) == 40_000
    invent_clients(quotas, "eve", 11_000)
    assert throttle_ms(quotas, "eve") >= 40_000
    assert throttle_ms(quotas, "eve", "another") >= 40_000


def test_invented_client_ids_leave_the_rates_of_other_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_quotas, "METERS_MAX", 1_000)
    monkeypatch.setattr(client_quotas, "CLIENTS_MAX", 250)
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({EVERY_CLIENT: {"producer_byte_rate": 100.0, "request_percentage": 1_000.0}})
    assert quotas.charge_produce(quotas.meters("victim", "app"), 5_000) == 40_000
    for user in ("eve", "mallory"):
        invent_clients(quotas, user, 1_000)
    assert throttle_ms(quotas, "victim") >= 40_000
    assert throttle_ms(quotas, "victim", "new") == 0
    assert throttle_ms(quotas, "new") == 0
    assert len(quotas._meters) <= 1_000


def test_a_new_client_looks_at_few_rates_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    is_idle = Meter.is_idle

    def count_looks(meter: Meter, now: float) -> bool:
        nonlocal looks
        looks += 1
        return is_idle(meter, now)

    monkeypatch.setattr(Meter, "is_idle", count_looks)
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({EVERY_CLIENT: {"producer_byte_rate": 100.0}})
    most = 0
    for number in range(11_000):
        looks = 0
        throttle_ms(quotas, "eve", f"{number}")
        most = max(most, looks)
    assert most <= client_quotas.SWEPT_AT_ONCE


def test_further_client_ids_share_a_rate_until_others_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_quotas, "METERS_MAX", 20)
    now = 0.0
    quotas = ClientQuotas(lambda: now)
    quotas.update({EVERY_CLIENT: {"producer_byte_rate": 100.0}})
    for number in range(10):
        assert quotas.charge_produce(quotas.meters("eve", f"{number}"), 1_000) == 0
    assert quotas.charge_produce(quotas.meters("eve", "a"), 1_000) == 0
    assert quotas.charge_produce(quotas.meters("eve", "b"), 1_000) == 10_000
    assert throttle_ms(quotas, "victim") == 0
    now = 20.0
    for number in range(5):
        quotas.meters("eve", f"sweep-{number}")
    assert quotas.charge_produce(quotas.meters("eve", "a"), 1_000) == 0
    assert quotas.charge_produce(quotas.meters("eve", "b"), 1_000) == 0


def test_a_request_that_began_before_its_rate_was_dropped_counts_for_it() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({EVERY_CLIENT: {"producer_byte_rate": 100.0}})
    early = quotas.meters("u", "app")
    quotas.meters("u", "another")  # drops the idle rate
    assert quotas.charge_produce(early, 5_000) == 40_000
    quotas.update(dict(quotas.entries))
    late = quotas.meters("u", "app")
    assert quotas.charge_produce(late, 100) == 41_000
    assert quotas.charge_produce(early, 100) == 42_000
