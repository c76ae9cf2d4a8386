"""The machine of partition_machine.py over topics with the strategy `generational`.

In three of four runs there are no transactions, with which every clean is one of the whole log.
"""

import random
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cleaner.engine import batch_blocks
from cleaner.planning import plan
from storage.format.batch import Record
from tests.support.cleaner.compacted_log import Producer
from tests.support.cleaner.partition_machine import (
    KEYS,
    LONGER,
    SLACKS,
    STEPS,
    Partition,
    machine_settings,
)
from tests.support.draws import cases

pytestmark = pytest.mark.timeout(400)  # many histories in one test


class SelectivePartition(Partition):
    """A partition whose topic is cleaned selectively, most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = ExitStack()
        # Small segments have several blocks of batches, and small logs several selective cleans.
        self.limits.enter_context(patch.object(batch_blocks, "BLOCK_BYTES_MIN", 64))
        self.limits.enter_context(patch.object(plan, "WHOLE_AFTER", 100))

    @initialize(seed=st.integers(0, 1 << 16), slack=SLACKS)
    def begin(self, seed: int, slack: tuple[float, float]) -> None:
        super().begin(seed, "generational", slack)
        self.has_transactions = seed % 4 == 0
        self.producers = [
            Producer(n, is_transactional=self.has_transactions and n > 2) for n in (1, 2, 3, 4, 5)
        ]

    @precondition(lambda self: self.has_transactions)
    @rule(writer=st.sampled_from([2, 3, 4]), commits=st.booleans(), bumps=st.booleans())
    def end_transaction(self, writer: int, commits: bool, bumps: bool) -> None:
        super().end_transaction(writer, commits, bumps)

    @rule(seed=st.integers(0, 1 << 16))
    def update_some_keys(self, seed: int) -> None:
        """Write a segment of updates: without them, most runs have little garbage."""
        rng = random.Random(seed)
        for _ in range(rng.choice([4, 12])):
            self.world.put([Record(0, 0, rng.choice(KEYS), rng.choice([None, b"v" * 40]))])
        self.world.roll()

    def teardown(self) -> None:
        self.limits.close()
        super().teardown()


SelectivePartition.TestCase.settings = machine_settings(
    int(LONGER or cases(few=20, many=400)), steps=STEPS, derandomize=LONGER is None
)
TestSelectiveInvariants = SelectivePartition.TestCase
