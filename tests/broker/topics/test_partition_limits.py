"""How many partitions a client may create: at most those that are free, and a share of them."""

from types import SimpleNamespace
from typing import cast

import pytest

from broker.topics.effective_settings import EffectiveSettings
from broker.topics.partition_limits import PartitionLimits
from broker.topics.topics import TopicError
from protocol.errors import ErrorCode


class World:
    """A broker that may have ten partitions."""

    def __init__(self) -> None:
        self.partitions = 0
        self.file = SimpleNamespace(limits=SimpleNamespace(partitions=10))
        settings = cast(EffectiveSettings, SimpleNamespace(file=self.file))
        self.limits = PartitionLimits(settings, lambda: self.partitions)

    def refusal(self, added: int, creator: str | None = None, pending: int = 0) -> ErrorCode:
        try:
            self.limits.check(added, added, creator, pending)
        except TopicError as error:
            return error.code
        return ErrorCode.NONE


@pytest.fixture
def world() -> World:
    return World()


def test_no_topic_has_more_partitions_than_the_broker_may_still_have(world: World) -> None:
    world.partitions = 6
    assert world.limits.room == 4
    assert [world.refusal(4), world.refusal(5)] == [ErrorCode.NONE, ErrorCode.INVALID_PARTITIONS]
    assert world.refusal(4, pending=1) == ErrorCode.INVALID_PARTITIONS
    world.file.limits.partitions = 11  # the settings file was changed
    assert world.refusal(5) == ErrorCode.NONE


def test_a_number_of_partitions_is_positive_or_stands_for_the_default(world: World) -> None:
    numbers = {number: world.refusal(number) for number in (-2, -1, 0, 1)}
    refused = [number for number, code in numbers.items() if code]
    assert refused == [-2, 0]


async def test_a_client_may_create_partitions_while_it_has_fewer_than_are_free(
    world: World,
) -> None:
    world.limits.add("t", range(5), "ada")
    world.partitions = 5
    assert world.refusal(1, "ada") == ErrorCode.POLICY_VIOLATION
    assert [world.refusal(1, "bob"), world.refusal(5)] == [ErrorCode.NONE] * 2
    await world.limits.remove("t", range(5))
    world.partitions = 0
    assert world.refusal(5, "ada") == ErrorCode.NONE
