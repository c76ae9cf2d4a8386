"""All erasures: requests, cancellation, and the task that carries them out.

Rules
- The task looks at the open parts that are due, and then searches the files of one for a slice. A
  search may take hours: after each slice the task looks at all parts again, because earlier
  deadlines may be due or new. A part that has to wait says for what (partition_eraser.py).
- The parts are searched in the order of their deadlines. The principals that requested them take
  turns: so nobody keeps the others waiting with more requests, with earlier deadlines, or with
  files that take long. A search that is paused is the next one of its principal, so there is at
  most one of each: its position may have megabytes. After a restart it begins again.
- A search that finds nothing is the receipt, which partition_eraser.py makes and store.py stores.
- A request is durable before it is answered. After a restart, the open parts go on.
- An erasure belongs to the topic with this id: if that topic is deleted, the erasure is void, even
  if there is a new topic with the same name.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from broker.erasure.forecast import Forecast, Obstacle, PartitionWork, Risk, forecast
from broker.erasure.model import (
    Erasure,
    ErasureState,
    PartitionErasure,
    PartitionReceipt,
    digest_of,
)
from broker.erasure.partition_eraser import LOOK_SECONDS, PartitionEraser, PartitionProgress
from broker.erasure.store import ErasureStore
from broker.event_loop.loop_turns import Turns
from broker.security.audit import log_change
from broker.security.principal import Principal
from broker.topics.topics import Topic, TopicError, Topics
from broker.views.compaction import ViewError
from cleaner.host import NotServedError
from cleaner.job import CleanAbortedError
from cleaner.workers.dedicated_worker import JobFailedError
from storage.env import Env
from storage.errors import StorageError
from storage.model import TopicPartition

OPEN_MAX: Final = 1000  # erasures
OPEN_PARTS_MAX: Final = 10_000  # each receipt writes the file, with 200 bytes for each part
KEY_BYTES_MAX: Final = 16 << 10
OPEN_KEYS_BYTES_MAX: Final = 1 << 20  # of all open erasures; the file has twice as much
IDLE_SECONDS: Final = 60.0
PAUSE_SECONDS_MIN: Final = 0.01  # a clock may be a fraction of a nanosecond short of `next_at`
FORECAST_SECONDS: Final = 5.0
FAILED_SECONDS: Final = 10.0  # after a part failed; doubled each time
FAILED_SECONDS_MAX: Final = 600.0

# Errors of a step, whose reasons people see.
PART_ERRORS: Final = (
    StorageError,
    OSError,
    JobFailedError,
    CleanAbortedError,
    NotServedError,
    TopicError,
    ViewError,
)

logger = structlog.get_logger("broker.erasure")

PartKey = tuple[str, int]  # (erasure id, partition)
_Part = tuple[Erasure, PartitionErasure]
Step = Callable[[Erasure, PartitionErasure, PartitionProgress], Awaitable[bool]]


class ErasureRefusedError(Exception):
    """The request is refused."""


class Erasures:
    """The erasures of a broker."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        store: ErasureStore,
        eraser: PartitionEraser,
        *,
        secret: Callable[[], bytes],
        measured: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """`secret` returns the key of the digests."""
        self._env = env
        self._topics = topics
        self._store = store
        self.eraser = eraser
        self._secret = secret
        self._measured = measured
        self._progress: dict[PartKey, PartitionProgress] = {}
        self._forecasts: dict[PartKey, Forecast] = {}
        # Principals whose parts were searched, the last one at the end.
        self._served: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._has_progress = asyncio.Event()  # since the last forecast
        self._tasks: list[asyncio.Task[None]] = []
        self.completed = 0  # since the start of the broker
        self.at_risk = dict.fromkeys(Risk, 0)  # open parts that are expected to be late

    # Start and stop -----------------------------------------------------------------------

    async def load(self) -> None:
        """Read the stored erasures. Call it before any request, which rewrites the whole file."""
        await self._store.load()

    def start(self) -> None:
        """Start the tasks that carry out the open erasures and forecast their ends."""
        for work, name in ((self._run(), "erasures"), (self._watch(), "erasure-forecasts")):
            self._tasks.append(asyncio.create_task(self._measure(work), name=name))

    async def _measure(self, work: Awaitable[None]) -> None:
        await self._measured(work)

    async def stop(self) -> None:
        """Stop; open erasures go on after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Requests -----------------------------------------------------------------------------

    async def request(
        self,
        topic: Topic,
        key: bytes,
        partitions: Iterable[int],
        *,
        within_ms: int,
        requested_by: Principal,
        has_share: bool = False,
    ) -> Erasure:
        """Store a request. Raises ErasureRefusedError, OSError.

        With `has_share`, the principal may have no more open erasures than are left for others.
        """
        if len(key) > KEY_BYTES_MAX:
            raise ErasureRefusedError(f"the key has more than {KEY_BYTES_MAX:,} bytes")
        now_ms = self._env.wall_ms()
        erasure = Erasure(
            erasure_id=self._env.random_bytes(8).hex(),
            topic=topic.name,
            topic_id=topic.topic_id,
            digest=self.digest_of(key),
            key=key,
            requested_by=str(requested_by),
            requested_ms=now_ms,
            deadline_ms=now_ms + within_ms,
            parts=tuple(map(PartitionErasure, sorted(set(partitions)))),
        )
        await self._store.add(erasure, partial(_check_room, erasure, has_share=has_share))
        logger.info("erasure requested", **_fields(erasure), deadline_ms=erasure.deadline_ms)
        self._wake.set()
        return erasure

    async def cancel(self, erasure_id: str, reason: str) -> Erasure:
        """Cancel an open erasure; its tombstone stays. Raises KeyError, OSError."""
        erasure = await self._end(erasure_id, ErasureState.CANCELLED, reason)
        self._wake.set()
        return erasure

    @property
    def open_count(self) -> int:
        """Return the number of open erasures."""
        return sum(erasure.is_open for erasure in self._store.all())

    def digest_of(self, key: bytes) -> str:
        """Return the digest by which a key is known."""
        return digest_of(key, self._secret())

    @property
    def unknown_because(self) -> str | None:
        """Return why no erasure is known and none may be requested; None if they are known."""
        return self._store.unknown_because

    def all(self) -> list[Erasure]:
        """Return every erasure, oldest first."""
        return self._store.all()

    def get(self, erasure_id: str) -> Erasure | None:
        """Return an erasure by its id."""
        return self._store.get(erasure_id)

    def end_in(self, partition: TopicPartition) -> int:
        """Return the end of the offsets that open erasures need in a partition; 0 without."""
        return max(
            (
                max(part.end_offset, (part.tombstone_offset or 0) + 1)
                for erasure in self._store.all()
                if erasure.is_open and erasure.topic == partition.topic
                for part in erasure.parts
                if part.partition == partition.partition
                and not part.is_done
                and part.end_offset is not None
            ),
            default=0,
        )

    def progress_of(self, erasure: Erasure, part: PartitionErasure) -> PartitionProgress | None:
        """Return what an open part waits for; None before it was looked at."""
        return self._progress.get((erasure.erasure_id, part.partition))

    def forecast_of(self, erasure: Erasure, part: PartitionErasure) -> Forecast | None:
        """Return when an open part is expected to be done; None before the first forecast."""
        return self._forecasts.get((erasure.erasure_id, part.partition))

    # The task -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            pause = IDLE_SECONDS
            try:
                pause = await self._round()
            except Exception:
                logger.exception("erasures failed")  # supervised: the next round follows
            await _wait(self._wake, pause)

    async def _watch(self) -> None:
        """Forecast the ends also while a search takes hours."""
        while True:
            self._has_progress.clear()
            try:
                await self._forecast()
            except Exception:
                logger.exception("erasures not forecast")  # supervised: the next one follows
            await _wait(self._has_progress, FORECAST_SECONDS)

    async def _round(self) -> float:
        """Carry out what is due; return the seconds until there is more."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self.eraser.round():
            while unsearched := await self._look_at_parts():
                # At least as long as the looks took: thousands of parts may wait.
                await self._search_first(unsearched, max(LOOK_SECONDS, clock() - began))
                began = clock()
        self._has_progress.set()
        now = clock()
        seconds = min((p.next_at - now for p in self._progress.values()), default=IDLE_SECONDS)
        return max(PAUSE_SECONDS_MIN, seconds)

    async def _look_at_parts(self) -> list[_Part]:
        """Look at the parts that are due; return those to search, in their order."""
        self._wake.clear()
        turns, unsearched = Turns(), list[_Part]()
        for erasure in self._still_open():
            if self._is_deleted(erasure):
                reason = f"topic {erasure.topic} was deleted, with all its records"
                await self._end(erasure.erasure_id, ErasureState.VOID, reason)
                continue
            for part in erasure.parts:
                name = erasure.erasure_id
                if not part.is_done and await self._attempt(name, part, self._look_at):
                    unsearched.append((erasure, part))
                await turns.take()
        return await self._in_turns(unsearched, turns)

    async def _in_turns(self, parts: Iterable[_Part], turns: Turns) -> list[_Part]:
        """Return parts, which are in the order of their deadlines, in turns by principal."""
        of_principals: dict[str, deque[_Part]] = {}
        async for erasure, part in turns.over(parts):
            own = of_principals.setdefault(erasure.requested_by, deque())
            is_paused = self._progress_of((erasure.erasure_id, part.partition)).paused is not None
            (own.appendleft if is_paused else own.append)((erasure, part))
        served = {principal: number for number, principal in enumerate(self._served, 1)}
        order = sorted(of_principals, key=lambda principal: served.get(principal, 0))
        rounds = itertools.zip_longest(*(of_principals[principal] for principal in order))
        ordered = list[_Part]()
        async for one_round in turns.over(rounds):
            ordered += (each for each in one_round if each is not None)
        return ordered

    def _note_served(self, principal: str) -> None:
        self._served.pop(principal, None)
        self._served[principal] = None
        if len(self._served) > OPEN_MAX:  # the others have waited for longer
            del self._served[next(iter(self._served))]

    async def _search_first(self, unsearched: Iterable[_Part], seconds: float) -> None:
        """Begin searches of the first parts for some seconds, or until there is a new request."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        for erasure, part in unsearched:
            self._note_served(erasure.requested_by)
            await self._attempt(erasure.erasure_id, part, self._search)
            if loop.time() >= ends_at or self._wake.is_set():
                return

    def _is_deleted(self, erasure: Erasure) -> bool:
        topic = self._topics.get(erasure.topic)
        return topic is None or topic.topic_id != erasure.topic_id

    async def _forecast(self) -> None:
        """Say when the open parts are expected to be done, and warn of those that will be late."""
        turns, parts = Turns(), list[_Part]()
        for erasure in self._still_open():
            parts += [(erasure, part) for part in erasure.parts if not part.is_done]
            await turns.take()
        parts = await self._in_turns(parts, turns)
        forecasts, at_risk = dict[PartKey, Forecast](), dict.fromkeys(Risk, 0)
        expected = forecast(itertools.starmap(self._work_of, parts), self._env.wall_ms())
        for (erasure, part), each in zip(parts, expected, strict=True):
            key = (erasure.erasure_id, part.partition)
            forecasts[key] = each
            if each.risk is not None:
                at_risk[each.risk] += 1
                before = self._forecasts.get(key)
                if before is None or before.risk is None:
                    _log_risk(erasure, each.risk, self._progress_of(key).reason)
            await turns.take()
        self._forecasts, self.at_risk = forecasts, at_risk

    def _work_of(self, erasure: Erasure, part: PartitionErasure) -> PartitionWork:
        progress = self._progress_of((erasure.erasure_id, part.partition))
        where = TopicPartition(erasure.topic, part.partition)
        return self.eraser.work_of(where, part, erasure.deadline_ms, progress)

    def _progress_of(self, key: PartKey) -> PartitionProgress:
        return self._progress.get(key) or PartitionProgress()

    def _still_open(self) -> list[Erasure]:
        """Return the open erasures in the order of their deadlines."""
        still_open = (erasure for erasure in self._store.all() if erasure.is_open)
        return sorted(still_open, key=lambda erasure: erasure.deadline_ms)

    async def _attempt(self, erasure_id: str, part: PartitionErasure, step: Step) -> bool:
        """Carry out a step of a part, if it is due, and return its result; note a failure."""
        erasure = self._store.get(erasure_id)
        if erasure is None or not erasure.is_open or self._is_deleted(erasure):
            return False  # since an earlier turn
        progress = self._progress.setdefault(
            (erasure_id, part.partition), PartitionProgress(erasure.requested_by)
        )
        if progress.next_at > asyncio.get_running_loop().time():
            return False
        try:
            return await step(erasure, part, progress)
        except PART_ERRORS as error:
            self._failed(progress, str(error) or "the worker was stopped")
        except Exception as error:
            where = f"{erasure.topic}-{part.partition}"
            logger.exception("erasure failed", erasure=erasure_id, partition=where)
            self._failed(progress, repr(error))
        return False

    async def _look_at(
        self, erasure: Erasure, part: PartitionErasure, progress: PartitionProgress
    ) -> bool:
        """Return whether the files of a part have to be searched."""
        where = TopicPartition(erasure.topic, part.partition)
        is_unsearched = await self.eraser.look_at(where, part, progress)
        if not is_unsearched:
            progress.failures = 0
        return is_unsearched

    async def _search(
        self, erasure: Erasure, part: PartitionErasure, progress: PartitionProgress
    ) -> bool:
        """Search the files of a part for a slice; return whether a step is due at once."""
        where = TopicPartition(erasure.topic, part.partition)
        assert erasure.key is not None
        changed = await self.eraser.search(where, erasure.key, part, progress)
        if progress.paused is None:
            progress.failures = 0
        if changed is part:
            return False
        await self._store_part(erasure.erasure_id, changed)
        # If a tombstone was written, the clean can be requested now.
        return not changed.is_done and await self.eraser.look_at(where, changed, progress)

    def _failed(self, progress: PartitionProgress, reason: str) -> None:
        seconds = min(FAILED_SECONDS * 2**progress.failures, FAILED_SECONDS_MAX)
        progress.failures += 1
        text = f"{reason}. The next attempt is in {seconds:.0f} s"
        progress.wait(text, seconds, Obstacle())

    async def _store_part(self, erasure_id: str, part: PartitionErasure) -> None:
        erasure = await self._store.change(
            erasure_id, lambda stored: stored.with_part(part, self._env.wall_ms())
        )
        if erasure.state in (ErasureState.CANCELLED, ErasureState.VOID):
            return  # it ended before this was stored
        if part.receipt is not None:
            self._progress.pop((erasure_id, part.partition), None)
            _log_receipt(erasure, part, part.receipt)
        if erasure.state is ErasureState.COMPLETE:
            self.completed += 1
            self._log_end(erasure)

    async def _end(self, erasure_id: str, state: ErasureState, reason: str) -> Erasure:
        was_open = self._store.get(erasure_id)
        erasure = await self._store.change(
            erasure_id, lambda stored: stored.ended(state, self._env.wall_ms(), reason)
        )
        for part in erasure.parts:
            progress = self._progress.pop((erasure_id, part.partition), None)
            if progress is not None:
                progress.is_ended = True
                self.eraser.forget(TopicPartition(erasure.topic, part.partition), progress)
        if was_open is not None and was_open.is_open:
            self._log_end(erasure)
        return erasure

    def _log_end(self, erasure: Erasure) -> None:
        """Write the end to the log, and to the audit log: nobody sent a request for it."""
        late_ms = max(0, (erasure.ended_ms or 0) - erasure.deadline_ms)
        logger.info("erasure ended", **_fields(erasure), reason=erasure.reason, late_ms=late_ms)
        details: dict[str, object] = {"resource": erasure.topic, "parameters": _fields(erasure)}
        log_change(BROKER, "", "erasure ended", "NONE", details)


BROKER: Final = Principal("varve", "Broker")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most this long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _check_room(new: Erasure, erasures: Iterable[Erasure], *, has_share: bool) -> None:
    """Raise ErasureRefusedError if too many erasures are open for a new one."""
    still_open = [erasure for erasure in erasures if erasure.is_open]
    owner = new.requested_by if has_share else None
    owned = [erasure for erasure in still_open if erasure.requested_by == owner]
    if (
        len(still_open) + len(owned) >= OPEN_MAX
        or _count_parts((*still_open, *owned, new)) > OPEN_PARTS_MAX
        or _key_bytes((*still_open, *owned, new)) > OPEN_KEYS_BYTES_MAX
    ):
        yours = f", {len(owned):,} of them requested by {owner}" if owned else ""
        raise ErasureRefusedError(
            f"{len(still_open):,} erasures of {_count_parts(still_open):,} partitions are open, "
            f"with {_key_bytes(still_open):,} bytes of keys{yours}: wait until some are complete, "
            "or use `varve pipeline erase` for many keys"
        )


def _count_parts(erasures: Iterable[Erasure]) -> int:
    return sum(len(erasure.parts) for erasure in erasures)


def _key_bytes(erasures: Iterable[Erasure]) -> int:
    return sum(len(erasure.key or b"") for erasure in erasures)


def _fields(erasure: Erasure) -> dict[str, object]:
    return {
        "erasure": erasure.erasure_id,
        "topic": erasure.topic,
        "key_digest": erasure.digest,
        "state": erasure.state.value,
    }


def _log_risk(erasure: Erasure, risk: Risk, reason: str) -> None:
    logger.warning("erasure at risk", **_fields(erasure), risk=risk.value, reason=reason)


def _log_receipt(erasure: Erasure, part: PartitionErasure, receipt: PartitionReceipt) -> None:
    logger.info(
        "key erased",
        erasure=erasure.erasure_id,
        partition=f"{erasure.topic}-{part.partition}",
        key_digest=erasure.digest,
        end_offset=part.end_offset,
        tombstone_offset=part.tombstone_offset,
        files=receipt.files,
        tombstones=receipt.tombstones,
    )
