"""What a selective clean reads of the segments that it rewrites."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine import batch_blocks
from cleaner.engine.clean import run_clean
from cleaner.engine.selective import key_index
from cleaner.job import CleanJob
from storage.format.compression import LZ4
from storage.segments.segment import Segment
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases

LARGE = "v" * 9_000  # a batch with one is a block of its own
SPILL_BYTES = 1 << 30


def log_of(*segments: str, value: str = LARGE) -> CompactedLog:
    """A log with one segment per string; each character is the key of a batch."""
    log = CompactedLog()
    for keys in segments:
        for key in keys:
            log.put((key, value))
        log.roll()
    return log


def job_of(log: CompactedLog, slack: float = 0.0) -> CleanJob:
    return replace(log.job(singly=True), slack=slack, spill_bytes_max=SPILL_BYTES)


def keys_of(log: CompactedLog) -> str:
    return "".join((record.key or b"?").decode() for _, batch in log.batches() for record in batch)


def first_segment(log: CompactedLog) -> Segment:
    return log.log.segments.closed[0]


def test_batches_without_a_live_record_are_not_read() -> None:
    log = log_of("abcdefgh", "abcdfgh")
    run_clean(log.env, job_of(log, slack=100.0), Recorder())  # writes the key indexes only
    report = run_clean(log.env, replace(job_of(log), job_id="second"), Recorder())
    assert report.bytes_read == pytest.approx(len(LARGE), abs=200), "only the batch of e"
    assert report.records_before - report.records_after == 7


def test_the_records_that_stay_are_those_of_a_rewrite_that_reads_everything() -> None:
    log = log_of("abcdefgh", "abcdfgh")
    log.publish(job_of(log))
    assert keys_of(log) == "eabcdfgh"


def test_a_batch_without_live_records_stays_for_the_last_sequence_of_its_producer() -> None:
    log = CompactedLog()
    producer = Producer(7)
    log.put(("a", LARGE))
    log.put(("b", LARGE), by=producer)
    log.put(("c", LARGE))
    log.roll()
    for key in "abd":
        log.put((key, LARGE))
    log.roll()
    log.publish(job_of(log))
    assert [header.producer_id for header, _ in log.batches()] == [7, -1, -1, -1, -1]
    assert keys_of(log) == "cabd"


def test_damage_in_a_batch_without_live_records_goes_with_it() -> None:
    log = log_of("abcdefgh", "abcdfgh")
    run_clean(log.env, job_of(log, slack=100.0), Recorder())
    log.env.open(first_segment(log).path, write=True).pwrite(b"\xff", 5_000)
    report = log.publish(replace(job_of(log), job_id="second"))
    assert not report.damaged
    assert keys_of(log) == "eabcdfgh"


def test_damage_in_a_batch_with_a_live_record_is_found() -> None:
    log = log_of("abcdefgh", "abcdfgh")
    run_clean(log.env, job_of(log, slack=100.0), Recorder())
    in_e = 4 * first_segment(log).size_bytes // 8 + 5_000
    log.env.open(first_segment(log).path, write=True).pwrite(b"\xff", in_e)
    report = log.publish(replace(job_of(log), job_id="second"))
    assert [damage.path for damage in report.damaged] == [first_segment(log).path]


def test_small_batches_share_a_block() -> None:
    log = log_of("abcdefgh" * 40, "a", value="v" * 20)
    job = job_of(log, slack=100.0)
    run_clean(log.env, job, Recorder())
    source = job.groups[0][0]
    blocks = key_index.read_blocks(log.env, job, Recorder(), source)
    assert len(blocks) > 1
    assert min(np.diff(blocks[:, 0])) >= batch_blocks.BLOCK_BYTES_MIN
    assert blocks[:, 3].sum() == 320


@settings(max_examples=cases(few=15, many=40), deadline=None)
@given(seed=st.integers(0, 1 << 32), codec=st.sampled_from([0, LZ4]))
def test_random_logs_become_the_same_with_small_and_large_blocks(seed: int, codec: int) -> None:
    """With one block for a segment, every batch of a rewritten segment is read."""
    results = []
    for block_bytes in (1, 200, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_blocks, "BLOCK_BYTES_MIN", block_bytes)
            log = random_log(random.Random(seed), codec)
        results.append([(header._replace(crc=0), batch) for header, batch in log.batches()])
    assert results[0] == results[1] == results[2]


def random_log(rng: random.Random, codec: int) -> CompactedLog:
    """A log that is cleaned several times while it grows."""
    log = CompactedLog()
    producers = [None, Producer(1), Producer(2)]
    for _ in range(rng.randint(2, 5)):
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(1, 12)):
                pairs = [
                    (rng.choice("abcdefgh"), None if rng.random() < 0.1 else "v" * 50)
                    for _ in range(rng.randint(1, 3))
                ]
                log.put(*pairs, codec=codec, by=rng.choice(producers))
            log.roll()
        log.publish(job_of(log, slack=rng.choice([0.0, 0.2])))
        if rng.random() < 0.2:
            log.clean()
    return log
