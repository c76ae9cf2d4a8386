"""Outputs that somebody else made of a job, true and forged, and the check of them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from crc32c import crc32c

from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import new_state
from cleaner.engine.output import CleanedOutput, OutputBuffers
from cleaner.engine.verify_job import verify_groups
from cleaner.job import CleanedGroup, CleanJob, CleanReport, JobControl
from cleaner.verification import InvalidOutputError, VerifyReport
from storage.env import Env
from storage.format import filenames
from storage.format.batch import read_header
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from storage.swap.swap_journal import CleanedFile
from tests.support.cleaner.cleaning import Recorder, batches_of
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

LARGE_MAP_BYTES = 1 << 20
# As many keys as fit, and all of them: whoever is checked in rounds is checked as well.
MAPS = pytest.mark.parametrize("map_bytes", [72, 1 << 20])


@dataclass
class StagedOutputs:
    """What is handed back for a job: groups, and the folder of each one's files."""

    job: CleanJob  # as the plan says
    groups: list[CleanedGroup]
    folders: list[str]
    report: CleanReport  # of whoever made them

    def path(self, kind: str = filenames.LOG, index: int = 0) -> str:
        """A file of a group."""
        output = self.groups[index].output
        assert output is not None
        return f"{self.folders[index]}/{name_of(output.files, kind)}"

    def claim(self, index: int, **changes: object) -> None:
        """Tell something else of a group."""
        self.groups[index] = replace(self.groups[index], **changes)  # type: ignore[arg-type]

    def describe(self, env: Env, index: int = 0) -> None:
        """Tell the sizes and checksums that the files have now: nobody was hit by a bit."""
        output = self.groups[index].output
        assert output is not None
        files = []
        for file in output.files:
            data = env.read_file(f"{self.folders[index]}/{file.name}")
            files.append(CleanedFile(file.name, len(data), crc32c(data)))
        self.claim(index, output=replace(output, files=tuple(files)))


def name_of(files: Sequence[CleanedFile], kind: str) -> str:
    for file in files:
        parsed = filenames.parse_file_name(file.name)
        assert parsed is not None
        if parsed.kind == kind:
            return file.name
    raise AssertionError(f"no {kind} in {files}")


def hand_back(env: MemoryEnv, job: CleanJob, **otherwise: object) -> StagedOutputs:
    """Run the job elsewhere, with room for every key; `otherwise`: not as it says.

    Each group lies in a folder of its own below the partition's.
    """
    control = Recorder()
    changes = {"dedupe_buffer_bytes": LARGE_MAP_BYTES} | otherwise
    report = run_clean(env, replace(job, **changes), control)  # type: ignore[arg-type]
    folders = []
    for number, group in enumerate(control.groups):
        folder = f"{job.directory}/varve.leases/{job.job_id}/out/{number}"
        env.mkdir(folder)
        folders.append(folder)
        for file in group.output.files if group.output else ():
            env.rename(f"{job.directory}/{file.name}", f"{folder}/{file.name}")
    return StagedOutputs(job, control.groups, folders, report)


def verify(env: Env, staged: StagedOutputs, control: JobControl | None = None) -> VerifyReport:
    """The broker's check."""
    return verify_groups(env, staged.job, staged.groups, staged.folders, control or Recorder())


def refusal(env: Env, staged: StagedOutputs) -> InvalidOutputError:
    """Why it is refused; it has to be, and nothing is left in the folder of the inputs."""
    before = env.listdir(staged.job.directory)
    try:
        verify(env, staged)
    except InvalidOutputError as error:
        assert env.listdir(staged.job.directory) == before
        return error
    raise AssertionError("taken for what the job allows")


def forge(
    env: MemoryEnv,
    staged: StagedOutputs,
    change: Callable[[list[bytes]], list[bytes]],
    index: int = 0,
) -> None:
    """Put other batches into a group, with indexes, sizes, checksums and counts that fit them."""
    group, folder = staged.groups[index], staged.folders[index]
    assert group.output is not None
    log = b"".join(change(batches_of(env.read_file(staged.path(index=index)))))
    buffers = OutputBuffers(len(log))
    buffers.batches[: len(log)] = np.frombuffer(log, dtype=np.uint8)
    mtime_ms = env.mtime_ms(staged.path(index=index))
    output = CleanedOutput(
        env,
        folder,
        base_offset=group.source_base_offsets[0],
        job_id=staged.job.job_id,
        index_interval_bytes=staged.job.index_interval_bytes,
        buffers=buffers,
        state=new_state(),
        charge=lambda count: None,
    )
    output.state[fields.WRITTEN] = len(log)
    files = tuple(file for file in group.output.files if filenames.TXN_INDEX in file.name)
    made = output.finish(mtime_ms, ())
    assert made is not None
    records = sum(read_header(item).record_count for item in batches_of(log))
    staged.claim(
        index,
        output=replace(made, files=made.files + files),
        bytes_after=len(log),
        records_after=records,
    )


def flip(env: MemoryEnv, path: str, byte: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(env.read_file(path))
    data[byte] ^= 1 << bit
    put(env, path, bytes(data))


KEYS = ["a", "b", "c", "d", "", "a key that takes more than one word of the hash"]
CODECS = [NONE, NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD]


def random_log(seed: int, *, batches: int = 60) -> CompactedLog:
    """A log with producers of all kinds, tombstones, gaps, and some cleans after it."""
    rng = random.Random(seed)
    log = CompactedLog(seed)
    producers = [Producer(number, is_transactional=number > 2) for number in range(1, 6)]
    open_: set[int] = set()
    cleans = rng.choice([0, 1, 3])
    for number in range(batches):
        by = rng.choice([None, None, *producers])
        pairs = [
            (rng.choice(KEYS), rng.choice([None, "v", "value " * rng.randrange(30)]))
            for _ in range(rng.randrange(1, 6))
        ]
        log.put(*pairs, by=by, codec=rng.choice(CODECS))
        if by is not None and by.is_transactional:
            open_.add(by.producer_id)
        for producer in producers:
            if producer.producer_id in open_ and rng.random() < 0.3:
                (log.abort if rng.random() < 0.5 else log.commit)(producer)
                open_.discard(producer.producer_id)
        log.now_ms += rng.choice([1, 100, 4000])
        if rng.random() < 0.15:
            log.roll()
        if cleans and number % 19 == 18 and not open_:
            cleans -= 1
            log.roll()
            log.clean()
    for producer in producers:
        if producer.producer_id in open_:
            log.commit(producer)
    log.roll()
    return log


def written() -> CompactedLog:
    """Three segments: keys with two lives, packed batches, an aborted transaction, tombstones."""
    log = CompactedLog()
    plain, rolled_back, done = Producer(1, is_transactional=False), Producer(2), Producer(3)
    log.put(("a", "old"), ("b", "only"), ("c", "old"), by=plain)  # 0
    log.put(("d", "old"), ("e", "only"), codec=ZSTD)  # 3
    log.put(("f", "deleted soon"))  # 5
    log.put(("g", None))  # 6
    log.roll()
    log.clean()  # the tombstone has a horizon from here on
    log.dirty = 0
    log.now_ms += 1
    log.put(("a", "new"), ("c", "new"))  # 7
    log.put(("b", "aborted"), ("z", "aborted"), by=rolled_back)  # 9
    log.abort(rolled_back)  # 11
    log.roll()
    log.put(("d", "new"), ("h", "only"), codec=ZSTD)  # 12
    log.put(("f", None), ("i", "only"))  # 14
    log.put(("a", "newest"), by=done)  # 16
    log.commit(done)  # 17
    log.put(("c", "passing"), by=plain)  # 18: its last batch, and empty in the end
    log.put(("c", "newest"))  # 19
    log.roll()
    return log


def handed(map_bytes: int = 1 << 20, **changes: object) -> tuple[CompactedLog, StagedOutputs]:
    """What the engine made of `written`, with a map of `map_bytes`."""
    log = written()
    job = log.job(dedupe_buffer_bytes=map_bytes, index_interval_bytes=0, **changes)  # type: ignore[arg-type]
    return log, hand_back(log.env, job)
