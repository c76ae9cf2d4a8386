"""A verified clean has the result of any other, and publishes nothing that lost a record."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.one_pass import buffered_output
from cleaner.engine.verify.check_log import check_log
from cleaner.engine.verify.verified_clean import UnverifiedOutputError, clean_verified
from cleaner.job import CleanJob, CleanReport, JobControl
from cleaner.verification import LogCheckRequest
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER
from tests.support.storage.memory_env import MemoryEnv

VALUE = "v" * 50
SPILL_BYTES = 1 << 30
LZ4 = 3

Change = Callable[[CleanJob], CleanJob]


def log_of(*segments: str) -> CompactedLog:
    """A log with one segment per string; each character is the key of a record."""
    log = CompactedLog()
    for keys in segments:
        for key in keys:
            log.put((key, VALUE))
        log.roll()
    return log


def job_of(log: CompactedLog, **changes: object) -> CleanJob:
    return replace(log.job(singly=True, **changes), spill_bytes_max=SPILL_BYTES, verify=True)  # type: ignore[arg-type]


def faulty(env: MemoryEnv, change: Change) -> Callable[[CleanJob, JobControl], CleanReport]:
    """A cleaner that runs another job than it is given."""

    def run(job: CleanJob, control: JobControl) -> CleanReport:
        return run_clean(env, change(job), control)

    return run


def refused(log: CompactedLog, change: Change, job: CleanJob | None = None) -> str:
    """Why the output of a faulty cleaner is refused; nothing of it is handed over."""
    control = Recorder()
    with pytest.raises(UnverifiedOutputError) as error:
        clean_verified(log.env, job or job_of(log), control, faulty(log.env, change))
    assert control.groups == []
    return error.value.reason


def files(log: CompactedLog) -> dict[str, bytes]:
    return {
        name: log.env.read_file(f"{FOLDER}/{name}")
        for name in log.env.listdir(FOLDER)
        if not name.endswith(".keys")  # each has the number of its segment object
    }


def test_an_output_that_lost_a_record_is_not_published() -> None:
    log = log_of("abc", "bx")
    reason = refused(log, lambda job: replace(job, log_start_offset=2, first_dirty_offset=2))
    assert reason.startswith("2 last records of keys have a value, and the output has 1")


def test_a_cleaner_that_takes_two_keys_for_one_is_noticed() -> None:
    log = log_of("ab", "cd", "a")
    # A clean under another key of the hash is correct. One that decides by records that do not
    # exist is not: as if "b" and "a" had one fingerprint.
    other = log_of("ab", "cb", "a")
    rewritten = other.env.read_file(f"{FOLDER}/{2:020d}.log")
    path = f"{FOLDER}/{2:020d}.log"

    def run(job: CleanJob, control: JobControl) -> CleanReport:
        original = log.env.read_file(path)
        log.env.open(path, write=True, truncate=True).pwrite(rewritten, 0)
        try:
            return run_clean(log.env, job, _Restoring(log.env, path, original, control))
        finally:
            log.env.open(path, write=True, truncate=True).pwrite(original, 0)

    with pytest.raises(UnverifiedOutputError, match="1 last records of keys have a value"):
        clean_verified(log.env, job_of(log), Recorder(), run)


class _Restoring(Recorder):
    """Restores a file before groups are verified."""

    def __init__(self, env: MemoryEnv, path: str, data: bytes, control: JobControl) -> None:
        super().__init__()
        self._env, self._path, self._data, self._control = env, path, data, control

    def groups_cleaned(self, groups) -> None:  # type: ignore[no-untyped-def]
        self._env.open(self._path, write=True, truncate=True).pwrite(self._data, 0)
        self._control.groups_cleaned(groups)


def test_a_delete_that_goes_too_early_is_noticed() -> None:
    log = log_of("ab")
    log.put(("a", None), ("c", VALUE))
    log.roll()
    log.clean()
    log.write("b")
    log.roll()
    reason = refused(log, lambda job: replace(job, now_ms=job.now_ms + 10**9))
    assert reason == "1 to 1 deletes must stay, and the output has 0"


def test_a_delete_whose_horizon_has_passed_may_go() -> None:
    log = log_of("ab")
    log.put(("a", None), ("c", VALUE))
    log.roll()
    log.clean()
    log.pass_retention()
    log.write("b")
    log.roll()
    log.publish(job_of(log))
    assert [record.key for _, batch in log.batches() for record in batch] == [b"c", b"b"]


def expired_job(log: CompactedLog) -> CleanJob:
    """A job that removes what has expired from the only closed segment."""
    source = log.sources()[0]
    end = source.next_base_offset
    job = job_of(log, expired_only=True, first_dirty_offset=end, end_offset=end)
    return replace(job, groups=((source,),))


def log_with_an_expired_delete() -> CompactedLog:
    log = log_of("ab")
    log.put(("a", None), ("c", VALUE))
    log.roll()
    log.clean()
    log.pass_retention()
    return log


def test_a_clean_for_expired_deletes_is_verified_too() -> None:
    log = log_with_an_expired_delete()
    assert log.publish(expired_job(log)).digests == ()
    assert [record.key for _, batch in log.batches() for record in batch] == [b"b", b"c"]


def test_a_clean_for_expired_deletes_may_remove_nothing_else() -> None:
    log = log_with_an_expired_delete()
    change = partial(replace, expired_only=False, log_start_offset=2)
    reason = refused(log, change, expired_job(log))
    assert reason.startswith("2 last records of keys have a value, and the output has 1")


def test_without_room_for_the_keys_nothing_is_published() -> None:
    log = log_of("abc", "bx")
    with pytest.raises(UnverifiedOutputError, match="it cannot be verified: the keys take more"):
        run_clean(log.env, replace(job_of(log), spill_bytes_max=1), Recorder())


def test_the_clean_leaves_the_scratch_file_of_its_verification_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffered_output, "BUFFERED_BYTES", 0)  # every survivor goes to scratch
    log = log_of("x", "abca", "defd")  # a group begins at each of the first offsets
    report = run_clean(log.env, job_of(log), Recorder())
    assert (report.passes, report.records_after) == (1, 7)


def test_a_source_that_retention_removed_is_not_compared() -> None:
    log = log_of("abc", "bx", "y")
    log.env.unlink(f"{FOLDER}/{0:020d}.log")
    report = run_clean(log.env, job_of(log), Recorder())
    assert [digest.first_offset for digest in report.digests] == [3, 5]


def test_the_digests_of_a_verified_clean_are_those_of_a_later_check() -> None:
    log = log_of("abc", "bx", "by")
    report = log.publish(job_of(log))
    assert sum(digest.records for digest in report.digests) == 5
    end = report.digests[-1].end_offset
    log.write("a", "z")
    log.roll()
    request = LogCheckRequest(0, digest_end=end, digests=report.digests)
    job = replace(job_of(log), verify=False)
    found = check_log(log.env, job, request, Recorder())
    assert (found.compared, found.changed) == (len(report.digests), ())


def random_log(rng: random.Random) -> CompactedLog:
    log = CompactedLog()
    producers = [Producer(number) for number in (1, 2, 3)]
    has_transactions = rng.random() < 0.4
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 4)):
            pairs: list[tuple[str | None, str | None]] = [
                (rng.choice("abcdefgh"), rng.choice([None, VALUE, "w"]))
                for _ in range(rng.randint(1, 6))
            ]
            if rng.random() < 0.1:
                pairs.append((None, VALUE))
            producer = rng.choice(producers) if has_transactions else None
            log.put(*pairs, by=producer, codec=rng.choice([0, LZ4]))
            if producer is not None:
                rng.choice([log.commit, log.abort])(producer)
        log.roll()
    return log


@settings(max_examples=cases(few=25, many=100), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    keys_max=st.sampled_from([1, 3, None]),
    slack=st.sampled_from([None, 0.0, 0.5]),
)
def test_a_verified_clean_leaves_what_any_other_leaves(
    seed: int, keys_max: int | None, slack: float | None
) -> None:
    verified, plain = random_log(random.Random(seed)), random_log(random.Random(seed))
    for turn in range(3):
        for log, is_verified in ((verified, True), (plain, False)):
            job = replace(
                job_of(log, keys=keys_max),
                verify=is_verified,
                slack=slack if turn else None,
                by_index=slack is not None,
            )
            report = log.publish(job)
            log.dirty = report.next_dirty_offset
            log.pass_retention()
            log.write(*"abc"[: turn + 1])
            log.roll()
        assert files(verified) == files(plain)


def test_the_bytes_that_verification_reads_are_charged_and_reported() -> None:
    log = log_of("abc", "bx")
    control = Recorder()
    report = run_clean(log.env, job_of(log), control)
    plain = run_clean(log.env, replace(job_of(log), verify=False), Recorder())
    size_bytes = sum(source.size_bytes for source in log.sources())
    outputs_bytes = sum(group.bytes_after for group in control.groups)
    # Once for the keys, once for the records of each segment, and the output.
    assert report.bytes_read == plain.bytes_read + 2 * size_bytes + outputs_bytes
    assert control.charged_read > report.bytes_read  # the scratch file
