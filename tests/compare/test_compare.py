"""A share of `make compare`: logs from fixed seeds, cleaned by Kafka 4.3.0 and by us.

Fresh seeds are for `make compare`, which draws them: what it finds is told there, and its seed is
added here. VARVE_DRAWS=fresh, or =SEED, has the first range begin elsewhere.
"""

from pathlib import Path

import pytest

from tests.compare.comparison import compare_cases
from tests.support.draws import cases, seed_of_test
from tests.support.peers.kafka import unavailable

FIRST = 1
CASES = cases(few=3, many=20)
# Each once showed a difference, or what is an exception now (docs/reference/compare-with-kafka.md).
FOUND = (
    316756658,  # a producer's last word is an emptied marker, and the stop is unclean
    1000019,  # an aborted transaction begins with a batch that Kafka keeps, empty
    1000137,  # the same, with later data of the producer
    1000335,  # an open transaction wholly below the log start, over an orderly stop
    40000385,  # the same, of a log without records, and then it goes on
    60000230,  # and is aborted
)


@pytest.mark.timeout(600)  # a JVM, and on a busy machine
def test_what_is_left_is_what_kafka_leaves(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"Apache Kafka cannot be run here: {reason}")
    first = seed_of_test(FIRST)
    print(f"make compare ARGS='--seed {first} --cases {CASES}', and the seeds {FOUND}")
    result = compare_cases(tmp_path, [*range(first, first + CASES), *FOUND])
    assert result.records > CASES
    assert not result.differences, "\n".join(map(str, result.differences))
