"""Frames between pool and worker: round trip, limits, and nothing that could call anything."""

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from cleaner.job import (
    CleanedGroup,
    CleanReport,
    Damage,
    RangeDigest,
    SegmentLiveness,
    ViewOrder,
    ViewRules,
)
from cleaner.key_search import (
    FileState,
    FoundFile,
    KeySearch,
    KeySearchResult,
    SearchedFolder,
    UnreadableFile,
)
from cleaner.verification import IndexState, LogCheck, LogCheckRequest, SegmentCheck, VerifyReport
from cleaner.workers import channel
from cleaner.workers.channel import LENGTH_BYTES, ChannelError, body_bytes, decode, encode
from storage.format.producer_state import LastRecords
from storage.format.txn_index import TxnIndexEntries, TxnIndexEntry
from storage.swap.swap_journal import CleanedFile, CleanedSegment
from tests.support.cleaner.cleaner_jobs import GROUP, REPORT, job

SEGMENT = CleanedSegment(0, "r", (CleanedFile(f"{0:020}.log.r.cleaned", 5, 7),))
ORDER = ViewOrder(b"version", CleanedFile("deleted-keys", 72, 7))
DIGEST = RangeDigest(0, 9, 3, "0f" * 16)
CHECK = LogCheck(
    end_offset=9,
    segments=(SegmentCheck(0, 9, 100, 5, 3, index=IndexState.STALE, damage=Damage("p", 7, "bad")),),
    keys=3,
    uncleaned=None,
    digests=(DIGEST,),
    changed=(),
    compared=1,
    bytes_read=200,
    seconds=0.5,
)
STATE = FileState(f"/d/t-0/{0:020}.log", 100, 1)
FOUND = KeySearchResult(
    files=1,
    bytes_read=100,
    seconds=0.5,
    found=(FoundFile(STATE, 1, 3, 3),),
    unreadable=(UnreadableFile(STATE, 40, "the last batch is cut short"),),
)
MESSAGES: list[channel.Message] = [
    channel.RunJob(3, job()),
    channel.RunJob(3, replace(job(), view=ViewRules(order=ORDER))),
    channel.VerifyJob(3, job(), (GROUP,), ("/data/t-0/out",)),
    channel.WorkerReady(12, 0.5),
    channel.Progressed(3, "map", 1, 2),
    channel.GroupsCleaned(3, (GROUP,)),
    channel.GroupsCleaned(3, (GROUP, CleanedGroup((0, 10), SEGMENT, 9, 5, 4, 2))),
    channel.JobDone(3, REPORT),
    channel.JobDone(3, replace(REPORT, deleted_keys=CleanedFile("deleted-keys", 72, 7))),
    channel.JobStopped(3),
    channel.OutputsVerified(3, VerifyReport(REPORT, 1, 100, 2, 0.5)),
    channel.OutputRefused(3, "/data/t-0/out/0.log", 17, "the file is too long"),
    channel.RunJob(3, replace(job(), last_records=LastRecords([(1 << 62, 3, -1), (5, 0, 7)]))),
    channel.CheckLog(3, job(), LogCheckRequest(5, 9, (DIGEST,))),
    channel.LogChecked(3, CHECK),
    channel.SearchFiles(3, KeySearch(b"k", (SearchedFolder("/d/t-0", 7),), 1000)),
    channel.FilesSearched(3, FOUND),
    channel.JobFailed(3, "OSError: [Errno 28] No space left on device", "Traceback ..."),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_was(message: channel.Message) -> None:
    frame = encode(message)
    assert body_bytes(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert decode(frame[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("kind", [tuple, TxnIndexEntries])
@pytest.mark.parametrize("rows", [0, 500, 501, 2_500])
def test_a_frame_has_a_bounded_number_of_aborted_transactions(
    rows: int, kind: Callable[[Iterable[TxnIndexEntry]], Sequence[TxnIndexEntry]]
) -> None:
    """To pickle 100,000 at once blocked the loop for 0.2 s."""
    aborted = kind(TxnIndexEntry(1, 2 * n, 2 * n + 1, 2 * n + 2) for n in range(rows))
    orders: list[channel.Message] = [
        channel.RunJob(3, replace(job(), aborted=aborted)),
        channel.RunJob(4, job()),
        channel.VerifyJob(5, replace(job(), aborted=aborted), (GROUP,), ("/data/t-0/out",)),
    ]
    frames = [
        channel.decode_frame(frame[LENGTH_BYTES:])
        for order in orders
        for frame in channel.encode_in_parts(order)
    ]
    carried = [
        len(frame.aborted if isinstance(frame, channel.JobPart) else frame.job.aborted)
        for frame in frames
        if isinstance(frame, channel.JobPart | channel.RunJob | channel.VerifyJob)
    ]
    assert sum(carried) == 2 * rows
    assert max(carried) <= channel.ROWS_PER_PART
    assert list(channel.join_parts(frames)) == orders


def test_parts_of_a_job_are_no_message_of_a_worker() -> None:
    frame = encode(channel.JobPart(TxnIndexEntries()))
    with pytest.raises(ChannelError, match="part of a job"):
        decode(frame[LENGTH_BYTES:])


@pytest.mark.parametrize("prefix", [bytes(4), b"\xff\xff\xff\xff", b"GET "])
def test_an_impossible_length_is_refused_before_anything_is_read(prefix: bytes) -> None:
    with pytest.raises(ChannelError, match="frame of"):
        body_bytes(prefix)


def test_a_message_too_large_for_a_frame_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "FRAME_BYTES_MAX", 100)
    with pytest.raises(ChannelError, match="RunJob takes"):
        encode(channel.RunJob(1, job()))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return (os.mkdir, ("/proc/no", 0))


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps(Evil()),
        pickle.dumps(os.system),
        pickle.dumps({"a": 1}),
        pickle.dumps(REPORT),
        pickle.dumps(CleanReport),
        b"",
        b"junk",
        encode(MESSAGES[0])[LENGTH_BYTES:-9],
    ],
    ids=["call", "function", "dict", "part", "class", "empty", "junk", "cut"],
)
def test_anything_but_our_messages_is_refused(body: bytes) -> None:
    with pytest.raises(ChannelError):
        decode(body)


def test_every_class_that_a_message_can_contain_may_be_sent() -> None:
    """A class missing from the list fails each job that sends one: seen with SegmentLiveness."""
    classes = set[type]()
    # LastRecords is what the broker sends as a sequence of tuples.
    pending: list[Any] = [channel.Message, channel.JobPart, LastRecords]
    while pending:
        annotation = pending.pop()
        pending += get_args(annotation)
        if not isinstance(annotation, type) or annotation.__module__ == "builtins":
            continue
        if annotation not in classes and get_origin(annotation) is None:
            classes.add(annotation)
            pending += get_type_hints(annotation).values()
    assert SegmentLiveness in classes
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in classes} == {
        ".".join(name) for name in channel._CLASSES
    }
