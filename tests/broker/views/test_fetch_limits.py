"""Readers of logs and views get the same records, whatever the limits of their fetches are."""

import asyncio
import random
from dataclasses import dataclass, field

from broker.app import Broker
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch, decode_records, read_header, walk_headers
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_settings, client_of
from tests.support.broker.views.view_broker import ANY_TIME, ON
from tests.support.broker.views.view_worker import thread_worker
from tests.support.draws import cases
from tests.support.protocol.raw_client import FETCH_VERSION, RawClient
from tests.support.storage.memory_env import MemoryEnv

SEEDS = cases(few=6, many=40)
READERS = 3  # for each seed
REQUESTS_MAX = 4_000  # of one reader
LARGE = 50 << 20
LIMITS = (0, 1, 60, 70, 100, 300, 1_000, 3_000, 100_000)  # bytes; batches have 70 to 8,000
TOPICS = ("orders", "feed", "plain")
VIEWS = ("orders", "feed")
NAMES = (*TOPICS, *(f"{topic}.compacted" for topic in VIEWS))


@dataclass
class Reader:
    """A client that reads topics from their starts to their ends."""

    rng: random.Random
    ends: dict[str, int]
    has_session: bool = False
    is_limited: bool = True
    records: dict[str, list[Record]] = field(default_factory=lambda: {name: [] for name in NAMES})
    offsets: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    _session: tuple[int, int] = (0, 0)  # id and next epoch

    def read(self, client: RawClient) -> None:
        """Send fetches until every end is reached."""
        for _ in range(REQUESTS_MAX):
            rest = [name for name, end in self.ends.items() if self.offsets[name] < end]
            if not rest:
                return
            self.rng.shuffle(rest)
            answer = client.request(ApiKey.FETCH, FETCH_VERSION, self._fetch(rest))
            assert isinstance(answer, m.FetchResponse)
            assert answer.error_code == ErrorCode.NONE
            self._session = answer.session_id, self._session[1] + 1
            for topic in answer.responses:
                self._take(topic.topic, topic.partitions[0])
        raise AssertionError(f"no end after {REQUESTS_MAX} fetches: {self.offsets} of {self.ends}")

    def _limit(self) -> int:
        return self.rng.choice(LIMITS) if self.is_limited else LARGE

    def _fetch(self, names: list[str]) -> m.FetchRequest:
        if not self.has_session:
            self._session = 0, -1
        elif self.rng.random() < 0.1:
            self._session = self._session[0], 0  # another session, with all topics
        rows = [
            m.FetchRequestTopic(
                topic=name,
                partitions=[
                    m.FetchRequestPartition(
                        partition=0,
                        fetch_offset=self.offsets[name],
                        partition_max_bytes=self._limit(),
                    )
                ],
            )
            for name in names
        ]
        session_id, epoch = self._session
        return m.FetchRequest(
            max_wait_ms=0,
            max_bytes=self._limit(),
            session_id=session_id,
            session_epoch=epoch,
            topics=rows,
        )

    def _take(self, name: str, row: m.FetchResponsePartition) -> None:
        assert row.error_code == ErrorCode.NONE, (name, self.offsets[name])
        data = bytes(row.records or b"")
        for position, header in walk_headers(data):
            if position + header.size_bytes > len(data):
                return  # the end of a response may have a part of a batch
            records = decode_records(data, header, position)
            self.records[name] += [r for r in records if r.offset >= self.offsets[name]]
            self.offsets[name] = max(self.offsets[name], header.next_offset)


def fill(env: MemoryEnv, broker: Broker, topic: str, batches: int, rng: random.Random) -> None:
    partition = broker.topics.partition(TopicPartition(topic, 0))
    assert partition is not None
    for _ in range(batches):
        now_ms = env.wall_ms()
        records = [
            Record(
                at,
                now_ms,
                b"k%d" % rng.randrange(12),
                None if rng.random() < 0.1 else rng.randbytes(rng.choice([3, 50, 400])),
            )
            for at in range(rng.choice([1, 1, 2, 5, 20]))
        ]
        batch = build_batch(records, codec=rng.randrange(3))
        partition.append(memoryview(batch), read_header(batch), now_ms)
        if rng.random() < 0.2:
            partition.log.roll(now_ms)


async def test_readers_get_the_same_records_whatever_their_limits_are() -> None:
    for seed in range(SEEDS):
        print(f"seed {seed}")
        rng, env = random.Random(seed), MemoryEnv(seed=seed)
        topics = {
            topic: {"keys": {**(ON if topic in VIEWS else {}), **ANY_TIME}} for topic in TOPICS
        }
        topics["orders"]["keys"]["cleanup.policy"] = "compact"
        settings = broker_settings(topics=topics)
        broker = Broker(settings, env, view_worker=thread_worker(env))
        await broker.start()
        try:
            for _ in range(rng.randrange(1, 4)):
                for topic in TOPICS:
                    fill(env, broker, topic, rng.randrange(25), rng)
                for topic in VIEWS:
                    await broker.view_scheduler.compact(TopicPartition(topic, 0))
            for topic in TOPICS:
                fill(env, broker, topic, rng.randrange(10), rng)
            ends = {
                name: partition.log.high_watermark
                for name in NAMES
                for partition in [broker.topics.partition(TopicPartition(name.split(".")[0], 0))]
                if partition is not None
            }
            expected = Reader(rng, ends, is_limited=False)
            with client_of(broker) as client:
                await asyncio.to_thread(expected.read, client)
            for _ in range(READERS):
                reader = Reader(rng, ends, has_session=rng.random() < 0.5)
                with client_of(broker) as client:
                    await asyncio.to_thread(reader.read, client)
                assert reader.records == expected.records
        finally:
            await broker.stop()
