"""Verify each group of a clean before it is published.

Rules
- Which records are alive is decided from the data (live_records.py), before the clean begins. This
  decision does not use the clean's map, key indexes or passes over a group.
- A group is passed on only if its output has all records of its sources that are the last ones of
  their keys and have a value, with the same key, value, headers and offset. Superseded records may
  be left, as by a clean with a full map, and are not compared.
- A last record without a value may be missing only if its delete horizon has passed, and none is
  added.
- A job that only removes what has expired must keep every record with a value.
- Sources that retention removes meanwhile, and what they had, are not compared.
- The digests of all segments, as the clean leaves them, go into the report.
- Cost: the log is read once more, and each rewritten group and its output as well. Memory: two read
  buffers and 28 MiB more than the clean; keys go to a scratch file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Bools
from cleaner.engine.source import SourceReader
from cleaner.engine.spilled.scratch import LiveOffsets, NoScratchSpaceError, Scratch
from cleaner.engine.verify.contents import DigestSum, Records, scan_records
from cleaner.engine.verify.live_records import KeySections
from cleaner.job import (
    CleanedGroup,
    CleanJob,
    CleanReport,
    ForwardingControl,
    JobControl,
    RangeDigest,
    SourceSegment,
)
from storage.env import Env
from storage.errors import DamagedSegmentError, StorageError
from storage.format import filenames

_SCRATCH: Final = 1  # the number of the scratch file; the clean has number 0

RunJob = Callable[[CleanJob, JobControl], CleanReport]


class UnverifiedOutputError(StorageError):
    """The output of a group may not be published."""

    def __init__(self, first_offset: int, end_offset: int, reason: str) -> None:
        super().__init__(
            f"the output for offsets {first_offset} to {end_offset - 1} is not published: {reason}"
        )
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.reason = reason


def clean_verified(env: Env, job: CleanJob, control: JobControl, run: RunJob) -> CleanReport:
    """Run the job by `run`, and verify its groups.

    Raises UnverifiedOutputError, TransactionIndexError, CleanAbortedError, OSError.
    """
    assert job.verify
    assert job.view is None
    plain = replace(job, verify=False)
    with _live_offsets(env, plain, control) as expected:
        verifier = _GroupVerifier(env, plain, control, expected)
        try:
            report = run(plain, verifier)
            digests = verifier.digests() if expected.is_complete else ()
        finally:
            verifier.close()
    bytes_read = report.bytes_read + expected.bytes_read + verifier.bytes_read
    return replace(report, bytes_read=bytes_read, digests=digests)


@dataclass(frozen=True, slots=True)
class _Expected:
    """The offsets of the last records of all keys; None: every record is one."""

    live_offsets: LiveOffsets | None
    bytes_read: int
    is_complete: bool  # whether digests say something about the whole log


@contextmanager
def _live_offsets(env: Env, job: CleanJob, control: JobControl) -> Iterator[_Expected]:
    if job.expired_only:
        yield _Expected(None, 0, is_complete=False)
        return
    scratch = Scratch(env, job, control, number=_SCRATCH, bytes_max=job.spill_bytes_max)
    try:
        sections = KeySections(env, job, control, scratch, ())
        try:
            sections.read()
        except NoScratchSpaceError as error:
            raise UnverifiedOutputError(
                job.log_start_offset, job.end_offset, f"it cannot be verified: {error}"
            ) from error
        live_offsets, _ = sections.live_below(job.end_offset)
        yield _Expected(live_offsets, sections.bytes_read, is_complete=not sections.damaged)
    finally:
        scratch.close()


@dataclass(slots=True)
class _Contents:
    """What a group must keep, or what its output has, from an offset on."""

    first_offset: int = 0
    values: DigestSum = field(default_factory=DigestSum)
    tombstones: int = 0
    expired_tombstones: int = 0  # not in `tombstones`


class _GroupVerifier(ForwardingControl):
    """The control of a clean: it verifies groups before it passes them on."""

    def __init__(self, env: Env, job: CleanJob, control: JobControl, expected: _Expected) -> None:
        super().__init__(control)
        self._log_start_offset = job.log_start_offset
        self._live_offsets = expected.live_offsets
        self._sources = {source.base_offset: source for group in job.groups for source in group}
        self._rest = dict(self._sources)  # the sources of no group yet
        self._digests: list[RangeDigest] = []
        rules = replace(job, dedupe_buffer_bytes=0)
        self._inputs = self._context(env, rules, SourceReader(
            env, job.directory, job.read_buffer_bytes
        ))  # fmt: skip
        self._outputs = self._context(env, rules, SourceReader(
            env, job.outputs, job.read_buffer_bytes, name_of=lambda base: filenames.cleaned_name(
                base, filenames.LOG, job.job_id
            )
        ))  # fmt: skip

    def _context(self, env: Env, job: CleanJob, reader: SourceReader) -> CleanContext:
        if self._live_offsets is None:
            return CleanContext(env, job, self._control, reader=reader)
        return CleanContext(env, job, self._control, reader=reader, survivors=self._live_offsets)

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Verify groups, then pass them on. Raises UnverifiedOutputError."""
        for group in groups:
            self._verify(group)
        super().groups_cleaned(groups)

    # Verification

    @property
    def bytes_read(self) -> int:
        """Return the bytes of segments and outputs that were read."""
        return self._inputs.reader.bytes_read + self._outputs.reader.bytes_read

    def close(self) -> None:
        """Close the files."""
        self._inputs.reader.close()
        self._outputs.reader.close()

    def digests(self) -> tuple[RangeDigest, ...]:
        """Return the digests of all ranges; read the segments of no group for them.

        Empty if a segment cannot be read any more.
        """
        for source in self._rest.values():
            try:
                contents = self._contents_of([source])
            except UnverifiedOutputError:  # damage that is younger than the clean
                return ()
            if contents.first_offset <= source.base_offset:
                self._add_digest(source.base_offset, source.next_base_offset, contents)
        return tuple(sorted(self._digests))

    def _verify(self, group: CleanedGroup) -> None:
        sources = [self._sources[base] for base in group.source_base_offsets]
        first_offset, end_offset = sources[0].base_offset, sources[-1].next_base_offset
        for source in sources:
            self._rest.pop(source.base_offset, None)
        before = self._contents_of(sources)
        after = _Contents(before.first_offset)
        if group.output is not None:
            output = replace(
                sources[0],
                base_offset=group.output.base_offset,
                next_base_offset=end_offset,
                size_bytes=group.bytes_after,
            )
            self._add(self._outputs, output, after)
        if reason := _difference(before, after):
            raise UnverifiedOutputError(first_offset, end_offset, reason)
        if before.first_offset <= first_offset:
            self._add_digest(first_offset, end_offset, after)

    def _contents_of(self, sources: Sequence[SourceSegment]) -> _Contents:
        """Return what the sources have, after those that retention removed."""
        contents = _Contents()
        for source in sources:
            self._add(self._inputs, source, contents)
            if self._inputs.reader.is_gone:
                contents = _Contents(source.next_base_offset)
        return contents

    def _add(self, context: CleanContext, source: SourceSegment, contents: _Contents) -> None:
        def add(records: Records) -> None:
            is_live = self._are_live(context, records) & (records.offsets >= contents.first_offset)
            contents.values.add(records, is_live & records.have_value)
            tombstones = int((is_live & ~records.have_value).sum())
            kept = int((is_live & ~records.have_value & records.must_stay).sum())
            contents.tombstones += kept
            contents.expired_tombstones += tombstones - kept

        try:
            scan_records(context, source, add)
        except DamagedSegmentError as error:
            raise UnverifiedOutputError(
                source.base_offset, source.next_base_offset, str(error)
            ) from error

    def _are_live(self, context: CleanContext, records: Records) -> Bools:
        if self._live_offsets is None:
            return np.ones(len(records.contents), dtype=np.bool_)
        return context.survive(records.offsets)

    def _add_digest(self, first_offset: int, end_offset: int, contents: _Contents) -> None:
        values, first_offset = contents.values, max(first_offset, self._log_start_offset)
        self._digests.append(RangeDigest(first_offset, end_offset, values.records, values.text))


def _difference(before: _Contents, after: _Contents) -> str:
    """Return how an output differs from what it must have; empty if it does not."""
    if before.values != after.values:
        return (
            f"{before.values.records} last records of keys have a value, and the output has "
            f"{after.values.records}, or some of them changed"
        )
    tombstones = after.tombstones + after.expired_tombstones
    most = before.tombstones + before.expired_tombstones
    if not before.tombstones <= tombstones <= most:
        return f"{before.tombstones} to {most} deletes must stay, and the output has {tombstones}"
    return ""
