"""One partition to which anything may happen: a state machine for hypothesis.

Random operations: writes of plain, idempotent and transactional producers in all codecs,
tombstones, gaps in the offsets; cleans with maps of any size that are let run, given up or cut off
by a loss of power, while retention, truncation or a change of settings comes in between; orderly
stops, kills and crashes. history.py says what must be readable.
"""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from storage.format.batch import ControlType, Record
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from tests.support.cleaner.compacted_log import Producer
from tests.support.cleaner.living_log import CONFIG, LivingLog
from tests.support.storage.memory_env import SimulatedCrash

LONGER = os.environ.get("VARVE_INVARIANT_EXAMPLES")  # how many, of a run that takes hours
STEPS = 40

# The last two are what the keys of markers look like.
KEYS = [b"a", b"b", b"c", b"", b"\0\0\0\0", b"\0\0\0\1"]
VALUES = [None, None, b"", b"v", b"value " * 12]
CODECS = [NONE, NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD]
HEADERS: list[tuple[tuple[str | bytes, bytes | None], ...]] = [(), (), (("h", b"x"),)]

RECORDS = st.lists(
    st.builds(
        Record,
        offset=st.just(0),
        timestamp=st.just(0),
        key=st.sampled_from(KEYS),
        value=st.sampled_from(VALUES),
        headers=st.sampled_from(HEADERS),
    ),
    min_size=1,
    max_size=4,
)
WRITERS = st.sampled_from([None, None, 0, 1, 2, 3, 4])
BATCHES = st.lists(st.tuples(RECORDS, WRITERS, st.sampled_from(CODECS)), min_size=2, max_size=10)
SHARES = st.integers(0, 100)
TIMES_MS = st.sampled_from([1, 4_000, 10_000, 25_000])
CONFIGS: list[dict[str, Any]] = [
    {"delete_retention_ms": 0},
    {"delete_retention_ms": 3_000},
    {"delete_retention_ms": 10_000},
    {"min_compaction_lag_ms": 5_000},
    {"min_compaction_lag_ms": 0},
    {"max_compaction_lag_ms": 6_000},
    {"min_cleanable_dirty_ratio": 0.0},
    {"min_cleanable_dirty_ratio": 0.5},
    {"cleanup_policy": ("compact",)},
    {"cleanup_policy": ("compact", "delete"), "retention_ms": 20_000},
    {"cleanup_policy": ("compact", "delete"), "retention_bytes": 1_500, "retention_ms": -1},
    {"cleanup_policy": ("delete",), "retention_ms": -1, "retention_bytes": -1},
    {"segment_bytes": 300},
    {"segment_bytes": 700},
    {"segment_bytes": 4_000},
    {"index_interval_bytes": 0},
    {"compression_gzip_level": 9, "compression_zstd_level": 9},
    {"varve_cleaner_strategy": "dirty-ratio"},
    {"varve_cleaner_strategy": "generational"},
]
STRATEGIES = st.sampled_from(["dirty-ratio", "survivorship", "generational", "generational"])
# (slack, dirty ratio): a ratio of 0 leaves no slack
SLACKS = st.sampled_from([(0.0, 0.0), (0.1, 0.5), (0.5, 0.5), (2.0, 0.8)])


class Partition(RuleBasedStateMachine):
    """One partition, and whatever may happen to it."""

    @initialize(seed=st.integers(0, 1 << 16), strategy=STRATEGIES, slack=SLACKS)
    def begin(self, seed: int, strategy: str, slack: tuple[float, float]) -> None:
        config = replace(CONFIG, varve_cleaner_strategy=strategy)
        if strategy == "generational":
            left, ratio = slack
            config = replace(config, varve_compaction_slack=left, min_cleanable_dirty_ratio=ratio)
        self.world = LivingLog(seed, config)
        self.producers = [Producer(n, is_transactional=n > 2) for n in (1, 2, 3, 4, 5)]
        self.open: set[int] = set()

    # Clients ------------------------------------------------------------------------------

    @rule(batches=BATCHES, rolls=st.booleans())
    def write(self, batches: list[tuple[list[Record], int | None, int]], rolls: bool) -> None:
        for records, writer, codec in batches:
            by = None if writer is None else self.producers[writer]
            self.world.put(records, by=by, codec=codec)
            if by is not None and by.is_transactional:
                self.open.add(by.producer_id)
        if rolls:
            self.world.roll()

    @rule(writer=st.sampled_from([2, 3, 4]), commits=st.booleans(), bumps=st.booleans())
    def end_transaction(self, writer: int, commits: bool, bumps: bool) -> None:
        producer = self.producers[writer]
        if bumps:  # as the newer protocol does with each of its transactions
            producer.epoch += 1
            producer.sequence = 0
        kind = ControlType.COMMIT if commits else ControlType.ABORT
        self.world.end_transaction(producer, kind)
        self.open.discard(producer.producer_id)

    @precondition(lambda self: not self.world.config.compacts)
    @rule()
    def write_without_key(self) -> None:
        """While the topic is not compacted, that is allowed."""
        self.world.put([Record(0, 0, None, b"no key")])

    @rule(offsets=st.sampled_from([1, 7, 1 << 31]))
    def leave_gap(self, offsets: int) -> None:
        self.world.leave_gap(offsets)
        self.world.put([Record(0, 0, b"a", b"after a gap")])

    # The broker's timers ------------------------------------------------------------------

    @rule(ms=TIMES_MS)
    def wait(self, ms: int) -> None:
        self.world.env.advance_ms(ms)

    @rule(
        what=st.sampled_from(
            ["roll", "flush", "checkpoint", "expire", "expire producers", "distrust", "trust"]
        )
    )
    def keep_house(self, what: str) -> None:
        match what:
            case "roll":
                self.world.roll()
            case "flush":
                self.world.log.flush()
            case "checkpoint":
                self.world.checkpoint()
            case "expire":
                self.world.expire()
            case "expire producers":
                self.expire_producers()
            case _:
                self.world.clock_trusted = what == "trust"

    def expire_producers(self) -> None:
        existing = self.world.expire_producers(20_000)
        for producer in self.producers:
            if producer.producer_id not in existing:
                producer.epoch += 1
                producer.sequence = 0

    # Operators ----------------------------------------------------------------------------

    @rule(changes=st.sampled_from(CONFIGS))
    def reconfigure(self, changes: dict[str, Any]) -> None:
        self.world.reconfigure(**changes)

    @precondition(lambda self: self.world.config.deletes)
    @rule(share=SHARES)
    def delete_records(self, share: int) -> None:
        log = self.world.log
        first, end = log.log_start_offset, log.high_watermark
        self.world.delete_records(first + (end - first) * share // 100)

    @rule(share=st.integers(40, 100))
    def truncate(self, share: int) -> None:
        """After a batch that is there: where a hole ends no start could tell from the log."""
        ends = [batch.header.next_offset for batch in self.world.batches()]
        if ends:
            self.world.truncate(ends[(len(ends) - 1) * share // 100])
            self.start_over()

    # The cleaner --------------------------------------------------------------------------

    @rule(
        keys=st.sampled_from([None, None, 1, 2, 4]),
        buffer_bytes=st.sampled_from([1, 1 << 16]),
    )
    def clean(self, keys: int | None, buffer_bytes: int) -> None:
        done = self.world.clean(keys=keys, buffer_bytes=buffer_bytes)
        if done is not None:
            self.world.check_log_alone()

    @rule(abort_after=st.integers(0, 12))
    def clean_and_give_up(self, abort_after: int) -> None:
        self.world.clean(abort_after=abort_after)

    @rule(what=st.sampled_from(["expire", "truncate", "reconfigure", "delete", "write"]))
    def clean_while_something_happens(self, what: str) -> None:
        self.world.meanwhile = {
            "expire": self.world.expire,
            "truncate": lambda: self.truncate(80),
            "reconfigure": lambda: self.world.reconfigure(cleanup_policy=("compact", "delete")),
            "delete": lambda: self.world.delete_records(self.world.log.high_watermark),
            "write": lambda: self.world.put([Record(0, 0, b"a", b"meanwhile")]),
        }[what]
        self.world.clean()
        self.world.meanwhile = None

    @rule(keys=st.sampled_from([None, 2]), at=st.integers(1, 60), again=st.integers(1, 60))
    def clean_and_lose_power(self, keys: int | None, at: int, again: int) -> None:
        env = self.world.env
        env.crash_at = env.operations + at
        try:
            self.world.clean(keys=keys)
            self.world.log.flush()
        except SimulatedCrash:
            pass
        env.crash_at = None
        self.lose_power(again)

    @rule()
    def clean_again_without_news(self) -> None:
        """9: once markers have been stamped, nothing changes any more."""
        if self.world.config.delete_retention_ms == 0 or self.world.config.min_compaction_lag_ms:
            return
        for _ in range(3):
            self.world.dirty = None
            if self.world.clean() is None:
                return
        before = self.world.batches()
        self.world.dirty = None
        self.world.clean()
        assert self.world.batches() == before, "9: a clean without news changes something"

    # Restarts -----------------------------------------------------------------------------

    @rule(how=st.sampled_from(["close", "kill", "lose power", "look"]), again=st.integers(1, 60))
    def restart(self, how: str, again: int) -> None:
        match how:
            case "close":
                self.world.close()
            case "kill":
                self.world.crash(kill=True)
            case "look":
                self.world.check_log_alone()
            case _:
                self.lose_power(again)

    def lose_power(self, again: int) -> None:
        """In two of three cases once more while the log is being opened."""
        self.world.crash(crash_again_at=again if again <= 40 else None)
        self.start_over()

    def start_over(self) -> None:
        """What was not durable has gone: producers come back with another epoch."""
        self.world.abort_open()
        self.open.clear()
        existing = self.world.log.producers.last_records()
        for producer in self.producers:
            epoch = existing.get(producer.producer_id, (0, 0))[0]
            producer.epoch = max(producer.epoch, epoch) + 1
            producer.sequence = 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            # A rule that failed between a crash and the next start says what is wrong.
            with suppress(SimulatedCrash):
                self.world.check("at the end")


def machine_settings(examples: int, *, steps: int = 30, derandomize: bool = True) -> settings:
    """The settings of a machine's test case: by default its runs are always the same."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
