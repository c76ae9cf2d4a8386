"""Erase a key from one partition: search, write a tombstone, clean, and search again.

Rules
- Only a search of every file says that no value of the key is left, if the partition was there, in
  the same folder and without another copy, when the search ended. What a clean, an index or the
  cleaner's state says does not count.
- If the first search finds a value, the broker appends a tombstone. So every value that was found
  is superseded, also the last one, and may go. Values that a client writes after that stay.
- In a view by timestamp or version, a value that was written between that search and the tombstone
  may rank above it. The next search with a value finds that out, and a second tombstone follows. It
  is the last one: below the end offset, which stays that of the first one, no record is added.
- A tombstone that retention removes before the view has read it is written again.
- The files that have values are left to those who own them: closed segments to the cleaner, the
  view to its compaction, leased files to the lease, replaced files to their deletion. Readers of a
  replaced version of the view move to the present one, however slow they are. The files are
  looked at until one has changed and no requested clean is under way; then all are searched again.
- A search runs in slices, so that the searches of others have their turns between them. It begins
  again if anything that makes its result void has happened in a pause.
- After an erasure has ended, a running search is aborted, so that it keeps no other one waiting,
  and a running step writes no tombstone and requests no clean.
- Only a slice of a search takes long: `PartitionProgress` says when to look again at a part, and
  why.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from broker.erasure.forecast import Obstacle, PartitionWork, work_left
from broker.erasure.model import PartitionErasure, PartitionReceipt
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import leases_path
from broker.leases.leases import Leases
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from broker.views.scheduler import ViewScheduler
from broker.views.views import Views
from cleaner.job import CleanAbortedError
from cleaner.key_search import (
    FoundFile,
    KeySearch,
    KeySearchResult,
    PausedSearch,
    SearchedFolder,
    UnreadableFile,
    file_state,
)
from cleaner.remote_compaction import Purpose
from cleaner.scheduler.clean_requests import CleanRequest
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.explain import Explanation, obstacle_text, sentences
from cleaner.states import is_busy
from cleaner.workers.dedicated_worker import JobFailedError, KeySearcher
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import StorageError
from storage.format import filenames
from storage.format.batch import Record, build_batch, read_header
from storage.log.log import LOG_APPEND_TIME_TYPE
from storage.model import TopicPartition
from storage.view.manifest import VIEW_FOLDER

LOOK_SECONDS: Final = 0.5
OFFLINE_SECONDS: Final = 5.0
# Of a search, before the next principal has its turn. The worker reads some of a chunk again.
SLICE_SECONDS: Final = 10.0
VIEW_SECONDS: Final = 30.0  # between two compactions of a view for one part
CLEANS_MAX: Final = 3  # of the same files, before the part fails
NAMED_FILES: Final = 3  # in a reason
VERSION_BYTES: Final = 8
STARTING: Final = (
    "the worker that searches its files is starting; the first start of an installation compiles "
    "native code for a while"
)
SEARCHING: Final = "its files are being searched"

StartSearcher = Callable[[], AbstractAsyncContextManager[KeySearcher]]


@dataclass(frozen=True, slots=True)
class PartitionSearch:
    """A search of a partition, with what must not have changed when it ends."""

    served: Partition
    directory: str
    generation: str
    end: int  # later records do not count
    copies: frozenset[str]  # of the replica
    search: KeySearch


@dataclass(slots=True)
class PartitionProgress:
    """How far an open part is. `next_at` is in seconds of the event loop's clock."""

    requested_by: str = ""  # the principal, whose cleans have a share of the starts
    next_at: float = 0.0
    reason: str = ""  # what it waits for
    found: tuple[FoundFile, ...] = ()  # files with values of the key, as the last search left them
    records: int = 0  # in these files
    is_searching: bool = False
    paused: PartitionSearch | None = None  # between two slices
    share: float = 0.0  # of the files, by a search that runs or is paused
    cleans: int = 0  # requested since the last search
    request: CleanRequest | None = None  # the last one
    failures: int = 0
    view_begun_at: float = -VIEW_SECONDS  # by the same clock: the last compaction requested
    obstacle: Obstacle | None = None  # why nothing is done for it
    is_ended: bool = False  # the erasure was cancelled, or is void: a running step does no more

    def wait(
        self, reason: str, seconds: float = LOOK_SECONDS, obstacle: Obstacle | None = None
    ) -> None:
        """Look again later. `obstacle` is set if nothing is done until it ends."""
        self.reason = reason
        self.obstacle = obstacle
        self.next_at = asyncio.get_running_loop().time() + seconds


class PartitionEraser:
    """Carries out the steps of parts."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        threads: DirectoryThreads,
        *,
        pool: CleanerPool,
        views: Views,
        view_scheduler: ViewScheduler,
        leases: Leases,
        start_searcher: StartSearcher,
        settings: Callable[[], CleanerSettings],
        directories: Callable[[], Iterable[LogDirectory]],
    ) -> None:
        """`directories` returns all data directories."""
        self._env = env
        self._topics = topics
        self._threads = threads
        self._pool = pool
        self._views = views
        self._view_scheduler = view_scheduler
        self._leases = leases
        self._start_searcher = start_searcher
        self._settings = settings
        self._directories = directories
        self._searcher: KeySearcher | None = None
        self._workers = AsyncExitStack()

    @asynccontextmanager
    async def round(self) -> AsyncIterator[None]:
        """Use one worker for all searches of the block; it starts at the first one."""
        async with AsyncExitStack() as self._workers:
            try:
                yield
            finally:
                self._searcher = None

    def forget(self, partition: TopicPartition, progress: PartitionProgress) -> None:
        """Search and rewrite nothing more for an erasure that has ended."""
        if progress.is_searching and self._searcher is not None:
            self._searcher.abort()
        if progress.request is not None:
            self._pool.scanner.requests.cancel_erasure(partition, progress.request)

    async def look_at(
        self, where: TopicPartition, part: PartitionErasure, progress: PartitionProgress
    ) -> bool:
        """Ask for what the part needs next; return whether its files have to be searched before.

        Raises StorageError, OSError.
        """
        served = self._served(where, progress)
        if served is None:
            return False
        if progress.paused is not None:
            return True
        has_tombstone = part.end_offset is not None
        is_unchanged = (
            has_tombstone
            and bool(progress.found)
            and (self._is_rewriting(where) or not await self._have_changed(served, progress.found))
        )
        if is_unchanged and not self._is_unread(served, part):
            await self._advance(served, part, progress)
            return False
        return True

    async def search(
        self, where: TopicPartition, key: bytes, part: PartitionErasure, progress: PartitionProgress
    ) -> PartitionErasure:
        """Search the files for a slice, and go on; return the part as it is to be stored.

        Raises StorageError, OSError, JobFailedError, CleanAbortedError.
        """
        served = self._served(where, progress)
        if served is None:
            return part
        return await self._search_and_advance(served, key, part, progress)

    def _served(self, where: TopicPartition, progress: PartitionProgress) -> Partition | None:
        """Return the partition; None, and note the reason, if it is offline."""
        served = self._topics.partition(where)
        if served is None:
            progress.paused = None
            topic = self._topics.get(where.topic)
            offline = "" if topic is None else topic.offline.get(where.partition, "")
            progress.wait(f"{where} is offline: {offline}", OFFLINE_SECONDS, Obstacle())
        return served

    async def _search_and_advance(
        self, served: Partition, key: bytes, part: PartitionErasure, progress: PartitionProgress
    ) -> PartitionErasure:
        begun, progress.paused = progress.paused, None
        if begun is None or begun.served is not served or self._why_void(begun):
            begun = await self._begin_search(served, key, part)
        result = await self._search(begun.search, progress)
        if why := self._why_void(begun):
            progress.wait(f"{why} during the search", 0.0)
            return part
        if isinstance(result, PausedSearch):
            search = replace(begun.search, position=result.position)
            progress.paused = replace(begun, search=search)
            return part
        end, copies = begun.end, begun.copies
        progress.found, progress.records, progress.cleans = result.found, result.records, 0
        if result.unreadable:
            files = result.unreadable[:NAMED_FILES]
            raise StorageError(". ".join(_note_unreadable(served, file) for file in files))
        if not result.found:
            offline = next((each for each in self._directories() if not each.is_online), None)
            if offline is not None:
                progress.wait(
                    f"data directory {offline.path} is offline, and may have a copy of the replica",
                    OFFLINE_SECONDS,
                    Obstacle(),
                )
                return part
            if not await self._copies_of(served) <= copies:
                progress.wait("a copy of the replica was begun during the search", 0.0)
                return part
            at_ms = self._env.wall_ms()
            until_ms = at_ms + served.log.config.delete_retention_ms if result.tombstones else None
            receipt = PartitionReceipt(
                at_ms, result.files, result.bytes_read, result.tombstones, until_ms
            )
            return replace(part, end_offset=end, receipt=receipt)
        is_first = part.end_offset is None
        is_unread = self._is_unread(served, part)
        if is_first or is_unread or _is_outranked(part, served.log.config, result):
            offset = await self._append_tombstone(served, key, result)
            progress.wait("a tombstone was written", 0.0)
            progress.view_begun_at = -VIEW_SECONDS
            end = offset + 1 if is_first else end
            return replace(part, end_offset=end, tombstone_offset=offset)
        await self._advance(served, part, progress)
        return part

    # Search -------------------------------------------------------------------------------

    async def _begin_search(
        self, served: Partition, key: bytes, part: PartitionErasure
    ) -> PartitionSearch:
        end, log = part.end_offset, served.log
        if end is None:
            end = log.log_end_offset
            await served.flush()  # no later record may get an offset below the end
        directory, generation = log.directory, log.generation
        copies = await self._copies_of(served)
        search = _search_of(served, key, end, copies)
        return PartitionSearch(served, directory, generation, end, copies, search)

    def _why_void(self, begun: PartitionSearch) -> str:
        """Return why the result of a search does not count; empty if it does."""
        served = begun.served
        if self._topics.partition(served.partition) is not served:
            return "it was deleted or went offline"
        if served.log.directory != begun.directory:
            return "it was moved to another data directory"
        if served.log.generation != begun.generation:
            return "its log was truncated, repaired or configured"
        return ""

    async def _search(
        self, search: KeySearch, progress: PartitionProgress
    ) -> KeySearchResult | PausedSearch:
        def on_progress(_stage: str, done_bytes: int, total_bytes: int) -> None:
            progress.reason = SEARCHING
            progress.share = min(1.0, done_bytes / max(total_bytes, 1))  # a file may have grown

        progress.is_searching = True
        if not search.position:
            progress.share = 0.0
        progress.wait(STARTING if self._searcher is None else SEARCHING, 0.0)
        try:
            if self._searcher is None:
                self._searcher = await self._workers.enter_async_context(self._start_searcher())
            if progress.is_ended:
                raise CleanAbortedError
            result = await self._searcher.search_files(search, on_progress)
            if progress.is_ended:  # too late for an abort, but the worker begins no other search
                raise CleanAbortedError
            return result
        except (JobFailedError, CleanAbortedError):
            self._searcher = None
            await self._workers.aclose()  # it may live; the next search starts another one
            raise
        finally:
            progress.is_searching = False

    async def _copies_of(self, served: Partition) -> frozenset[str]:
        """Return folders of deleted, moved and stray replicas of the partition.

        Another data directory may have one of the same name, which a move left or an operator made.
        """
        partition = served.partition
        own, name = served.log.directory, filenames.partition_dir_name(partition)

        def look(directory: str) -> set[str]:
            return {
                f"{directory}/{other}"
                for other in self._env.listdir(directory)
                if other == name or filenames.may_be_copy_of(other, partition)
            }

        copies = [
            await self._threads.run(directory, partial(look, directory))
            for directory in (each.path for each in self._directories() if each.is_online)
        ]
        return frozenset[str]().union(*copies) - {own}

    def _is_unread(self, served: Partition, part: PartitionErasure) -> bool:
        """Return whether retention removed the tombstone of a part before the view has read it."""
        tombstone, where = part.tombstone_offset, served.partition
        if tombstone is None or self._views.partition(where) is None:
            return False
        return self._views.horizon_of(where) <= tombstone < served.log.log_start_offset

    def _is_rewriting(self, where: TopicPartition) -> bool:
        """Return whether a requested clean is under way: it publishes one group after another."""
        is_requested = self._pool.operator.is_erasing(where)
        return is_requested and is_busy(self._pool.in_progress.state(where))

    async def _have_changed(self, served: Partition, found: tuple[FoundFile, ...]) -> bool:
        def look() -> bool:
            return any(
                file_state(self._env, file.state.path) != file.state
                for file in found
                if file.state.size_bytes  # the active segment changes all the time
            )

        return await self._threads.run(served.log.directory, look)

    # Tombstone ----------------------------------------------------------------------------

    async def _append_tombstone(
        self, served: Partition, key: bytes, result: KeySearchResult
    ) -> int:
        """Append a tombstone that supersedes every value found, durably; return its offset."""
        now_ms, config = self._env.wall_ms(), served.log.config
        record = _tombstone(key, config, result, now_ms)
        if config.message_timestamp_type == LOG_APPEND_TIME_TYPE:
            now_ms = record.timestamp  # the log gives it this time; the clock may be set back
        return await self.append(served, record, now_ms)

    @staticmethod
    async def append(served: Partition, record: Record, now_ms: int) -> int:
        """Append a record durably, outside of any transaction; return its offset."""
        batch = build_batch([record])
        header = read_header(batch)
        append = partial(served.append, memoryview(batch), header, now_ms)
        info = await served.wait_change(append)
        served.record_keys(memoryview(batch), header, info, None)
        await served.flush()
        return info.first_offset

    # Those who own the files --------------------------------------------------------------

    async def _advance(
        self, served: Partition, part: PartitionErasure, progress: PartitionProgress
    ) -> None:
        """Ask the owners of the files to remove what they have, and note what they wait for."""
        where, log, end = served.partition, served.log, part.end_offset
        assert end is not None
        assert part.tombstone_offset is not None
        view_end = max(end, part.tombstone_offset + 1)
        if not log.config.compacts:
            policy = ",".join(log.config.cleanup_policy) or "empty"
            reason = f"cleanup.policy is {policy}: only retention removes records"
            progress.wait(reason, obstacle=Obstacle())
        elif not self._settings().enabled:
            reason = "the cleaner is switched off (cleaner.enabled)"
            progress.wait(reason, obstacle=Obstacle())
        elif self._views.partition(where) is not None and self._views.horizon_of(where) < view_end:
            self._compact_view(where, progress)
        else:
            if log.segment_facts()[-1].base_offset < end:
                served.roll(self._env.wall_ms())
            progress.found = await self._with_states(served, progress.found)
            if progress.is_ended:
                return
            segments = _segments_of(log.directory, progress.found)
            start = log.log_start_offset  # cleans leave segments below it to retention
            below = {s.base_offset for s in log.segment_facts() if s.next_base_offset <= start}
            victims = tuple(segment for segment in segments if segment not in below)
            if victims:
                self._clean(where, end, victims, progress)
            else:
                self._view_scheduler.move_readers(where)
                self._wait_for_others(log.directory, progress, log.config.file_delete_delay_ms)

    async def _with_states(
        self, served: Partition, found: tuple[FoundFile, ...]
    ) -> tuple[FoundFile, ...]:
        """Add the state of the segment that was active during the search: it is closed now."""

        def look(file: FoundFile) -> FoundFile:
            state = None if file.state.size_bytes else file_state(self._env, file.state.path)
            return file if state is None else replace(file, state=state)

        if all(file.state.size_bytes for file in found):
            return found
        return await self._threads.run(served.log.directory, lambda: tuple(map(look, found)))

    def _compact_view(self, where: TopicPartition, progress: PartitionProgress) -> None:
        status, now = self._view_scheduler.status_of(where), asyncio.get_running_loop().time()
        is_running = status.state in ("waiting", "running")
        if not is_running and now - progress.view_begun_at >= VIEW_SECONDS:
            progress.view_begun_at, is_running = now, True
            self._view_scheduler.begin(where)
        if is_running:
            progress.wait("the compacted view is being compacted")
            return
        why = status.error or f"it is compacted up to offset {status.horizon}"
        progress.wait(f"the compacted view still has the key: {why}", obstacle=Obstacle())

    def _clean(
        self, where: TopicPartition, end: int, victims: tuple[int, ...], progress: PartitionProgress
    ) -> None:
        """Request a clean of these segments, unless something stands in the way."""
        leases = [
            lease.compaction_id
            for lease in self._leases.table.alive()
            if lease.purpose is Purpose.COMPACT
            and any(part.where == where and part.is_alive for part in lease.parts.values())
        ]
        if leases:
            reason = f"remote compaction {leases[0]} has leased the partition"
            progress.wait(reason, obstacle=Obstacle())
            return
        is_requested = self._pool.operator.is_erasing(where)
        if not is_requested:
            if progress.cleans >= CLEANS_MAX:
                progress.found = ()  # search again
                raise StorageError(f"{CLEANS_MAX} cleans left values of the key in its segments")
            progress.request = self._pool.operator.request_erasure(
                where, end, victims, progress.requested_by
            )
            is_requested = progress.request is not None
            progress.cleans += is_requested
        explanation = self._pool.explain(where)
        reason = sentences(explanation)[0]
        if not is_requested:
            reason = obstacle_text(explanation) or reason
        else:
            count = "a segment has" if len(victims) == 1 else f"{len(victims)} segments have"
            reason = f"{count} values of the key. {reason}"
        progress.wait(reason, obstacle=_obstacle_of(explanation, is_requested=is_requested))

    def _wait_for_others(self, directory: str, progress: PartitionProgress, delay_ms: int) -> None:
        """Wait for files that no clean of the log removes."""
        names = [file.state.path for file in progress.found]
        text = ", ".join(names[:NAMED_FILES]) + (", ..." if len(names) > NAMED_FILES else "")
        if any(name.startswith(f"{leases_path(directory)}/") for name in names):
            progress.wait(f"a remote compaction has leased {text}", obstacle=Obstacle())
            return
        until_ms = self._env.wall_ms() + delay_ms
        progress.wait(f"it waits until {text} is deleted", obstacle=Obstacle(until_ms))

    def work_of(
        self,
        where: TopicPartition,
        part: PartitionErasure,
        deadline_ms: int,
        progress: PartitionProgress,
    ) -> PartitionWork:
        """Return what is left to do for a part."""
        served = self._topics.partition(where)
        log_bytes = 0 if served is None else served.log.segments.size_bytes
        rewritten_bytes = sum(file.state.size_bytes for file in progress.found)
        read_bytes, write_bytes = work_left(
            log_bytes,
            rewritten_bytes,
            is_searched=part.end_offset is not None,
            share_searched=progress.share if progress.is_searching or progress.paused else 0.0,
        )
        read_rate, write_rate = self._pool.rates_of(where)
        return PartitionWork(
            deadline_ms, read_bytes, write_bytes, read_rate, write_rate, progress.obstacle
        )


def _search_of(served: Partition, key: bytes, end: int, copies: frozenset[str]) -> KeySearch:
    """Return a search of the partition below `end`, and of copies of its replica."""
    log, config = served.log, served.log.config
    active = f"{log.directory}/{_log_name(log.segment_facts()[-1].base_offset)}"
    return KeySearch(
        key,
        (
            SearchedFolder(log.directory, end, active),
            *(SearchedFolder(path, filenames.LARGEST_OFFSET) for path in sorted(copies)),
        ),
        config.varve_decompressed_batch_bytes,
        config.varve_view_version_header if config.has_view else "",
        SLICE_SECONDS,
    )


def _note_unreadable(served: Partition, file: UnreadableFile) -> str:
    """Say why a file cannot be searched and what to do; record damage of the log."""
    path, position, (topic, number) = file.state.path, file.position, served.partition
    text = f"{path} cannot be searched from byte {position} on: {file.reason}"
    if path.endswith(filenames.DAMAGED_BYTES):
        return f"{text}. Delete the file when you no longer need it"
    if path.startswith(f"{served.log.directory}/{VIEW_FOLDER}/"):
        return f"{text}. `varve view compact {topic} {number} --from-scratch` makes the view again"
    damage = served.log.damage.mark(path, position, file.reason)
    if damage is None:
        return text
    if damage.is_served:
        text += ". If the batch is too large, raise varve.decompressed.batch.bytes of the topic"
    first, last = damage.first_offset, damage.next_offset - 1
    return (
        f"{text}. `varve log skip {topic} {number} --offset {first}` removes offsets {first} to "
        f"{last} from the log, and keeps their bytes in a file, which has to be deleted as well"
    )


def _obstacle_of(explanation: Explanation, *, is_requested: bool) -> Obstacle | None:
    """Return why a partition is not cleaned as far as an erasure needs it; None if it is."""
    verdict = explanation.verdict
    if is_requested and (is_busy(explanation.state) or (verdict and verdict.to_clean)):
        return None
    if not is_requested and verdict is not None and verdict.section is not None:
        return Obstacle(verdict.section.ripe_ms)
    next_attempt = explanation.next_attempt
    return Obstacle(None if next_attempt is None else next_attempt.at_ms)


def _tombstone(key: bytes, config: TopicConfig, result: KeySearchResult, now_ms: int) -> Record:
    """Return a tombstone with a rank above every record of the key, for a compacted view."""
    strategy = config.varve_view_strategy if config.has_view else "offset"
    timestamp = max(now_ms, result.latest_ms) if strategy == "timestamp" else now_ms
    headers: tuple[tuple[str, bytes], ...] = ()
    if strategy == "header" and result.version is not None:
        version = result.version.to_bytes(VERSION_BYTES, "big", signed=True)
        headers = ((config.varve_view_version_header, version),)
    return Record(0, timestamp, key, None, headers)


def _is_outranked(part: PartitionErasure, config: TopicConfig, result: KeySearchResult) -> bool:
    """Return whether a value ranks above the first tombstone of a part in a compacted view."""
    assert part.end_offset is not None
    assert part.tombstone_offset is not None
    if not config.has_view or part.tombstone_offset >= part.end_offset:
        return False
    offsets = {"timestamp": result.latest_offset, "header": result.version_offset}
    largest = offsets.get(config.varve_view_strategy, -1)
    return largest not in (-1, part.tombstone_offset)


def _segments_of(directory: str, found: tuple[FoundFile, ...]) -> tuple[int, ...]:
    """Return the base offsets of the files that are segments of the log."""
    bases = []
    for file in found:
        folder, _, name = file.state.path.rpartition("/")
        parsed = filenames.parse_file_name(name) if folder == directory else None
        if parsed is not None and parsed.kind == filenames.LOG and not parsed.temporary:
            bases.append(parsed.base_offset)
    return tuple(sorted(bases))


def _log_name(base_offset: int) -> str:
    return filenames.file_name(base_offset, filenames.LOG)
