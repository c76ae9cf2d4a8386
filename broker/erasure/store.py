"""The erasures on disk: `varve.erasures` in every data directory that is online.

Rules
- The file is sealed and replaced as a whole, and only the user of the broker can read it: it has
  the keys of open erasures. `add` and `change` return when the file is durable. A file that is only
  appended to would keep the keys of erasures that have ended.
- Changes that come during a write wait for its end, and the next write has all of them. So many
  requests at a time cost two writes. The changes are applied to a copy, which becomes the state
  after its write, so a write that fails changes nothing. A write encodes only what has changed.
- The copy with the highest revision counts. Copies that lag behind, because their directory was
  offline or its disk did not answer, are replaced at the start: they may have keys of erasures
  that have ended.
- All copies are written at once. A disk that answers HANG_SECONDS after another is left behind; the
  changes leave its directory out until it has finished that write.
- If there are copies and none can be read, or one is of a newer version, the erasures are unknown
  (`unknown_because`). Then nothing is written: the keys of open erasures are nowhere else.
- Erasures that ended stay listed, the last ENDED_MAX of them, if they have no more than
  ENDED_PARTS_MAX parts: each change writes all of them. Users share this room equally.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Final, TypeAlias

import structlog

from broker.erasure.model import Erasure
from broker.event_loop.directory_threads import HANG_SECONDS, DirectoryThreads
from broker.event_loop.loop_turns import Turns, run_to_end
from storage.env import Env, write_file_atomically
from storage.errors import NewerFormatError, StorageError
from storage.format.sealed_json import seal_body, to_json, unseal

FILE_NAME: Final = "varve.erasures"
MAGIC: Final = "varve-erasures"
VERSION: Final = 1
ENDED_MAX: Final = 1000  # erasures
ENDED_PARTS_MAX: Final = 20_000  # 200 bytes each in the file

logger = structlog.get_logger("broker.erasure")


# A function from all erasures by id to the erasure that is new or has changed.
_Change: TypeAlias = Callable[[Mapping[str, Erasure]], Erasure]


@dataclass(frozen=True, slots=True)
class _WaitingChange:
    """A change that waits for the next write."""

    change: _Change
    stored: asyncio.Future[Erasure]


class ErasureStore:
    """All erasures by id, oldest first."""

    def __init__(
        self,
        env: Env,
        directories: Callable[[], Iterable[str]],
        threads: DirectoryThreads,
    ) -> None:
        """`directories` returns the data directories that are online."""
        self._env = env
        self._directories = directories
        self._threads = threads
        self._unfinished: set[str] = set()  # directories with a write that has not ended
        self._erasures: dict[str, Erasure] = {}  # those on the disk
        self._encoded: dict[str, _Encoded] = {}  # by erasure, of the last write
        self._revision = 0
        self._waiting: list[_WaitingChange] = []
        self._writer: asyncio.Task[None] | None = None  # while changes wait or are written
        self.unknown_because: str | None = None  # set by `load`

    async def load(self) -> None:
        """Read the newest copy, and replace older ones. Logs files that cannot be read."""
        directories = tuple(self._directories())
        copies = await asyncio.to_thread(
            lambda: [_read(self._env, directory) for directory in directories]
        )
        newest = max(copies, key=lambda copy: copy.revision, default=_Copy())
        has_none = not newest.revision
        unread = [copy for copy in copies if copy.is_newer or (copy.failure and has_none)]
        if unread:
            self.unknown_because = (
                "the open erasures are unknown, because their file cannot be read: "
                f"{unread[0].failure}. Restore the file, or remove it and request them again; then "
                "restart the broker"
            )
            return
        self._revision = newest.revision
        self._erasures = {erasure.erasure_id: erasure for erasure in newest.erasures}
        if any(copy.revision < self._revision for copy in copies):
            try:
                await self._write(self._erasures)
            except OSError as error:  # the next change writes them
                logger.warning("erasures not saved", reason=str(error))

    def all(self) -> list[Erasure]:
        """Return every erasure, oldest first."""
        return list(self._erasures.values())

    def get(self, erasure_id: str) -> Erasure | None:
        """Return an erasure by its id."""
        return self._erasures.get(erasure_id)

    async def add(
        self, erasure: Erasure, check: Callable[[Collection[Erasure]], None] = lambda _: None
    ) -> None:
        """Add an erasure durably. Raises OSError if it could not be stored.

        `check` gets all other erasures, also those that wait for the same write. What it raises is
        raised here.
        """

        def add(erasures: Mapping[str, Erasure]) -> Erasure:
            check(erasures.values())
            return erasure

        await self._apply(add)

    async def change(self, erasure_id: str, change: Callable[[Erasure], Erasure]) -> Erasure:
        """Change an open erasure durably, and return it; one that has ended stays as it is.

        Raises OSError if the change could not be stored, and KeyError if there is none.
        """

        def change_open(erasures: Mapping[str, Erasure]) -> Erasure:
            erasure = erasures[erasure_id]
            return change(erasure) if erasure.is_open else erasure

        return await self._apply(change_open)

    async def _apply(self, change: _Change) -> Erasure:
        """Make a change durable with the next write, even if the caller is cancelled."""
        assert self.unknown_because is None, "it would replace erasures that are unknown"
        waiting = _WaitingChange(change, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting(), name="erasure-store")
        return await run_to_end(waiting.stored)

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                changes, self._waiting = self._waiting, []
                await self._write_changes(changes)
        finally:
            self._writer = None

    async def _write_changes(self, changes: Sequence[_WaitingChange]) -> None:
        """Apply the changes in their order and write them; set the result of each."""
        turns, changed = Turns(), dict(self._erasures)
        applied = list[tuple[asyncio.Future[Erasure], Erasure]]()
        for each in changes:
            try:
                erasure = each.change(changed)
            except Exception as error:  # noqa: BLE001 - raised where the change was requested
                each.stored.set_exception(error)
                continue
            changed[erasure.erasure_id] = erasure
            applied.append((each.stored, erasure))
            await turns.take()
        try:
            if changed != self._erasures:
                changed = _without_oldest(changed)
                await self._write(changed)
                self._erasures = changed
        except Exception as error:  # noqa: BLE001 - likewise
            for stored, _ in applied:
                stored.set_exception(error)
            return
        for stored, erasure in applied:
            stored.set_result(erasure)

    async def _write(self, erasures: dict[str, Erasure]) -> None:
        """Write all copies; a directory that fails is logged, unless all do. Raises OSError."""
        self._revision += 1
        data = await asyncio.to_thread(self._encode, self._revision, tuple(erasures.values()))
        errors = await self._write_all(data)
        for directory, error in errors.items():
            if error is not None:
                logger.warning("erasures not saved", directory=directory, reason=str(error))
        if None not in errors.values():
            raise next(filter(None, errors.values()), OSError("no data directory answers"))

    def _encode(self, revision: int, erasures: Sequence[Erasure]) -> bytes:
        before = self._encoded
        self._encoded = {
            erasure.erasure_id: _encode(erasure, before.get(erasure.erasure_id))
            for erasure in erasures
        }
        rows = b",".join(encoded.row for encoded in self._encoded.values())
        return seal_body(MAGIC, VERSION, b'{"erasures":[%b],"revision":%d}' % (rows, revision))

    async def _write_all(self, data: bytes) -> dict[str, OSError | None]:
        """Return the error of each directory that answers, None if the file is durable there."""
        directories = [path for path in self._directories() if path not in self._unfinished]
        answering = [path for path in directories if not self._threads.hangs(path)]
        writes = {path: self._begin_write(path, data) for path in answering or directories}
        if writes:
            await asyncio.wait(writes.values(), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(writes.values(), timeout=HANG_SECONDS)
        return {path: write.result() for path, write in writes.items() if write.done()}

    def _begin_write(self, directory: str, data: bytes) -> asyncio.Task[OSError | None]:
        write = self._threads.sync(directory, partial(_write_file, self._env, directory, data))
        self._unfinished.add(directory)
        task = asyncio.create_task(write, name="erasure-file")
        task.add_done_callback(lambda _: self._unfinished.discard(directory))
        return task


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An erasure as JSON."""

    erasure: Erasure
    parts: tuple[bytes, ...]  # the JSON of each part
    row: bytes


def _encode(erasure: Erasure, before: _Encoded | None) -> _Encoded:
    """Return an erasure as JSON; `before` is what the last write had of it.

    It encodes one changed part at a time: Python's JSON encoder holds the interpreter, and thus
    the event loop, for 30 ms with 5,000 parts.
    """
    if before is not None and before.erasure is erasure:
        return before
    known = () if before is None else zip(before.erasure.parts, before.parts, strict=True)
    encoded = {id(part): text for part, text in known}  # `before` keeps these parts alive
    parts = tuple(encoded.get(id(part)) or to_json(part.to_json()) for part in erasure.parts)
    fields = to_json(erasure.to_json()).removesuffix(b"}")
    return _Encoded(erasure, parts, b'%b,"parts":[%b]}' % (fields, b",".join(parts)))


def _without_oldest(erasures: dict[str, Erasure]) -> dict[str, Erasure]:
    """Return the erasures without the oldest ones that ended, if those are too many.

    Each user has the same share: one with many erasures does not displace the receipts of others.
    """
    ended = [erasure for erasure in erasures.values() if not erasure.is_open]
    own_count, own_parts = Counter[str](), Counter[str]()  # of the newer ones, by user
    order = []
    for erasure in sorted(ended, key=_ended_ms, reverse=True):
        user = erasure.requested_by
        own_count[user] += 1
        own_parts[user] += len(erasure.parts)
        share = max(own_count[user] / ENDED_MAX, own_parts[user] / ENDED_PARTS_MAX)
        order.append((share, erasure))
    order.sort(key=itemgetter(0))
    kept, parts = dict(erasures), 0
    for count, (_, erasure) in enumerate(order):
        parts += len(erasure.parts)
        if count >= ENDED_MAX or parts > ENDED_PARTS_MAX:
            del kept[erasure.erasure_id]
    return kept


def _ended_ms(erasure: Erasure) -> int:
    return erasure.ended_ms or 0


def _write_file(env: Env, directory: str, data: bytes) -> OSError | None:
    try:
        write_file_atomically(env, f"{directory}/{FILE_NAME}", data, is_private=True)
    except OSError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class _Copy:
    """The file of one directory. Without one, or if it cannot be read, the revision is 0."""

    revision: int = 0
    erasures: tuple[Erasure, ...] = ()
    failure: str = ""  # why it cannot be read
    is_newer: bool = False  # than this broker


def _read(env: Env, directory: str) -> _Copy:
    path = f"{directory}/{FILE_NAME}"
    try:
        document = unseal(MAGIC, VERSION, env.read_file(path), path)
        rows = tuple(map(Erasure.from_json, document["erasures"]))
        return _Copy(int(document["revision"]), rows)
    except FileNotFoundError:
        return _Copy()
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        reason = str(error) or repr(error)
        logger.error("erasures not read", path=path, reason=reason)
        failure = reason if path in reason else f"{path}: {reason}"
        return _Copy(failure=failure, is_newer=isinstance(error, NewerFormatError))
