"""No request occupies the event loop for long, however many rows it has."""

import asyncio
import gc
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import SharedTurns, yield_to_loop
from broker.groups.group_log import APPEND_BYTES, GroupLog
from broker.handlers.dispatch import (
    LARGE_REQUESTS_AT_ONCE,
    LISTS_AT_ONCE,
    WHOLE_BYTES_MAX,
    Dispatcher,
)
from broker.handlers.groups.classic_protocol import LEAVERS_PER_TURN
from broker.handlers.list_offsets import ListOffsetsHandler
from broker.handlers.routes import make_dispatcher
from broker.network.request_context import RequestContext
from broker.security.principal import Principal
from broker.topics.internal_topic import LogRecord
from broker.topics.metadata_service import NewTopic
from broker.topics.topics import TopicError
from broker.transactions import coordinator as transaction_coordinator
from broker.transactions.markers import MarkerWriter
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode, ProtocolError, RowLimitError
from protocol.limits import ROWS as ROWS_MAX
from protocol.table_compiler import ELEMENTS_PER_SLICE
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import fake_connection, make_context
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv

ROWS = cases(few=100, many=300)  # more than one append of the groups' log takes
TOPIC = 2  # resource type


# Freeing rows ---------------------------------------------------------------------------------


async def test_work_that_fails_after_its_client_has_left_is_reported_once() -> None:
    mistakes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context))
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        begun.set()
        await may_fail.wait()
        raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "it was deleted")

    work = asyncio.create_task(fail())
    client = asyncio.create_task(loop_turns.run_to_end(work))
    await begun.wait()
    client.cancel()
    await asyncio.wait([client])
    with capture_logs() as logs:
        may_fail.set()
        await asyncio.wait([work])
        await asyncio.sleep(0)
    del work
    gc.collect()
    await asyncio.sleep(0)
    assert mistakes == []
    assert [line["event"] for line in logs] == ["request failed after disconnect"]
    assert "it was deleted" in logs[0]["reason"]


def test_rows_of_a_message_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any nesting; freeing 800,000 objects at once blocked the loop for 47 ms."""
    freed: list[int] = []
    monkeypatch.setattr(
        m.MetadataResponsePartition, "__del__", lambda row: freed.append(1), raising=False
    )
    for topics, partitions in ((1_000, 1), (1, 1_000), (20, 50)):
        freed.clear()
        rows = [
            m.MetadataResponseTopic(
                partitions=[m.MetadataResponsePartition() for _ in range(partitions)]
            )
            for _ in range(topics)
        ]
        answer = m.MetadataResponse(topics=rows)
        del rows
        at_once = []
        for _ in codec.release_rows(answer):
            at_once.append(len(freed))
            freed.clear()
        assert max(at_once, default=0) <= 1
        del answer
        assert len(freed) <= 20 * codec.RELEASED_ROWS_MIN


async def test_rows_of_a_request_that_its_handler_refuses_are_freed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = [m.MetadataRequestTopic(name=f"t{number}") for number in range(2_000)]
    body = m.MetadataRequest(topics=topics)
    frame = memoryview(bytearray(codec.encode_request(ApiKey.METADATA, 9, 1, "c", body)[4:]))
    del body, topics
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        dispatcher = make_dispatcher(broker._services)

        def refuse(*_: object) -> m.Message:
            raise ProtocolError("no", ApiKey.METADATA, 9)

        monkeypatch.setitem(cast(dict[int, Any], dispatcher._handlers), ApiKey.METADATA, refuse)
        clock = count()
        monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each row
        freed: list[int] = []
        monkeypatch.setattr(
            m.MetadataRequestTopic, "__del__", lambda _: freed.append(1), raising=False
        )
        answering = asyncio.ensure_future(cast(Any, dispatcher.handle(fake_connection(), frame)))
        in_one_turn = 0
        while not answering.done():
            before = len(freed)
            await asyncio.sleep(0)
            in_one_turn = max(in_one_turn, len(freed) - before)
        with pytest.raises(ProtocolError):
            await answering
        assert len(freed) > 1_500
        assert in_one_turn < 200


def test_an_array_that_somebody_else_holds_keeps_its_rows() -> None:
    """As a group keeps the protocols of its members, which came in a request."""
    protocols = [m.JoinGroupRequestProtocol(name=str(number)) for number in range(1_000)]
    assert list(codec.release_rows(m.JoinGroupRequest(protocols=protocols))) == []
    assert len(protocols) == 1_000


async def test_the_rows_of_a_large_request_and_of_its_answer_are_freed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn, freed_in = count(), []
    number = next(turn)

    def next_turn() -> None:
        nonlocal number
        number = next(turn)
        asyncio.get_running_loop().call_soon(next_turn)

    for kind in (m.CreateTopicsRequestTopic, m.CreateTopicsResponseTopic):
        monkeypatch.setattr(kind, "__del__", lambda row: freed_in.append(number), raising=False)
    ticks = count()
    monkeypatch.setattr(
        loop_turns, "perf_counter", lambda: next(ticks) * loop_turns.TURN_SECONDS / 32
    )
    body = m.CreateTopicsRequest(
        topics=[
            m.CreateTopicsRequestTopic(name=f"{number:0250}", num_partitions=1)
            for number in range(ROWS)
        ],
        validate_only=True,
    )
    frame = memoryview(codec.encode_request(ApiKey.CREATE_TOPICS, 4, 1, "me", body)[4:])
    del body
    freed_in.clear()
    async with broker_in_memory(MemoryEnv(seed=1), topics={}) as broker:
        next_turn()
        answer = make_dispatcher(broker._services).handle(fake_connection(), frame)
        assert inspect.isawaitable(answer)
        await answer
    assert len(freed_in) == 2 * ROWS
    assert max(freed_in.count(item) for item in set(freed_in)) <= 64


# Handlers -------------------------------------------------------------------------------------


class Requester:
    """Puts requests to a broker's dispatcher, and counts the turns that others have meanwhile."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.connection = fake_connection()
        self.turns = 0

    async def ask(self, key: ApiKey, version: int, body: m.Message) -> Any:
        frame = bytearray(codec.encode_request(key, version, 1, "me", body)[4:])
        others = asyncio.create_task(self._count())
        await asyncio.sleep(0)
        self.turns = 0
        answer = self.dispatcher.handle(self.connection, memoryview(frame))
        if inspect.isawaitable(answer):
            answer = await answer
        others.cancel()
        if not isinstance(answer, bytes):
            answer = b"".join(cast("list[bytes]", answer))
        return codec.decode_response(key, version, answer[4:])[1]

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turns += 1


@pytest.fixture
async def asker(every_turn_is_over: None) -> AsyncIterator[Requester]:
    topics = {"t": {"partitions": ROWS, "keys": {"cleanup.policy": "delete"}}}
    async with broker_in_memory(MemoryEnv(seed=5), topics=topics) as broker:
        requester = Requester(make_dispatcher(broker._services))
        await requester.ask(
            ApiKey.FIND_COORDINATOR, 4, m.FindCoordinatorRequest(coordinator_keys=["g"])
        )
        yield requester


def names(prefix: str = "x") -> list[str]:
    return [f"{prefix}{index}" for index in range(ROWS)]


Case = tuple[ApiKey, int, m.Message]


def of_partitions() -> list[Case]:
    """Of each API that takes partitions, one request of many."""
    every = range(ROWS)
    ends = [m.OffsetForLeaderEpochRequestPartition(partition=index) for index in every]
    listed = [m.ListOffsetsRequestPartition(partition_index=i, timestamp=-1) for i in every]
    partitions = [m.DeleteRecordsRequestPartition(partition_index=i, offset=-1) for i in every]
    logs = m.DescribeLogDirsRequestTopic(topic="t", partitions=list(every))
    return [
        (
            ApiKey.LIST_OFFSETS,
            7,
            m.ListOffsetsRequest(topics=[m.ListOffsetsRequestTopic(name="t", partitions=listed)]),
        ),
        (
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            3,
            m.OffsetForLeaderEpochRequest(
                topics=[m.OffsetForLeaderEpochRequestTopic(topic="t", partitions=ends)]
            ),
        ),
        (
            ApiKey.DELETE_RECORDS,
            2,
            m.DeleteRecordsRequest(
                topics=[m.DeleteRecordsRequestTopic(name="t", partitions=partitions)]
            ),
        ),
        (ApiKey.METADATA, 9, m.MetadataRequest(topics=None)),
        (
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            0,
            m.DescribeTopicPartitionsRequest(
                topics=[m.DescribeTopicPartitionsRequestTopic(name="t")]
            ),
        ),
        (ApiKey.DESCRIBE_LOG_DIRS, 4, m.DescribeLogDirsRequest(topics=None)),
        (ApiKey.DESCRIBE_LOG_DIRS, 4, m.DescribeLogDirsRequest(topics=[logs])),
    ]


def of_groups() -> list[Case]:
    """Of each API about groups that takes rows, one request of many."""
    every = range(ROWS)
    committed = [m.OffsetCommitRequestPartition(partition_index=index) for index in every]
    commit = m.OffsetCommitRequestTopic(name="t", partitions=committed)
    fetched = m.OffsetFetchRequestTopic(name="t", partition_indexes=list(every))
    gone = [m.OffsetDeleteRequestPartition(partition_index=index) for index in every]
    return [
        (ApiKey.FIND_COORDINATOR, 4, m.FindCoordinatorRequest(coordinator_keys=names())),
        (
            ApiKey.OFFSET_COMMIT,
            8,
            m.OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[commit]),
        ),
        (ApiKey.OFFSET_FETCH, 6, m.OffsetFetchRequest(group_id="g", topics=[fetched])),
        (
            ApiKey.OFFSET_FETCH,
            8,
            m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(group_id=n) for n in names()]),
        ),
        (
            ApiKey.OFFSET_DELETE,
            0,
            m.OffsetDeleteRequest(
                group_id="g", topics=[m.OffsetDeleteRequestTopic(name="t", partitions=gone)]
            ),
        ),
        (ApiKey.DESCRIBE_GROUPS, 5, m.DescribeGroupsRequest(groups=names())),
        (ApiKey.DELETE_GROUPS, 2, m.DeleteGroupsRequest(groups_names=names())),
    ]


def of_topics() -> list[Case]:
    """Of each API that takes topics, one request of many."""
    new = [m.CreateTopicsRequestTopic(name=name, num_partitions=1) for name in names()]
    grown = [m.CreatePartitionsRequestTopic(name=name, count=2) for name in names()]
    altered = [m.AlterConfigsRequestResource(resource_type=TOPIC, resource_name=n) for n in names()]
    changed = [
        m.IncrementalAlterConfigsRequestResource(resource_type=TOPIC, resource_name=name)
        for name in names()
    ]
    resources = [
        m.DescribeConfigsRequestResource(resource_type=TOPIC, resource_name=n) for n in names()
    ]
    return [
        (ApiKey.CREATE_TOPICS, 5, m.CreateTopicsRequest(topics=new, validate_only=True)),
        (ApiKey.DELETE_TOPICS, 5, m.DeleteTopicsRequest(topic_names=names())),
        (ApiKey.CREATE_PARTITIONS, 3, m.CreatePartitionsRequest(topics=grown)),
        (ApiKey.ALTER_CONFIGS, 2, m.AlterConfigsRequest(resources=altered)),
        (ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, m.IncrementalAlterConfigsRequest(resources=changed)),
        (ApiKey.DESCRIBE_CONFIGS, 4, m.DescribeConfigsRequest(resources=resources)),
        (
            ApiKey.METADATA,
            9,
            m.MetadataRequest(topics=[m.MetadataRequestTopic(name=name) for name in names()]),
        ),
    ]


@pytest.mark.parametrize(
    "case",
    [*of_partitions(), *of_groups(), *of_topics()],
    ids=lambda case: f"{case[0].name}-{case[1]}".lower(),
)
async def test_after_each_row_of_a_request_others_may_have_the_loop(
    case: Case, asker: Requester
) -> None:
    await asker.ask(*case)
    assert asker.turns >= ROWS


@pytest.mark.parametrize("key", [ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS])
async def test_others_may_have_the_loop_while_assignments_are_checked(
    key: ApiKey, asker: Requester
) -> None:
    """Those of one topic: 24,900 took 11 ms."""
    body: m.Message
    if key == ApiKey.CREATE_TOPICS:
        rows = [
            m.CreateTopicsRequestAssignment(partition_index=n, broker_ids=[1]) for n in range(ROWS)
        ]
        new = m.CreateTopicsRequestTopic(
            name="x", num_partitions=-1, replication_factor=-1, assignments=rows
        )
        body = m.CreateTopicsRequest(topics=[new], validate_only=True)
    else:
        added = [m.CreatePartitionsRequestAssignment(broker_ids=[1]) for _ in range(ROWS)]
        grown = m.CreatePartitionsRequestTopic(name="t", count=2 * ROWS, assignments=added)
        body = m.CreatePartitionsRequest(topics=[grown], validate_only=True)
    answer = await asker.ask(key, 3, body)
    (row,) = answer.topics if key == ApiKey.CREATE_TOPICS else answer.results
    assert (row.error_code, row.error_message) == (0, None)
    assert asker.turns >= ROWS


async def test_others_may_have_the_loop_while_names_are_put_in_order(asker: Requester) -> None:
    """To make a heap of 50,000 names at once takes 9 ms."""
    topics = [m.DescribeTopicPartitionsRequestTopic(name=name) for name in reversed(names())]
    body = m.DescribeTopicPartitionsRequest(topics=topics)
    answer = await asker.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, body)
    assert [topic.name for topic in answer.topics] == sorted(names())
    assert asker.turns >= 4 * ROWS, "names are decoded, gathered, ordered and described"


async def test_each_topic_and_group_of_a_long_answer_offers_a_turn(asker: Requester) -> None:
    for group in names("g"):
        commit = m.OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1)
        row = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
        commit.topics = [m.OffsetCommitRequestTopic(name="t", partitions=[row])]
        await asker.ask(ApiKey.OFFSET_COMMIT, 8, commit)
    answer = await asker.ask(ApiKey.LIST_GROUPS, 4, m.ListGroupsRequest())
    assert len(answer.groups) == ROWS
    assert asker.turns >= ROWS


async def test_the_markers_of_a_large_transaction_are_written_in_turns(
    asker: Requester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of its records are encoded in a thread."""
    monkeypatch.setattr(transaction_coordinator, "PARTITIONS_AT_ONCE", ROWS // 2)
    request = m.InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=60_000)
    while True:  # until __transaction_state is there
        begun = await asker.ask(ApiKey.INIT_PRODUCER_ID, 4, request)
        if begun.error_code == ErrorCode.NONE:
            break
        await asker.ask(
            ApiKey.FIND_COORDINATOR,
            4,
            m.FindCoordinatorRequest(key_type=1, coordinator_keys=["tx"]),
        )
    producer = {"producer_id": begun.producer_id, "producer_epoch": begun.producer_epoch}
    every = m.AddPartitionsToTxnRequestTopicV3(name="t", partitions=list(range(ROWS)))
    added = await asker.ask(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        m.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="tx",
            v3_and_below_producer_id=begun.producer_id,
            v3_and_below_producer_epoch=begun.producer_epoch,
            v3_and_below_topics=[every],
        ),
    )
    rows = added.results_by_topic_v3_and_below[0].results_by_partition
    assert {row.partition_error_code for row in rows} == {ErrorCode.NONE}
    written: Counter[int] = Counter()  # markers by turn
    turn, write = 0, MarkerWriter.write

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def count_marker(*values: Any, **options: Any) -> None:
        written[turn] += 1
        await write(*values, **options)

    monkeypatch.setattr(MarkerWriter, "write", count_marker)
    counting = asyncio.create_task(count_turns())
    end = m.EndTxnRequest(transactional_id="tx", committed=True, **producer)
    assert (await asker.ask(ApiKey.END_TXN, 3, end)).error_code == ErrorCode.NONE
    describe = m.DescribeTransactionsRequest(transactional_ids=["tx"])
    state = ""
    while state != "CompleteCommit":
        answer = await asker.ask(ApiKey.DESCRIBE_TRANSACTIONS, 0, describe)
        state = answer.transaction_states[0].transaction_state
    counting.cancel()
    assert written.total() == ROWS
    assert max(written.values()) == 1


async def test_members_leave_some_at_a_time(asker: Requester) -> None:
    members = [m.LeaveGroupRequestMember(member_id=name) for name in names()]
    request = m.LeaveGroupRequest(group_id="g", members=members)
    answer = await asker.ask(ApiKey.LEAVE_GROUP, 5, request)
    assert [member.member_id for member in answer.members] == names()
    assert {member.error_code for member in answer.members} == {ErrorCode.UNKNOWN_MEMBER_ID}
    assert asker.turns >= ROWS // LEAVERS_PER_TURN


async def test_a_large_request_is_decoded_in_slices(asker: Requester) -> None:
    keys = [f"a group with a name of its own {index}" for index in range(5_000)]
    request = m.FindCoordinatorRequest(coordinator_keys=keys)
    answer = await asker.ask(ApiKey.FIND_COORDINATOR, 4, request)
    assert [coordinator.key for coordinator in answer.coordinators] == keys
    slices = 5_000 // ELEMENTS_PER_SLICE  # of the request, and of the answer
    assert asker.turns >= 5_000 + 2 * slices


async def test_requests_that_wait_for_the_disk_do_not_hold_up_other_large_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = asyncio.Event()

    async def create(new_topics: Sequence[NewTopic], *_: object, **__: object) -> list[TopicError]:
        await disk.wait()
        return [TopicError(ErrorCode.KAFKA_STORAGE_ERROR, "the disk is gone") for _ in new_topics]

    requests = [
        m.CreateTopicsRequestTopic(name=f"x{n}" * 50, num_partitions=1, replication_factor=1)
        for n in range(ROWS)
    ]
    topics = [m.MetadataRequestTopic(name=str(number)) for number in range(ROWS * 10)]
    async with broker_in_memory(MemoryEnv(seed=1), topics={}) as broker:
        monkeypatch.setattr(broker.metadata_service, "create_all", create)
        requester = Requester(make_dispatcher(broker._services))
        waiting = [
            asyncio.create_task(
                requester.ask(ApiKey.CREATE_TOPICS, 4, m.CreateTopicsRequest(topics=requests))
            )
            for _ in range(2 * LARGE_REQUESTS_AT_ONCE)
        ]
        await asyncio.sleep(0)
        request = m.MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        async with asyncio.timeout(60):
            answer = await requester.ask(ApiKey.METADATA, 8, request)
        assert len(answer.topics) == len(topics)
        assert not any(task.done() for task in waiting)
        disk.set()
        await asyncio.gather(*waiting)


async def test_large_requests_of_one_client_do_not_hold_up_those_of_others_nor_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = asyncio.Event()

    async def wait(*_: object, **__: object) -> m.ListOffsetsResponsePartition:
        await search.wait()
        return m.ListOffsetsResponsePartition()

    monkeypatch.setattr(ListOffsetsHandler, "_list_offset", wait)
    searches = m.ListOffsetsRequest(
        topics=[
            m.ListOffsetsRequestTopic(
                name="t", partitions=[m.ListOffsetsRequestPartition(partition_index=0)]
            ),
            *(m.ListOffsetsRequestTopic(name="x" * 200) for _ in range(100)),
        ]
    )
    topics = [m.MetadataRequestTopic(name=str(number)) for number in range(ROWS * 10)]
    metadata = m.MetadataRequest(topics=topics, allow_auto_topic_creation=False)
    async with broker_in_memory(MemoryEnv(seed=1), topics={}) as broker:
        dispatcher = make_dispatcher(broker._services)
        attacker, other = Requester(dispatcher), Requester(dispatcher)
        other.connection.peer_host = "10.0.0.2"
        waiting = [
            asyncio.create_task(attacker.ask(ApiKey.LIST_OFFSETS, 6, searches))
            for _ in range(2 * LARGE_REQUESTS_AT_ONCE)
        ]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            assert len((await other.ask(ApiKey.METADATA, 8, metadata)).topics) == len(topics)
            # Large requests may wait for a disk: no list waits for them.
            everything = m.MetadataRequest(topics=None)
            assert (await attacker.ask(ApiKey.METADATA, 8, everything)).topics == []
        assert not any(task.done() for task in waiting)
        search.set()
        await asyncio.gather(*waiting)


async def test_offsets_with_much_metadata_are_appended_in_turns(
    asker: Requester, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended, append = [], GroupLog.append

    def note(log: GroupLog, group_id: str, records: Sequence[LogRecord], *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
        appended.append((asker.turns, sum(len(value or b"") for _, value in records)))
        return append(log, group_id, records, *rest, **more)

    monkeypatch.setattr(GroupLog, "append", note)
    partitions = [
        m.OffsetCommitRequestPartition(partition_index=index, committed_metadata="x" * 4_000)
        for index in range(ROWS)
    ]
    topic = m.OffsetCommitRequestTopic(name="t", partitions=partitions)
    answer = await asker.ask(
        ApiKey.OFFSET_COMMIT,
        8,
        m.OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[topic]),
    )
    assert {row.error_code for row in answer.topics[0].partitions} == {ErrorCode.NONE}
    assert sum(size_bytes for _, size_bytes in appended) > ROWS * 4_000
    assert max(size_bytes for _, size_bytes in appended) <= APPEND_BYTES + 10_000
    turns = [turn for turn, _ in appended]
    assert len(set(turns)) == len(turns)


@pytest.mark.parametrize(
    ("case", "row", "rows"),
    [
        ((ApiKey.LIST_GROUPS, 4, m.ListGroupsRequest()), m.ListGroupsResponseGroup, 20),
        (
            (ApiKey.DESCRIBE_GROUPS, 5, m.DescribeGroupsRequest(groups=names())),
            m.DescribeGroupsResponseGroup,
            ROWS,
        ),
        (
            (ApiKey.CONSUMER_GROUP_DESCRIBE, 0, m.ConsumerGroupDescribeRequest(group_ids=names())),
            m.ConsumerGroupDescribeResponseGroup,
            ROWS,
        ),
        (
            (ApiKey.OFFSET_FETCH, 6, m.OffsetFetchRequest(group_id="x0", topics=None)),
            m.OffsetFetchResponsePartition,
            ROWS,
        ),
        ((ApiKey.METADATA, 9, m.MetadataRequest(topics=None)), m.MetadataResponseTopic, 2),
        ((ApiKey.METADATA, 0, m.MetadataRequest(topics=[])), m.MetadataResponseTopic, 2),
    ],
    ids=lambda value: f"{value[0].name.lower()}-{value[1]}" if isinstance(value, tuple) else "",
)
async def test_rows_of_a_number_of_lists_at_most_are_in_memory_at_a_time(
    case: Case,
    row: type[m.Message],
    rows: int,
    asker: Requester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [m.OffsetCommitRequestPartition(partition_index=index) for index in range(ROWS)]
    topics = [m.OffsetCommitRequestTopic(name="t", partitions=every)]
    for group_id in names()[:20]:
        commit = m.OffsetCommitRequest(
            group_id=group_id, generation_id_or_member_epoch=-1, topics=topics
        )
        await asker.ask(ApiKey.OFFSET_COMMIT, 8, commit)
        topics[0].partitions = every[:1]
    number_of_rows, most = 0, 0
    make = row.__init__

    def made(self: m.Message, **fields: object) -> None:
        nonlocal number_of_rows, most
        make(self, **fields)
        number_of_rows += 1
        most = max(most, number_of_rows)

    def freed(_: m.Message) -> None:
        nonlocal number_of_rows
        number_of_rows -= 1

    monkeypatch.setattr(row, "__init__", made)
    monkeypatch.setattr(row, "__del__", freed, raising=False)
    frame = memoryview(codec.encode_request(*case[:2], 1, "me", case[2])[4:])
    assert len(frame) <= WHOLE_BYTES_MAX
    answers = []
    for user in range(3 * LISTS_AT_ONCE):
        asker.connection.context, asker.connection.peer_host = None, f"10.0.0.{user}"
        answer = asker.dispatcher.handle(asker.connection, frame)
        assert inspect.isawaitable(answer)
        answers.append(asyncio.ensure_future(answer))
    await asyncio.gather(*answers)
    assert number_of_rows == 0
    assert rows < most <= LISTS_AT_ONCE * rows


async def test_a_string_is_no_longer_than_kafkas(asker: Requester) -> None:
    request = m.FindCoordinatorRequest(coordinator_keys=["x" * 32_768])
    with pytest.raises(ProtocolError, match="length 32768"):
        await asker.ask(ApiKey.FIND_COORDINATOR, 4, request)


async def test_a_request_of_too_many_rows_is_told_where_its_answer_has_a_place(
    asker: Requester,
) -> None:
    members = [m.LeaveGroupRequestMember()] * (ROWS_MAX + 1)
    request = m.LeaveGroupRequest(group_id="g", members=members)
    answer = await asker.ask(ApiKey.LEAVE_GROUP, 5, request)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    keys = m.FindCoordinatorRequest(coordinator_keys=[""] * (ROWS_MAX + 1))
    with pytest.raises(RowLimitError):  # no place in version 4: the connection is closed
        await asker.ask(ApiKey.FIND_COORDINATOR, 4, keys)


async def test_one_turn_of_a_client_with_much_work_runs_in_each_round() -> None:
    lock, turns = asyncio.Lock(), list[int]()

    async def work(number: int) -> int:
        for _ in range(5):
            turns.append(number)
            await yield_to_loop()
        return number

    tasks = [asyncio.ensure_future(SharedTurns(work(n), lock)) for n in range(20)]
    for _ in range(30):
        before = len(turns)
        await yield_to_loop()
        assert len(turns) - before <= 1
    assert await asyncio.gather(*tasks) == list(range(20))
    assert len(turns) == 100


@pytest.mark.parametrize(("users", "turns_in_a_round"), [(["eve"], 1), (["eve", "ann"], 2)])
async def test_of_all_requests_of_a_user_one_has_a_turn_in_each_round(
    users: list[str], turns_in_a_round: int
) -> None:
    turns: list[str] = []

    async def list_groups(context: RequestContext, *_: object) -> m.ListGroupsResponse:
        for _ in range(10):
            turns.append(context.principal.name)
            await yield_to_loop()
        return m.ListGroupsResponse()

    frame = memoryview(
        codec.encode_request(ApiKey.LIST_GROUPS, 4, 1, "me", m.ListGroupsRequest())[4:]
    )
    async with broker_in_memory(MemoryEnv(seed=1), topics={}) as broker:
        dispatcher = Dispatcher(broker._services, {}, {ApiKey.LIST_GROUPS: list_groups})
        answers = []
        for user in users * 20:
            context = make_context(broker, Principal(user))
            answer = dispatcher.handle(fake_connection(context), frame)
            assert inspect.isawaitable(answer)
            answers.append(asyncio.ensure_future(answer))
        for _ in range(5):
            await yield_to_loop()  # each request has its first turn at once
        for _ in range(50):
            before = len(turns)
            await yield_to_loop()
            assert len(turns) - before <= turns_in_a_round
        await asyncio.gather(*answers)
    assert Counter(turns) == dict.fromkeys(users, 200)


async def test_a_request_is_not_charged_with_the_work_of_others_before_its_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 0
    monkeypatch.setattr(
        "broker.handlers.dispatch.time", SimpleNamespace(perf_counter_ns=lambda: now_ns)
    )
    monkeypatch.setattr(loop_turns, "perf_counter_ns", lambda: now_ns)

    def list_groups(*_: object) -> Any:
        nonlocal now_ns
        now_ns += 3_000

        async def work() -> m.ListGroupsResponse:
            nonlocal now_ns
            now_ns += 5_000
            return m.ListGroupsResponse()

        return work()

    request = codec.encode_request(ApiKey.HEARTBEAT, 4, 1, "me", m.HeartbeatRequest())
    async with broker_in_memory(MemoryEnv(seed=1), topics={}) as broker:
        broker.quotas.update({(("user", None),): {"request_percentage": 1.0}})
        charged: list[int] = []
        monkeypatch.setattr(broker.quotas, "charge_request", lambda _, ns: charged.append(ns))
        dispatcher = Dispatcher(broker._services, {}, {ApiKey.HEARTBEAT: list_groups})
        answer = dispatcher.handle(fake_connection(make_context(broker)), memoryview(request)[4:])
        now_ns += 1_000_000  # other requests
        assert inspect.isawaitable(answer)
        await answer
        stats = broker.stats.requests["Heartbeat"]
    assert sum(charged) == 8_000
    assert stats.longest_turn_ns == 5_000
    assert stats.latency.sum_us == 1_008


async def test_work_that_ends_its_turns_itself_waits_for_others_only_then() -> None:
    lock, turns = asyncio.Lock(), []

    async def work(number: int, count: int) -> int:
        for _ in range(count - 1):
            turns.append(number)
            await yield_to_loop()
        turns.append(number)
        return number

    def shared(number: int, count: int) -> asyncio.Future[int]:
        return asyncio.ensure_future(SharedTurns(work(number, count), lock, if_yielded=True))

    long = [shared(number, 5) for number in range(20)]
    for _ in range(2):
        await yield_to_loop()
    assert len(turns) == 20 + 1
    short = shared(20, 1)
    await yield_to_loop()
    assert short.done()
    for _ in range(30):
        before = len(turns)
        await yield_to_loop()
        assert len(turns) - before <= 1
    assert await asyncio.gather(*long, short) == list(range(21))
    assert len(turns) == 101


async def test_a_cancellation_reaches_work_that_waits_for_its_turn() -> None:
    lock, ended = asyncio.Lock(), []

    async def work() -> None:
        try:
            await yield_to_loop()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    task = asyncio.ensure_future(SharedTurns(work(), lock))
    await yield_to_loop()
    await lock.acquire()
    await yield_to_loop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]
