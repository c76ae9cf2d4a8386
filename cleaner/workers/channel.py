"""The messages between the pool and a worker, and their encoding as frames. No sockets here.

A frame is a length (4 bytes, big-endian) and a pickled message. Both sides unpickle only the
classes below: a worker processes untrusted bytes, and its messages must not call anything in the
broker.

Pickling a job with 100,000 aborted transactions at once takes 0.2 s. So the pool sends a job in
several frames: `JobPart`s with some aborted transactions each, then the job without them.
"""

import io
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeAlias

from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.shared import parts
from cleaner.engine.spilled.checksums import Checksums
from cleaner.job import (
    CleanedGroup,
    CleanJob,
    CleanReport,
    Damage,
    RangeDigest,
    SegmentHorizon,
    SegmentLiveness,
    SourceSegment,
    ViewOrder,
    ViewRules,
)
from cleaner.key_search import (
    FileState,
    FoundFile,
    KeySearch,
    KeySearchResult,
    PausedSearch,
    SearchedFolder,
    UnreadableFile,
)
from cleaner.verification import (
    IndexState,
    LogCheck,
    LogCheckRequest,
    SegmentCheck,
    VerifyReport,
)
from storage.format.producer_state import LastRecords
from storage.format.txn_index import TxnIndexEntries, TxnIndexEntry
from storage.model import TopicPartition
from storage.swap.swap_journal import CleanedFile, CleanedSegment

LENGTH_BYTES: Final = 4
# A job names every segment of its partition; this is enough for about two million.
FRAME_BYTES_MAX: Final = 64 << 20
ROWS_PER_PART: Final = 500  # aborted transactions in one frame; pickling them takes 1 to 2 ms


@dataclass(frozen=True, slots=True)
class RunJob:
    """To the worker: run this job. Each attempt has its run number; the abort flag has one."""

    run: int
    job: CleanJob


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """To the worker: verify these outputs of the job, which were made elsewhere."""

    run: int
    job: CleanJob
    groups: tuple[CleanedGroup, ...]
    folders: tuple[str, ...]  # of each group's files


@dataclass(frozen=True, slots=True)
class CheckLog:
    """To the worker: check the segments of the job, which would clean the whole log."""

    run: int
    job: CleanJob
    request: LogCheckRequest


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """To the worker: search files for a key."""

    run: int
    search: KeySearch


@dataclass(frozen=True, slots=True)
class RunPart:
    """To the worker: run this part of a job that several workers share under the same run."""

    run: int
    job: CleanJob
    part: parts.Part


@dataclass(frozen=True, slots=True)
class EndParts:
    """To the worker: no further part of this run follows; there is no reply."""

    run: int


@dataclass(frozen=True, slots=True)
class JobPart:
    """To the worker: some aborted transactions of the job that follows."""

    aborted: TxnIndexEntries


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """From the worker, as the first message: its kernels are loaded."""

    pid: int
    seconds: float  # since its start


@dataclass(frozen=True, slots=True)
class Progressed:
    """From the worker: the progress of a stage ("map", "rewrite")."""

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
    """From the worker: the job ran to its end."""

    run: int
    report: CleanReport


@dataclass(frozen=True, slots=True)
class JobStopped:
    """From the worker: the job stopped because of the abort flag."""

    run: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """From the worker: the job failed. `traceback` is empty for operating errors."""

    run: int
    reason: str
    traceback: str
    file_missing: bool = False  # a source file was missing
    index_wrong: bool = False  # a transaction index contradicts the log


@dataclass(frozen=True, slots=True)
class PartDone:
    """From the worker: the part with this number is complete."""

    run: int
    number: int
    result: parts.PartResult


@dataclass(frozen=True, slots=True)
class OutputsVerified:
    """From the worker: the outputs are correct."""

    run: int
    report: VerifyReport


@dataclass(frozen=True, slots=True)
class OutputRefused:
    """From the worker: the outputs are wrong. See InvalidOutputError."""

    run: int
    path: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class LogChecked:
    """From the worker: what a check of the log found."""

    run: int
    check: LogCheck


@dataclass(frozen=True, slots=True)
class FilesSearched:
    """From the worker: what a search of files found, or that it pauses."""

    run: int
    result: KeySearchResult | PausedSearch


# Of dedicated workers only.
SoloResult: TypeAlias = OutputsVerified | OutputRefused | LogChecked | FilesSearched
FromWorker: TypeAlias = (
    WorkerReady
    | Progressed
    | GroupsCleaned
    | JobDone
    | JobStopped
    | JobFailed
    | PartDone
    | SoloResult
)
# Their jobs may have aborted transactions, which go ahead in frames of their own.
SplitOrder: TypeAlias = RunJob | VerifyJob | CheckLog
Order: TypeAlias = SplitOrder | RunPart | SearchFiles
Message: TypeAlias = Order | EndParts | FromWorker
Frame: TypeAlias = Message | JobPart

_TOP: Final = (
    RunJob,
    VerifyJob,
    CheckLog,
    SearchFiles,
    RunPart,
    EndParts,
    JobPart,
    WorkerReady,
    Progressed,
    GroupsCleaned,
    JobDone,
    JobStopped,
    JobFailed,
    PartDone,
    OutputsVerified,
    OutputRefused,
    LogChecked,
    FilesSearched,
)
_CLASSES: Final[dict[tuple[str, str], type]] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        *_TOP,
        CleanJob,
        SourceSegment,
        ViewOrder,
        ViewRules,
        CleanedGroup,
        CleanReport,
        Damage,
        VerifyReport,
        SegmentHorizon,
        SegmentLiveness,
        RangeDigest,
        LogCheckRequest,
        LogCheck,
        SegmentCheck,
        IndexState,
        KeySearch,
        SearchedFolder,
        KeySearchResult,
        PausedSearch,
        FoundFile,
        UnreadableFile,
        FileState,
        LastRecords,
        TxnIndexEntries,
        TxnIndexEntry,
        TopicPartition,
        CleanedSegment,
        CleanedFile,
        parts.IndexPart,
        parts.ListPart,
        parts.MergePart,
        parts.RewritePart,
        parts.WaitPart,
        parts.RowsFile,
        parts.OffsetsFile,
        Checksums,
        parts.RowsResult,
        parts.MergePartResult,
        parts.RewritePartResult,
        parts.NoSpace,
        parts.Waited,
        RewriteTotals,
    )
}


class ChannelError(Exception):
    """A malformed frame, or a message that is too large for a frame."""


def encode_in_parts(message: Message) -> Iterator[bytes]:
    """Yield the frames of a message. Raises ChannelError, before the first, if one is too large."""
    if isinstance(message, SplitOrder) and len(message.job.aborted) > ROWS_PER_PART:
        aborted = message.job.aborted
        last = encode(replace(message, job=replace(message.job, aborted=())))
        for first in range(0, len(aborted), ROWS_PER_PART):
            yield encode(JobPart(TxnIndexEntries(aborted[first : first + ROWS_PER_PART])))
        yield last
    else:
        yield encode(message)


def join_parts(frames: Iterable[Frame]) -> Iterator[Message]:
    """Yield the messages of frames; the inverse of `encode_in_parts`."""
    aborted: list[TxnIndexEntries] = []
    for frame in frames:
        if isinstance(frame, JobPart):
            aborted.append(frame.aborted)
            continue
        message = frame
        if aborted:
            if not isinstance(message, SplitOrder):
                raise ChannelError(f"parts of a job before a {type(message).__name__}")
            job = replace(message.job, aborted=tuple(chain.from_iterable(aborted)))
            message = replace(message, job=job)
            aborted = []
        yield message


def encode(message: Frame) -> bytes:
    """Return a message as a frame. Raises ChannelError if it is too large."""
    body = pickle.dumps(message, protocol=5)
    if len(body) > FRAME_BYTES_MAX:
        raise ChannelError(
            f"{type(message).__name__} takes {len(body)} bytes, a frame holds {FRAME_BYTES_MAX}"
        )
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(prefix: bytes) -> int:
    """Return the length of the body after `prefix`. Raises ChannelError if it is impossible."""
    assert len(prefix) == LENGTH_BYTES
    length = int.from_bytes(prefix, "big")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ChannelError(f"a frame of {length} bytes")
    return length


def decode(body: bytes) -> Message:
    """Return the message in a frame's body. Raises ChannelError for anything else."""
    frame = decode_frame(body)
    if isinstance(frame, JobPart):
        raise ChannelError("a part of a job")
    return frame


def decode_frame(body: bytes) -> Frame:
    """Return the message or JobPart in a frame's body. Raises ChannelError for anything else."""
    try:
        message = _Unpickler(io.BytesIO(body)).load()
    except ChannelError:
        raise
    except Exception as error:  # unpickling malformed data raises nearly anything
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
