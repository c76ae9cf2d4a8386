"""Complete a segment replacement that a killed Kafka interrupted.

Kafka writes new segments as `.cleaned`, renames all of them to `.swap` (descending), renames the
old segments to `.deleted`, removes the `.swap` suffix, and syncs once. A restart completes this by
the rules of Kafka's LogLoader: 1. Delete `.deleted` files. 2. If a `.cleaned` file exists, the
renaming to `.swap` was incomplete: delete the `.swap` files at or above the smallest `.cleaned`
base offset, and the `.cleaned` files. 3. Delete segment files whose base offset is in the range of
a remaining `.swap` log. 4. Remove the suffix of the remaining `.swap` files.

We differ where Kafka could lose data:
- With a `.cleaned` file of an earlier, failed clean, rule 2 deletes the only copy. We therefore
  complete a `.swap` log whose range no other log covers.
- Each `.swap` log covers its own range, not one range from the first to the last log.
- We verify a `.swap` log before we delete the first file.
- We delete the `.swap` files while the first segment that they replace is in place. Kafka marks the
  old segments as deleted in order of their offsets, so all of them are there and the new files are
  not needed. The clean is repeated.
- A `.swap` log replaces no segment that its last batch is not from, and never the last segment,
  which Kafka does not clean. A damaged offset, which no checksum covers, would have all later
  segments deleted.
- We sync the folder between the rules, and rename logs before their indexes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from storage.env import Env
from storage.errors import CorruptBatchError, UnfinishedSwapError, UnsupportedMagicError
from storage.format import filenames
from storage.format.filenames import SegmentFile
from storage.segments.batch_scan import scan, skip_old_messages, verify


@dataclass(frozen=True, slots=True)
class KafkaSwapRecovery:
    """The completed names (with their `.swap` suffix) and the deleted names.

    `deleted` has the files that were marked as deleted. The deletion of a segment leaves such files
    as well, so alone they do not show an interrupted swap.
    """

    completed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


def finish_kafka_swap(env: Env, directory: str) -> KafkaSwapRecovery:
    """Apply the rules above to one partition's folder; idempotent, safe against crashes.

    Cleaned files with a job id are Varve's and are ignored. Raises UnfinishedSwapError for a
    `.swap` log that cannot be read completely (nothing was changed), and OSError.
    """
    files = filenames.classify(env.listdir(directory))
    cleaned = [file for file in files.cleaned if not file.job_id]
    if not (files.deleted or cleaned or files.swaps):
        return KafkaSwapRecovery()
    completed, abandoned = _select_swaps(env, directory, files, cleaned)
    replaced = _replaced_by(env, directory, files, completed)
    # Logs go last: an index without its log looks like one of a segment that is in place already.
    _remove(env, directory, [file for file in abandoned if file.kind != filenames.LOG])
    _remove(env, directory, [file for file in abandoned if file.kind == filenames.LOG])
    _remove(env, directory, files.deleted)
    _remove(env, directory, cleaned)
    _remove(env, directory, replaced)
    logs = [file for file in completed if file.kind == filenames.LOG]
    _put_in_place(env, directory, logs)
    _put_in_place(env, directory, [file for file in completed if file.kind != filenames.LOG])
    removed = [*abandoned, *cleaned, *replaced]
    return KafkaSwapRecovery(
        tuple(file.name for file in completed),
        tuple(file.name for file in removed),
        tuple(file.name for file in files.deleted),
    )


def _select_swaps(
    env: Env, directory: str, files: filenames.PartitionFiles, cleaned: Sequence[SegmentFile]
) -> tuple[list[SegmentFile], list[SegmentFile]]:
    """Return the `.swap` files to complete and those to delete (rule 2)."""
    logs = [file.base_offset for file in files.swaps if file.kind == filenames.LOG]
    if logs and _has_all_sources(files, min(logs)):
        return [], list(files.swaps)
    if not cleaned:
        return list(files.swaps), []
    first_cleaned = min(file.base_offset for file in cleaned)
    only_copies = {base for base in logs if not _is_covered(env, directory, files, base)}
    completed: list[SegmentFile] = []
    abandoned: list[SegmentFile] = []
    for file in files.swaps:
        keep = file.base_offset < first_cleaned or file.base_offset in only_copies
        (completed if keep else abandoned).append(file)
    return completed, abandoned


def _has_all_sources(files: filenames.PartitionFiles, first_offset: int) -> bool:
    """Return whether no segment from this offset on was marked as deleted yet."""
    deleted = [file.base_offset for file in files.deleted if file.kind == filenames.LOG]
    return first_offset in files.logs and all(base < first_offset for base in deleted)


def _is_covered(
    env: Env, directory: str, files: filenames.PartitionFiles, base_offset: int
) -> bool:
    """Return whether a log has a segment that begins at or reaches beyond `base_offset`."""
    floor = max((base for base in files.logs if base <= base_offset), default=-1)
    if floor in (-1, base_offset):
        return floor == base_offset
    return _next_offset(env, directory, SegmentFile(floor, filenames.LOG)) > base_offset


def _replaced_by(
    env: Env,
    directory: str,
    files: filenames.PartitionFiles,
    completed: Sequence[SegmentFile],
) -> list[SegmentFile]:
    """Return the files that a completed `.swap` log replaces (rule 3)."""
    in_place = [
        SegmentFile(base, kind)
        for kind, bases in (
            (filenames.LOG, files.logs),
            (filenames.INDEX, files.indexes),
            (filenames.TIME_INDEX, files.time_indexes),
            (filenames.TXN_INDEX, files.txn_indexes),
            (filenames.SNAPSHOT, files.snapshots),
        )
        for base in bases
    ]
    replaced: set[SegmentFile] = set()
    for swap in completed:
        if swap.kind != filenames.LOG:
            continue
        last, end = _last_batch(env, directory, swap)
        replaced |= {file for file in in_place if swap.base_offset <= file.base_offset < end}
        sources = [base for base in files.logs if swap.base_offset <= base < end]
        is_plausible = not sources or (
            end <= max(files.logs) and _may_hold(env, directory, max(sources), last)
        )
        if not is_plausible:
            reason = f"its last offset, {end - 1}, is not one of the segments that it replaces"
            raise UnfinishedSwapError(directory, swap.name, reason)
    return sorted(replaced)


def _may_hold(env: Env, directory: str, base_offset: int, batch_offset: int) -> bool:
    """Return whether a segment that reaches an offset has a batch that begins there.

    A clean keeps the base offset of a batch. True where that is unknown: for -1, of a log without
    batches of version 2, and for a damaged segment.
    """
    if batch_offset < 0:
        return True
    path = os.path.join(directory, filenames.file_name(base_offset, filenames.LOG))
    file = env.open(path)
    try:
        end = file.size()
        position, _ = skip_old_messages(file, 0, end)
        batches = scan(file, position, end, whole=False)
        following = next((b for b in batches if b.header.next_offset > batch_offset), None)
        return following is None or following.header.base_offset == batch_offset
    except (CorruptBatchError, UnsupportedMagicError):
        return True
    finally:
        file.close()


def _next_offset(env: Env, directory: str, segment: SegmentFile) -> int:
    """Return the offset after the last batch of a log file; verify every batch."""
    return _last_batch(env, directory, segment)[1]


def _last_batch(env: Env, directory: str, segment: SegmentFile) -> tuple[int, int]:
    """Return the base offset of the last batch of a log file and the offset after it.

    Verify every batch. The first part is -1 without a batch of version 2.
    """
    path = os.path.join(directory, segment.name)
    file = env.open(path)
    try:
        end, last = file.size(), -1
        position, next_offset = skip_old_messages(file, 0, end)
        for batch in scan(file, position, end, whole=True):
            verify(batch, path)
            if batch.header.base_offset < next_offset:
                raise CorruptBatchError("its offset goes back", batch.position, path)
            last, next_offset = batch.header.base_offset, batch.header.next_offset
    except (CorruptBatchError, UnsupportedMagicError) as error:
        reason = f"damaged at byte {error.position}: {error.reason}"
        raise UnfinishedSwapError(directory, segment.name, reason) from error
    finally:
        file.close()
    return last, max(next_offset, segment.base_offset)


def _remove(env: Env, directory: str, files: Sequence[SegmentFile]) -> None:
    for file in files:
        env.unlink(os.path.join(directory, file.name))
    if files:
        env.sync_dir(directory)


def _put_in_place(env: Env, directory: str, files: Sequence[SegmentFile]) -> None:
    for file in files:
        target = filenames.file_name(file.base_offset, file.kind)
        env.rename(os.path.join(directory, file.name), os.path.join(directory, target))
    if files:
        env.sync_dir(directory)
