"""Levels of features: what may change, row by row as Apache Kafka 4.3.0 answered."""

import asyncio
from typing import Any

import pytest

from broker.app import Broker
from broker.features import FeatureError, FeatureUpdate, levels, plan_update
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.protocol.raw_client import RawClient
from tests.support.protocol.requests import advertised_range
from tests.support.storage.memory_env import MemoryEnv

UP, SAFE_DOWN, UNSAFE_DOWN = 1, 2, 3
TYPE = "The controller does not support the given upgrade type."
DOWN = (
    "Can't downgrade the version of this feature without setting the upgrade type to either safe "
    "or unsafe downgrade."
)


@pytest.mark.parametrize(
    ("name", "level", "upgrade_type"),
    [
        ("group.version", 1, UP),
        ("metadata.version", 30, UP),
        ("transaction.version", 1, SAFE_DOWN),
        ("transaction.version", 0, UNSAFE_DOWN),
        ("group.version", 0, SAFE_DOWN),
    ],
)
def test_a_level_may_change(name: str, level: int, upgrade_type: int) -> None:
    stored = plan_update({}, [FeatureUpdate(name, level, upgrade_type)], 1)
    assert levels(stored)[name] == level


@pytest.mark.parametrize(
    ("name", "level", "upgrade_type", "reason"),
    [
        ("metadata.version", 99, UP, "Local controller 1 only supports versions 30-30"),
        ("metadata.version", 20, SAFE_DOWN, "Local controller 1 only supports versions 30-30"),
        ("foo", 1, UP, "Local controller 1 does not support this feature."),
        ("share.version", 1, UP, "Local controller 1 does not support this feature."),
        ("transaction.version", 1, UP, DOWN),
        ("transaction.version", 9, UP, "Local controller 1 only supports versions 0-2"),
        ("group.version", 0, UP, DOWN),
        ("group.version", -1, UP, "A feature version cannot be less than 0."),
        ("group.version", 1, 9, TYPE),
        ("group.version", 1, 0, TYPE),
    ],
)
def test_a_level_may_not_change(name: str, level: int, upgrade_type: int, reason: str) -> None:
    with pytest.raises(FeatureError) as refused:
        plan_update({}, [FeatureUpdate(name, level, upgrade_type)], 1)
    assert str(refused.value) == (
        "The update failed for all features since the following feature had an error: "
        f"Invalid update version {level} for feature {name}. {reason}"
    )


async def ask(broker: Broker, key: ApiKey, body: Any) -> Any:
    def exchange() -> Any:
        with RawClient(broker.addresses[0].port) as client:
            return client.request(key, advertised_range(key).max_version, body)

    return await asyncio.to_thread(exchange)


async def finalized(broker: Broker) -> dict[str, int]:
    request = m.ApiVersionsRequest(client_software_name="t", client_software_version="1")
    answer = await ask(broker, ApiKey.API_VERSIONS, request)
    return {feature.name: feature.max_version_level for feature in answer.finalized_features}


def update(*rows: tuple[str, int, int], check: bool = False) -> Any:
    return m.UpdateFeaturesRequest(
        feature_updates=[
            m.UpdateFeaturesRequestFeatureUpdate(
                feature=name, max_version_level=level, upgrade_type=upgrade_type
            )
            for name, level, upgrade_type in rows
        ],
        validate_only=check,
    )


async def test_levels_are_durable_and_an_update_is_made_whole_or_not_at_all() -> None:
    env = MemoryEnv(seed=5)
    default = {"group.version": 1, "metadata.version": 30, "transaction.version": 2}
    down = ("transaction.version", 1, SAFE_DOWN)
    async with broker_in_memory(env) as broker:
        for body, code in (
            (update(down, check=True), ErrorCode.NONE),
            (update(down, ("foo", 1, UP)), ErrorCode.INVALID_UPDATE_VERSION),
        ):
            answer = await ask(broker, ApiKey.UPDATE_FEATURES, body)
            assert answer.error_code == code
            assert await finalized(broker) == default
        changes = update(down, ("group.version", 0, SAFE_DOWN))
        assert (await ask(broker, ApiKey.UPDATE_FEATURES, changes)).error_code == 0
    async with broker_in_memory(env) as broker:
        assert await finalized(broker) == {"metadata.version": 30, "transaction.version": 1}
        heartbeat = m.ConsumerGroupHeartbeatRequest(group_id="g", member_id="m")
        answer = await ask(broker, ApiKey.CONSUMER_GROUP_HEARTBEAT, heartbeat)
        assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION


async def test_delegation_tokens_are_refused_as_by_a_kafka_without_authentication() -> None:
    async with broker_in_memory(MemoryEnv(seed=6)) as broker:
        answers = [
            await ask(broker, key, body)
            for key, body in (
                (ApiKey.CREATE_DELEGATION_TOKEN, m.CreateDelegationTokenRequest()),
                (ApiKey.RENEW_DELEGATION_TOKEN, m.RenewDelegationTokenRequest(hmac=b"x")),
                (ApiKey.EXPIRE_DELEGATION_TOKEN, m.ExpireDelegationTokenRequest(hmac=b"x")),
                (ApiKey.DESCRIBE_DELEGATION_TOKEN, m.DescribeDelegationTokenRequest()),
            )
        ]
    refused = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    assert [answer.error_code for answer in answers] == [refused] * 4
    created = answers[0]
    assert (created.principal_name, created.expiry_timestamp_ms) == ("ANONYMOUS", -1)
