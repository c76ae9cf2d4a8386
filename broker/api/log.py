"""/api/v1/log: list damage of logs, verify logs, skip damage. openapi.py lists the paths.

Status codes are those of the cleaner's API: 400 for an invalid request, 404 for an unknown
partition, 409 if the request is not possible now.
"""

from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import web

from broker.api.requests import ApiError, flags_of, json_response, number, partition_of, query_of
from broker.api.shapes import Json, named
from broker.damage import DamageWatch, damage_fields
from broker.log_repair import LogRepair, NotDamagedError, SkipRefusedError
from broker.partition import Partition
from broker.topics import Topics
from storage.errors import LogDirectoryError, StorageError
from storage.log_manager import LogManager
from storage.model import TopicPartition

ROOT: Final = "/api/v1/log"
OFFSET_MAX: Final = (1 << 63) - 1


class LogApi:
    """Handlers of the requests under /api/v1/log."""

    def __init__(
        self,
        manager: LogManager,
        topics: Topics,
        damage: DamageWatch,
        repair: LogRepair,
        *,
        skipped: Callable[[TopicPartition], None],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        """`skipped` is called after damage of a partition was skipped."""
        self._manager = manager
        self._topics = topics
        self._damage = damage
        self._repair = repair
        self._skipped = skipped
        self._fail_directory = fail_directory

    def routes(self) -> Iterator[web.RouteDef]:
        """Return the routes for the HTTP server."""
        partition = f"{ROOT}/partitions/{{topic}}/{{partition}}"
        yield web.get(f"{partition}/damage", self._damaged)
        yield web.post(f"{partition}/verify", self._verify)
        yield web.post(f"{partition}/skip", self._skip)

    async def _damaged(self, request: web.Request) -> web.Response:
        query_of(request, ())
        partition = self._find(partition_of(request))
        opened = partition.log
        return json_response(
            {
                **named(partition.partition),
                "log_start_offset": opened.log_start_offset,
                "log_end_offset": opened.log_end_offset,
                "damage": self._damage.to_json(opened),
                "uncleanable": [damage_fields(one) for one in opened.uncleanable],
            }
        )

    async def _verify(self, request: web.Request) -> web.Response:
        query = query_of(request, ("from_offset", "end_offset"))
        bounds = {key: number(text, key, 0, OFFSET_MAX) for key, text in query.items()}
        await flags_of(request)
        partition = self._find(partition_of(request))
        try:
            found = await self._repair.verify(
                partition, bounds.get("from_offset"), bounds.get("end_offset")
            )
        except (StorageError, OSError) as error:
            raise self._refused(partition, error) from error
        return json_response(
            {
                **named(partition.partition),
                "first_offset": found.first_offset,
                "next_offset": found.next_offset,
                "end_offset": found.end_offset,
                "done": found.next_offset >= found.end_offset,
                "bytes": found.size_bytes,
                "batches": found.batches,
                "records": found.records,
                "damage": [damage_fields(one) for one in found.damage],
            }
        )

    async def _skip(self, request: web.Request) -> web.Response:
        query = query_of(request, ("offset",))
        if "offset" not in query:
            raise ApiError(400, "offset is missing: expected an offset in the damaged range")
        offset = number(query["offset"], "offset", 0, OFFSET_MAX)
        await flags_of(request)
        partition = self._find(partition_of(request))
        try:
            skipped = await self._repair.skip(partition, offset)
        except (NotDamagedError, SkipRefusedError) as error:
            raise ApiError(409, str(error)) from error
        except (StorageError, OSError) as error:
            raise self._refused(partition, error) from error
        self._skipped(partition.partition)
        answer: Json = {
            **named(partition.partition),
            **damage_fields(skipped.damage),
            "kept_as": skipped.kept_as,
        }
        return json_response(answer)

    def _refused(self, partition: Partition, error: StorageError | OSError) -> ApiError:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            error = self._manager.failure_in(partition.log.directory, error)
        if isinstance(error, LogDirectoryError):
            self._fail_directory(error)
        return ApiError(409, f"{partition.partition}: {error}")

    def _find(self, where: TopicPartition) -> Partition:
        topic = self._topics.get(where.topic)
        if topic is None:
            raise ApiError(404, f"there is no topic {where.topic[:300]}")
        found = topic.partitions.get(where.partition)
        if found is not None:
            return found
        if where.partition in topic.offline:
            raise ApiError(409, f"{where} is offline: {topic.offline[where.partition]}")
        raise ApiError(404, f"topic {topic.name} has {topic.partition_count} partitions, from 0 on")
