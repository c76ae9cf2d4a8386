"""A topic that changes between `compact` and `delete` while it is written to and cleaned.

The promise is in docs/explanation/compaction.md.
"""

import random
from dataclasses import replace

from tests.support.cleaner.compacted_log import CONFIG, CompactedLog

SEEDS = 20
OPERATIONS = 60
KEYS = 8
RETENTION_MS = 30_000
COMPACT = replace(CONFIG, file_delete_delay_ms=0)
DELETE = replace(COMPACT, cleanup_policy=("delete",), retention_ms=RETENTION_MS)


class ToggledLog:
    """A log, and the last record that was written for each key."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.written = CompactedLog(seed, COMPACT)
        self.last: dict[str, tuple[int, str | None]] = {}
        self.expired = 0  # segments

    @property
    def compacts(self) -> bool:
        return self.written.log.config.compacts

    def put(self) -> None:
        key = f"key{self.random.randrange(KEYS)}"
        value = None if self.random.random() < 0.3 else f"{key}@{self.written.log.log_end_offset}"
        self.last[key] = (self.written.put((key, value)), value)

    def toggle(self) -> None:
        log = self.written.log
        before = log.generation
        log.update_config(DELETE if self.compacts else COMPACT)
        assert log.generation != before, "a clean that was planned before is discarded"

    def retain(self) -> None:
        """Retention, on a topic of either policy."""
        log = self.written.log
        log.flush()
        expired = log.retention.expire(self.written.now_ms)
        if self.compacts:
            assert not expired, "no record expires while the policy is compact"
        self.expired += len(expired)

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.6:
            self.put()
        elif draw < 0.75:
            self.written.roll()
        elif draw < 0.85:
            self.toggle()
        elif draw < 0.92 and self.compacts and self.written.sources():
            self.written.clean()
        else:
            self.written.now_ms += self.random.choice((1_000, 11_000, 31_000))
            self.retain()
        self.check()

    def check(self) -> None:
        log = self.written.log
        records = [record for _, batch in self.written.batches() for record in batch]
        present = {}
        for record in records:
            assert record.key is not None
            present[record.key.decode()] = record.value and record.value.decode()
        for key, (offset, value) in self.last.items():
            if value is None:
                assert present.get(key) is None, (self.seed, "a deleted key does not come back")
            elif offset >= log.log_start_offset:
                assert present[key] == value, (self.seed, "the last value of a key stays")
            else:
                assert key not in present, (self.seed, "no older value is left")


def test_a_change_of_policy_costs_no_last_value_but_by_retention_and_restores_no_key() -> None:
    logs = [run(seed) for seed in range(SEEDS)]
    assert sum(log.expired for log in logs) > SEEDS
    assert sum(log.written.runs for log in logs) > 2 * SEEDS


def run(seed: int) -> ToggledLog:
    toggled = ToggledLog(seed)
    for _ in range(OPERATIONS):
        toggled.step()
    if not toggled.compacts:
        toggled.toggle()
    toggled.put()  # or retention may have left no record at all
    toggled.written.roll()
    toggled.written.clean()
    toggled.check()
    keys = [r.key for _, batch in toggled.written.batches() for r in batch]
    assert len(keys) == len(set(keys)), f"seed {seed}: the next clean goes over all dirty records"
    return toggled
