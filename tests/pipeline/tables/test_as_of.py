"""Which earlier states of a topic exist, without a broker."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.client.topics import TopicBounds
from pipeline.errors import JobError
from pipeline.tables.as_of import Moved, check_offsets


def test_a_state_is_gone_if_the_log_start_passed_it_before_the_lease() -> None:
    """DeleteRecords or retention may run after the job has asked for the bounds."""
    job = SimpleNamespace(partition=SimpleNamespace(partition=0), groups=(), log_start_offset=50)
    plan = SimpleNamespace(topic="t", partitions=(SimpleNamespace(job=job),))
    reading: Any = SimpleNamespace(lease=SimpleNamespace(plan=plan))
    client: Any = None
    bounds = TopicBounds({0: 10}, {0: 100})
    with pytest.raises(JobError, match="as of 30 is gone: its log starts at offset 50"):
        check_offsets(reading, client, bounds, {0: 30}, nearest=False)
    nearest = check_offsets(reading, client, bounds, {0: 30}, nearest=True)
    assert nearest == ({0: 50}, [Moved(0, 30, 50)])
    assert check_offsets(reading, client, bounds, {0: 50}, nearest=False) == ({0: 50}, [])
