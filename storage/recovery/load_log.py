"""Log recovery: load the log of a partition folder after a clean stop or a crash.

Rules
- Complete or undo an interrupted swap first. No file is opened before the folder has either all old
  or all new segments.
- After a clean stop, read the headers at the ends of files only. After a crash, verify every batch
  from the recovery point on, and rebuild indexes, transaction index and producer state from them.
- After the recovery point, truncate the log at the first bad batch. Never truncate below it: a bad
  batch there becomes a damaged range. If the last batch ends below the recovery point, or damage
  hides the end of the log, continue in a new segment after it, whose name shows the end: no offset
  is assigned twice, even if a later start does not find the recovery point.
- A batch with a valid CRC whose offset contradicts later batches is a damaged range everywhere: the
  CRC does not cover the offset, and such a batch is not a torn write.
- Convert messages of formats 0 and 1 in a folder that is taken over from Kafka (old_segments.py).
  Treat others as damaged, and never truncate them.
- A segment that overlaps the following one is not damaged: a swap whose journal was lost leaves
  this state. If the following segments contain all overlapping records, truncate its end, whatever
  the recovery point; otherwise refuse the log. Never change the later segments. If all of these are
  empty, remove them: the log went on in the old segment after a roll that failed.
- Ignore a log start offset beyond the log end: its file has no checksum, and the broker flushes the
  log before it writes one. A checkpoint is never a reason to remove a segment.
- Removals are durable before anything can be appended.
- Recovery needs no room on the disk, but for the index of aborted transactions: indexes and
  snapshots that cannot be written are absent, and can be made again from the log.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from storage.env import Env, remove_if_there
from storage.errors import (
    CorruptBatchError,
    CorruptCheckpointError,
    DamagedSegmentError,
    NewerFormatError,
    NoRoomError,
    OverlappingSegmentsError,
    is_scarcity,
)
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, read_header
from storage.format.index import RELATIVE_OFFSET_MAX, CorruptIndexError, IndexLimits
from storage.format.leader_epochs import LeaderEpochs
from storage.format.producer_state import ProducerStates
from storage.format.txn_index import TxnIndexEntry
from storage.recovery.old_segments import OldSegments, convert_old_segments
from storage.recovery.segment_overlap import Tail, returns_below, why_not_copied
from storage.segments.batch_scan import ScannedBatch, scan, skip_old_messages, verify
from storage.segments.content_ids import restore_content_ids
from storage.segments.damage import DamagedSegment, why_contradicted
from storage.segments.offset_lookup import locate
from storage.segments.producer_snapshots import (
    load_states,
    note_batch,
    remove_snapshots,
    replay,
    snapshot_path,
    snapshots_in,
    write_snapshot,
)
from storage.segments.segment import Segment
from storage.segments.segment_list import SegmentList
from storage.swap.swap_journal import recover_swap


@dataclass(slots=True)
class RecoveryCounts:
    """The work of recovery beyond reading the ends of logs."""

    segments_verified: int = 0
    bytes_verified: int = 0
    bytes_cut: int = 0
    deleted_files: int = 0  # whose deletion the end of the process had interrupted

    @classmethod
    def total(cls, counts: Iterable["RecoveryCounts"]) -> "RecoveryCounts":
        """Return the sum over several logs."""
        total = cls()
        for count in counts:
            total.segments_verified += count.segments_verified
            total.bytes_verified += count.bytes_verified
            total.bytes_cut += count.bytes_cut
            total.deleted_files += count.deleted_files
        return total


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """A loaded log, ready for appends."""

    segments: SegmentList
    producers: ProducerStates
    epochs: LeaderEpochs
    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    leader_epoch: int
    notes: tuple[str, ...]  # repairs, for the log lines
    counts: RecoveryCounts = field(default_factory=RecoveryCounts)
    epochs_learned: bool = False  # from the batches: their file is missing or wrong


@dataclass(slots=True)
class _Loading:
    """The state of one folder during recovery."""

    env: Env
    directory: str
    limits: IndexLimits
    recovery_point: int
    log_start_offset: int = 0  # as noted
    segments: list[Segment] = field(default_factory=list)
    next_offset: int = 0
    shows_end: bool = True  # whether a batch or a file name shows the end of the log
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    epochs_learned: bool = False
    states: ProducerStates = field(default_factory=ProducerStates)
    notes: list[str] = field(default_factory=list)
    counts: RecoveryCounts = field(default_factory=RecoveryCounts)
    removed_names: bool = False
    go_on: Callable[[], None] = lambda: None
    segments_left: Callable[[int], None] = lambda _: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def remove(self, segment: Segment) -> None:
        """Delete a segment's files."""
        for kind in filenames.FILE_KINDS:
            path = f"{self.directory}/{filenames.file_name(segment.base_offset, kind)}"
            if self.env.exists(path):
                self.env.unlink(path)
        self.removed_names = True

    def write_snapshot(self, offset: int) -> None:
        """Write the present producer state as that before `offset`, or remove the old file."""
        try:
            write_snapshot(self.env, self.directory, offset, self.states, durable=True)
        except OSError as error:
            if not is_scarcity(error):
                raise
            remove_if_there(self.env, snapshot_path(self.directory, offset))
            self.removed_names = True

    def create(self, base_offset: int) -> Segment:
        """Return a new, empty segment."""
        return Segment(self.env, self.directory, base_offset, self.limits, create=True)


def load_log(
    env: Env,
    directory: str,
    limits: IndexLimits,
    *,
    was_clean: bool,
    recovery_point: int | None,
    log_start_offset: int | None,
    old_segments: OldSegments = OldSegments.NONE,
    go_on: Callable[[], None] = lambda: None,
    segments_left: Callable[[int], None] = lambda _: None,
) -> LoadedLog:
    """Load the log of a partition folder.

    `go_on` is called for each segment and each verified batch. It may raise to stop recovery, which
    is as safe as a kill. `segments_left` is called before each segment with the number of segments
    still to verify.

    `recovery_point` is None if it was lost. Then all batches are verified, unless the stop was
    clean, and only the last segment can have a torn end: a bad batch in another segment becomes a
    damaged range. `log_start_offset` comes from its checkpoint, None without one. It may be below
    the first segment, if compaction removed all records there.

    `old_segments`: where there may be messages of formats 0 and 1, which are converted.

    Raises OSError, UnfinishedSwapError and NewerFormatError of an interrupted swap, and
    OverlappingSegmentsError.
    """
    swap = recover_swap(env, directory, was_clean=was_clean)
    files = filenames.classify(env.listdir(directory))
    converted = convert_old_segments(env, directory, files.logs, go_on, expected=old_segments)
    if converted:
        files = filenames.classify(env.listdir(directory))
    is_point_lost = recovery_point is None
    if recovery_point is None:
        recovery_point = _assumed_recovery_point(files, was_clean=was_clean)
    loading = _Loading(
        env,
        directory,
        limits,
        recovery_point,
        log_start_offset or 0,
        go_on=go_on,
        segments_left=segments_left,
    )
    loading.notes.extend(converted)
    loading.counts.deleted_files = len(swap.deleted)
    if swap.changed:
        loading.note(f"after an interrupted swap: {swap}")
    _remove_leftovers(loading, files)
    _read_epochs(loading)
    first_unclean = _open_segments(loading, files, was_clean=was_clean)
    if is_point_lost and not was_clean:
        first_unclean = 0
    is_txn_index_lost = any(filenames.TXN_INDEX in name for name, _ in swap.distrusted)
    if swap.refused or is_txn_index_lost:
        # A transaction index may belong to the old segment, its log to the new one.
        first_unclean = 0
    is_noted = False  # whether a clean stop recorded the open transactions
    if first_unclean < len(loading.segments):
        _recover(loading, first_unclean)
    elif loading.segments:
        loading.states = load_states(env, directory, loading.segments, loading.next_offset)
        is_noted = loading.next_offset in snapshots_in(env, directory)
    if loading.next_offset < recovery_point and not is_point_lost:
        missing = f"[{loading.next_offset}, {recovery_point})"
        loading.note(f"flushed offsets {missing} cannot be read; the log goes on after them")
        loading.next_offset = recovery_point
        loading.shows_end = False
    if log_start_offset is not None and loading.segments and log_start_offset > loading.next_offset:
        loading.note(f"log start offset {log_start_offset} is beyond the log end and was ignored")
        log_start_offset = None
    _choose_active(loading, log_start_offset)
    _settle_key_indexes(loading, files)
    if not is_noted:
        _forget_hidden(loading, log_start_offset or 0)
    return _finish(loading, log_start_offset, was_clean=was_clean)


def _assumed_recovery_point(files: filenames.PartitionFiles, *, was_clean: bool) -> int:
    """Return a lower bound for truncation if the recovery point was lost.

    After a clean stop everything is flushed, so the bound is above all possible offsets.
    """
    last_base_offset = files.logs[-1] if files.logs else 0
    beyond = min(last_base_offset + RELATIVE_OFFSET_MAX, filenames.LARGEST_OFFSET)
    return beyond if was_clean else last_base_offset


def begin_log(env: Env, directory: str, limits: IndexLimits) -> LoadedLog:
    """Return the log of a new folder. Raises NoRoomError, OSError."""
    first = Segment.begin(env, directory, 0, limits, is_first=True)
    return LoadedLog(SegmentList([first]), ProducerStates(), LeaderEpochs(), 0, 0, 0, 0, ())


def _remove_leftovers(loading: _Loading, files: filenames.PartitionFiles) -> None:
    """Delete files in deletion, and indexes without a log."""
    names = [file.name for file in files.deleted]
    lost = set(files.indexes) & set(files.time_indexes) - set(files.logs)
    for base in sorted(lost):
        # Deletion of a segment leaves such files only after a power failure.
        path = f"{loading.directory}/{filenames.file_name(base, filenames.LOG)}"
        loading.note(f"{path} is missing; its indexes were removed")
    for kind, bases in (
        (filenames.INDEX, files.indexes),
        (filenames.TIME_INDEX, files.time_indexes),
        (filenames.TXN_INDEX, files.txn_indexes),
    ):
        names += [filenames.file_name(base, kind) for base in bases if base not in files.logs]
    for name in names:
        loading.env.unlink(f"{loading.directory}/{name}")
        loading.removed_names = True


def _read_epochs(loading: _Loading) -> None:
    path = f"{loading.directory}/{filenames.LEADER_EPOCH_CHECKPOINT}"
    if not loading.env.exists(path):
        return
    try:
        loading.epochs = LeaderEpochs.decode(loading.env.read_file(path), path)
    except CorruptCheckpointError as error:
        loading.note(str(error))


def _open_segments(loading: _Loading, files: filenames.PartitionFiles, *, was_clean: bool) -> int:
    """Open all segments and find the log end; return the index of the first one to verify."""
    for base_offset in files.logs:
        loading.segments.append(
            Segment(loading.env, loading.directory, base_offset, loading.limits, create=False)
        )
    count = len(loading.segments)
    ends = [segment.base_offset for segment in loading.segments[1:]]
    recovery_point = loading.recovery_point
    first_unclean = count
    if not was_clean:
        first_unclean = sum(1 for end in ends if end <= recovery_point)
    for index, segment in enumerate(loading.segments[:first_unclean]):
        loading.go_on()
        has_txn_index = segment.base_offset in files.txn_indexes
        try:
            loading.next_offset = segment.load(has_txn_index=has_txn_index)
            is_doubtful = False
        except (CorruptIndexError, CorruptBatchError) as error:
            loading.note(str(error))
            # Bytes after the recovery point may be at its end: parts of a batch that was not
            # appended, whose removal was not durable when the segment was closed.
            if (
                index == count - 1
                or has_txn_index
                or (not was_clean and ends[index] == recovery_point)
            ):
                return index
            loading.next_offset = segment.rebuild()
            if segment.has_transactions:
                return index  # its transaction index may have been removed with the other indexes
            is_doubtful = True
        doubt = _why_doubtful(segment, loading.segments[: index + 1])
        if doubt:
            loading.note(f"transaction index of {segment.path}: {doubt}")
            return index
        if index < len(ends) and loading.next_offset > ends[index]:
            loading.note(f"{segment.path} reaches beyond {ends[index]}, into the next segment")
            return index
        if index < count - 1:
            segment.txn_index.drop()  # the last one may be appended to
        is_last = not was_clean and index == first_unclean - 1
        if is_last and not is_doubtful and ends[index] == recovery_point:
            # Its log was flushed before the roll, but its indexes perhaps were not.
            if has_txn_index:
                return index
            segment.rebuild()
    return first_unclean


def _why_doubtful(segment: Segment, segments: Sequence[Segment]) -> str:
    """Return why the transaction index of the last segment contradicts the batches, or "".

    An entry begins with a batch of its producer. If the cleaner removed that batch, no batch has
    the offset, and the entry counts as valid.
    """
    searches: dict[Segment, Callable[[int], ScannedBatch | None]] = {}
    for entry in segment.txn_index.entries:
        holder = next(
            (
                segment
                for segment in reversed(segments)
                if segment.base_offset <= entry.first_offset
            ),
            None,
        )
        try:
            if holder is not None and holder not in searches:
                searches[holder] = holder.lookup.ascending()
            batch = searches[holder](entry.first_offset) if holder is not None else None
        except (DamagedSegmentError, CorruptIndexError, CorruptBatchError):
            continue
        if batch is None or batch.header.base_offset > entry.first_offset:
            continue
        header = batch.header
        is_begin = header.is_transactional and not header.is_control
        if not is_begin or (header.base_offset, header.producer_id) != (
            entry.first_offset,
            entry.producer_id,
        ):
            return f"{entry} begins with a batch of something else"
    return ""


def _recover(loading: _Loading, first: int) -> None:
    """Verify the segments from `first` on; truncate at the first bad one if allowed."""
    segments = loading.segments
    base_offset = segments[first].base_offset
    loading.next_offset = base_offset
    loading.states = _states_before(loading, first)
    _forget_decided(loading, segments[:first])
    for index in range(first, len(segments)):
        segment = segments[index]
        loading.segments_left(len(segments) - index)
        loading.write_snapshot(segment.base_offset)
        if _recover_segment(loading, segment, segments[index + 1 :]):
            for log_segment in segments[index + 1 :]:
                loading.note(f"{log_segment.path} follows the cut and is removed")
                loading.counts.bytes_cut += log_segment.size_bytes
                loading.remove(log_segment)
            del segments[index + 1 :]
            break
    loading.notes.extend(
        f"{damage.path} is damaged at byte {damage.position}: {damage.reason}"
        for segment in segments[first:]
        for damage in segment.damages
    )


def _states_before(loading: _Loading, first: int) -> ProducerStates:
    """Return the producer state before a segment.

    A snapshot may have the state of another offset, which its checksum does not show. Then the
    markers after it would end other transactions. If the transaction indexes of the segments say
    so, and the whole log agrees with them, the state is that of the log.
    """
    segments = loading.segments
    base_offset = segments[first].base_offset
    states = load_states(loading.env, loading.directory, segments[: first + 1], base_offset)
    stored = {entry[:3] for segment in segments[first:] for entry in segment.txn_index.read()}
    doubtful = stored and stored - _entries_from(states, segments[first:])
    if not doubtful:
        return states
    replayed = ProducerStates()
    for segment in segments[:first]:
        replay(replayed, segment, 0, base_offset)
    if not doubtful & _entries_from(replayed, segments[first:]):
        return states
    loading.note(f"the producer snapshot of offset {base_offset} contradicts the log; not used")
    return replayed


def _entries_from(states: ProducerStates, segments: Sequence[Segment]) -> set[tuple[int, int, int]]:
    """Return producer, first and last offset of the aborted transactions that end in `segments`."""
    copy = ProducerStates.from_snapshot(states.to_snapshot())
    return {
        entry[:3]
        for segment in segments
        for entry in replay(copy, segment, 0, filenames.LARGEST_OFFSET)
    }


def _forget_decided(loading: _Loading, before: Sequence[Segment]) -> None:
    """Close transactions that are open in a snapshot, but have no batch left in the log.

    The cleaner never removes batches of open transactions. So these were decided, and the cleaner
    may have removed their markers as well; nothing read later would close them.
    """
    for entry in loading.states.producers:
        begun = entry.transaction_first_offset
        if begun is not None and not _has_batch_of(before, entry.producer_id, begun):
            loading.note(f"transaction of producer {entry.producer_id} at {begun} is long decided")
            loading.states.forget_transaction(entry.producer_id)


def _forget_hidden(loading: _Loading, log_start_offset: int) -> None:
    """Close transactions without a batch at or above the start of the log.

    Their markers may be gone, because the cleaner skips segments that retention will delete. A
    transaction that is open all the same begins again with its next batch.
    """
    for entry in loading.states.producers:
        begun = entry.transaction_first_offset
        if begun is None or begun >= log_start_offset:
            continue
        if not _has_batch_of(loading.segments, entry.producer_id, log_start_offset):
            loading.note(f"transaction of producer {entry.producer_id} at {begun} is not readable")
            loading.states.forget_transaction(entry.producer_id)


def _has_batch_of(segments: Sequence[Segment], producer_id: int, offset: int) -> bool:
    """Return whether the producer has a transactional batch from `offset` on; True if unsure."""
    ends = [*(segment.base_offset for segment in segments[1:]), None]
    for segment, end in zip(segments, ends, strict=False):
        if end is not None and end <= offset:
            continue
        try:
            position = locate(segment, offset)
        except DamagedSegmentError:
            return True
        for batch in segment.readable_batches(position):
            header = batch.header
            is_data = header.is_transactional and not header.is_control
            if header.producer_id == producer_id and is_data:
                return True
    return False


def _recover_segment(loading: _Loading, segment: Segment, later: Sequence[Segment]) -> bool:
    """Verify one segment and rebuild its indexes; return True if it is the last one then."""
    following = later[0].base_offset if later else None
    entries: list[TxnIndexEntry] = []
    loading.counts.segments_verified += 1
    loading.counts.bytes_verified += segment.size_bytes
    segment.start_rebuild()
    segment.synced_bytes = 0
    loading.next_offset = max(loading.next_offset, segment.base_offset)
    position = 0
    was_cut = False
    while position < segment.size_bytes:
        try:
            for batch in scan(segment.file, position, segment.size_bytes, whole=True):
                loading.go_on()
                entry = _recover_batch(loading, segment, batch, following)
                if entry is not None:
                    entries.append(entry)
                position = batch.end_position
        except _OverlapError as overlap:
            if _follow_empty(overlap.batch, later, loading):
                loading.note(f"{segment.path} goes on: the segments after it are empty")
                position, following, was_cut = overlap.batch.position, None, True
            else:
                position = _undo_overlap(loading, segment, overlap.batch, later)
        except _ContradictedError as error:
            position = segment.note_damage(error.position, error.reason).end_position
        except CorruptBatchError as error:
            old_end, old_next = skip_old_messages(segment.file, position, segment.size_bytes)
            if old_end == position and loading.next_offset >= loading.recovery_point:
                tail_bytes = segment.size_bytes - position
                loading.counts.bytes_cut += tail_bytes
                loading.note(f"{segment.path}: {tail_bytes} bytes cut: {error.reason}")
                segment.cut_back(position)
                segment.file.sync()
                was_cut = True
            else:
                damage = segment.note_damage(position, error.reason)
                next_offset = (
                    old_next
                    if old_end > position
                    else _offset_behind(loading, segment, damage, following)
                )
                loading.next_offset = max(loading.next_offset, next_offset)
                position = damage.end_position
    segment.finish_rebuild()
    segment.write_txn_entries(entries)
    return was_cut


def _recover_batch(
    loading: _Loading, segment: Segment, batch: ScannedBatch, following: int | None
) -> TxnIndexEntry | None:
    """Verify one batch and add it to indexes, producer state and epochs.

    Raises CorruptBatchError, _OverlapError, _ContradictedError.
    """
    header = batch.header
    reason = segment.why_misplaced(header, batch.position, loading.next_offset)
    if not reason:
        verify(batch, segment.path)
        if following is not None and header.last_offset >= following:
            raise _OverlapError(batch)
        reason = why_contradicted(
            segment.file,
            header,
            batch.position,
            next_offset=loading.next_offset,
            end=segment.size_bytes,
        )
        if reason:
            raise _ContradictedError(batch.position, reason)
        segment.index_batch(header, batch.position)
        _compare_epoch(loading, header.partition_leader_epoch, header.last_offset)
        loading.next_offset = header.next_offset
        return note_batch(loading.states, batch)
    raise CorruptBatchError(reason, batch.position, segment.path)


class _OverlapError(Exception):
    """A valid batch has offsets of the following segment."""

    def __init__(self, batch: ScannedBatch) -> None:
        super().__init__()
        self.batch = batch


class _ContradictedError(Exception):
    """A batch with a valid CRC has wrong offsets, which the CRC does not cover."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__()
        self.position = position
        self.reason = reason


def _follow_empty(batch: ScannedBatch, later: Sequence[Segment], loading: _Loading) -> bool:
    """Return whether the log goes on with a batch, in front of empty segments at its offset.

    A roll that failed has removed such a segment, and the log went on in the old one. If the power
    fails before the removal is durable, the empty segment is back.
    """
    goes_on = batch.header.base_offset == loading.next_offset == later[0].base_offset
    return goes_on and not any(segment.size_bytes for segment in later)


def _undo_overlap(
    loading: _Loading, segment: Segment, batch: ScannedBatch, later: Sequence[Segment]
) -> int:
    """Truncate the segment at `batch` if no record is lost; return where to continue reading.

    Raises OverlappingSegmentsError if a record would be lost.
    """
    tail = Tail(segment.file, batch.position, segment.size_bytes)
    if returns_below(tail):
        following = later[0].base_offset
        reason = f"offset {batch.header.base_offset} in front of {following} lies"
        return segment.note_damage(batch.position, reason).end_position
    first, last = batch.header.base_offset, batch.header.last_offset
    if first < later[0].base_offset:
        reason = f"no other segment has its offsets below {later[0].base_offset}"
    else:
        reason = why_not_copied(tail, [other.file for other in later], loading.go_on)
    if reason:
        raise OverlappingSegmentsError(segment.path, batch.position, first, last, reason)
    cut_bytes = segment.size_bytes - batch.position
    loading.counts.bytes_cut += cut_bytes
    loading.note(
        f"{segment.path}: {cut_bytes} bytes truncated: the segments after it also have its"
        f" records from {first} on"
    )
    segment.cut_back(batch.position)
    segment.file.sync()
    return segment.size_bytes


def _offset_behind(
    loading: _Loading, segment: Segment, damage: DamagedSegment, following: int | None
) -> int:
    """Return the offset after a damaged batch if its header is plausible, else -1.

    Batches after the damage take precedence, and so does the next segment, at `following`: if the
    header led beyond them, they would be cut.
    """
    try:
        header = read_header(segment.file.pread(HEADER_BYTES, damage.position))
    except CorruptBatchError:
        return -1
    end_offset = loading.recovery_point if following is None else following
    if damage.next_offset >= 0:
        end_offset = damage.next_offset
    return header.next_offset if header.next_offset <= end_offset else -1


def _choose_active(loading: _Loading, noted_start_offset: int | None) -> None:
    """Make sure that the log has an active segment to append to."""
    segments = loading.segments
    log_start_offset = noted_start_offset or 0
    if not segments:
        loading.next_offset = max(loading.next_offset, log_start_offset)
        segments.append(loading.create(loading.next_offset))
        return
    last = segments[-1]
    ends_damaged = any(damage.end_position >= last.size_bytes for damage in last.damages)
    if ends_damaged:
        loading.next_offset = max(loading.next_offset, last.base_offset + 1)
        segments.append(loading.create(loading.next_offset))
        return
    if not loading.shows_end:
        with suppress(NoRoomError):
            end = loading.next_offset
            segments.append(Segment.begin(loading.env, loading.directory, end, loading.limits))
            return
    last.open_for_append()


def _settle_key_indexes(loading: _Loading, files: filenames.PartitionFiles) -> None:
    """Keep the key indexes of segments whose content is known; delete all others."""
    kept: frozenset[int] = frozenset()
    if files.keys and filenames.CONTENT_IDS in files.others:
        try:
            kept = restore_content_ids(loading.env, loading.directory, loading.segments[:-1])
        except (CorruptCheckpointError, NewerFormatError) as error:
            loading.note(str(error))
    for base in files.keys:
        if base not in kept:
            name = filenames.file_name(base, filenames.KEYS)
            remove_if_there(loading.env, f"{loading.directory}/{name}")


def _finish(loading: _Loading, noted_start_offset: int | None, *, was_clean: bool) -> LoadedLog:
    """Update snapshots and epochs, and make removals durable."""
    end_offset = loading.next_offset
    bases = {segment.base_offset for segment in loading.segments}
    if not was_clean:
        loading.write_snapshot(end_offset)
    snapshots = snapshots_in(loading.env, loading.directory)
    newest = max((offset for offset in snapshots if offset <= end_offset), default=-1)
    strays = [
        snapshot
        for snapshot in snapshots
        if snapshot > end_offset or (snapshot not in bases and snapshot != newest)
    ]
    remove_snapshots(loading.env, loading.directory, strays)
    # A snapshot of truncated batches must not reappear beside other batches.
    if loading.removed_names or strays:
        loading.env.sync_dir(loading.directory)
    first_base_offset = loading.segments[0].base_offset
    log_start_offset = first_base_offset if noted_start_offset is None else noted_start_offset
    leader_epoch = _settle_epoch(loading, log_start_offset, was_clean=was_clean)
    return LoadedLog(
        segments=SegmentList(loading.segments),
        producers=loading.states,
        epochs=loading.epochs,
        log_start_offset=log_start_offset,
        log_end_offset=end_offset,
        recovery_point=min(loading.recovery_point, end_offset),
        leader_epoch=leader_epoch,
        notes=tuple(loading.notes),
        counts=loading.counts,
        epochs_learned=loading.epochs_learned,
    )


def _settle_epoch(loading: _Loading, log_start_offset: int, *, was_clean: bool) -> int:
    """Remove epochs of truncated batches, begin a new one after a crash; return the epoch."""
    epochs = loading.epochs
    highest = epochs.latest.epoch if epochs.latest is not None else -1
    last = next((s for s in reversed(loading.segments) if s.last_epoch >= 0), None)
    if last is not None:
        _compare_epoch(loading, last.last_epoch, last.last_epoch_offset)
    if loading.epochs_learned:
        _learn_epochs(loading)
        highest = max(highest, epochs.latest.epoch if epochs.latest is not None else -1)
    epochs.truncate_from_end(loading.next_offset)
    epochs.truncate_from_start(log_start_offset)
    if highest < 0:
        return 0
    return highest if was_clean else highest + 1


def _compare_epoch(loading: _Loading, epoch: int, offset: int) -> None:
    """Note whether the epochs contradict that of a batch: their file is missing or wrong.

    An epoch is durable before its first batch, and stays until the log start is after its last
    offset; `offset` is the last one of the batch.
    """
    epochs, latest = loading.epochs, loading.epochs.latest
    if epoch < 0 or offset < loading.log_start_offset or loading.epochs_learned:
        return
    if latest is not None and latest.epoch == epoch and latest.start_offset <= offset:
        return
    if epochs.epoch_of(offset) != epoch:
        loading.epochs_learned = True
        if latest is not None:
            loading.note(f"the leader epochs contradict epoch {epoch} of offset {offset}")


def _learn_epochs(loading: _Loading) -> None:
    """Replace the epochs by those of all batches."""
    epochs = loading.epochs
    epochs.clear()
    for segment in loading.segments:
        loading.go_on()
        for batch in segment.readable_batches(0):
            epoch, latest = batch.header.partition_leader_epoch, epochs.latest
            if epoch >= 0 and (latest is None or epoch > latest.epoch):
                epochs.assign(epoch, batch.header.base_offset)
