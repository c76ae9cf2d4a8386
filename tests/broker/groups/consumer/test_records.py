"""The records of consumer groups (KIP-848): what is answered is in the log, and fits it."""

import asyncio
import errno
import random
from collections.abc import Mapping, Sequence

import pytest

from broker.event_loop import loop_turns
from broker.groups import live_consumer_group
from broker.groups.consumer.model import ConsumerGroup, HeartbeatAnswer
from broker.groups.consumer.records import (
    ConsumerGroupLoader,
    decode_key,
    encode_changes,
    largest_record_bytes,
)
from broker.groups.live_consumer_group import LiveConsumerGroup
from broker.topics.internal_topic import decode_batches
from protocol import record_codec
from protocol.errors import ErrorCode
from protocol.messages import (
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
)
from protocol.table_compiler import ELEMENTS_PER_SLICE
from storage.errors import LogDirectoryError, NoRoomError
from storage.format.batch import HEADER_BYTES
from tests.support.broker.groups.consumer_group_world import (
    NO_TOPICS,
    Client,
    check_restart,
    converge,
    group,
    make_world,
    names,
)
from tests.support.broker.groups.group_world import World
from tests.support.clocks.virtual_clock import settle
from tests.support.draws import cases

GROUP_METADATA = record_codec.encode(ConsumerGroupMetadataValue(epoch=1, metadata_hash=0), 0)


async def test_an_answer_waits_for_the_log_and_a_failed_append_loses_no_change() -> None:
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    world.log.error = LogDirectoryError("/d", "disk")
    other = Client(world, "b")
    assert (await other.heartbeat()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.error = None
    await converge(member, other)
    check_restart(world)


async def test_the_work_of_a_heartbeat_does_not_grow_with_the_appends_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a disk is full, each heartbeat tries again: for hours, if nobody makes room."""
    world, _ = make_world()
    clients = [Client(world, name) for name in "abc"]
    await converge(*clients)
    compared: list[ConsumerGroup] = []

    async def counted(
        before: ConsumerGroup, after: ConsumerGroup, keys: Sequence[bytes]
    ) -> Mapping[bytes, bytes | None]:
        compared.append(before)
        return await encode_changes(before, after, keys)

    monkeypatch.setattr(live_consumer_group, "encode_changes", counted)
    world.log.error = NoRoomError(OSError(errno.ENOSPC, "full"), "/d")
    await clients.pop().leave()
    for _ in range(50):
        compared.clear()
        assert (await clients[0].heartbeat()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert len(compared) == 1
    world.log.error = None
    await converge(*clients)
    check_restart(world)


async def test_an_answer_needs_the_appends_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large append may find no room where the small one after it does."""
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: 0.0)  # no turn ends
    world, _ = make_world(orders=6, more=2)
    first, second = Client(world, "a"), Client(world, "b", topics=frozenset({"more"}))
    await converge(first)

    async def join_without_room() -> HeartbeatAnswer:
        world.log.error = NoRoomError(OSError(errno.ENOSPC, "full"), "/d")
        return await second.heartbeat()

    async def heartbeat_with_room() -> HeartbeatAnswer:
        world.log.error = None
        return await first.heartbeat()

    joined, answer = await asyncio.gather(join_without_room(), heartbeat_with_room())
    assert joined.error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.restart()
    assert answer.error is not ErrorCode.NONE or answer.epoch <= group(world).epoch
    await converge(first, second)
    assert (len(first.owned), len(second.owned)) == (6, 2)


@pytest.mark.parametrize("release", [None, LogDirectoryError("/d", "disk")])
async def test_a_deletion_removes_what_appends_under_way_may_have_written(
    release: Exception | None,
) -> None:
    world, _ = make_world()
    first = Client(world, "a", regex="ord.*")
    await converge(first)
    world.log.held = True
    second = await world.begin(Client(world, "b").heartbeat())
    leaving = [await world.begin(first.send(-1)), await world.begin(Client(world, "b").send(-1))]
    world.log.held = False
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    world.log.release(release)
    assert await deletion is ErrorCode.NONE
    for request in (second, *leaving):
        await request
    loader = ConsumerGroupLoader()
    for batch in world.log.batches[0]:
        for _, records in decode_batches(batch):
            for record in records:
                key = decode_key(record.key or b"")
                if key is not None:
                    loader.add(key, record.value)
    loader.add(ConsumerGroupMetadataKey(group_id="g"), GROUP_METADATA)
    assert loader.groups()["g"] == ConsumerGroup("g", epoch=1), "nothing of it is left"


def records_of(world: World) -> int:
    return sum(map(len, world.log.appends))


async def refused(client: Client, world: World) -> None:
    """The subscription of a client is refused and changes nothing."""
    before, records = group(world), records_of(world)
    answer = await client.heartbeat()
    assert answer.error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert "max.message.bytes" in (answer.message or "")
    assert group(world) is before
    assert records_of(world) == records


async def test_a_subscription_whose_records_exceed_the_limit_is_refused() -> None:
    world, topics = make_world(orders=6, wide=1_000, **{f"t{n}" * 10: 1 for n in range(100)})
    world.log.max_batch_bytes = 3_000
    works = Client(world, "a")
    await converge(works)
    await refused(Client(world, "names", topics=names(0, 1_000)), world)
    await refused(Client(world, "partitions", topics=frozenset({"wide"})), world)
    await refused(Client(world, "regex", topics=NO_TOPICS, regex="t.*"), world)
    await refused(Client(world, "long", topics=NO_TOPICS, regex="é" * 1_500), world)
    topics.counts["orders"] = 7
    await world.clock.advance(1_000)
    await converge(works)
    assert len(works.owned) == 7, "the group goes on"
    world.restart()
    assert (await works.heartbeat()).error is ErrorCode.NONE
    assert group(world).members.keys() == {"a"}


async def test_a_member_keeps_its_subscription_if_its_next_one_is_too_large_for_its_record() -> (
    None
):
    world, _ = make_world(orders=6)
    world.log.max_batch_bytes = 3_000
    member = Client(world, "a")
    await converge(member)
    member.topics, member.missed_answer = names(0, 1_000), True
    await refused(member, world)
    member.topics = frozenset({"orders"})
    await converge(member)
    assert len(member.owned) == 6


@pytest.mark.parametrize("seed", range(cases(few=3, many=30)))
async def test_no_record_is_larger_than_the_subscription_was_estimated(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    counts = {"é" * rng.randrange(1, 40) + str(n): rng.randrange(1, 300) for n in range(50)}
    world, topics = make_world(**counts)
    for number in range(5):
        subscription = frozenset(rng.sample(sorted(counts), rng.randrange(1, 50)))
        instance_id = rng.choice([None, "i" * rng.randrange(1, 900) + str(number)])
        client = Client(world, f"m{number}", topics=subscription, instance_id=instance_id)
        await converge(client)
        after = group(world)
        member = after.members[client.member_id]
        bound = largest_record_bytes(ConsumerGroup("g"), after, member, topics.existing())
        records = await encode_changes(ConsumerGroup("g"), after, ())
        of_member = [
            HEADER_BYTES + len(key) + len(value or b"")
            for key, value in records.items()
            if client.member_id.encode() in key
        ]
        assert max(of_member) <= bound


async def begin_encoding(world: World, client: Client) -> "asyncio.Task[HeartbeatAnswer]":
    """Begin a heartbeat whose records are being encoded when this returns."""
    live = world.coordinator._served.get("g")
    assert isinstance(live, LiveConsumerGroup)
    heartbeat = asyncio.ensure_future(client.heartbeat())
    while not live._encoding.locked():
        assert not heartbeat.done()
        await asyncio.sleep(0)
    return heartbeat


async def test_records_are_encoded_in_turns_and_appended_in_the_order_of_the_changes(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    first = Client(world, "a")
    await converge(first)
    world.log.appends.clear()
    subscription = names(0, 5 * ELEMENTS_PER_SLICE) | {"orders"}
    large = await begin_encoding(world, Client(world, "b", topics=subscription))
    small = asyncio.ensure_future(Client(world, "c").heartbeat())
    turns = 0
    while not world.log.appends:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    assert [(await each).error for each in (large, small)] == [ErrorCode.NONE] * 2
    members = [
        key.member_id
        for records in world.log.appends
        for data, _ in records
        if isinstance(key := decode_key(data), ConsumerGroupMemberMetadataKey)
    ]
    assert members == ["b", "c"]
    check_restart(world)


async def test_no_record_follows_the_tombstones_of_a_group_that_is_deleted_while_one_is_encoded(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    await converge(Client(world, "a"))
    join = await begin_encoding(world, Client(world, "b"))
    live = world.coordinator._served.get("g")
    assert live is not None
    live.begin_deletion()
    records = records_of(world)
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert records_of(world) == records
    live.fail_deletion()
    assert (await Client(world, "c").heartbeat()).error is ErrorCode.NONE
    check_restart(world)


async def test_the_change_of_a_client_that_leaves_while_its_records_are_encoded_is_appended(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    await converge(Client(world, "a"))
    join = await begin_encoding(world, Client(world, "b"))
    join.cancel()
    await asyncio.wait([join])
    await settle()
    before = group(world)
    assert "b" in before.members
    world.restart()
    assert group(world) == before
