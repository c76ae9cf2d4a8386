"""Fetch: collects records, waits for more if there are too few, sends ranges of files.

Rules. A response contains no record at or above the high watermark (for read_committed: the last
stable offset). A fetch in a damaged range gets CORRUPT_MESSAGE; one that begins before the range
gets the records before it. The first batch of a response is whole even above the limits (KIP-74).
Partitions wake a waiting fetch (data_wait.py); it does not poll. A thread first reads records that
are not in the page cache, so that a slow disk delays one client and not the loop. A thread loads or
rebuilds an index that is not in memory or contradicts the log.

A fetch of more than PARTITIONS_AT_ONCE partitions is handled in turns, and only few such fetches
read partitions at a time: a thousand consumers that connect again, each with hundreds of
partitions, do not delay all other requests until they have been served. What they decode and
collect counts as memory for responses. A fetch of more than WHOLE_ROWS_MAX partitions is also
decoded in slices; so is the response if it names more aborted transactions than that.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Final

from broker.counters import BrokerStats, TopicStats
from broker.event_loop.loop_turns import Turns, run_in_turns, yield_to_loop
from broker.handlers.list_offsets import READ_COMMITTED, epoch_error
from broker.network.connection import Response
from broker.network.fetch_sessions import (
    FetchSession,
    FetchSessionError,
    PartitionKey,
    Targets,
    is_full,
)
from broker.network.request_context import RequestContext, Services
from broker.security.acls import Operation
from broker.topics.cold_reads import is_cached
from broker.topics.data_wait import DataWait
from broker.topics.index_loads import LOADS_MAX
from broker.topics.partition import Partition
from broker.views.view_partition import ViewPartition
from config.topics.names import can_exist
from protocol.api import ApiKey
from protocol.codec import RequestHeader, read_header
from protocol.errors import ErrorCode, SlicesNeededError, code_of
from protocol.fetch_codec import (
    FIRST_TOPIC_ID_VERSION,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    decode_fetch,
    decode_fetch_sliced,
    encode_fetch_response,
    encode_fetch_response_sliced,
    partitions_max,
)
from protocol.limits import WHOLE_ROWS_MAX
from protocol.produce_codec import TopicRef
from storage.errors import DamagedSegmentError, StorageError
from storage.format.txn_index import TxnIndexEntry
from storage.log.log_reader import LogReader
from storage.segments.fetch_slice import FetchSlice
from storage.segments.segment import IndexNotReadyError
from storage.view.view_log import ViewCursor

MAX_WAIT_MS: Final = 60_000  # bounds how long a waiting request keeps its memory
FIRST_ZSTD_VERSION: Final = 10
PARTITIONS_AT_ONCE: Final = 32  # half a millisecond
BYTES_AT_ONCE: Final = 1 << 10  # of a frame: about so many partitions
# Memory of a partition that a request names, and of one that was read, until the response is sent.
# A user may have a thousand fetches of thousands of partitions that wait, so they count as memory
# for responses (broker/network/response_memory.py).
NAMED_BYTES: Final = 300
COLLECTED_BYTES: Final = 250
ABORTED_BYTES: Final = 50  # of an aborted transaction: the index entry, and its row of the response

Fetched = FetchedPartition[FetchSlice]


@dataclass(slots=True)
class CollectedRecords:
    """The result of one pass over the requested partitions."""

    partitions: list[tuple[PartitionKey, Fetched]] = field(default_factory=list)
    slices: list[FetchSlice] = field(default_factory=list)
    record_bytes: int = 0
    has_error: bool = False
    counted: list[tuple[TopicStats, Fetched]] = field(default_factory=list)
    bytes_left: int = 0  # bytes of records that may be added
    bytes_max: int = 0  # `bytes_left` at the beginning
    readable: dict[TopicRef, bool] = field(default_factory=dict)  # topics -> permission
    # The response for partitions if the client says that it is another broker; otherwise None.
    refusal: ErrorCode | None = None
    aborted_rows: int = 0
    in_place: bool = False  # load and rebuild indexes on the loop
    not_ready: list[IndexNotReadyError] = field(default_factory=list)  # otherwise


def fetch(
    context: RequestContext, version: int, frame: memoryview
) -> Response | Awaitable[Response]:
    """Answer a Fetch request, versions 4-18. Raises ProtocolError."""
    services = context.services
    header = read_header(frame)
    context.meters = None
    if services.quotas.enforced:
        context.find_meters(header.client_id)
    if len(frame) > BYTES_AT_ONCE:
        return _fetch_sliced(context, header, frame)
    try:
        request = decode_fetch(header, frame)
    except SlicesNeededError:
        return _fetch_sliced(context, header, frame)
    try:
        session, targets = _targets_of(context, request, by_id=version >= FIRST_TOPIC_ID_VERSION)
    except FetchSessionError as error:
        return encode_fetch_response(version, header.correlation_id, [], error_code=error.code)
    if len(targets) > PARTITIONS_AT_ONCE:
        return _wait(context, header, request, session, targets)
    collected = _collect(context, header, request, targets)
    is_short = collected.aborted_rows <= WHOLE_ROWS_MAX  # otherwise memory is reserved first
    if not collected.not_ready and is_short and _is_enough(request, targets, collected):
        if context.meters is not None:
            throttled = _throttle(context, header, request, session, collected)
            if throttled is not None:
                return throttled
        if not all(map(is_cached, collected.slices)):
            return _answer_later(context, header, request, session, collected)
        return _answer(services, header, request, session, collected)
    return _wait(context, header, request, session, targets)


def _targets_of(
    context: RequestContext, request: FetchRequest, *, by_id: bool
) -> tuple[FetchSession | None, Targets]:
    """Return the partitions to fetch, and their session if any. Raises FetchSessionError."""
    for topic, _ in request.topics:
        _check_name(topic)
    named = {
        (topic, partition.partition): partition
        for topic, row in request.topics
        for partition in row
    }
    sessions, owner = context.services.sessions, context.principal
    session_id, epoch = request.session_id, request.session_epoch
    now = context.services.env.monotonic()
    if is_full(epoch):
        session = sessions.full(session_id, epoch, named, by_id=by_id, owner=owner, now=now)
        return session, named
    forgotten = [(topic, index) for topic, row in request.forgotten for index in row]
    session = sessions.incremental(
        session_id, epoch, named, forgotten, by_id=by_id, owner=owner, now=now
    )
    return session, session.targets


async def _fetch_sliced(
    context: RequestContext, header: RequestHeader, frame: memoryview
) -> Response:
    """Answer a request of many rows. Raises ProtocolError."""
    counted = partitions_max(header.api_version, len(frame))
    await _reserve(context, (NAMED_BYTES + COLLECTED_BYTES) * counted)
    async with AsyncExitStack() as slot:
        await slot.enter_async_context(_slot(context))
        max_rows = context.services.limits.of(ApiKey.FETCH).rows
        request = await run_in_turns(decode_fetch_sliced(header, frame, max_rows))
        by_id = header.api_version >= FIRST_TOPIC_ID_VERSION
        named, session = Targets(), None
        try:
            session, targets = await _targets_in_turns(context, request, named, by_id=by_id)
            if len(targets) > counted:  # a session has far more
                await slot.aclose()
                return await _wait(context, header, request, session, targets)
            return await _wait(context, header, request, session, targets, slot=slot)
        except FetchSessionError as error:
            version, correlation_id = header.api_version, header.correlation_id
            return encode_fetch_response(version, correlation_id, [], error_code=error.code)
        finally:
            if session is None or session.targets is not named:
                context.services.freed_later.add(named)
            context.services.freed_later.add(*(row for _, row in request.topics), request.topics)


async def _reserve(context: RequestContext, size_bytes: int) -> None:
    """Wait for memory until the response is sent. Few partitions do not wait."""
    if context.response_memory is not None:
        await context.response_memory.grow_to(size_bytes)


def _check_name(topic: TopicRef) -> None:
    """Refuse a name that no topic can have: a session would keep it. Raises FetchSessionError."""
    if isinstance(topic, str) and not can_exist(topic):
        raise FetchSessionError(ErrorCode.INVALID_TOPIC_EXCEPTION)


async def _targets_in_turns(
    context: RequestContext, request: FetchRequest, named: Targets, *, by_id: bool
) -> tuple[FetchSession | None, Targets]:
    """Do what `_targets_of` does, in turns. `named` receives what the request names.

    Raises FetchSessionError.
    """
    turns = Turns()
    for topic, row in request.topics:
        await turns.take()
        _check_name(topic)
        for partition in row:
            await turns.take()
            named[topic, partition.partition] = partition
    sessions, owner = context.services.sessions, context.principal
    session_id, epoch = request.session_id, request.session_epoch
    now = context.services.env.monotonic()
    if is_full(epoch):
        full = sessions.full(session_id, epoch, named, by_id=by_id, owner=owner, now=now)
        return full, named
    session = sessions.resume(session_id, epoch, len(named), by_id=by_id, owner=owner, now=now)
    try:
        for key, target in named.items():
            await turns.take()
            session.update({key: target}, ())
    finally:
        session.added(len(named))
    for topic, indexes in request.forgotten:
        await turns.take()
        for index in indexes:
            await turns.take()
            session.update({}, [(topic, index)])
    return session, session.targets


def _is_enough(request: FetchRequest, targets: Targets, collected: CollectedRecords) -> bool:
    return (
        _missing_bytes(request, collected) <= 0
        or request.max_wait_ms <= 0
        or not targets
        or collected.has_error
    )


def _missing_bytes(request: FetchRequest, collected: CollectedRecords) -> int:
    return min(request.min_bytes, max(collected.bytes_max, 1)) - collected.record_bytes


def _collect(
    context: RequestContext, header: RequestHeader, request: FetchRequest, targets: Targets
) -> CollectedRecords:
    collected = _nothing_collected(context, request)
    committed = request.isolation_level == READ_COMMITTED
    for key, target in targets.items():
        _collect_one(context, header, key, target, collected, committed=committed)
    return collected


async def _collect_in_turns(
    context: RequestContext,
    header: RequestHeader,
    request: FetchRequest,
    targets: Targets,
    *,
    turns: Turns,
    collected: CollectedRecords,
) -> None:
    committed = request.isolation_level == READ_COMMITTED
    for key, target in tuple(targets.items()):  # other requests may change the session meanwhile
        await turns.take()
        _collect_one(context, header, key, target, collected, committed=committed)


def _nothing_collected(context: RequestContext, request: FetchRequest) -> CollectedRecords:
    bytes_max = min(max(request.max_bytes, 0), context.services.settings.limits.fetch_bytes)
    if context.meters is not None:
        quota_bytes = context.services.quotas.fetch_bytes_max(context.meters)
        if quota_bytes is not None:
            bytes_max = min(bytes_max, quota_bytes)
    refusal = None
    if request.replica_id >= 0:  # a follower; Kafka checks its permission first
        refusal = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if context.may_cluster(Operation.CLUSTER_ACTION):
            refusal = ErrorCode.NOT_LEADER_OR_FOLLOWER
    return CollectedRecords(bytes_left=bytes_max, bytes_max=bytes_max, refusal=refusal)


def _throttle(
    context: RequestContext,
    header: RequestHeader,
    request: FetchRequest,
    session: FetchSession | None,
    collected: CollectedRecords,
) -> Response:
    """Return a response without partitions if the client is above a quota, as Kafka; else None.

    A client that begins a session gets none: a first response has to contain every partition.
    """
    services, meters = context.services, context.meters
    assert meters is not None
    throttle_ms = services.quotas.charge_fetch(meters, collected.record_bytes)
    request_throttle_ms = services.quotas.check_request(meters)
    if request_throttle_ms and not throttle_ms:
        services.quotas.return_fetch(meters, collected.record_bytes)
    throttle_ms = context.throttle(max(throttle_ms, request_throttle_ms))
    if not throttle_ms:
        return None
    session_id = 0
    if session is not None and is_full(request.session_epoch):
        services.sessions.end(session)
    elif session is not None:
        session_id = session.session_id
    return encode_fetch_response(
        header.api_version,
        header.correlation_id,
        [],
        session_id=session_id,
        throttle_time_ms=throttle_ms,
    )


def _collect_one(
    context: RequestContext,
    header: RequestHeader,
    key: PartitionKey,
    target: FetchPartition,
    collected: CollectedRecords,
    *,
    committed: bool,
) -> None:
    """Read one partition and add its records."""
    may_read = collected.readable.get(key[0])
    if collected.refusal is not None:
        may_read = collected.refusal is not ErrorCode.TOPIC_AUTHORIZATION_FAILED
    elif may_read is None:  # once for all partitions of a topic
        may_read = collected.readable[key[0]] = context.may_ref(Operation.READ, key[0])
    partition: Partition | ViewPartition | ErrorCode = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if may_read:
        partition = _partition_of(context.services, key, header.api_version)
        if collected.refusal is not None and not isinstance(partition, ErrorCode):
            partition = collected.refusal
    fetched: Fetched
    if isinstance(partition, ErrorCode):
        fetched = Fetched(target.partition, partition)
    else:
        try:
            fetched = _read(
                context, partition, target, header, collected.bytes_left,
                committed=committed, first=collected.record_bytes == 0,
                in_place=collected.in_place,
            )  # fmt: skip
        except IndexNotReadyError as error:
            collected.not_ready.append(error)
            return
        collected.counted.append((partition.stats, fetched))
    collected.partitions.append((key, fetched))
    if fetched.error_code:
        collected.has_error = True
    elif isinstance(fetched.records, FetchSlice) and fetched.records.length:
        collected.slices.append(fetched.records)
        collected.record_bytes += fetched.records.length
        collected.bytes_left -= fetched.records.length
        collected.aborted_rows += len(fetched.aborted_transactions or ())


def _partition_of(
    services: Services, key: PartitionKey, version: int
) -> Partition | ViewPartition | ErrorCode:
    partition_or_error = services.readable(*key)
    if (
        version < FIRST_ZSTD_VERSION
        and not isinstance(partition_or_error, ErrorCode)
        and partition_or_error.log.config.compression_type == "zstd"
    ):
        return ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    return partition_or_error


def _read(
    context: RequestContext,
    partition: Partition | ViewPartition,
    target: FetchPartition,
    header: RequestHeader,
    remaining: int,
    *,
    committed: bool,
    first: bool,
    in_place: bool,
) -> Fetched:
    """Raises IndexNotReadyError."""
    fenced = epoch_error(partition, target.current_leader_epoch)
    if fenced is not None:
        return Fetched(target.partition, fenced)
    log = partition.log
    source: LogReader | ViewCursor | None
    if isinstance(partition, ViewPartition):
        memory = context.services.views.cursor_memory
        source = context.cursors.find(partition, memory, context.client)
        if source is None:  # clients try again; there is memory when other connections are closed
            return Fetched(target.partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    else:
        source = partition.log.reader
    end = log.last_stable_offset if committed else log.high_watermark
    limit = min(remaining, max(target.partition_max_bytes, 0))
    aborted: Sequence[TxnIndexEntry] | None = () if committed else None
    try:
        records = source.read(
            target.fetch_offset,
            limit,
            end_offset=end if first or limit > 0 else 0,  # 0: only check the offset
            at_least_one=first,
            in_place=in_place,
        )
        if committed and records.length:
            aborted = source.aborted_in_slice(records, target.fetch_offset, end, in_place=in_place)
    except IndexNotReadyError:
        raise
    except DamagedSegmentError as error:
        opened = partition.log.log if isinstance(partition, ViewPartition) else partition.log
        context.services.damage.refuse(opened, target.fetch_offset, header.client_id or "", error)
        return Fetched(target.partition, code_of(error))
    except StorageError as error:
        return Fetched(target.partition, code_of(error))
    return Fetched(
        target.partition,
        0,
        log.high_watermark,
        log.last_stable_offset,
        log.log_start_offset,
        aborted,
        records,
    )


def _answer(
    services: Services,
    header: RequestHeader,
    request: FetchRequest,
    session: FetchSession | None,
    collected: CollectedRecords,
) -> Response:
    """Encode the response; an incremental one omits partitions without news."""
    for topic, fetched in collected.counted:
        _count(topic, fetched)
    incremental = session is not None and not is_full(request.session_epoch)
    rows: dict[TopicRef, list[Fetched]] = {}
    for key, fetched in collected.partitions:
        if fetched.error_code:
            _count_error(services.stats, fetched)
        if _is_reported(session, key, fetched) or not incremental:
            rows.setdefault(key[0], []).append(fetched)
    return encode_fetch_response(
        header.api_version,
        header.correlation_id,
        list(rows.items()),
        session_id=session.session_id if session is not None else 0,
    )


async def _answer_in_turns(
    services: Services,
    header: RequestHeader,
    request: FetchRequest,
    session: FetchSession | None,
    collected: CollectedRecords,
) -> Response:
    """Encode the response as `_answer` does, in turns."""
    turns = Turns()
    for topic, fetched in collected.counted:
        await turns.take()
        _count(topic, fetched)
    incremental = session is not None and not is_full(request.session_epoch)
    rows: dict[TopicRef, list[Fetched]] = {}
    for key, fetched in collected.partitions:
        await turns.take()
        if fetched.error_code:
            _count_error(services.stats, fetched)
        if _is_reported(session, key, fetched) or not incremental:
            rows.setdefault(key[0], []).append(fetched)
    parts = await run_in_turns(
        encode_fetch_response_sliced(
            header.api_version,
            header.correlation_id,
            list(rows.items()),
            session.session_id if session is not None else 0,
        )
    )
    services.freed_later.add(*rows.values(), rows)
    return parts


def _count(topic: TopicStats, fetched: Fetched) -> None:
    """Count the fetch of one partition. Callers count only the last pass of a request."""
    topic.fetch_requests += 1
    topic.failed_fetch_requests += fetched.error_code != 0
    if isinstance(fetched.records, FetchSlice):
        topic.bytes_out += fetched.records.length


def _count_error(stats: BrokerStats, fetched: Fetched) -> None:
    stats.errors["Fetch", ErrorCode(fetched.error_code).name] += 1


def _is_reported(session: FetchSession | None, key: PartitionKey, fetched: Fetched) -> bool:
    """Return whether a partition has news for the client; record its offsets in the session."""
    return session is None or session.needs_response(
        key,
        records=isinstance(fetched.records, FetchSlice) and fetched.records.length > 0,
        error=fetched.error_code != 0,
        high_watermark=fetched.high_watermark,
        log_start=fetched.log_start_offset,
    )


async def _answer_later(
    context: RequestContext,
    header: RequestHeader,
    request: FetchRequest,
    session: FetchSession | None,
    collected: CollectedRecords,
) -> Response:
    services = context.services
    await services.cold_reads.warm(context.client, collected.slices)
    return await _answer_in_turns(services, header, request, session, collected)


async def _wait(
    context: RequestContext,
    header: RequestHeader,
    request: FetchRequest,
    session: FetchSession | None,
    targets: Targets,
    *,
    slot: AsyncExitStack | None = None,
) -> Response:
    """Wait until there are enough records or max_wait_ms is over, then answer.

    `slot` is one that the caller has taken; the first pass over the partitions gives it back.
    """
    services = context.services
    passes: list[CollectedRecords] = []
    try:
        collected = await _collect_until_enough(
            context, header, request, targets, passes, slot=slot
        )
        if context.meters is not None:
            throttled = _throttle(context, header, request, session, collected)
            if throttled is not None:
                return throttled
        await services.cold_reads.warm(context.client, collected.slices)
        async with _slot_for(context, targets):  # a thousand fetches may end their wait at once
            return await _answer_in_turns(services, header, request, session, collected)
    finally:
        _free(services, passes)


async def _collect_until_enough(
    context: RequestContext,
    header: RequestHeader,
    request: FetchRequest,
    targets: Targets,
    passes: list[CollectedRecords],
    *,
    slot: AsyncExitStack | None,
) -> CollectedRecords:
    """Collect records in passes until they are enough; return the last of `passes`."""
    size_bytes = (NAMED_BYTES + COLLECTED_BYTES) * len(targets)
    if slot is None:
        await _reserve(context, size_bytes)
    aborted_max = WHOLE_ROWS_MAX  # more of them need memory
    services = context.services
    wait = DataWait()
    max_wait_s = min(request.max_wait_ms, MAX_WAIT_MS) / 1000
    timer = asyncio.get_running_loop().call_later(max_wait_s, wait.end)
    watched: list[Partition | ViewPartition] = []
    turns, loads = Turns(), 0
    services.stats.delayed_fetches += 1
    try:
        while True:
            wait.begin()
            _free(services, passes)
            collected = _nothing_collected(context, request)
            collected.in_place = loads == LOADS_MAX
            passes.append(collected)
            async with slot or _slot_for(context, targets):
                for key in () if watched else tuple(targets):
                    await turns.take()
                    partition = _partition_of(services, key, header.api_version)
                    if not isinstance(partition, ErrorCode):
                        partition.add_waiter(wait)
                        watched.append(partition)
                await _collect_in_turns(
                    context, header, request, targets, turns=turns, collected=collected
                )
            slot = None
            if collected.not_ready:
                is_loaded = await services.index_loads.load(collected.not_ready)
                loads = loads + 1 if is_loaded else LOADS_MAX
                continue
            loads = 0
            if collected.aborted_rows > aborted_max:
                aborted_max = 2 * collected.aborted_rows  # the next pass may find some more
                del collected
                _free(services, passes)
                await _reserve(context, size_bytes + ABORTED_BYTES * aborted_max)
                continue
            if wait.is_over or _is_enough(request, targets, collected):
                return collected
            await wait.wait(_missing_bytes(request, collected))
            if wait.is_unchanged and not collected.record_bytes:
                return collected  # the time is over, and every partition is still as it was read
            turns = Turns()
    finally:
        services.stats.delayed_fetches -= 1
        timer.cancel()
        for partition in watched:
            await turns.take()
            partition.remove_waiter(wait)


def _free(services: Services, passes: list[CollectedRecords]) -> None:
    """Free what passes have collected, and nobody uses any more."""
    while passes:
        old = passes.pop()
        services.freed_later.add(old.partitions, old.counted, old.slices)


@asynccontextmanager
async def _slot(context: RequestContext) -> AsyncIterator[None]:
    """Yield a block in which few fetches of many partitions are at a time."""
    async with context.services.wide_fetches.slot(context.client):
        # Within one round of the loop, a slot must not serve one fetch after the other.
        await yield_to_loop()
        yield


def _slot_for(
    context: RequestContext, targets: Targets
) -> AbstractAsyncContextManager[None, bool | None]:
    """Return the block for the steps of a fetch: few partitions need no slot."""
    return _slot(context) if len(targets) > PARTITIONS_AT_ONCE else nullcontext()
