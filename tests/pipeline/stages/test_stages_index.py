"""What an index says of partitions, against the records read one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.job import CleanJob
from pipeline.compaction.indexing import PartitionIndex, index_partitions
from pipeline.stages.planning import Limits
from pipeline.stages.survivors import Kind, SurvivorsFile, read_survivors
from storage.env import Env
from storage.format.batch import Record, decode_records, read_header, walk_headers
from storage.format.filenames import LOG, file_name
from tests.pipeline.stages.test_stages_damage import damage, some_log
from tests.support.cleaner.cleaning import write_segments
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.draws import cases
from tests.support.stages import DirectEngine, any_limits, out_of, source_of
from tests.support.storage.memory_env import MemoryEnv

PROPERTY = settings(
    max_examples=cases(few=25, many=100),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class Model:
    """A table in plain Python: committed records from the log's start on, the last of each key."""

    def __init__(self, env: Env, job: CleanJob) -> None:
        self.last: dict[bytes, Record] = {}
        self.records: dict[int, list[Record]] = {}
        self.aborted: dict[int, int] = {}
        self.control: dict[int, int] = {}
        self.batches: dict[int, int] = {}
        for source in (source for group in job.groups for source in group):
            base = source.base_offset
            self.records[base], self.aborted[base] = [], 0
            self.control[base] = self.batches[base] = 0
            data = env.read_file(f"{job.directory}/{file_name(base, LOG)}")
            for position, header in walk_headers(data):
                self.batches[base] += 1
                batch = data[position : position + header.size_bytes]
                records = [
                    record
                    for record in decode_records(batch, read_header(batch))
                    if record.offset >= job.log_start_offset
                ]
                if header.is_control:
                    self.control[base] += len(records)
                elif header.is_transactional and any(
                    entry.producer_id == header.producer_id
                    and entry.first_offset <= header.base_offset
                    and header.last_offset <= entry.last_offset
                    for entry in job.aborted
                ):
                    self.aborted[base] += len(records)
                else:
                    self.records[base] += records
                    self.last |= {
                        record.key: record for record in records if record.key is not None
                    }

    def offsets(self, *, deletes: bool) -> set[int]:
        return {record.offset for record in self.last.values() if (record.value is None) == deletes}


def check(env: Env, job: CleanJob, index: PartitionIndex) -> None:
    model = Model(env, job)
    assert index.keys == len(model.last)
    assert index.damaged == ()
    files = [
        SurvivorsFile(env, f"{out_of(job)}/{survivor_files.folder}/{name}")
        for survivor_files in index.survivors
        for name in survivor_files.names
    ]
    live, deletes = model.offsets(deletes=False), model.offsets(deletes=True)
    sources = [source for group in job.groups for source in group]
    assert [counts.base_offset for counts in index.counts] == [
        source.base_offset for source in sources
    ]
    for source, counts in zip(sources, index.counts, strict=True):
        base, end = source.base_offset, source.next_base_offset
        for kind, expected in ((Kind.LIVE, live), (Kind.DELETES, deletes)):
            survivors = read_survivors(files, base, end, kind)
            inside = sorted(offset for offset in expected if base <= offset < end)
            assert survivors.listed().tolist() == inside
            assert survivors.count == len(inside)
            reported = counts.live if kind is Kind.LIVE else counts.tombstones
            assert reported == len(inside)
            requested = np.array([*inside, base - 1, end, base, end - 1], dtype=np.int64)
            assert survivors.contains(requested).tolist() == [
                item in inside for item in requested.tolist()
            ]
        records = model.records[base]
        times = [record.timestamp for record in records]
        assert counts.batches == model.batches[base]
        assert counts.records == len(records) + model.aborted[base]
        assert counts.aborted == model.aborted[base]
        assert counts.control == model.control[base]
        assert counts.keyless == sum(record.key is None for record in records)
        keyed = [record for record in records if record.key is not None]
        assert counts.null_values == sum(record.value is None for record in keyed)
        assert counts.key_bytes == sum(len(record.key or b"") for record in keyed)
        assert counts.value_bytes == sum(len(record.value or b"") for record in records)
        assert (counts.first_ms, counts.last_ms) == (
            (min(times), max(times)) if times else (-1, -1)
        )


def check_all(env: Env, job: CleanJob, rng: random.Random) -> None:
    for limits in (
        Limits(memory_bytes=1 << 20),
        any_limits(rng, shards=None),
        any_limits(rng, shards=rng.randint(1, 7)),
    ):
        (index,) = index_partitions(DirectEngine(env), [job], source_of, limits)
        check(env, job, index)
        env.remove_tree(out_of(job))


@PROPERTY
@given(st.data(), st.integers(0, 1 << 30))
def test_an_index_tells_what_any_log_holds(data: st.DataObject, seed: int) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    job = data.draw(jobs(segments, write_segments(env, segments)))
    check_all(env, job, random.Random(seed))


@pytest.mark.parametrize("seed", range(cases(few=10, many=40)))
def test_an_index_leaves_out_what_was_aborted(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    env, job = some_log(rng, transactions=True)
    assert any(job.aborted) or seed != 0
    check_all(env, job, rng)


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
def test_an_index_tells_of_damage_and_of_what_stands_before_it(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    env, job = some_log(rng, transactions=False)
    damage(env, job, rng)
    indexes = []
    for limits in (Limits(memory_bytes=1 << 20), any_limits(rng, shards=rng.randint(1, 7))):
        (index,) = index_partitions(DirectEngine(env), [job], source_of, limits)
        indexes.append(replace(index, survivors=()))
    assert indexes[0] == indexes[1]
    broken = {damaged_segment.base_offset for damaged_segment in indexes[0].damaged}
    assert broken <= {counts.base_offset for counts in indexes[0].counts}
