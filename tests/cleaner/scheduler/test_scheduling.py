"""A scheduling simulation: thousands of partitions, loads, clocks, and what is promised to each.

The promises are those of docs/decisions/0024-scheduling-order.md. Each seed is one history and can
be had again: VARVE_SCHEDULE_SEEDS=17:18. `make sim-schedule` runs more of them.
"""

import random

import pytest

from cleaner.planning.scheduling_order import Requester
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.schedule_model import MIB, ModelPartition, ScheduleModel
from tests.support.draws import seeds_of_tests

GIB, TIB = 1 << 30, 1 << 40
DAY_MS = 86_400_000
LIMITS = {"limited": 64 << 10, "less limited": MIB}  # of topics


SEEDS = seeds_of_tests("VARVE_SCHEDULE_SEEDS", few=1, many=2)


def small_partitions(count: int, rng: random.Random) -> list[ModelPartition]:
    return [
        ModelPartition(
            TopicPartition("small", number),
            clean_bytes=rng.randrange(MIB),
            bytes_per_second=rng.choice([0.1, 10.0, 1000.0]),
            lag_ms=rng.choice([900_000, DAY_MS]),
            survives=rng.random() * 0.2,
        )
        for number in range(count)
    ]


def any_load(seed: int) -> ScheduleModel:
    """Partitions of all sizes, some of them hostile."""
    rng = random.Random(seed)
    partitions = small_partitions(rng.choice([50, 500, 2000]), rng)
    for number in range(rng.randrange(1, 20)):
        size = int(10 ** rng.uniform(8.5, 12.3))
        topic = rng.choice(["large", "large", *LIMITS])
        partitions.append(
            ModelPartition(
                TopicPartition(topic, number),
                clean_bytes=size * rng.random(),
                dirty_bytes=size * rng.random(),
                dirty_since_ms=-rng.randrange(10**11),
                bytes_per_second=rng.choice([0.0, 1e4, 1e6]),
                lag_ms=rng.choice([1, 60_000, DAY_MS]),
                survives=rng.random(),
                limit=LIMITS.get(topic),
                is_aborted_often=rng.random() < 0.2,
            )
        )
    return ScheduleModel(
        seed,
        partitions,
        workers=rng.choice([1, 1, 2, 5]),
        bytes_per_second=rng.choice([8, 64, 500]) * MIB,
        request_every_ms=rng.choice([None, 5_000, 600_000]),
        requesters=(Requester.OPERATOR, "alice", "bob"),
        pause_every_ms=rng.choice([None, 7_000]),
        jump_every_ms=rng.choice([None, 1_000_000]),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_overtaken_twice_by_the_same_one_whatever_the_load(seed: int) -> None:
    print(f"seed {seed}")
    model = any_load(seed)
    model.run(hours=1)
    assert sum(model.starts.values()) > 0  # the model checks each of them


def always_late(topic: str, count: int, clean_bytes: int = 64 * MIB) -> list[ModelPartition]:
    return [
        ModelPartition(
            TopicPartition(topic, number), clean_bytes=clean_bytes, dirty_bytes=1,
            dirty_since_ms=-DAY_MS, bytes_per_second=1.0, lag_ms=1, survives=0.0,
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("count", [100, 400])
def test_the_wait_of_a_topic_does_not_grow_with_the_late_partitions_of_another(
    count: int, is_late: bool
) -> None:
    """A clean takes 1.5 s: the one that runs, and two at most before the turn of the topics."""
    (other,) = always_late("other", 1, clean_bytes=MIB)
    if not is_late:
        other.lag_ms, other.bytes_per_second = DAY_MS, MIB
    model = ScheduleModel(0, [*always_late("late", count), other])
    model.run(hours=0.5)
    assert other.cleans >= 25
    assert model.longest_ms["topic other"] <= 3 * 1_600, model.longest_ms


def test_a_partition_of_a_large_topic_waits_for_two_jobs_of_each_partition_at_most() -> None:
    """In the order of the topics alone, each would wait for a hundred jobs of each topic."""
    others = [partition for n in range(100) for partition in always_late(f"other {n}", 1)]
    model = ScheduleModel(0, [*others, *always_late("large", 100)])
    model.run(hours=1)
    assert model.longest_ms["topic large"] <= 2 * 200 * 1_600, model.longest_ms


@pytest.mark.parametrize("seed", SEEDS)
def test_partitions_that_are_always_late_take_turns_with_one_that_has_no_deadline(
    seed: int,
) -> None:
    print(f"seed {seed}")
    patient = ModelPartition(
        TopicPartition("patient", 0), clean_bytes=MIB, dirty_bytes=2 * MIB, dirty_since_ms=0,
        bytes_per_second=MIB / 10, lag_ms=DAY_MS, survives=0.5,
    )  # fmt: skip
    model = ScheduleModel(seed, [*always_late("late", 100), patient])
    model.run(hours=1)
    assert patient.cleans >= 5


@pytest.mark.parametrize("seed", SEEDS)
def test_small_partitions_wait_for_each_other_but_never_for_a_terabyte(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    huge = [
        ModelPartition(
            TopicPartition("huge", number), clean_bytes=TIB, dirty_bytes=TIB,
            dirty_since_ms=-DAY_MS, bytes_per_second=10 * MIB, lag_ms=1, survives=0.5,
        )
        for number in range(3)
    ]  # fmt: skip
    model = ScheduleModel(seed, [*small_partitions(1000, rng), *huge])
    model.run(hours=1)
    assert model.longest_ms["small partition"] <= 3 * 60_000, model.longest_ms
    assert model.starts["small partition"] >= 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_topic_with_a_low_limit_delays_no_other_topic(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    huge = ModelPartition(
        TopicPartition("huge", 0), clean_bytes=40 * GIB, dirty_bytes=20 * GIB,
        dirty_since_ms=-DAY_MS, bytes_per_second=0.0, lag_ms=1, survives=0.5, limit=64 << 10,
    )  # fmt: skip
    others = [
        ModelPartition(
            TopicPartition(f"limited-{number}", 0), clean_bytes=0, dirty_bytes=rng.randrange(GIB),
            dirty_since_ms=0, bytes_per_second=0.0, lag_ms=1, survives=0.5,
            limit=rng.choice([64 << 10, MIB]),
        )
        for number in range(20)
    ]  # fmt: skip
    model = ScheduleModel(seed, [huge, *others])
    model.run(hours=1)
    assert all(partition.cleans >= 1 for partition in others)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_partitions_of_a_topic_with_a_limit_take_turns(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    partitions = [
        ModelPartition(
            TopicPartition("limited", number), clean_bytes=rng.randrange(100 * MIB),
            dirty_bytes=MIB, dirty_since_ms=-1, bytes_per_second=rng.choice([1e3, 1e5]), lag_ms=0,
            survives=rng.random() * 0.2, limit=MIB,
        )
        for number in range(10)
    ]  # fmt: skip
    on_time = ModelPartition(
        TopicPartition("limited", 10), clean_bytes=0, dirty_bytes=MIB, dirty_since_ms=0,
        bytes_per_second=0.0, lag_ms=DAY_MS, survives=0.5, limit=MIB,
    )  # fmt: skip
    model = ScheduleModel(seed, [*partitions, on_time], workers=2)
    model.run(hours=5)
    assert on_time.cleans == 1
    cleans = [partition.cleans for partition in partitions]
    assert min(cleans) >= 1, cleans
    assert max(cleans) <= min(cleans) + 1, cleans


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_waits_for_other_requests_only(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    backfill = ModelPartition(
        TopicPartition("backfill", 0), clean_bytes=500 * GIB, dirty_bytes=64 * MIB,
        dirty_since_ms=-365 * DAY_MS, bytes_per_second=5 * MIB, lag_ms=1, survives=1.0,
    )  # fmt: skip
    model = ScheduleModel(
        seed, [*small_partitions(200, rng), backfill],
        bytes_per_second=20 * MIB, request_every_ms=60_000,
    )  # fmt: skip
    model.run(hours=1)
    assert model.starts["requested"] > 0
    assert model.longest_ms["request"] <= 60_000, model.longest_ms


@pytest.mark.parametrize("seed", SEEDS)
def test_partitions_whose_jobs_are_always_aborted_keep_nobody_from_being_cleaned(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    storm = [
        ModelPartition(
            TopicPartition("storm", number), clean_bytes=GIB, dirty_bytes=100 * GIB,
            dirty_since_ms=-DAY_MS, bytes_per_second=MIB, lag_ms=1, survives=0.5,
            is_aborted_often=True,
        )
        for number in range(50)
    ]  # fmt: skip
    calm = [
        ModelPartition(
            TopicPartition("calm", number), clean_bytes=0, dirty_bytes=rng.randrange(GIB),
            dirty_since_ms=0, bytes_per_second=0.0, lag_ms=DAY_MS, survives=0.5,
        )
        for number in range(50)
    ]  # fmt: skip
    model = ScheduleModel(seed, [*storm, *calm])
    model.run(hours=1)
    assert all(partition.cleans >= 1 for partition in calm)
    assert all(partition.cleans == 0 for partition in storm)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wall_clock_that_jumps_by_years_moves_nobody_further_than_the_head_start(
    seed: int,
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = ScheduleModel(seed, small_partitions(300, rng), jump_every_ms=20_000)
    model.run(hours=1)
    assert model.longest_ms["small partition"] <= 60_000, model.longest_ms
