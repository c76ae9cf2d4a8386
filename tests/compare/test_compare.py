"""A share of `make compare`: random logs, cleaned by Kafka 4.3.0 and by us."""

import random
from pathlib import Path

import pytest

from tests.compare.comparison import compare_cases
from tests.support.kafka import unavailable

CASES = 40


def test_what_is_left_is_what_kafka_leaves(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"Apache Kafka cannot be run here: {reason}")
    first = random.randrange(1 << 30)
    print(f"make compare ARGS='--seed {first} --cases {CASES}'")
    result = compare_cases(tmp_path, range(first, first + CASES))
    assert result.records > CASES
    assert not result.differences, "\n".join(map(str, result.differences))
