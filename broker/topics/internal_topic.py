"""A compacted topic in which a coordinator keeps its state: creates it, loads it, appends to it.

Rules
- Each key has one partition, chosen as Kafka chooses it, so that Kafka and Varve find each other's
  records. An existing topic therefore keeps its number of partitions; the settings give the number
  for a new topic.
- The last record of a key counts; a null value deletes it.
- Appends are acknowledged as with acks=all, in the order of the calls.
- The coordinator serves the keys of a partition from `activate` to `deactivate`. A partition that
  cannot be read is offline; the others are served.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.directory_writer import ChangePendingError
from broker.event_loop.loop_turns import run_to_end
from broker.topics.index_loads import IndexLoads
from broker.topics.metadata_service import MetadataService
from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from broker.topics.topics import TopicError, Topics
from protocol.errors import ErrorCode, code_of
from storage.env import Env
from storage.errors import (
    CorruptBatchError,
    NoRoomError,
    OfflinePartitionError,
    OffsetOutOfRangeError,
    StorageError,
)
from storage.format.batch import (
    TRANSACTIONAL,
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    read_header,
    verify_crc,
    walk_headers,
)
from storage.model import AppendInfo, TopicPartition
from storage.segments.fetch_slice import FetchSlice

logger = structlog.get_logger("broker.internal_topic")

HASHED_AT_ONCE: Final = 4096  # code units of a key
_POWERS_OF_31: Final = np.array(
    [pow(31, exponent, 1 << 32) for exponent in reversed(range(HASHED_AT_ONCE))], dtype=np.uint32
)

# Kafka's offsets.load.buffer.size; one batch may be larger and is still read whole.
LOAD_BUFFER_BYTES: Final = 5 * 1024 * 1024
RETRY_SECONDS: Final = 0.5
LOADERS: Final = 2  # partitions loaded at a time: decoding is bound by the one interpreter

LogRecord = tuple[bytes, bytes | None]
L_co = TypeVar("L_co", covariant=True)
L_contra = TypeVar("L_contra", contravariant=True)
L = TypeVar("L")


class PartitionState(Enum):
    """The state of one partition of an internal topic."""

    LOADING = "loading"
    ACTIVE = "active"
    OFFLINE = "offline"

    @property
    def error(self) -> ErrorCode:
        """Return NONE if keys of the partition are served, else the error for the client."""
        match self:
            case PartitionState.ACTIVE:
                return ErrorCode.NONE
            case PartitionState.LOADING:
                return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            case PartitionState.OFFLINE:
                return ErrorCode.COORDINATOR_NOT_AVAILABLE


class Append(Protocol):
    """Appends to one partition of an internal topic, acknowledged as acks=all is.

    Offsets are assigned in the order of the calls, before the first await. The awaitables end in
    the same order, when the records are acknowledged. The call or the awaitable raises StorageError
    if they are not.
    """

    def __call__(
        self, partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> Awaitable[object]:
        """Append `records`; with a producer, as part of its open transaction."""
        ...


async def _acknowledged(partition: Partition, pending: "asyncio.Future[AppendInfo]") -> None:
    """Wait for an append that the disk has not finished, and for its acknowledgement."""
    info = await run_to_end(pending)
    if not partition.is_acked(info):
        await partition.wait_flushed(info.last_offset + 1)


def _unbounded(_partition: int) -> int:
    return sys.maxsize


class KeyedLog:
    """Appends records to the partition of their key."""

    def __init__(
        self,
        partition_count: int,
        append: Append,
        max_batch_bytes: Callable[[int], int] = _unbounded,
    ) -> None:
        """`max_batch_bytes` returns the limit of a partition; `append` does not check it."""
        assert partition_count > 0
        self.partition_count = partition_count
        self._append = append
        self._max_batch_bytes = max_batch_bytes

    def partition_of(self, key: str) -> int:
        """Return the partition of a key."""
        return partition_of(key, self.partition_count)

    def max_batch_bytes(self, key: str) -> int:
        """Return how large a batch with records of a key may be."""
        return self._max_batch_bytes(self.partition_of(key))

    def append(
        self, key: str, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> "asyncio.Future[object]":
        """Start to append; the future ends when the records are acknowledged."""
        try:
            return asyncio.ensure_future(self._append(self.partition_of(key), records, producer))
        except StorageError as error:
            failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed


class PartitionStates:
    """Which partitions of an internal topic a coordinator serves: none before it activates them."""

    def __init__(self, log: KeyedLog) -> None:
        self._log = log
        self._states = [PartitionState.LOADING] * log.partition_count

    def activate(self, partition: int) -> None:
        """Note that a partition is served from now on."""
        assert self._states[partition] is not PartitionState.ACTIVE
        self._states[partition] = PartitionState.ACTIVE

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Note that a partition failed or will be loaded again."""
        assert state is not PartitionState.ACTIVE
        self._states[partition] = state

    def error(self, key: str) -> ErrorCode:
        """Return NONE if the partition of a key is served, else the error for the client."""
        return self._states[self._log.partition_of(key)].error

    def is_offline(self, partition: int) -> bool:
        """Return whether a partition is neither served nor being loaded."""
        return self._states[partition] is PartitionState.OFFLINE

    def is_loading(self, partition: int) -> bool:
        """Return whether a partition is being loaded."""
        return self._states[partition] is PartitionState.LOADING

    @property
    def any_loading(self) -> bool:
        """Return whether a partition is still being loaded."""
        return PartitionState.LOADING in self._states

    @property
    def all_active(self) -> bool:
        """Return whether all partitions are served."""
        return all(state is PartitionState.ACTIVE for state in self._states)


def partition_of(key: str, partition_count: int) -> int:
    """Return `abs(key.hashCode()) % partitions` as Java computes it, over UTF-16 code units.

    A request hashes its key several times; 32,767 characters, the most there are, take 30 us.
    """
    units = np.frombuffer(key.encode("utf-16-be", "surrogatepass"), dtype=">u2")
    code = 0
    for first in range(0, len(units), HASHED_AT_ONCE):
        block = units[first : first + HASHED_AT_ONCE]
        # Products and sum wrap around at 2**32, as they should.
        added = int((block * _POWERS_OF_31[-len(block) :]).sum(dtype=np.uint32))
        code = (code * pow(31, len(block), 1 << 32) + added) & 0xFFFFFFFF
    if code >= 1 << 31:
        code -= 1 << 32
    # Kafka's Utils.abs maps the one int without a positive counterpart to 0.
    positive = 0 if code == -(1 << 31) else abs(code)
    return positive % partition_count


class Loader(Protocol[L_co]):
    """Gathers the content of one partition from its batches, in log order."""

    def add_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Add the records of one batch."""
        ...

    def finish(self) -> L_co:
        """Return the content after the last batch."""
        ...


def decode_batches(data: bytes) -> Iterator[tuple[BatchHeader, Sequence[Record]]]:
    """Yield the header and the records of each batch.

    Raises CorruptBatchError (also for a wrong CRC) and DecompressionLimitError.
    """
    for position, header in walk_headers(data):
        if not verify_crc(data, position, header):
            raise CorruptBatchError("the CRC does not match", position)
        yield header, decode_records(data, header, position)


def add_batches(loader: Loader[L], data: bytes, offset: int) -> int:
    """Add whole batches, of which the first contains `offset` or follows it; return their end.

    May run in a thread. Raises CorruptBatchError and DecompressionLimitError.
    """
    next_offset = offset
    for header, records in decode_batches(data):
        loader.add_records(header, records)
        next_offset = header.next_offset
    if next_offset <= offset:
        raise CorruptBatchError(f"no whole batch at offset {offset}")
    return next_offset


class Coordinator(Protocol[L_contra]):
    """Serves the keys of the partitions that are active."""

    async def activate(self, partition: int, loaded: L_contra) -> None:
        """Serve a partition from its content on, which is taken in turns.

        It is loading until then. If it is deactivated meanwhile, it stays so.
        """
        ...

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Stop serving a partition."""
        ...

    def is_offline(self, partition: int) -> bool:
        """Return whether a partition is neither served nor being loaded."""
        ...


class InternalTopic(Generic[L]):
    """A coordinator's access to its topic."""

    def __init__(
        self,
        name: str,
        partitions: int,
        *,
        topics: Topics,
        metadata_service: MetadataService,
        env: Env,
        threads: DirectoryThreads,
        new_loader: Callable[[], Loader[L]],
    ) -> None:
        self.name = name
        self._configured = partitions
        self._topics = topics
        self._metadata_service = metadata_service
        self._env = env
        self._new_loader = new_loader
        self._threads = threads
        self._index_loads = IndexLoads(threads)
        self._creating: asyncio.Task[ErrorCode] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.failures: dict[TopicPartition, str] = {}  # why partitions are not loaded
        self.coordinator: Coordinator[L]  # set before `start`

    @property
    def partition_count(self) -> int:
        """Return the number of partitions that the topic has, or will have."""
        topic = self._topics.get(self.name)
        return topic.partition_count if topic is not None else self._configured

    def start(self) -> None:
        """Load the topic in the background."""
        if self._topics.get(self.name) is not None:
            self._tasks.append(asyncio.create_task(self._load_all(), name=f"load {self.name}"))

    async def stop(self) -> None:
        """Stop loading."""
        tasks = self._tasks if self._creating is None else [*self._tasks, self._creating]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ensure(self) -> ErrorCode:
        """Create the topic if there is none; return NONE if it exists then."""
        if self._creating is None or self._creating.done():
            if self._topics.get(self.name) is not None:
                return ErrorCode.NONE
            # A task of its own, because the first client may disconnect while others wait.
            self._creating = asyncio.create_task(self._create(), name=f"create {self.name}")
        return await asyncio.shield(self._creating)

    async def _create(self) -> ErrorCode:
        try:
            await self._metadata_service.ensure(self.name, self._configured, created_by="broker")
        except TopicError as error:
            return error.code
        except StorageError as error:
            return code_of(error)
        await self._load_all()
        return ErrorCode.NONE

    def append(
        self, partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> Awaitable[object]:
        """Append records; they have their offsets when this returns (see Append)."""
        served = self._partition(partition)
        now_ms = self._env.wall_ms()
        rows = [Record(index, now_ms, key, value, ()) for index, (key, value) in enumerate(records)]
        if producer is None:
            batch = build_batch(rows)
        else:
            batch = build_batch(
                rows,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=0,  # as Kafka's coordinators; it is not checked
                attributes=TRANSACTIONAL,
            )
        try:
            info = served.append(
                memoryview(batch), read_header(batch), now_ms, by_coordinator=producer is not None
            )
        except ChangePendingError as error:
            return _acknowledged(served, error.pending)
        if served.is_acked(info):
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return served.wait_flushed(info.last_offset + 1)

    def max_batch_bytes(self, partition: int) -> int:
        """Return max.message.bytes; no limit for a partition to which nothing can be appended."""
        served = self._topics.partition(TopicPartition(self.name, partition))
        return _unbounded(partition) if served is None else served.log.config.max_message_bytes

    def fail(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop serving the keys of partitions that are offline."""
        for partition in partitions:
            if partition.topic == self.name:
                self.coordinator.deactivate(partition.partition, PartitionState.OFFLINE)

    def reload_after_repair(self, partition: TopicPartition) -> None:
        """Load a partition again if damage prevented it before."""
        if partition.topic == self.name and self.coordinator.is_offline(partition.partition):
            self.failures.pop(partition, None)
            self.coordinator.deactivate(partition.partition, PartitionState.LOADING)
            self._tasks = [task for task in self._tasks if not task.done()]
            name = f"load {partition} again"
            self._tasks.append(asyncio.create_task(self._load(partition.partition), name=name))

    def _partition(self, index: int) -> Partition:
        partition = TopicPartition(self.name, index)
        served = self._topics.partition(partition)
        if served is None:
            raise OfflinePartitionError(partition, "its records cannot be written")
        return served

    async def _load_all(self) -> None:
        gate = asyncio.Semaphore(LOADERS)

        async def load_partition(index: int) -> None:
            async with gate:
                await self._load(index)

        await asyncio.gather(*(load_partition(index) for index in range(self.partition_count)))

    async def _load(self, index: int) -> None:
        partition = self._topics.partition(TopicPartition(self.name, index))
        if partition is None:
            self.coordinator.deactivate(index, PartitionState.OFFLINE)
            return
        try:
            loaded = await self._read_patiently(partition)
        except Exception as error:
            # Supervised: the other partitions are loaded, and clients of this one get an error.
            is_expected = isinstance(error, StorageError | OSError)
            logger.error(
                "partition not loaded",
                partition=str(partition.partition),
                reason=str(error),
                exc_info=None if is_expected else error,
            )
            self.failures[partition.partition] = str(error)
            self.coordinator.deactivate(index, PartitionState.OFFLINE)
            return
        is_served = self._topics.partition(partition.partition) is partition
        if is_served:  # else its directory failed meanwhile
            await self.coordinator.activate(index, loaded)

    async def _read_patiently(self, partition: Partition) -> L:
        """Like `_read`; begin again after errors that end by themselves, until the broker stops."""
        while True:
            try:
                return await self._read(partition)
            except (NoRoomError, OffsetOutOfRangeError) as error:
                # No file descriptor is left, or retention overtook the reads.
                logger.warning(
                    "loading begins again", partition=str(partition.partition), reason=str(error)
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _read(self, partition: Partition) -> L:
        """Return the content of a partition. Raises StorageError, OSError.

        The event loop finds the batches, for a clean may replace segments meanwhile; a thread reads
        and decodes them.
        """
        loader, offset = self._new_loader(), partition.log.log_start_offset

        def find(in_place: bool) -> FetchSlice:
            log = partition.log  # another one after a move to another data directory
            return log.reader.read(
                offset, LOAD_BUFFER_BYTES, end_offset=log.log_end_offset, in_place=in_place
            )

        while (
            batches := await self._index_loads.read(find)
        ).length:  # compaction may empty the end
            data = await self._threads.run(partition.log.directory, batches.read)
            offset = await asyncio.to_thread(add_batches, loader, data, offset)
        return await asyncio.to_thread(loader.finish)
