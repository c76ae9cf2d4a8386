"""/api/v1/cleaner: the state of the cleaner, and its controls. openapi/ lists the paths.

The pool decides and acts. Status codes: 400 for an invalid request, 404 for an unknown partition,
409 if the action is not possible now. An action without effect is not an error (`changed` is
false). Long responses are built in turns of the event loop.
"""

import asyncio
import os.path
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import structlog
from aiohttp import web

from broker.damage.damaged_reads import blocked_text
from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.http.api.json_shapes import (
    Json,
    estimate_json,
    explanation_json,
    group_json,
    job_json,
    offline_partition_json,
    partition_fields,
    partition_json,
    spark_json,
    state_name,
    status_json,
)
from broker.http.api.lookup import find_partition, find_topic, served_partition
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    action_response,
    cursor_of,
    cut_page,
    json_response,
    page_limit,
    parse_cursor,
    parse_integer,
    parse_number,
    parse_partition,
    query_flags,
    query_parameters,
    rows_response,
)
from broker.http.audited import client_of, note_no_change, principal_of, sender_of
from broker.network.request_context import Services
from broker.topics.end_transaction import NoTransactionError
from broker.topics.partition import Partition
from cleaner.host import NotServedError
from cleaner.planning.scheduling_order import Requester
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from storage.errors import LogDirectoryError, StorageError
from storage.model import TopicPartition

ROOT: Final = "/api/v1/cleaner"
PARTITIONS: Final = f"{ROOT}/partitions"
HISTORY: Final = f"{ROOT}/history"
OF_QUERY_TOPIC: Final = (PARTITIONS, HISTORY)
END_TRANSACTION: Final = (
    f"{ROOT}/partitions/{{topic}}/{{partition}}/transactions/{{producer_id}}/abort"
)
PAGE_ROWS: Final = 1000
PAGE_ROWS_MAX: Final = 5000  # about 2 MB
SLACK_MAX: Final = 100.0
JOBS: Final = 100
LAST_JOBS: Final = 6  # in the answer on one partition
JOBS_MAX: Final = 2000  # jobs that the pool keeps in memory

logger = structlog.get_logger("broker.api")

Action = Callable[[Partition, web.Request], Awaitable[Json]]


class CleanerApi:
    """Handlers of the requests under /api/v1/cleaner."""

    def __init__(
        self,
        services: Services,
        pool: CleanerPool,
        *,
        settings: Callable[[], CleanerSettings],
    ) -> None:
        self._services = services
        self._env = services.env
        self._damage = services.damage
        self._topics = services.topics
        self._pool = pool
        self._settings = settings
        self._keyless = services.keyless
        self._permissions = Permissions(services.allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._status)
        yield web.get(PARTITIONS, self._partitions)
        yield web.get(HISTORY, self._history)
        yield web.get(f"{ROOT}/partitions/{{topic}}/{{partition}}", self._explain)
        yield web.get(f"{ROOT}/partitions/{{topic}}/{{partition}}/estimate", self._estimate)
        actions: dict[str, Action] = {
            "run": self._request_clean,
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "retry": self._retry,
        }
        for name, action in actions.items():
            path = f"{ROOT}/partitions/{{topic}}/{{partition}}/{name}"
            yield web.post(path, self._action_handler(action))
        yield web.post(END_TRANSACTION, self._action_handler(self._end_transaction))
        yield web.post(f"{ROOT}/pause", self._pause_all)
        yield web.post(f"{ROOT}/resume", self._resume_all)

    # State --------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        counts = {"compacted": 0, "internal": 0, "policy_unknown": 0, "offline": 0}
        turns = Turns()
        for topic in self._topics:
            kind = "internal" if topic.is_internal else "compacted"
            counts[kind] += len(topic.partitions) if topic.config.compacts else 0
            counts["policy_unknown"] += 0 if topic.config.policy_known else topic.partition_count
            counts["offline"] += len(topic.offline)
            await turns.take()
        return json_response(
            {
                **status_json(self._pool.status(), self._pool.stats, self._settings(), counts),
                "spark": spark_json(self._pool.offload.status()),
            }
        )

    async def _partitions(self, request: web.Request) -> web.Response:
        """Return a page of compacted and damaged partitions, or of all partitions of a topic."""
        query = query_parameters(request, ("topic", "after", "limit"))
        limit = page_limit(query, PAGE_ROWS, PAGE_ROWS_MAX)
        after = parse_cursor(query["after"]) if "after" in query else None
        following = await self._partitions_after(after, limit + 1, query.get("topic"))
        page, last = cut_page(following, limit)
        status = self._pool.status()
        busy = {worker.partition: worker for worker in status.workers}

        def rows() -> Iterator[Json]:
            for partition in page:
                topic_partition = partition.partition
                yield partition_json(
                    partition,
                    status.verdicts.get(topic_partition),
                    self._pool.in_progress.state(topic_partition),
                    is_paused=topic_partition in status.paused,
                    worker=busy.get(topic_partition),
                )

        extra: Json = {"next": None if last is None else cursor_of(last.partition)}
        if "topic" in query:
            topic = find_topic(self._topics, query["topic"])
            extra |= {"partition_count": topic.partition_count, "view": topic.config.has_view}
        return await rows_response("partitions", rows(), extra)

    async def _partitions_after(
        self, after: TopicPartition | None, count: int, only: str | None
    ) -> list[Partition]:
        """Return the first partitions after the cursor, in order.

        These are the compacted and damaged ones, or all of topic `only`. Raises ApiError 404.
        """
        if only is not None:
            find_topic(self._topics, only)
        first = "" if after is None else after.topic
        names = [only] if only is not None else [t.name for t in self._topics if t.name >= first]
        turns, page = Turns(), list[Partition]()
        await yield_to_loop()
        for name in sorted(names):
            topic = self._topics.get(name)  # None, as below: it was deleted in an earlier turn
            partitions = {} if topic is None else topic.partitions
            for index in sorted(partitions):
                await turns.take()
                partition = partitions.get(index)
                if partition is None or (after is not None and partition.partition <= after):
                    continue
                if only is None and not (
                    partition.log.config.compacts or partition.log.damage.ranges
                ):
                    continue
                page.append(partition)
                if len(page) == count:
                    return page
        return page

    async def _explain(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = parse_partition(request)
        partition_or_reason = find_partition(self._topics, partition)
        if isinstance(partition_or_reason, str):
            topic = self._topics.get(partition.topic)
            policy = topic.config.cleanup_policy if topic is not None else ()
            is_paused = self._pool.operator.is_paused(partition)
            return json_response(
                offline_partition_json(partition, policy, partition_or_reason, is_paused=is_paused)
            )
        answer = self._explanation(partition_or_reason, request)
        answer["sentences"] += await self._keyless_warning(partition_or_reason, request)
        return json_response(answer)

    async def _keyless_warning(self, partition: Partition, request: web.Request) -> list[str]:
        """Return a sentence if a first clean would remove records without a key."""
        name, config = partition.partition, partition.log.config
        if config.compacts and self._pool.state_of(name).learned_at_ms:
            return []  # a clean has removed them
        client = client_of(request)
        estimate = await self._keyless.of_partition(partition, client)
        warning = estimate.warning(str(name))
        return [f"{warning}."] if warning else []

    async def _estimate(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("slack",))
        slack = None
        if "slack" in query:
            slack = parse_number(query["slack"], "slack", SLACK_MAX)
        partition = parse_partition(request)
        served = served_partition(self._topics, partition)
        answer = await self._pool.estimate(self._check_exists(served), slack)
        if answer is None:
            _check_compacted(served)
            raise ApiError(409, f"{partition} has no closed segment that can be cleaned")
        estimate, seconds = answer
        rows = (group_json(group) for group in estimate.groups)
        return await rows_response(
            "groups", rows, {**partition_fields(partition), **estimate_json(estimate, seconds)}
        )

    def _explanation(self, partition: Partition, request: web.Request) -> Json:
        explanation = self._pool.explain(partition.partition)
        active = partition.log.segment_facts()[-1].base_offset
        answer = explanation_json(partition, explanation, active)
        answer["cleaned_end_offset"] = self._pool.state_of(partition.partition).cleaned_end
        jobs = self._pool.history.newest(partition.partition, LAST_JOBS)
        answer["last_jobs"] = [job_json(job) for job in jobs]
        if partition.log.damage.ranges:
            sees_group = partial(self._permissions.sees_group, request)
            answer["damage"] = self._damage.to_json(partition.log, sees_group)
            answer["sentences"] += [blocked_text(item) for item in answer["damage"]]
        return answer

    async def _history(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("topic", "partition", "limit"))
        limit = page_limit(query, JOBS, JOBS_MAX)
        if "partition" in query and "topic" not in query:
            raise ApiError(400, "a partition is named together with its topic")
        if "partition" in query:
            partition = TopicPartition(
                query["topic"], parse_integer(query["partition"], "partition")
            )
            jobs = self._pool.history.newest(partition, limit)
            if not jobs:  # a deleted partition may have jobs
                find_partition(self._topics, partition)
        elif "topic" in query:
            records = self._pool.history.newest(limit=JOBS_MAX)
            jobs = [job for job in records if job.partition.topic == query["topic"]][:limit]
            if not jobs:
                find_topic(self._topics, query["topic"])
        else:
            jobs = self._pool.history.newest(limit=limit)
        rows = ({**job_json(job), "deleted": self._is_deleted(job.partition)} for job in jobs)
        return await rows_response("jobs", rows)

    def _is_deleted(self, partition: TopicPartition) -> bool:
        topic = self._topics.get(partition.topic)
        return topic is None or partition.partition >= topic.partition_count

    # Actions ------------------------------------------------------------------

    def _action_handler(self, action: Action) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            query_parameters(request, ())
            partition = parse_partition(request)
            served = served_partition(self._topics, partition)
            return action_response(request, await action(served, request))

        return handle

    async def _request_clean(self, partition: Partition, request: web.Request) -> Json:
        flags = await query_flags(request, ("roll",))
        topic_partition = self._check_exists(partition)
        self._check_cleanable(partition)
        rolled = False
        if flags.get("roll"):
            before = len(partition.log.segments)
            try:
                partition.roll(self._env.wall_ms())
            except LogDirectoryError as error:
                raise ApiError(409, f"{topic_partition} is offline: {error}") from error
            except StorageError as error:  # no space, or no file descriptor
                raise ApiError(
                    409,
                    f"the active segment of {topic_partition} cannot be closed: {error}. Try "
                    "again later, or clean without `roll`",
                ) from error
            rolled = len(partition.log.segments) > before
        operator, quarantines = self._pool.operator, self._pool.in_progress.quarantines()
        requested = operator.clean_requested(topic_partition)
        sender = sender_of(request)
        requested_by = Requester.OPERATOR if sender.is_unlimited else str(sender.principal)
        operator.request_clean(topic_partition, requested_by)
        is_new = operator.clean_requested(topic_partition) != requested
        if not (rolled or is_new or topic_partition in quarantines):
            note_no_change(request)
        return {**self._explanation(partition, request), "rolled": rolled}

    def _check_cleanable(self, partition: Partition) -> None:
        topic_partition = partition.partition
        _check_compacted(partition)
        if not self._settings().enabled:
            raise ApiError(409, "the cleaner is switched off (cleaner.enabled)")
        if self._pool.operator.is_paused(topic_partition):
            raise ApiError(409, f"{topic_partition} is paused by an operator: resume it first")

    async def _pause(self, partition: Partition, request: web.Request) -> Json:
        await query_flags(request)
        changed = self._pool.operator.pause(self._check_exists(partition))
        return await self._durable_action_response(partition, changed)

    async def _resume(self, partition: Partition, request: web.Request) -> Json:
        await query_flags(request)
        changed = self._pool.operator.resume(self._check_exists(partition))
        return await self._durable_action_response(partition, changed)

    async def _abort(self, partition: Partition, request: web.Request) -> Json:
        await query_flags(request)
        return self._action_response(
            partition, self._pool.operator.abort(self._check_exists(partition))
        )

    async def _retry(self, partition: Partition, request: web.Request) -> Json:
        await query_flags(request)
        topic_partition = self._check_exists(partition)
        changed = topic_partition in self._pool.in_progress.quarantines()
        self._pool.operator.retry(topic_partition)
        self._pool.wake()
        return self._action_response(partition, changed)

    async def _end_transaction(self, partition: Partition, request: web.Request) -> Json:
        await query_flags(request)
        topic_partition = self._check_exists(partition)
        producer_id = parse_integer(
            request.match_info["producer_id"], "producer id", 0, (1 << 63) - 1
        )
        try:
            offset = await self._services.coordinators.hanging.abort(partition, producer_id)
        except NoTransactionError as error:
            raise ApiError(409, str(error)) from error
        except LogDirectoryError as error:
            raise ApiError(409, f"{topic_partition} is offline: {error}") from error
        except StorageError as error:
            raise ApiError(409, f"{topic_partition}: {error}") from error
        self._pool.wake()
        logger.warning(
            "transaction aborted by an operator",
            principal=str(principal_of(request)),
            partition=str(topic_partition),
            producer_id=producer_id,
            marker_offset=offset,
        )
        return {
            **partition_fields(topic_partition),
            "producer_id": producer_id,
            "marker_offset": offset,
        }

    def _action_response(self, partition: Partition, changed: bool) -> Json:
        topic_partition = partition.partition
        is_paused = self._pool.operator.is_paused(topic_partition)
        state = state_name(self._pool.in_progress.state(topic_partition))
        return {
            **partition_fields(topic_partition),
            "changed": changed,
            "state": state,
            "paused": is_paused,
        }

    async def _durable_action_response(self, partition: Partition, changed: bool) -> Json:
        """Return the response of an action in effect; `durable`: whether it survives a restart."""
        durable = await self._pool.operator.is_saved(partition.partition)
        return {**self._action_response(partition, changed), "durable": durable}

    async def _pause_all(self, request: web.Request) -> web.Response:
        return await self._apply_to_all(request, self._pool.operator.pause)

    async def _resume_all(self, request: web.Request) -> web.Response:
        return await self._apply_to_all(request, self._pool.operator.resume)

    async def _apply_to_all(
        self, request: web.Request, act: Callable[[TopicPartition], bool]
    ) -> web.Response:
        """Apply an action to all served compacted partitions, and to paused ones."""
        query_parameters(request, ())
        await query_flags(request)
        turns, changed = Turns(), 0
        of_directories: dict[str, TopicPartition] = {}  # each directory has one file
        for partition in self._topics.partitions():
            is_meant = partition.log.config.compacts or self._pool.operator.is_paused(
                partition.partition
            )
            if is_meant and self._exists(partition):
                with suppress(NotServedError):  # it has just gone offline
                    changed += act(partition.partition)
                    of_directories[os.path.dirname(partition.log.directory)] = partition.partition
            await turns.take()
        saved = await asyncio.gather(*map(self._pool.operator.is_saved, of_directories.values()))
        return action_response(request, {"changed": changed, "durable": all(saved)})

    # Lookup -------------------------------------------------------------------

    def _exists(self, partition: Partition) -> bool:
        return self._topics.partition(partition.partition) is partition

    def _check_exists(self, partition: Partition) -> TopicPartition:
        """Return its name. Raises ApiError 404 if it was deleted while the body was read."""
        if not self._exists(partition):
            raise ApiError(404, f"{partition.partition} was deleted during the request")
        return partition.partition


def _check_compacted(partition: Partition) -> None:
    """Raise ApiError if the cleaner never cleans the partition because of its policy."""
    topic_partition, config = partition.partition, partition.log.config
    if not config.policy_known:
        raise ApiError(
            409,
            f"the cleanup.policy of {topic_partition} is unknown: set it in the settings file or "
            "with an admin client",
        )
    if not config.compacts:
        policy = ",".join(config.cleanup_policy) or "empty"
        raise ApiError(400, f"{topic_partition} is not compacted: its cleanup.policy is {policy}")
