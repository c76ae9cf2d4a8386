"""Frames between the pool and a worker: what they say, and how they are cut. No sockets here.

A frame is a length (4 bytes, big-endian) and a pickled message. Only the classes named below are
unpickled, on either side: a worker works on bytes that strangers wrote, and what it sends must not
be able to call anything in the broker.

To pickle a job with 100,000 aborted transactions at once takes 0.2 s. So a job goes to its worker
in several frames: `JobPart`s with some aborted transactions each, then the job itself without them.
"""

import io
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeAlias

from cleaner.job import (
    CleanedGroup,
    CleanJob,
    CleanReport,
    Damage,
    SegmentHorizon,
    SourceSegment,
    ViewOrder,
)
from cleaner.verification import VerifyReport
from storage.format.txn_index import TxnIndexEntry
from storage.model import TopicPartition
from storage.segments.swap import CleanedFile, CleanedSegment

LENGTH_BYTES: Final = 4
# A job names every segment of its partition: this is room for some two million of them.
FRAME_BYTES_MAX: Final = 64 << 20
ROWS_PER_PART: Final = 500  # aborted transactions in one frame; to pickle them takes 1 to 2 ms


@dataclass(frozen=True, slots=True)
class RunJob:
    """To the worker: run this. Run numbers only grow; the abort flag refers to them."""

    run: int
    job: CleanJob


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """To the worker: check these outputs of the job, which were made elsewhere."""

    run: int
    job: CleanJob
    groups: tuple[CleanedGroup, ...]
    folders: tuple[str, ...]  # of each group's files


@dataclass(frozen=True, slots=True)
class JobPart:
    """To the worker: some aborted transactions of the job that follows."""

    aborted: tuple[TxnIndexEntry, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """From the worker, first of all: its kernels are loaded."""

    pid: int
    seconds: float  # from its start to here


@dataclass(frozen=True, slots=True)
class Progressed:
    """From the worker: how far a stage ("map", "rewrite") is."""

    run: int
    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class GroupsCleaned:
    """From the worker: groups that are complete and synced, to be published together."""

    run: int
    groups: tuple[CleanedGroup, ...]


@dataclass(frozen=True, slots=True)
class JobDone:
    """From the worker: the job came to its end."""

    run: int
    report: CleanReport


@dataclass(frozen=True, slots=True)
class JobStopped:
    """From the worker: it saw the abort flag and let go."""

    run: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """From the worker: the job raised. `traceback` is empty where it is no mistake of ours."""

    run: int
    reason: str
    traceback: str
    file_missing: bool = False  # a source had gone


@dataclass(frozen=True, slots=True)
class OutputsVerified:
    """From the worker: they are what the job allows."""

    run: int
    report: VerifyReport


@dataclass(frozen=True, slots=True)
class OutputRefused:
    """From the worker: they are not. See InvalidOutputError."""

    run: int
    path: str
    position: int
    reason: str


FromWorker: TypeAlias = (
    WorkerReady
    | Progressed
    | GroupsCleaned
    | JobDone
    | JobStopped
    | JobFailed
    | OutputsVerified
    | OutputRefused
)
Message: TypeAlias = RunJob | VerifyJob | FromWorker
Frame: TypeAlias = Message | JobPart

_TOP: Final = (
    RunJob,
    VerifyJob,
    JobPart,
    WorkerReady,
    Progressed,
    GroupsCleaned,
    JobDone,
    JobStopped,
    JobFailed,
    OutputsVerified,
    OutputRefused,
)
_CLASSES: Final[dict[tuple[str, str], type]] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        *_TOP,
        CleanJob,
        SourceSegment,
        ViewOrder,
        CleanedGroup,
        CleanReport,
        Damage,
        VerifyReport,
        SegmentHorizon,
        TxnIndexEntry,
        TopicPartition,
        CleanedSegment,
        CleanedFile,
    )
}


class ChannelError(Exception):
    """Bytes that are no frame of ours, or a message too large for one."""


def encode_in_parts(message: Message) -> Iterator[bytes]:
    """Yield the frames of a message. Raises ChannelError, before the first, if one is too large."""
    if isinstance(message, RunJob | VerifyJob) and len(message.job.aborted) > ROWS_PER_PART:
        aborted = message.job.aborted
        last = encode(replace(message, job=replace(message.job, aborted=())))
        for first in range(0, len(aborted), ROWS_PER_PART):
            yield encode(JobPart(aborted[first : first + ROWS_PER_PART]))
        yield last
    else:
        yield encode(message)


def join_parts(frames: Iterable[Frame]) -> Iterator[Message]:
    """Yield the messages that frames make up; the inverse of `encode_in_parts`."""
    parts: list[tuple[TxnIndexEntry, ...]] = []
    for frame in frames:
        if isinstance(frame, JobPart):
            parts.append(frame.aborted)
            continue
        message = frame
        if parts:
            if not isinstance(message, RunJob | VerifyJob):
                raise ChannelError(f"parts of a job before a {type(message).__name__}")
            job = replace(message.job, aborted=tuple(chain.from_iterable(parts)))
            message = replace(message, job=job)
            parts = []
        yield message


def encode(message: Frame) -> bytes:
    """A message as a frame. Raises ChannelError if it is too large."""
    body = pickle.dumps(message, protocol=5)
    if len(body) > FRAME_BYTES_MAX:
        raise ChannelError(
            f"{type(message).__name__} takes {len(body)} bytes, a frame holds {FRAME_BYTES_MAX}"
        )
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(prefix: bytes) -> int:
    """The length of the body that follows `prefix`. Raises ChannelError for an impossible one."""
    assert len(prefix) == LENGTH_BYTES
    length = int.from_bytes(prefix, "big")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ChannelError(f"a frame of {length} bytes")
    return length


def decode(body: bytes) -> Message:
    """The message in a frame's body. Raises ChannelError for anything else, a part too."""
    frame = decode_frame(body)
    if isinstance(frame, JobPart):
        raise ChannelError("a part of a job")
    return frame


def decode_frame(body: bytes) -> Frame:
    """The message, or part of one, in a frame's body. Raises ChannelError for anything else."""
    try:
        message = _Unpickler(io.BytesIO(body)).load()
    except ChannelError:
        raise
    except Exception as error:  # unpickling junk raises nearly anything
        raise ChannelError(f"not a message: {error!r:.200}") from error
    if not isinstance(message, _TOP):
        raise ChannelError(f"not a message: a {type(message).__name__}")
    return message


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        result = _CLASSES.get((module, name))
        if result is None:
            raise ChannelError(f"{module}.{name} may not be sent")
        return result
