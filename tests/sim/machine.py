"""The whole broker in memory, and everything that touches a partition at once; see script.py.

What runs is `broker.app.Broker` with its pool, views, leases, timers and logs. Simulated are files
and clocks (`SimulatedEnv`), the processes of workers (`WorkerInProcess`: the engine itself runs),
and sockets: clients call what handlers call. A life of the broker ends in order, by a kill between
any two file operations or by a loss of power; the next one finds what is left on the disk.
"""

import asyncio
import errno
import functools
import random
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import structlog

import broker.app
import broker.turns
from broker.app import Broker
from broker.end_transaction import end_transaction
from broker.handlers.produce import _produce_one
from broker.offline.issue import Wanted
from broker.offline.model import OfflineError
from broker.partition import Partition
from broker.protocol.codec import RequestHeader
from broker.protocol.produce import ProducedPartition
from broker.topics import TopicError
from broker.view_making import ViewError
from broker.views import ViewCursor
from cleaner.engine import background
from cleaner.engine.clean import run_clean
from cleaner.engine.verify import verify_groups
from cleaner.handoff import MANIFEST_NAME, Purpose, RunManifest, encode_manifest
from cleaner.host import PublishOutcome
from cleaner.job import CleanedGroup, CleanJob
from cleaner.pool import dispatch
from cleaner.workers import solo
from cleaner.workers.channel import (
    FromWorker,
    Message,
    RunJob,
    VerifyJob,
    WorkerReady,
    decode,
    encode,
)
from cleaner.workers.throttle import SharedMemory, Slots
from cleaner.workers.worker import execute
from config.settings import Settings
from storage.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    read_header,
    walk_headers,
)
from storage.errors import DamagedSegmentError, LogDirectoryError, StorageError
from storage.model import TopicPartition
from tests.sim.interleaving import (
    CrashPoint,
    EndlessError,
    Fault,
    FiberExecutor,
    FiberLock,
    Fibers,
    KilledError,
    Pace,
    SimulatedEnv,
    SimulatedLoop,
)
from tests.sim.model import (
    READ_BYTES,
    Cleaned,
    Death,
    Gone,
    PartitionModel,
    RuleError,
    batches_of,
    committed,
)
from tests.sim.script import OFFSETS_GO_BACK, Operation, Script
from tests.support.broker_in_memory import broker_settings
from tests.support.cleaning import Recorder
from tests.support.history import Batch
from tests.support.memory_env import SimulatedCrash
from tests.support.swaps import put
from tests.support.virtual_loop import InlineExecutor

HOME = "/disk1"
PATIENCE_SECONDS = 120.0  # virtual, for what a script waits for
TURNS_MAX = 2_000  # of the loop while what is left of a life ends
SETTLE_SECONDS = 25.0  # virtual, at the end: timers, views and the cleaner go on by themselves
CLEANER = {
    "dedupe_buffer_bytes": 1 << 20,
    "read_buffer_bytes": 64 << 10,
    "backoff_ms": 1_000,
    "retry_backoff_ms": 1_000,
    "retry_backoff_max_ms": 4_000,
}
# Scarcity at these moments takes a directory offline all the same: half of a change is done.
NOT_WITHOUT = ("transaction index of", "swap in", "roll of", "access to")
BY_ITSELF = "its log was changed"  # why a job ended that nobody gave a reason for
OPERATION_ERRORS = (StorageError, TopicError, ViewError, OfflineError, OSError, KeyError)


class LifeEndedError(Exception):
    """This life of the broker is over; `how`: stop, kill or power."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class _NoServer:
    """In the place of the listener and of the HTTP server: nobody connects."""

    def __init__(self, *_: object, **__: object) -> None:
        self.guard: object = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        return host, port

    def open(self, *_: object) -> None:
        pass

    async def stop(self, *_: object) -> None:
        pass


class WorkerInProcess:
    """A cleaner worker (WorkerLink) whose process is a fiber."""

    def __init__(self, machine: "Machine", pace: Pace) -> None:
        self.pid = 1
        self._pace = pace
        self._machine = machine
        self._memory = SharedMemory()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._fiber: Any = None
        self._is_gone = False
        self._beats = 0
        self._say(WorkerReady(self.pid, 0.0))

    @property
    def slots(self) -> Slots:
        return self._memory.slots

    def _say(self, message: FromWorker) -> None:
        self._said.put_nowait(decode(encode(message)[4:]))

    def send(self, message: Message) -> None:
        order = decode(encode(message)[4:])
        assert isinstance(order, RunJob | VerifyJob)
        machine = self._machine
        work = functools.partial(
            execute,
            order,
            run_clean,
            machine.env,
            self.slots,
            send=self._say,
            nap=machine.fibers.nap,
            verifier=verify_groups,
        )
        self._fiber = machine.fibers.start(work, self._pace)

    def beats(self) -> int:
        """It never stands still for long enough to be taken for one that hangs."""
        self._beats += 1
        return self._beats

    async def receive(self) -> Message | None:
        return await self._said.get()

    def shutdown(self) -> None:
        self._end()

    def kill(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            if self._fiber is not None:
                self._fiber.kill()
            self._said.put_nowait(None)

    def abandon(self) -> None:
        self._end()

    async def reap(self) -> str:
        self._end()
        return "killed"

    def close(self) -> None:
        self._memory.close()

    def is_gone(self) -> bool:
        return self._is_gone

    def set_nice(self, nice: int) -> None:
        pass

    def short_of_core_seconds(self) -> float | None:
        return None


class Machine:
    """One run of a script. Raises RuleError, and has a readable trace of what came before."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.rng = random.Random(f"run {script.seed}")
        self.env = SimulatedEnv(script.seed)
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.models: dict[str, PartitionModel] = {}
        self.fibers: Fibers
        self.broker: Broker
        self.loop: SimulatedLoop
        self._settings = settings()
        self._at = 0  # the next operation
        self._lives = 0
        self._workers = 0  # of this life
        self._is_dead: asyncio.Event
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wrong: RuleError | None = None
        self._has_news = False  # something was published since the last check
        self._losses: tuple[str, ...] = ()
        self._how = "kill"  # what follows where a process ends by itself
        self._next_producer = 100
        self._open: dict[str, list[tuple[int, bool]]] = {}  # transactions to be ended, by topic
        self._is_over = False

    # Lives --------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry the script out. Raises RuleError."""
        with self._patched():
            while not self._is_over:
                self._live()
        if self._wrong is not None:
            raise self._wrong

    @contextmanager
    def _patched(self) -> Iterator[None]:
        processors = structlog.get_config()["processors"]
        saved = processors.copy()
        with ExitStack() as stack:
            stack.callback(lambda: processors.__setitem__(slice(None), saved))
            processors[:] = [self._heard]
            structlog.configure(processors=processors)
            for name in ("Listener", "HttpServer", "BrokerMetrics", "make_dispatcher"):
                stack.enter_context(mock.patch.object(broker.app, name, _NoServer))
            stack.enter_context(mock.patch.object(background, "ThreadPoolExecutor", InlineExecutor))
            stack.enter_context(mock.patch.object(broker.app, "gc", mock.Mock()))
            stack.enter_context(mock.patch.object(dispatch, "TOP_UP_SECONDS", 0.5))
            stack.enter_context(mock.patch.object(solo, "TOP_UP_SECONDS", 0.5))
            stack.enter_context(mock.patch.object(broker.turns, "perf_counter", float))
            yield

    def _heard(self, _logger: Any, _name: str, event: dict[str, Any]) -> Any:
        """A line of the broker's log."""
        text = str(event.pop("event"))
        self.seen[text] += 1
        if text in ("cleaned", "view compacted", "segments expired", "lease ended"):
            self._has_news = True
        if event.pop("exc_info", None) and not self._is_excused():
            self.note(traceback.format_exc())
            self._go_wrong(RuleError("no mistakes", f"{text} {event}"))
        self.note(f"    {text} " + " ".join(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.env._passed_ms / 1000:9.3f} {text}")

    def _go_wrong(self, error: RuleError) -> None:
        if self._wrong is None:
            self._wrong = error
            self.env._dead = True

    def _is_excused(self) -> bool:
        return self.env.is_dead or bool(self.env.happened)

    def _live(self) -> None:
        """One life of the broker."""
        self._lives += 1
        if self._lives > 60:
            raise RuleError("no mistakes", "the broker does not stay alive")
        self.loop = SimulatedLoop(self.rng.randrange(1 << 30), self.env)
        self.loop.set_exception_handler(self._unhandled)
        self.fibers = Fibers(self.loop, self.rng)
        self.loop.set_default_executor(
            FiberExecutor(self.fibers, self.script.thread_share, self.script.threads)
        )
        self.env.fibers = self.fibers
        self.env.calls = 0
        self._workers = 0
        self.env.happened = []
        how = "kill"
        asyncio.set_event_loop(self.loop)
        try:
            how = self.loop.run_until_complete(self._until_it_ends())
        finally:
            self._bury()
        if self._wrong is not None:
            self._is_over = True
            return
        if self._is_over and how == "stop":
            return
        self._start_over(how)

    async def _until_it_ends(self) -> str:
        self._is_dead = asyncio.Event()
        self.env.on_death = self._is_dead.set
        self._tasks = set()
        main = asyncio.ensure_future(self._script())
        dead = asyncio.ensure_future(self._is_dead.wait())
        await asyncio.wait([main, dead], return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if self._wrong is not None:
            return "kill"
        if not main.done() or self.env.is_dead:
            main.cancel()
            self.note(f"the process ends by itself ({self._how})")
            return self._how
        try:
            main.result()
        except LifeEndedError as ended:
            return ended.how
        except RuleError as error:
            self._wrong = error
            return "kill"
        return "stop"

    def _unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._is_excused() or isinstance(error, SimulatedCrash | KilledError | None):
            return
        lines = traceback.format_exception(error) if error is not None else []
        self.note(f"unhandled: {context} {''.join(lines)}")
        self._go_wrong(RuleError("no mistakes", f"{context.get('message')}: {error!r}"))

    def _bury(self) -> None:
        """Let everything end that belongs to a life that is over."""
        self.env.on_death = lambda: None
        self.loop.set_exception_handler(lambda _loop, _context: None)
        self._note_deaths()
        was_dead, self.env._dead = self.env._dead, True
        self.fibers.kill_all()
        for _ in range(TURNS_MAX):
            tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
            if not tasks and not self.fibers.alive:
                break
            for task in tasks:
                task.cancel()
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            self.fibers.kill_all()
        self.env._dead = was_dead
        self.env.fibers = None
        asyncio.set_event_loop(None)
        self.loop.close()

    def _note_deaths(self) -> None:
        for model in self.models.values():
            log, model.log = model.log, None
            if log is not None:
                model.death = Death(log.log_end_offset, log.recovery_point)
                model.log_start_max = max(model.log_start_max, log.log_start_offset)

    def _start_over(self, how: str) -> None:
        """What the next life finds."""
        if any(
            fault.number == errno.EIO and "sync" in fault.operation for fault in self.env.happened
        ):
            how = "power"  # what the device lost shows only then
        self.env.crash_at = self.env.crash_point = self.env.fault = None
        self.env = self.env.crash() if how == "power" else self.env.kill()
        self.seen[f"ended: {how}"] += 1
        self.note(f"--- {how}; life {self._lives + 1}")
        if how == "power":
            for model in self.models.values():
                model.lost_power = True
        losses, self._losses = self._losses, ()
        if how != "stop":
            self._lose_files(losses)

    def _lose_files(self, kinds: tuple[str, ...]) -> None:
        """Files beside the log's go, or rot."""
        for model in self.models.values():
            folder = f"{HOME}/{model.where}"
            if not self.env.is_dir(folder):
                continue
            if OFFSETS_GO_BACK in kinds:
                model.is_damaged |= self._turn_offsets_back(folder)
                continue
            for name in self.env.listdir(folder):
                if not name.endswith(kinds) or self.env.is_dir(f"{folder}/{name}"):
                    continue
                if self.rng.random() < 0.5:
                    self.env.unlink(f"{folder}/{name}")
                else:
                    file = self.env.open(f"{folder}/{name}", write=True)
                    file.truncate(file.size() // 2)
                self.note(f"lost: {folder}/{name}")
                model.files_lost = True
        self.env.settle()

    def _turn_offsets_back(self, folder: str) -> bool:
        """Damage the last batch of a closed segment in a way that its checksum does not show."""
        names = [name for name in self.env.listdir(folder) if name.endswith(".log")]
        for name in names[:-1]:
            headers = list(walk_headers(self.env.read_file(f"{folder}/{name}")))
            if len(headers) > 1:
                (_, first), *_, (position, _) = headers
                file = self.env.open(f"{folder}/{name}", write=True)
                file.pwrite(first.base_offset.to_bytes(8, "big"), position)
                self.note(f"damaged: {folder}/{name} at {position}")
                return True
        return False

    # The script ---------------------------------------------------------------------------

    async def _script(self) -> None:
        try:
            await self._follow()
        except (LifeEndedError, RuleError):
            raise
        except EndlessError:
            raise RuleError("no mistakes", "the broker calls the file system for ever") from None
        except Exception as error:
            if self._is_excused() and isinstance(error, OPERATION_ERRORS):
                raise LifeEndedError("kill") from error
            self.note(traceback.format_exc())
            raise RuleError("no mistakes", repr(error)) from error

    async def _follow(self) -> None:
        self.broker = Broker(self._settings, self.env, spawn=self._spawn)
        self.broker.manager._written.writing = FiberLock(self.fibers)  # type: ignore[assignment]
        self._watch_publications()
        await self.broker.start()
        await self._check_start()
        operations = self.script.operations
        while self._at < len(operations):
            operation = operations[self._at]
            self._at += 1
            self.note(f"{self._at - 1}: {operation}")
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._carry_out(operation)
            except TimeoutError:
                self.note("gave up waiting")
            except OPERATION_ERRORS as error:
                self.note(f"refused: {error!r:.200}")
            if operation.pause:
                await asyncio.sleep(operation.pause)
            self._check_health()
            if self._has_news:
                self._has_news = False
                self._check_all()
        await self._settle()
        self._is_over = True
        await self._stop()

    async def _settle(self) -> None:
        """Without further disturbance everything goes on by itself."""
        self.env.crash_point = self.env.fault = None
        for name in list(self.models):
            await self._end_transactions(name)
        await asyncio.sleep(SETTLE_SECONDS)
        self._check_health()
        self._check_all()

    async def _stop(self) -> None:
        for task in self._tasks:  # connections are closed first
            task.cancel()
        async with asyncio.timeout(PATIENCE_SECONDS * 5):
            await self.broker.stop()

    async def _spawn(self, _nice: int) -> WorkerInProcess:
        self._workers += 1  # the first one of each life is the pool's
        script = self.script
        return WorkerInProcess(self, script.worker if self._workers == 1 else script.other_worker)

    def _watch_publications(self) -> None:
        """Note which offsets became clean, and when."""
        publish = self.broker.cleaning.publish

        async def watched(
            job: CleanJob, groups: tuple[CleanedGroup, ...]
        ) -> tuple[PublishOutcome, ...]:
            model = self.models.get(job.partition.topic)
            log = self.broker.manager.logs.get(job.partition)
            if model is not None and log is not None and log.topic_id == model.topic_id:
                leased = any(job.run_id == run.run_id for run in self.broker.offline.runs())
                if not job.expired_only:
                    cleaned = Cleaned(job.now_ms, self.env.wall_ms(), leased)
                    model.published(job.log_start_offset, job.end_offset, cleaned)
                self.seen["published by a lease" if leased else "published"] += 1
            outcomes = await publish(job, groups)
            self._has_news = True
            return outcomes

        self.broker.cleaning.publish = watched  # type: ignore[method-assign]

    async def _carry_out(self, operation: Operation) -> None:
        self.seen[operation.kind] += 1
        name, values = operation.topic, operation.values
        match operation.kind:
            case "create":
                await self._create(name, values["config"])
            case "produce" | "delete key" | "big":
                await self._produce(name, values["records"], values["codec"])
            case "burst":
                for record in values["records"]:
                    await self._produce(name, [record], values["codec"])
                self._roll(name)
            case "transaction":
                self._transact(name, **values)
            case "roll":
                self._roll(name)
            case "clean":
                if values["rolls"]:
                    self._roll(name)
                self.broker.pool.run_now(TopicPartition(name, 0))
            case "view":
                await self._compact_view(name, **values)
            case "alter":
                await self._alter(name, values["changes"])
            case "delete records":
                self._delete_records(name, values["share"])
            case "lease":
                self._begin(functools.partial(self._lease, name, **values))
            case "replace topic":
                await self._replace(name, **values)
            case "wait":
                await asyncio.sleep(values["seconds"])
            case "check":
                self._check_all()
            case "end":
                await self._end(values["how"], values["loses"])
            case "end at" | "end in swap":
                self.env.crash_point = CrashPoint(*values["point"])
                self._how, self._losses = values["how"], values["loses"]
            case "fault":
                number, operations = values["errno"], values["operations"]
                self.env.fault = Fault(number, operations, values["countdown"])
            case other:
                raise AssertionError(other)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """In the background; what is refused is no mistake."""

        async def quietly() -> None:
            try:
                await work()
            except OPERATION_ERRORS as error:
                self.note(f"    refused: {error!r:.200}")

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Topics -------------------------------------------------------------------------------

    def _served(self, name: str) -> Partition | None:
        return self.broker.topics.partition(TopicPartition(name, 0))

    async def _create(self, name: str, config: dict[str, str]) -> None:
        known = self.models.get(name)
        if self.broker.topics.get(name) is not None or (known and not known.topic_id):
            return  # it is there, or is being made
        model = self.models[name] = PartitionModel(TopicPartition(name, 0), b"")
        topic = await self.broker.topics.create(name, 1, config)
        model.topic_id = topic.topic_id
        model.log = self.broker.manager.logs.get(model.where)
        self._note_config(name)

    def _note_config(self, name: str) -> None:
        topic = self.broker.topics.get(name)
        assert topic is not None
        now_ms = self.env.wall_ms()
        self.models[name].retention.append((now_ms, topic.config.delete_retention_ms))

    async def _alter(self, name: str, changes: dict[str, str]) -> None:
        topic = self.broker.topics.get(name)
        if topic is None:
            return
        retention = changes.get("delete.retention.ms")
        if retention is not None:  # in force some time from now on
            self.models[name].retention.append((self.env.wall_ms(), int(retention)))
        await self.broker.topics.alter(name, lambda dynamic: {**dynamic, **changes})

    async def _replace(self, name: str, *, waits: bool, config: dict[str, str]) -> None:
        model = self.models.get(name)
        if model is None or model.deleting or not model.topic_id:
            return  # another one is under way
        model.deleting = True
        work = functools.partial(self._delete_and_create, name, config)
        if waits:
            await work()
        else:
            self._begin(work)

    async def _delete_and_create(self, name: str, config: dict[str, str]) -> None:
        await self.broker.topics.delete(name)
        self.models.pop(name, None)
        self._open.pop(name, None)
        await self._create(name, config)

    def _delete_records(self, name: str, share: float) -> None:
        partition = self._served(name)
        if partition is None or not partition.log.config.deletes:
            return
        log = partition.log
        log.delete_records(
            log.log_start_offset + int((log.high_watermark - log.log_start_offset) * share)
        )

    def _roll(self, name: str) -> None:
        partition = self._served(name)
        if partition is None:
            return
        try:
            partition.log.roll(self.env.wall_ms())
        except LogDirectoryError as error:
            self.broker.fail_directory(error)

    # Clients ------------------------------------------------------------------------------

    async def _produce(
        self, name: str, pairs: list[tuple[bytes, bytes | None]], codec: int
    ) -> None:
        model = self.models.get(name)
        if model is None or model.deleting or not model.topic_id:
            return
        now_ms = self.env.wall_ms()
        records = [Record(at, now_ms, key, value) for at, (key, value) in enumerate(pairs)]
        data = build_batch(records, codec=codec)
        sent = Batch(read_header(data), tuple(records))
        model.pending.append(sent)
        services = self.broker._services
        header = RequestHeader(0, 9, 1, "simulation", 0)
        produced = _produce_one(services, header, -1, name, (0, memoryview(data)))
        if not isinstance(produced, ProducedPartition):
            produced = await produced
        if produced.error_code == 0:
            model.acknowledged(sent, produced.base_offset)
        else:
            self.note(f"    not produced: {produced.error_code} {produced.error_message}")

    def _transact(
        self,
        name: str,
        *,
        records: list[tuple[bytes, bytes | None]],
        codec: int,
        commits: bool,
        batches: int,
    ) -> None:
        """End what is open, then begin another transaction."""
        for producer_id, was_committed in self._open.pop(name, []):
            self._write_marker(name, producer_id, commits=was_committed)
        producer_id = self._next_producer = self._next_producer + 1
        now_ms, sequence = self.env.wall_ms(), 0
        self._open.setdefault(name, []).append((producer_id, commits))
        for _ in range(batches):
            placed = [Record(at, now_ms, key, value) for at, (key, value) in enumerate(records)]
            data = build_batch(
                placed,
                codec=codec,
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequence,
                attributes=TRANSACTIONAL,
            )
            sequence += len(placed)
            self._append(name, data, placed, None)

    def _write_marker(self, name: str, producer_id: int, *, commits: bool) -> None:
        kind = ControlType.COMMIT if commits else ControlType.ABORT
        record = marker_record(kind, 0, self.env.wall_ms())
        data = build_batch(
            [record],
            producer_id=producer_id,
            producer_epoch=0,
            attributes=TRANSACTIONAL | CONTROL,
        )
        self._append(name, data, [record], kind)

    def _append(
        self, name: str, data: bytearray, records: list[Record], marker: ControlType | None
    ) -> None:
        """As the coordinator of a cluster that this log came from."""
        model, partition = self.models.get(name), self._served(name)
        if model is None or partition is None or model.deleting:
            return
        sent = Batch(read_header(data), tuple(records), marker)
        model.pending.append(sent)
        try:
            info = partition.log.append(
                data, sent.header, now_ms=self.env.wall_ms(), in_transaction=marker is None
            )
        except LogDirectoryError as error:
            self.broker.fail_directory(error)
            raise
        model.acknowledged(sent, info.first_offset)

    async def _end_transactions(self, name: str) -> None:
        """Abort what nobody else will end, as an operator does."""
        self._open.pop(name, None)
        model, partition = self.models[name], self._served(name)
        if partition is None or model.is_damaged:
            return
        while (pending := partition.log.open_transaction()) is not None:
            now_ms = self.env.wall_ms()
            record = marker_record(ControlType.ABORT, 0, now_ms)
            offset = await end_transaction(partition, pending[0], now_ms)
            batch = batches_of(partition.log.read(offset, 1, end_offset=offset + 1))[0]
            model.history.add(
                Batch(batch.header, (record._replace(offset=offset),), ControlType.ABORT)
            )

    # Views and leases ---------------------------------------------------------------------

    async def _compact_view(self, name: str, *, waits: bool, from_scratch: bool) -> None:
        partition = self._served(name)
        if partition is None or not partition.log.config.has_view:
            return
        if from_scratch and not partition.log.config.compacts:
            from_scratch = False  # what expired would be lost, as the operator is told
        where = TopicPartition(name, 0)
        work = functools.partial(self.broker.view_runs.compact, where, from_scratch=from_scratch)
        if waits:
            await work()
        else:
            self._begin(work)

    async def _lease(self, name: str, *, seconds: float, rolls: bool, ttl: int) -> None:
        """Somebody compacts outside of the broker, and hands the files back."""
        wanted = Wanted(name, None, Purpose.COMPACT, rolls, ttl)
        plan = await self.broker.offline.open(wanted)
        for part in plan.partitions:
            folder = part.job.directory.rpartition("/")[0]
            out, recorder = f"{folder}/out/attempt", Recorder()
            self.env.mkdir(out)
            job = replace(part.job, output_directory=out)
            call = functools.partial(run_clean, self.env, job, recorder)
            fiber = self.fibers.start(call, self.script.other_worker)
            report = await asyncio.wrap_future(fiber.future)
            manifest = RunManifest(
                run_id=plan.run_id,
                partition=job.partition,
                topic_id=part.topic_id,
                generation=job.generation,
                end_offset=job.end_offset,
                folders=("attempt",) * len(recorder.groups),
                groups=tuple(recorder.groups),
                report=report,
                engine="simulation",
            )
            await asyncio.sleep(seconds)
            put(self.env, f"{folder}/{MANIFEST_NAME}", encode_manifest(manifest))
            self.env.sync_dir(folder)
        _, results, _ = await self.broker.offline.adopt(plan.run_id, None)
        self.note(f"    adopted: {[(result.outcome.value, result.reason) for result in results]}")
        self.seen.update(f"adoption: {result.outcome.value}" for result in results)

    # Ends ---------------------------------------------------------------------------------

    async def _end(self, how: str, losses: tuple[str, ...]) -> None:
        self._losses = losses
        if how == "stop":
            await self._stop()
        raise LifeEndedError(how)

    # Checks -------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """Directories and partitions are served unless the disk failed."""
        faults = self.env.happened
        offline = [one for one in self.broker.manager.directories if not one.is_online]
        reasons = [one.offline_reason or "" for one in offline]
        if faults and any(part in reason for part in NOT_WITHOUT for reason in reasons):
            raise LifeEndedError("power")
        if offline and not any(fault.number == errno.EIO for fault in faults):
            raise RuleError(
                "directory", f"offline without a disk fault: {offline[0].offline_reason}"
            )
        if offline or any(fault.number == errno.EIO for fault in faults):
            raise LifeEndedError("power")  # an operator sees to the disk
        for record in self.broker.pool.history(limit=20):
            # Changes of a topic, leases and operators give other reasons.
            if record.outcome == "aborted" and record.reason == BY_ITSELF:
                raise RuleError("undisturbed", f"{record.run_id} was given up for no change")
        for name, model in self.models.items():
            topic = self.broker.topics.get(name)
            if topic is None or not topic.offline or model.deleting or faults:
                continue
            if model.files_lost or model.is_damaged:
                continue
            raise RuleError("partition", f"{name} is offline: {topic.offline}")

    async def _check_start(self) -> None:
        """After a start: what must be there is, and what was decided stays so."""
        self._check_health()
        for name, model in list(self.models.items()):
            topic = self.broker.topics.get(name)
            known = topic is not None and topic.topic_id == model.topic_id
            if not known and (model.deleting or not model.topic_id):
                del self.models[name]  # its deletion, or its creation, was cut off or finished
                if topic is not None:
                    self.models[name] = PartitionModel(model.where, topic.topic_id)
                    self._note_config(name)
                continue
            if not known:
                raise model.fail("acknowledged", "the topic has gone")
            model.deleting = False
            self._note_config(name)
            partition = self._served(name)
            if partition is None:
                continue
            log = model.log = partition.log
            if model.is_damaged:
                continue  # that it was opened is all
            start, log.log_start_offset = (
                log.log_start_offset,
                min(log.log_start_offset, log.first_base_offset),
            )
            try:
                found = self._batches(model, partition)
            finally:
                log.log_start_offset = start
            model.reopened(found, log.log_end_offset)
            await self._end_transactions(name)
        self._check_all()

    def _check_all(self) -> None:
        for name, model in self.models.items():
            partition = self._served(name)
            if partition is None or model.deleting or partition.log.topic_id != model.topic_id:
                continue
            if model.is_damaged:
                continue
            self._check_log(model, partition)
            self._check_view(model, partition)

    def _batches(self, model: PartitionModel, partition: Partition) -> list[Batch]:
        """Every batch of the log."""
        log = partition.log
        found: list[Batch] = []
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            try:
                part = log.read(offset, READ_BYTES, end_offset=log.log_end_offset)
                batches = batches_of(part)
            except (DamagedSegmentError, AssertionError) as error:
                raise model.fail("readable", f"offset {offset}: {error}") from error
            if not batches:
                break
            found += batches
            offset = batches[-1].header.next_offset
        return found

    def _check_log(self, model: PartitionModel, partition: Partition) -> None:
        log = partition.log
        found = self._batches(model, partition)
        model.check_written(found)
        start, stable = log.log_start_offset, log.last_stable_offset
        seen = committed(found, log.aborted_transactions(start, stable), start, stable)
        model.check_latest(seen, start, stable, self.env.wall_ms())

    def _check_view(self, model: PartitionModel, partition: Partition) -> None:
        view = self.broker.views.partition(partition.partition)
        if view is None:
            return
        if view.log.failure is not None:
            if self.env.happened:
                return  # until the next start, and said so
            raise model.fail("readable", f"its view: {view.log.failure}")
        log, cursor = partition.log, ViewCursor(view.log)
        stable = log.last_stable_offset
        seen: list[Record] = []
        offset = 0
        while offset < stable:
            try:
                part = cursor.read(offset, READ_BYTES, end_offset=stable)
            except StorageError as error:
                raise model.fail("readable", f"its view at {offset}: {error}") from error
            batches = batches_of(part)
            if not batches:
                break
            end = batches[-1].header.next_offset
            aborted = cursor.aborted_transactions(offset, end)
            seen += committed(batches, aborted, offset, stable)
            offset = end
        ledger, start = view.log.ledger, max(log.log_start_offset, model.log_start_max)
        gone = ((0, start),)
        if ledger is not None:
            manifest = ledger.manifest
            gone = ((0, manifest.first_offset), (manifest.horizon, start), *manifest.missed)
        model.check_view(seen, stable, Gone(gone))
        self.seen["views checked"] += 1


def settings() -> Settings:
    """Of every run."""
    return broker_settings(
        HOME,
        cleaner=CLEANER,
        retention_check_interval_ms=2_000,
        checkpoint_interval_ms=6_000,
    )
