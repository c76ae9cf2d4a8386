"""Random logs, cleaned by the kernels and by a cleaner in plain Python: the same must remain."""

from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from cleaner.engine import context
from cleaner.engine.clean import run_clean
from cleaner.engine.key_map import offset_map
from cleaner.job import CleanJob
from storage.format.batch import read_header
from tests.support.cleaner.cleaning import (
    Recorder,
    Segment,
    assert_indexes_fit,
    assert_same_batch,
    batches_of,
    clean,
    clean_job,
    cleaned_log,
    expected_batch,
    last_offsets_of,
    output_bytes,
    records_of,
    write_segments,
)
from tests.support.cleaner.random_logs import PROPERTY, WINDOWS, jobs, logs
from tests.support.storage.memory_env import MemoryEnv


@PROPERTY
@given(st.data(), WINDOWS, st.sampled_from([1, 3, 4096]))
def test_a_clean_leaves_what_the_rules_say(
    data: st.DataObject, window: tuple[int, int], chunk_keys: int
) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    job = data.draw(jobs(segments, write_segments(env, segments)))
    # The bitmap of survivors as it is, turning often, and not at all; fingerprints gathered over
    # many batches, and not even over one.
    with (
        patch.object(context, "WINDOW_OFFSETS", window[0]),
        patch.object(context, "WINDOWS_MAX", window[1]),
        patch.object(offset_map, "CHUNK_KEYS", chunk_keys),
    ):
        report, groups = clean(env, job)

    map_end = report.next_dirty_offset
    assert job.first_dirty_offset <= map_end <= job.end_offset
    assert map_end == job.end_offset or report.map_full
    last_offsets = last_offsets_of(job, segments, map_end)
    assert report.keys_indexed == len(last_offsets)
    sources = [batch for part in segments for batch in part.batches]
    expected = [
        (batch, requested)
        for batch in sources
        if (requested := expected_batch(job, batch, last_offsets, map_end)) is not None
    ]
    actual = batches_of(cleaned_log(env, segments, groups))
    assert len(actual) == len(expected)
    for received, (source, requested) in zip(actual, expected, strict=True):
        assert_same_batch(received, requested, read_header(source).codec)
        if requested == source:
            assert received == source, "a batch that lost nothing is copied byte for byte"
    for group in groups:
        assert_indexes_fit(env, group, job.index_interval_bytes)
    assert report.damaged == ()


@PROPERTY
@given(
    st.data(), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([24, 100, 1 << 20]), st.booleans()
)
def test_a_selective_clean_leaves_a_group_as_it_is_or_without_what_is_superseded(
    data: st.DataObject, slack: float, map_bytes: int, names_victim: bool
) -> None:
    """Each rewritten group has what the rules say of a clean without horizons, of all records."""
    segments = data.draw(logs())
    env = MemoryEnv(1)
    sources = write_segments(env, segments)
    job = replace(
        data.draw(jobs(segments, sources)),
        slack=slack, dedupe_buffer_bytes=map_bytes, spill_bytes_max=1 << 40,
        victims=(sources[0].base_offset,) if names_victim else (),
    )  # fmt: skip
    control = Recorder()
    report = run_clean(env, job, control)
    if report.resolved_end is None:  # it has records without a key
        return
    rules = replace(job, first_dirty_offset=job.log_start_offset, drop_expired_tombstones=False)
    last_offsets = last_offsets_of(rules, segments, job.end_offset)
    for group in control.groups:
        expected = [
            (batch, wanted)
            for part in segments
            if part.base_offset in group.source_base_offsets
            for batch in part.batches
            if (wanted := expected_batch(rules, batch, last_offsets, job.end_offset)) is not None
        ]
        actual = batches_of(output_bytes(env, group))
        assert len(actual) == len(expected)
        for received, (source, wanted) in zip(actual, expected, strict=True):
            assert_same_batch(received, wanted, read_header(source).codec)
        assert_indexes_fit(env, group, job.index_interval_bytes)
    assert report.next_dirty_offset == job.first_dirty_offset
    rewritten = {base for group in control.groups for base in group.source_base_offsets}
    if names_victim:
        assert rewritten <= {source.base_offset for source in job.groups[0]}
    elif slack == 0:
        assert _is_compacted(cleaned_log(env, segments, control.groups), job, last_offsets)


def _is_compacted(log: bytes, job: CleanJob, last_offsets: dict[bytes, int]) -> bool:
    """Whether no record from the log start on is superseded."""
    return all(
        record.key is None or record.offset == last_offsets[record.key]
        for record in records_of(log)
        if record.offset >= job.log_start_offset
    )


@PROPERTY
@given(st.data())
def test_every_clean_gets_on_until_all_is_indexed(data: st.DataObject) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    sources = write_segments(env, segments)
    dirty = segments[0].base_offset
    end = segments[-1].next_base_offset
    for run in range(end - dirty if end - dirty < 500 else 500):
        job = clean_job(
            [sources], first_dirty_offset=dirty, dedupe_buffer_bytes=24, job_id=f"run{run}"
        )
        report, _ = clean(env, job)
        assert report.next_dirty_offset > dirty
        dirty = report.next_dirty_offset
        if dirty == end:
            return
    raise AssertionError(f"stopped at {dirty} of {end}")


@PROPERTY
@given(st.data())
def test_a_second_clean_changes_nothing(data: st.DataObject) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    job = data.draw(jobs(segments, write_segments(env, segments)))
    job = replace(job, dedupe_buffer_bytes=1 << 20)
    _, groups = clean(env, job)

    again = MemoryEnv(2)
    published = [
        Segment(
            group.source_base_offsets[0],
            batches_of(output_bytes(env, group)),
            next(
                part.next_base_offset
                for part in segments
                if part.base_offset == group.source_base_offsets[-1]
            ),
        )
        for group in groups
    ]
    replaced = {base for group in groups for base in group.source_base_offsets}
    published += [part for part in segments if part.base_offset not in replaced]
    published.sort(key=lambda part: part.base_offset)
    sources = write_segments(again, published)
    _, groups = clean(again, replace(job, groups=tuple((source,) for source in sources)))
    assert groups == [], "segments that lose nothing are not replaced"
