"""Which earlier states of a topic exist, without a broker."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.client.topics import TopicBounds
from pipeline.errors import JobError
from pipeline.tables import as_of
from pipeline.tables.as_of import Moved, check_offsets


def leased(*partitions: int, first: int = 0, end: int = 100, groups: object = ((),)) -> Any:
    """A reading of a topic with these partitions."""
    jobs = [
        SimpleNamespace(
            partition=SimpleNamespace(partition=number),
            groups=groups,
            log_start_offset=first,
            end_offset=end,
        )
        for number in partitions
    ]
    plan = SimpleNamespace(topic="t", partitions=[SimpleNamespace(job=job) for job in jobs])
    return SimpleNamespace(lease=SimpleNamespace(plan=plan))


def test_a_state_is_gone_if_the_log_start_passed_it_before_the_lease() -> None:
    """DeleteRecords or retention may run after the job has asked for the bounds."""
    reading = leased(0, first=50, groups=())
    client: Any = None
    bounds = TopicBounds({0: 10}, {0: 100})
    with pytest.raises(JobError, match="as of 30 is gone: its log starts at offset 50"):
        check_offsets(reading, client, bounds, {0: 30}, nearest=False)
    nearest = check_offsets(reading, client, bounds, {0: 30}, nearest=True)
    assert nearest == ({0: 50}, [Moved(0, 30, 50)])
    assert check_offsets(reading, client, bounds, {0: 50}, nearest=False) == ({0: 50}, [])


def test_the_nearest_state_exists_however_far_the_cleaner_is_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease has the state as of its own end, even after a clean beyond the bounds."""
    client: Any = None
    bounds = TopicBounds({0: 0}, {0: 100})
    for cleaned, taken in ((80, 80), (105, 105), (120, 110)):
        monkeypatch.setattr(as_of, "fetch_cleaned_end_offset", lambda *_, end=cleaned: end)
        nearest = check_offsets(
            leased(0, end=110), client, bounds, {0: 30}, missing={0}, nearest=True
        )
        assert nearest == ({0: taken}, [Moved(0, 30, taken)])


def test_a_clean_during_the_indexing_takes_no_state_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job indexes one partition after the other, each for minutes."""
    client: Any = None
    cleaned = {0: 20, 1: 20}

    def earliest(_: object, __: object, end: int, *___: object, **____: object) -> int:
        cleaned.update({0: 90, 1: 90})
        return end

    monkeypatch.setattr(as_of, "fetch_cleaned_end_offset", lambda _, __, number: cleaned[number])
    monkeypatch.setattr(as_of, "_earliest", earliest)
    bounds = TopicBounds({0: 0, 1: 0}, {0: 100, 1: 100})
    requested = {0: 30, 1: 30}
    assert check_offsets(leased(0, 1), client, bounds, requested, nearest=False) == (requested, [])
