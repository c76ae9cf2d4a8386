"""Budgets of small requests and timers at a broker where others have thousands of everything.

The other budgets send large requests. Here one client or timer does little, and its turn on the
event loop must not grow with the topics, groups, members, permissions, quotas, users, transactions,
sessions and connections that the broker has. The tests count lines of Python, not seconds.
"""

import asyncio
import copy
import inspect
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import pytest
from aiohttp import web

from broker.app import Broker
from broker.groups.classic.subscription import encode_assignment_sliced
from broker.handlers.dispatch import Dispatcher
from broker.handlers.routes import make_dispatcher
from broker.views.views import view_id
from protocol import codec
from protocol import messages as m
from protocol.api import APIS, ApiKey
from protocol.errors import ErrorCode
from protocol.messages import Message
from storage.slices import run_at_once
from tests.broker.network.test_heavy_partitions import fill
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.groups.classic_client import subscription
from tests.support.broker.http_client import get
from tests.support.broker.principals import fake_connection
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.draws import cases
from tests.support.protocol.largest_requests import Names, largest_bodies
from tests.support.storage.memory_env import MemoryEnv

ALL: Final = "VARVE_ALL_BUDGETS" in os.environ
CROWD: Final = 3_000 if ALL else cases(few=500, many=1_000)  # topics, groups, permissions, ...
MEMBERS: Final = min(CROWD // 2, 500)  # of a group; each that joins assigns all partitions again
SUBSCRIBED: Final = 6 * CROWD  # topics of one member; most do not exist
GROUPS: Final = ("large classic", "large modern", "classic", "modern", "g0")
ASKED: Final = GROUPS[: cases(few=2, many=5)]
OF_GROUPS: Final = re.compile("GROUP|OFFSET_(COMMIT|FETCH|DELETE)|HEARTBEAT")
OF_TOPICS: Final = re.compile("TOPIC|METADATA|CONFIGS|LOG_DIRS|OFFSET|RECORDS")
CONNECTIONS: Final = 300
SESSIONS: Final = 20  # of CROWD partitions each
# The clock of the loop runs faster, so a turn ends after 2,000 lines, or with its slice of rows.
CLOCK_RATE: Final = 20
# A slice of 512 rows has 18,000 lines. A loop over the crowd without turns is found if it has 46
# lines for each entry; CI finds 23, `make budgets` five.
LINES_PER_TURN_MAX: Final = 23_000
ROWS: Final = 3  # of a request
VIEW: Final = "wide.compacted"
RETRIED: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)
# These answer for as long as the client listens, or send files.
STREAMS: Final = re.compile(r"/events|/console|/inputs/|/outputs/")
IN_PATHS: Final = {
    "topic": "t0",
    "partition": "0",
    "name": "t0",
    "user": "u1",
    "version": "1",
    "id": "1",
    "erasure_id": "1",
    "compaction_id": "1",
}

pytestmark = pytest.mark.timeout(900 if ALL else 240)


class Crowd:
    """The broker, and one client of it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._dispatcher: Dispatcher = make_dispatcher(broker._services)
        self._streams: list[asyncio.StreamWriter] = []

    def names(self, *groups: str) -> Names:
        """What exists, for a request of few rows."""
        known = ("t0", "t1", "wide")
        topics = [self.broker.topics.get(name) for name in known]
        ids = tuple(topic.topic_id for topic in topics if topic is not None)
        return Names(known, ids, 1, groups)

    async def ask(self, key: int, body: Message, version: int | None = None) -> Any:
        """Return the response."""
        version = APIS[key].versions.last if version is None else version
        parts = await self.exchange(key, body, version)
        return codec.decode_response(key, version, b"".join(parts)[4:])[1]

    async def exchange(self, key: int, body: Message, version: int) -> list[bytes]:
        frame = memoryview(bytearray(codec.encode_request(key, version, 1, "me", body)[4:]))
        answer: Any = self._dispatcher.handle(fake_connection(), frame)
        if inspect.isawaitable(answer):
            answer = await answer
        parts = [answer] if isinstance(answer, bytes) else answer or []
        return [bytes(part) for part in parts if isinstance(part, bytes)]

    async def retried(self, key: int, body: Message, error_of: Callable[[Any], int]) -> Any:
        """Return the response once the coordinator serves."""
        error: int = RETRIED[0]
        while error in RETRIED:
            answer = await self.ask(key, body)
            error = error_of(answer)
        assert error == ErrorCode.NONE, answer
        return answer

    async def gather(self) -> None:
        """Let others have thousands of everything."""
        await self._create_permissions_quotas_and_users()
        await self._commit_offsets()
        await self._join_classic_group("classic", MEMBERS)
        await self._join_consumer_group("modern", MEMBERS)
        await self._join_classic_group("large classic", 1, SUBSCRIBED)
        await self._join_consumer_group("large modern", 1, SUBSCRIBED)
        await self._begin_transactions()
        await self._open_sessions_and_connections()
        topic = self.broker.topics.get("t0")
        assert topic is not None
        fill(topic.partitions[0].log)  # type: ignore[arg-type]

    async def disperse(self) -> None:
        for writer in self._streams:
            writer.close()

    async def _create_permissions_quotas_and_users(self) -> None:
        acls = [
            m.CreateAclsRequestCreation(
                resource_type=2,
                resource_name=f"t{number}",
                resource_pattern_type=3 + number % 2,
                principal=f"User:u{number}",
                host="*",
                operation=3,
                permission_type=3,
            )
            for number in range(CROWD)
        ]
        quotas = [
            m.AlterClientQuotasRequestEntry(
                entity=[
                    m.AlterClientQuotasRequestEntity(entity_type="user", entity_name=f"u{number}")
                ],
                ops=[m.AlterClientQuotasRequestOp(key="producer_byte_rate", value=1e6)],
            )
            for number in range(CROWD)
        ]
        users = [
            m.AlterUserScramCredentialsRequestUpsertion(
                name=f"u{number}",
                mechanism=1,
                iterations=8192,
                salt=number.to_bytes(16),
                salted_password=bytes(32),
            )
            for number in range(CROWD // 4)
        ]
        created = await self.ask(ApiKey.CREATE_ACLS, m.CreateAclsRequest(creations=acls))
        assert {row.error_code for row in created.results} == {0}
        altered = await self.ask(
            ApiKey.ALTER_CLIENT_QUOTAS, m.AlterClientQuotasRequest(entries=quotas)
        )
        assert {row.error_code for row in altered.entries} == {0}
        stored = await self.ask(
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
            m.AlterUserScramCredentialsRequest(upsertions=users),
        )
        assert {row.error_code for row in stored.results} == {0}

    async def _commit_offsets(self) -> None:
        """One group with offsets of many partitions, and many groups with one."""
        await self.ask(
            ApiKey.FIND_COORDINATOR, m.FindCoordinatorRequest(coordinator_keys=["g", "h"])
        )
        wide = self.broker.topics.get("wide")
        assert wide is not None
        for number in range(CROWD):
            indexes = range(CROWD) if number == 0 else (number,)
            rows = [
                m.OffsetCommitRequestPartition(partition_index=index, committed_offset=1)
                for index in indexes
            ]
            body = m.OffsetCommitRequest(
                group_id=f"g{number}",
                generation_id_or_member_epoch=-1,
                topics=[
                    m.OffsetCommitRequestTopic(name="wide", topic_id=wide.topic_id, partitions=rows)
                ],
            )
            await self.retried(
                ApiKey.OFFSET_COMMIT, body, lambda answer: answer.topics[0].partitions[0].error_code
            )

    async def _join_classic_group(self, group_id: str, count: int, topics: int = 1) -> None:
        names = frozenset(f"t{number}" for number in range(topics))
        metadata = subscription(names, [(name, 0) for name in names])
        assignment = run_at_once(encode_assignment_sliced(1, dict.fromkeys(names, (0,))))

        def join(number: int) -> Awaitable[Any]:
            protocol = m.JoinGroupRequestProtocol(name="range", metadata=metadata)
            body = m.JoinGroupRequest(
                group_id=group_id,
                session_timeout_ms=300_000,
                rebalance_timeout_ms=300_000,
                group_instance_id=f"i{number}",
                protocol_type="consumer",
                protocols=[protocol],
            )
            return self.ask(ApiKey.JOIN_GROUP, body)

        def sync(joined: Any) -> Awaitable[Any]:
            is_leader = joined.member_id == joined.leader
            assignments = [
                m.SyncGroupRequestAssignment(member_id=each.member_id, assignment=assignment)
                for each in members
            ]
            body = m.SyncGroupRequest(
                group_id=group_id,
                generation_id=joined.generation_id,
                member_id=joined.member_id,
                protocol_type="consumer",
                protocol_name="range",
                assignments=assignments if is_leader else [],
            )
            return self.ask(ApiKey.SYNC_GROUP, body)

        members = await asyncio.gather(*map(join, range(count)))
        synced = await asyncio.gather(*map(sync, members))
        assert {answer.error_code for answer in synced} == {0}

    async def _join_consumer_group(self, group_id: str, count: int, topics: int = 0) -> None:
        names = [f"t{number}" for number in range(topics)]
        for number in range(count):
            body = m.ConsumerGroupHeartbeatRequest(
                group_id=group_id,
                member_id=f"member-{number}",
                rebalance_timeout_ms=300_000,
                subscribed_topic_names=["wide", *names],
                topic_partitions=[],
            )
            answer = await self.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, body)
            assert answer.error_code == 0, answer.error_message

    async def _begin_transactions(self) -> None:
        for number in range(CROWD):
            name = f"transaction-{number}"
            begun = await self.retried(
                ApiKey.INIT_PRODUCER_ID,
                m.InitProducerIdRequest(
                    transactional_id=name, transaction_timeout_ms=600_000, producer_epoch=-1
                ),
                lambda answer: answer.error_code,
            )
            body = m.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=begun.producer_id,
                v3_and_below_producer_epoch=begun.producer_epoch,
                v3_and_below_topics=[m.AddPartitionsToTxnRequestTopicV3(name="t1", partitions=[0])],
            )
            added = await self.ask(ApiKey.ADD_PARTITIONS_TO_TXN, body, 3)
            (topic,) = added.results_by_topic_v3_and_below
            assert topic.results_by_partition[0].partition_error_code == 0

    async def _open_sessions_and_connections(self) -> None:
        wide = self.broker.topics.get("wide")
        assert wide is not None
        rows = [
            m.FetchRequestPartition(partition=index, partition_max_bytes=1)
            for index in range(CROWD)
        ]
        topic = m.FetchRequestTopic(topic="wide", topic_id=wide.topic_id, partitions=rows)
        for _ in range(SESSIONS):
            body = m.FetchRequest(max_bytes=1, session_epoch=0, topics=[topic])
            await self.ask(ApiKey.FETCH, body)
        port = self.broker.addresses[0].port
        for _ in range(CONNECTIONS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            self._streams.append(writer)


@pytest.fixture(scope="module")
def runner() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def crowd(runner: asyncio.Runner) -> Iterator[Crowd]:
    keys = {"cleanup.policy": "compact"}
    topics: dict[str, Any] = {f"t{n}": {"partitions": 1, "keys": keys} for n in range(CROWD)}
    topics["wide"] = {"partitions": CROWD, "keys": keys}

    async def serve() -> AsyncIterator[Crowd]:
        async with broker_in_memory(
            MemoryEnv(seed=3),
            topics=topics,
            auto_create_topics=False,
            authorization={"enabled": True, "super_users": ["User:ANONYMOUS"]},
            # All members join before it ends.
            groups={"initial_rebalance_delay_ms": 3_000},
            limits={"first_request_ms": 3_600_000},  # the tests before need the connections, too
        ) as broker:
            made = Crowd(broker)
            await made.gather()
            yield made
            await made.disperse()

    serving = serve()
    yield runner.run(anext(serving))
    with pytest.raises(StopAsyncIteration):
        runner.run(anext(serving))


def longest_turn(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[object]]
) -> int:
    """The lines of its longest turn; if they are too many, in a second run. The first one compiles
    codecs, and a task of the broker may have run beside it.
    """
    meter = LoopMeter(CLOCK_RATE)

    async def run() -> int:
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            await work()
            await asyncio.sleep(0)
        return meter.longest_turn

    lines = runner.run(run())
    return lines if lines <= LINES_PER_TURN_MAX else min(lines, runner.run(run()))


def small_requests(crowd: Crowd) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    last = (ApiKey.CREATE_PARTITIONS, ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS)
    for key in sorted(APIS, key=lambda key: (key in last, key)):
        name, version = ApiKey(key).name, APIS[key].versions.last
        for group in ASKED if OF_GROUPS.search(name) else ASKED[:1]:
            for label, body in largest_bodies(key, version, ROWS, crowd.names(group)):

                async def ask(key: int = key, body: Message = body, version: int = version) -> None:
                    await crowd.exchange(key, copy.deepcopy(body), version)

                yield f"{name} {group} {label}", ask


def test_no_turn_of_a_small_request_depends_on_what_others_have(
    crowd: Crowd, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = {label: longest_turn(runner, monkeypatch, ask) for label, ask in small_requests(crowd)}
    assert len(turns) > len(APIS)
    print(sorted(((v, k) for k, v in turns.items()), reverse=True)[:12])
    assert {label: lines for label, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


def pages(crowd: Crowd) -> list[str]:
    routes = crowd.broker.http.server._routes.definitions
    paths = {r.path for r in routes if isinstance(r, web.RouteDef) and r.method == "GET"}
    known = {
        path.format_map({**IN_PATHS, "group": quote(group)})
        for path in paths
        for group in GROUPS
        if not STREAMS.search(path)
    }
    return sorted([*known, "/metrics", "/readyz", "/healthz"])


def test_no_turn_of_a_page_of_the_http_api_depends_on_what_the_broker_has(
    crowd: Crowd, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, turns = 0, {}
    for path in pages(crowd):
        statuses = []

        async def ask(path: str = path, statuses: list[int] = statuses) -> None:
            statuses.append((await get(crowd.broker, path))[0])

        turns[path] = longest_turn(runner, monkeypatch, ask)
        found += statuses[0] == 200
    assert found > len(turns) / 2
    assert {path: lines for path, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


def timers(crowd: Crowd) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    broker = crowd.broker
    maintenance = broker.log_maintenance
    for work in (
        maintenance.watch_clock,
        maintenance.watch_directories,
        maintenance.limit_producers,
        maintenance.expire_producers,
        maintenance.expire,
        maintenance.roll,
        maintenance.flush,
        maintenance.purge,
        maintenance.measure_disks,
        maintenance.checkpoint,
    ):
        yield work.__name__, work
    deletion = broker._services.coordinators.groups.deletion
    yield "expire offsets", partial(deletion.expire_offsets, 0)
    yield "expire all offsets", partial(deletion.expire_offsets, 1 << 60)
    idle = partial(broker.listener.sweep, float(1 << 40))
    yield "close idle connections", idle


def test_no_turn_of_a_timer_depends_on_what_the_broker_has(
    crowd: Crowd, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(crowd.broker.listener.connections) >= CONNECTIONS
    turns = {name: longest_turn(runner, monkeypatch, work) for name, work in timers(crowd)}
    assert len(crowd.broker.listener.connections) == 0
    assert {name: lines for name, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}


def requests_about_the_view(crowd: Crowd) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    """Yield requests; the view of the topic with many partitions is switched on just before."""
    wide = crowd.broker.topics.get("wide")
    assert wide is not None

    def switch_on() -> None:
        wide.config = replace(wide.config, varve_view="none")
        assert crowd.broker.views.get(VIEW) is None
        wide.config = replace(wide.config, varve_view="compacted")

    names = Names((VIEW,), (view_id(wide.topic_id),), 1, GROUPS[:1])
    for key in sorted(key for key in APIS if OF_TOPICS.search(ApiKey(key).name)):
        version = APIS[key].versions.last
        for label, body in largest_bodies(key, version, ROWS, names):

            async def ask(key: int = key, body: Message = body, version: int = version) -> None:
                switch_on()
                await crowd.exchange(key, copy.deepcopy(body), version)

            yield f"{ApiKey(key).name} {label}", ask
    for path in ("/api/v1/view", "/api/v1/view?topic=wide", "/metrics"):

        async def read(path: str = path) -> None:
            switch_on()
            assert (await get(crowd.broker, path))[0] == 200

        yield path, read


def test_no_turn_of_a_request_opens_all_partitions_of_a_view_that_was_just_switched_on(
    crowd: Crowd, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = crowd.broker.topics.get("wide")
    assert wide is not None
    config = wide.config
    try:
        turns = {
            label: longest_turn(runner, monkeypatch, ask)
            for label, ask in requests_about_the_view(crowd)
        }
    finally:
        wide.config = config
    print(sorted(((v, k) for k, v in turns.items()), reverse=True)[:12])
    assert {label: lines for label, lines in turns.items() if lines > LINES_PER_TURN_MAX} == {}
