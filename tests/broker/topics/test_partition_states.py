"""Which partitions of an internal topic a coordinator serves."""

import asyncio
from collections.abc import Sequence

import pytest

from broker.topics.internal_topic import KeyedLog, LogRecord, PartitionState, PartitionStates
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode


def no_append(
    partition: int, records: Sequence[LogRecord], producer: Producer | None = None
) -> "asyncio.Future[None]":
    raise AssertionError("states need no append")


@pytest.fixture
def states() -> PartitionStates:
    return PartitionStates(KeyedLog(2, no_append))


def test_every_partition_is_loading_at_first(states: PartitionStates) -> None:
    assert states.any_loading
    assert all(states.is_loading(partition) for partition in (0, 1))
    assert states.error("g") is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert not states.all_active


def test_the_state_of_a_key_is_that_of_its_partition(states: PartitionStates) -> None:
    states.activate(0)
    states.deactivate(1, PartitionState.OFFLINE)
    errors = {key: states.error(key) for key in ("b", "a")}  # their hashes are 98 and 97
    assert errors == {"b": ErrorCode.NONE, "a": ErrorCode.COORDINATOR_NOT_AVAILABLE}
    assert [states.is_offline(partition) for partition in (0, 1)] == [False, True]
    assert not states.any_loading
    assert not states.all_active


def test_a_partition_is_loaded_again_after_it_was_deactivated(states: PartitionStates) -> None:
    for partition in (0, 1):
        states.activate(partition)
    assert states.all_active
    states.deactivate(1, PartitionState.LOADING)
    assert states.is_loading(1)
    states.activate(1)
    assert states.all_active


def test_an_active_partition_is_not_activated_again(states: PartitionStates) -> None:
    states.activate(0)
    with pytest.raises(AssertionError):
        states.activate(0)
