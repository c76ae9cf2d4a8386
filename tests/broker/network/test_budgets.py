"""Budgets of the most expensive requests that the limits of each API allow.

The tests assert counts, not seconds: lines of Python in one turn of the event loop, bytes allocated
per row. A whole broker without sockets handles each request.

- The default run measures the newest version of each API with few rows. Its loop clock runs faster,
  so that a handler that never yields is found with few rows, too.
- With `CI`, memory is measured with more rows, and also for the oldest and the first flexible
  version of each API.
- `make budgets` sends as many rows as the limits allow to the newest version of each API; a tenth
  of that, where each row is about the settings of a topic. Each older version whose fields differ
  from those of the version before it gets a fifth of that; the bound on a turn is a fifth there,
  too. Memory is measured with a fifth of the rows, and for older versions with a thousand.
"""

import asyncio
import copy
import gc
import inspect
import os
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest

from broker.app import Broker
from broker.handlers.dispatch import WHOLE_BYTES_MAX, Dispatcher
from broker.handlers.routes import make_dispatcher
from protocol import codec
from protocol.api import APIS, ApiKey
from protocol.errors import RowLimitError
from protocol.limits import FEW_ROWS, ROWS, ROWS_PER_PARTITION, RequestLimits
from protocol.schema import walk
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import fake_connection
from tests.support.clocks.loop_meter import SECONDS_PER_LINE, LoopMeter
from tests.support.protocol.largest_requests import Names, largest_bodies, long_array_bodies
from tests.support.protocol.messages import every_version, name_of
from tests.support.storage.memory_env import MemoryEnv

ALL: Final = "VARVE_ALL_BUDGETS" in os.environ
# 5 ms; or a slice of 512 rows of the largest kind, which 2,000 rows without turns are above.
LINES_PER_TURN_MAX: Final = int(0.005 / SECONDS_PER_LINE) if ALL else 20_000
CLOCK_RATE: Final = 1 if ALL else 10
OLD_VERSION_SHARE: Final = 5  # of rows and of a turn, for all but the newest version of an API
FAST_ROWS: Final = 2_000
# Of these each row is hundreds of lines: every setting of a topic is looked at.
FAST_ROWS_WITH_SETTINGS: Final = 200
ALL_ROWS_WITH_SETTINGS: Final = 5_000  # a turn of so many rows is above its bound, too
WITH_SETTINGS: Final = frozenset(
    (
        ApiKey.CREATE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
    )
)
IN_CI: Final = "CI" in os.environ
# Rows whose memory is measured: tracing makes a request three times slower.
MEMORY_ROWS: Final = 1_000 if ALL or IN_CI else 300
ALL_MEMORY_ROWS: Final = ROWS // 5  # of the newest versions, with `make budgets`
# The limit where one row too many is refused: a request of so many is never decoded as a whole.
REFUSED_ABOVE_ROWS: Final = WHOLE_BYTES_MAX
LINES_PER_REFUSAL_MAX: Final = 500  # measured: at most 340
# A row exists as part of the request, as a result and as bytes. Measured with CPython 3.11: 2,170
# bytes for DescribeGroups 6, 1,610 for IncrementalAlterConfigs, at most 1,150 for all other APIs.
BYTES_PER_ROW_MAX: Final = 2_500
BYTES_WITHOUT_ROWS_MAX: Final = 256 << 10  # Metadata of 400 partitions is the largest
# CreateTopics and DescribeConfigs answer with some forty settings a topic.
SETTINGS_OF_A_TOPIC: Final = 40
# Requests that create or delete topics run last: those before them find the topics of the fixture.
CHANGES_TOPICS: Final = (
    ApiKey.CREATE_PARTITIONS,
    ApiKey.CREATE_TOPICS,
    ApiKey.METADATA,
    ApiKey.DELETE_TOPICS,
)
TOPICS: Final = 20
PARTITIONS: Final = 20


# A case takes 10 s of processor time at most.
pytestmark = pytest.mark.timeout(600 if ALL else 120)


def cases() -> list[tuple[int, int]]:
    return topic_changes_last(
        case for case in every_version() if is_newest(case) or (ALL and is_different(case))
    )


def memory_cases() -> list[tuple[int, int]]:
    if ALL or not IN_CI:
        return cases()
    return topic_changes_last(
        case for case in every_version() if is_newest(case) or is_border(case)
    )


def topic_changes_last(cases: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    order = {key: place for place, key in enumerate(CHANGES_TOPICS, 1)}
    return sorted(cases, key=lambda case: order.get(ApiKey(case[0]), 0))


def is_border(case: tuple[int, int]) -> bool:
    """Return whether this is the oldest or the first flexible version of an API."""
    key, version = case
    api = APIS[key]
    is_first_flexible = version in api.flexible and version - 1 not in api.flexible
    return version == api.versions.first or is_first_flexible


def is_newest(case: tuple[int, int]) -> bool:
    key, version = case
    return version == APIS[key].versions.last


def is_different(case: tuple[int, int]) -> bool:
    """Whether the version before it has other fields."""
    key, version = case
    return version == APIS[key].versions.first or fields_of(case) != fields_of((key, version - 1))


def fields_of(case: tuple[int, int]) -> list[object]:
    key, version = case
    api = APIS[key]
    parts = [part for root in (api.request, api.response) for part in walk(root)]
    fields = [
        (part.name, field.name)
        for part in parts
        for field in part.fields
        if version in field.versions
    ]
    return [version in api.flexible, *fields]


def rows_of(case: tuple[int, int]) -> int:
    key = case[0]
    limit = RequestLimits(100 << 20, 10_000).of(key).rows
    if ALL:
        limit = min(limit, ALL_ROWS_WITH_SETTINGS) if key in WITH_SETTINGS else limit
        return limit if is_newest(case) else limit // OLD_VERSION_SHARE
    return min(limit, FAST_ROWS_WITH_SETTINGS if key in WITH_SETTINGS else FAST_ROWS)


def memory_rows_of(case: tuple[int, int]) -> int:
    return min(rows_of(case), ALL_MEMORY_ROWS if ALL and is_newest(case) else MEMORY_ROWS)


def share_of(case: tuple[int, int]) -> int:
    """The part of a turn that is allowed. A step for one topic's settings has a fixed length."""
    is_part = ALL and not is_newest(case) and case[0] not in WITH_SETTINGS
    return OLD_VERSION_SHARE if is_part else 1


class Requester:
    """Puts frames to the dispatcher of a broker."""

    def __init__(self, broker: Broker, limits: RequestLimits) -> None:
        services = copy.copy(broker._services)
        services.limits = limits
        self._dispatcher: Dispatcher = make_dispatcher(services)
        self._connection = fake_connection()
        names = [f"t{number}" for number in range(TOPICS)]
        topics = [broker.topics.get(name) for name in names]
        ids = tuple(topic.topic_id for topic in topics if topic is not None)
        self.names = Names(tuple(names), ids, PARTITIONS, ("g",))

    async def ask(self, frame: memoryview) -> int:
        """-> bytes of the answer"""
        answer: Any = self._dispatcher.handle(self._connection, frame)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is None or isinstance(answer, bytes):
            return len(answer or b"")
        return sum(len(part) for part in answer if isinstance(part, bytes))


@pytest.fixture(scope="module")
def runner() -> Any:
    with asyncio.Runner() as runner:
        yield runner


def serve(runner: asyncio.Runner, limits: RequestLimits | None = None) -> Iterator[Requester]:
    """One broker for all requests of a test: the last of them delete its topics."""
    settings = {"partitions": PARTITIONS, "keys": {"cleanup.policy": "delete"}}
    topics = {f"t{number}": settings for number in range(TOPICS)}
    # Topics that Metadata creates would make all later requests more expensive.
    serving = broker_in_memory(MemoryEnv(seed=5), topics=topics, auto_create_topics=False)
    broker = runner.run(serving.__aenter__())
    yield Requester(broker, limits or broker._services.limits)
    runner.run(serving.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def requester(runner: asyncio.Runner) -> Iterator[Requester]:
    yield from serve(runner)


@pytest.fixture(scope="module")
def requester_for_memory(runner: asyncio.Runner) -> Iterator[Requester]:
    yield from serve(runner)


@pytest.fixture(scope="module")
def limited_requester(runner: asyncio.Runner) -> Iterator[Requester]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocol.limits.ROWS", REFUSED_ABOVE_ROWS)
        patch.setattr("protocol.limits.FEW_ROWS", REFUSED_ABOVE_ROWS)
        limits = RequestLimits(100 << 20, REFUSED_ABOVE_ROWS // ROWS_PER_PARTITION)
    assert {limits.of(key).rows for key in APIS} == {REFUSED_ABOVE_ROWS}
    yield from serve(runner, limits)


def frames(case: tuple[int, int], rows: int, requester: Requester) -> list[tuple[str, memoryview]]:
    made = []
    for label, body in largest_bodies(*case, rows, requester.names, with_known=ALL):
        frame = codec.encode_request(*case, 1, "me", body)[4:]
        limit = RequestLimits(100 << 20, 10_000).of(case[0]).frame_bytes
        assert len(frame) <= limit, (label, "rows reach their limit before bytes do")
        made.append((label, memoryview(bytearray(frame))))
    return made


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_no_turn_of_a_request_holds_the_loop_for_long(
    case: tuple[int, int],
    requester: Requester,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, too_long = LoopMeter(CLOCK_RATE * share_of(case)), []
    for label, frame in frames(case, rows_of(case), requester):

        async def ask(frame: memoryview = frame) -> None:
            with meter.measuring(monkeypatch):
                await asyncio.sleep(0)
                await requester.ask(frame)

        runner.run(ask())
        assert meter.lines > 0
        if meter.longest_turn > LINES_PER_TURN_MAX // share_of(case):
            too_long.append((label, meter.longest_turn, meter.lines))
    assert not too_long


@pytest.mark.parametrize("case", memory_cases(), ids=name_of)
def test_memory_of_a_request_is_in_proportion_to_its_rows(
    case: tuple[int, int], requester_for_memory: Requester, runner: asyncio.Runner
) -> None:
    rows = memory_rows_of(case)
    too_much = []
    factor = SETTINGS_OF_A_TOPIC if case[0] == ApiKey.CREATE_TOPICS else 1
    limit = rows * BYTES_PER_ROW_MAX * factor + BYTES_WITHOUT_ROWS_MAX

    def peak_of(frame: memoryview) -> int:
        tracemalloc.start()
        try:
            runner.run(requester_for_memory.ask(frame))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for label, frame in frames(case, rows, requester_for_memory):
        runner.run(requester_for_memory.ask(frame))  # compile the codecs, fill the tables
        peak = peak_of(frame)
        if peak > limit:  # a thread that another test left may allocate, but not each time
            peak = peak_of(frame)
        if peak > limit:
            too_much.append((label, peak, peak // rows))
    assert not too_much


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_a_request_of_one_row_too_many_is_refused_at_no_cost(
    case: tuple[int, int],
    limited_requester: Requester,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its rows are built: in as few lines as a request without rows."""
    meter = LoopMeter()
    bodies = long_array_bodies(*case, REFUSED_ABOVE_ROWS + 1, limited_requester.names)
    for label, body in bodies:
        frame = memoryview(bytearray(codec.encode_request(*case, 1, "me", body)[4:]))

        async def ask(frame: memoryview = frame) -> bool:
            try:
                with meter.measuring(monkeypatch):
                    answer = await limited_requester.ask(frame)
            except RowLimitError:
                return True
            return answer < 200

        counts = []
        for _ in range(4):  # the first one compiles the codec; a task may run beside another one
            runner.run(let_others_run())
            assert runner.run(ask()), label
            counts.append(meter.lines)
        assert min(counts) < LINES_PER_REFUSAL_MAX, (label, counts)


async def let_others_run() -> None:
    """Let the tasks that are ready go on, so that their lines do not count."""
    for _ in range(1000):
        await asyncio.sleep(0)


def test_the_meter_sees_every_round_of_a_comprehension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a loop that is written in one line would cost nothing."""
    meter = LoopMeter()

    async def hold() -> None:
        with meter.measuring(monkeypatch):
            await asyncio.sleep(0)
            assert len({n: n for n in range(10_000)}) == 10_000
            await asyncio.sleep(0)

    asyncio.run(hold())
    assert meter.longest_turn > 10_000


def test_the_meter_does_not_count_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that other tests left would make a measurement depend on them."""

    class Left:
        def __del__(self) -> None:
            assert sum(1 for _ in range(10_000)) == 10_000

    meter = LoopMeter()
    gc.collect()
    for _ in range(50):
        left: Any = Left()
        left.itself = left
    with meter.measuring(monkeypatch):
        assert len(list(map(list, [()] * 10_000))) == 10_000
    assert meter.lines < 100
    assert gc.isenabled()


def test_every_api_has_a_limit() -> None:
    limits = RequestLimits(100 << 20, 10_000)
    for key in APIS:
        assert FEW_ROWS <= limits.of(key).rows <= ROWS
    assert RequestLimits(100 << 20, 100_000).of(ApiKey.FETCH).rows == 300_000
