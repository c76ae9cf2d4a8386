"""/api/v1/log: list damage, verify, skip damage, truncate logs. openapi/ lists the paths.

Status codes are those of the cleaner's API: 400 for an invalid request, 404 for an unknown
partition, 409 if the request is not possible now.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from aiohttp import web

from broker.damage.damaged_reads import DamageWatch, damage_fields
from broker.damage.log_repair import (
    LogRepair,
    NotDamagedError,
    SkipRefusedError,
    TruncationRefusedError,
)
from broker.http.api.json_shapes import Json, partition_fields
from broker.http.api.lookup import LogFailures, served_partition
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    json_response,
    parse_integer,
    parse_partition,
    query_flags,
    query_parameters,
)
from broker.http.audited import client_of, note_no_change
from broker.http.authentication import Allows
from broker.topics.topics import Topics
from storage.errors import LogDirectoryError, StorageError
from storage.model import TopicPartition

ROOT: Final = "/api/v1/log"
PARTITION: Final = f"{ROOT}/partitions/{{topic}}/{{partition}}"
SKIP: Final = f"{PARTITION}/skip"  # this and the next remove records
TRUNCATE: Final = f"{PARTITION}/truncate"
OFFSET_MAX: Final = (1 << 63) - 1


class LogApi:
    """Handlers of the requests under /api/v1/log."""

    def __init__(
        self,
        topics: Topics,
        damage: DamageWatch,
        repair: LogRepair,
        *,
        skipped: Callable[[TopicPartition], None],
        fail_directory: Callable[[LogDirectoryError], None],
        allows: Allows,
    ) -> None:
        """`skipped` is called after damage of a partition was skipped."""
        self._topics = topics
        self._damage = damage
        self._repair = repair
        self._skipped = skipped
        self._permissions = Permissions(allows)
        self._failures = LogFailures(fail_directory)

    def routes(self) -> Iterator[web.RouteDef]:
        """Return the routes for the HTTP server."""
        yield web.get(f"{PARTITION}/damage", self._damaged)
        yield web.post(f"{PARTITION}/verify", self._verify)
        yield web.post(SKIP, self._skip)
        yield web.post(TRUNCATE, self._truncate)

    async def _damaged(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = served_partition(self._topics, parse_partition(request))
        opened = partition.log
        return json_response(
            {
                **partition_fields(partition.partition),
                "log_start_offset": opened.log_start_offset,
                "log_end_offset": opened.log_end_offset,
                "damage": self._damage.to_json(
                    opened, partial(self._permissions.sees_group, request)
                ),
                "uncleanable": [damage_fields(damage) for damage in opened.damage.uncleanable],
            }
        )

    async def _verify(self, request: web.Request) -> web.Response:
        note_no_change(request)  # it reads
        query = query_parameters(request, ("from_offset", "end_offset"))
        bounds = {key: parse_integer(text, key, 0, OFFSET_MAX) for key, text in query.items()}
        await query_flags(request)
        partition = served_partition(self._topics, parse_partition(request))
        try:
            verified_offsets = await self._repair.verify(
                partition,
                bounds.get("from_offset"),
                bounds.get("end_offset"),
                client=client_of(request),
            )
        except (StorageError, OSError) as error:
            raise self._failures.refuse(partition, error) from error
        return json_response(
            {
                **partition_fields(partition.partition),
                "first_offset": verified_offsets.first_offset,
                "next_offset": verified_offsets.next_offset,
                "end_offset": verified_offsets.end_offset,
                "done": verified_offsets.next_offset >= verified_offsets.end_offset,
                "bytes": verified_offsets.size_bytes,
                "batches": verified_offsets.batches,
                "records": verified_offsets.records,
                "damage": [damage_fields(damage) for damage in verified_offsets.damage],
            }
        )

    async def _skip(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("offset",))
        if "offset" not in query:
            raise ApiError(400, "offset is missing: expected an offset in the damaged range")
        offset = parse_integer(query["offset"], "offset", 0, OFFSET_MAX)
        await query_flags(request)
        partition = served_partition(self._topics, parse_partition(request))
        try:
            skipped = await self._repair.skip(partition, offset)
        except (NotDamagedError, SkipRefusedError) as error:
            raise ApiError(409, str(error)) from error
        except (StorageError, OSError) as error:
            raise self._failures.refuse(partition, error) from error
        self._skipped(partition.partition)
        answer: Json = {
            **partition_fields(partition.partition),
            **damage_fields(skipped.damage),
            "kept_as": skipped.kept_as,
        }
        return json_response(answer)

    async def _truncate(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("to",))
        if "to" not in query:
            raise ApiError(400, "to is missing: expected the new end offset of the log")
        offset = parse_integer(query["to"], "to", 0, OFFSET_MAX)
        flags = await query_flags(request, ("force",))
        partition = served_partition(self._topics, parse_partition(request))
        try:
            done = await self._repair.truncate(partition, offset, force=flags.get("force", False))
        except TruncationRefusedError as error:
            raise ApiError(409, str(error)) from error
        except (StorageError, OSError) as error:
            raise self._failures.refuse(partition, error) from error
        answer: Json = {
            **partition_fields(partition.partition),
            "end_offset": done.end_offset,
            "former_end_offset": done.former_end_offset,
            "acknowledged": done.acknowledged,
        }
        return json_response(answer)
