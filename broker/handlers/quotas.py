"""DescribeClientQuotas and AlterClientQuotas (KIP-546)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import structlog

from broker.event_loop.loop_turns import Turns
from broker.handlers.security.acls import DENIED
from broker.network.request_context import RequestContext
from broker.quotas.entities import (
    QuotaError,
    check_entity,
    check_value,
    make_entity,
    parse_filter,
)
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasRequestEntry,
    AlterClientQuotasResponse,
    AlterClientQuotasResponseEntity,
    AlterClientQuotasResponseEntry,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    DescribeClientQuotasResponseEntity,
    DescribeClientQuotasResponseEntry,
    DescribeClientQuotasResponseValue,
)
from storage.directory.security_entries import QuotaEntity
from storage.errors import StorageError

logger = structlog.get_logger("broker.quotas")

ENTITY_PARTS_MAX: Final = 3  # a user, a client id, an address
ENTITIES_MAX: Final = 20_000  # the metadata is written whole at each change
NAME_BYTES_MAX: Final = 1_000

Row = tuple[QuotaEntity, dict[str, float]]


async def describe_client_quotas(
    context: RequestContext, _header: RequestHeader, body: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    """Return the quotas of the entities that match the filter."""
    turns = Turns()
    if not context.may_cluster(Operation.DESCRIBE_CONFIGS):
        return DescribeClientQuotasResponse(
            error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, error_message=DENIED, entries=None
        )
    try:
        entity_filter = parse_filter(
            [(row.entity_type, row.match_type, row.match) for row in body.components],
            strict=body.strict,
        )
    except QuotaError as error:
        return DescribeClientQuotasResponse(
            error_code=error.code, error_message=error.reason, entries=None
        )
    response = DescribeClientQuotasResponse(error_message="", entries=[])
    assert response.entries is not None
    async for entity, values in turns.over(context.services.quotas.entries.items()):
        if entity_filter.matches(entity):
            response.entries.append(
                DescribeClientQuotasResponseEntry(
                    entity=[
                        DescribeClientQuotasResponseEntity(entity_type=kind, entity_name=name)
                        for kind, name in entity
                    ],
                    values=[
                        DescribeClientQuotasResponseValue(key=key, value=value)
                        for key, value in values.items()
                    ],
                )
            )
    return response


async def alter_client_quotas(
    context: RequestContext, _header: RequestHeader, body: AlterClientQuotasRequest
) -> AlterClientQuotasResponse:
    """Change the quotas of each entity; the response has a row for each of them."""
    if not context.may_cluster(Operation.ALTER_CONFIGS):
        denied = QuotaError(DENIED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        return AlterClientQuotasResponse(
            entries=[
                _row(_named_entity(entry), denied) async for entry in Turns().over(body.entries)
            ]
        )
    return await context.services.metadata_writer.run(context.client, _alter, context, body)


def _named_entity(entry: AlterClientQuotasRequestEntry) -> QuotaEntity:
    """Return the entity of an entry; of one with too many parts, the first of them."""
    parts = entry.entity[: ENTITY_PARTS_MAX + 1]
    return make_entity({part.entity_type: part.entity_name for part in parts})


async def _alter(
    context: RequestContext, body: AlterClientQuotasRequest
) -> AlterClientQuotasResponse:
    services, turns = context.services, Turns()
    writer = services.metadata_writer
    quotas = dict(writer.metadata.client_quotas)
    errors: dict[QuotaEntity, QuotaError | None] = {}
    async for entry in turns.over(body.entries):
        entity = _named_entity(entry)
        keys = [op.key for op in entry.ops]
        try:
            if len(entry.entity) > ENTITY_PARTS_MAX:
                raise QuotaError(f"An entity has at most {ENTITY_PARTS_MAX} parts.")
            if entity in errors or len(set(keys)) < len(keys):
                raise QuotaError(f"Ignoring duplicate entity {_text(entity)}")
            errors[entity] = None
            values = _changed(entity, entry, quotas.get(entity, {}))
            if values and entity not in quotas and len(quotas) >= ENTITIES_MAX:
                raise QuotaError(f"The broker stores quotas of at most {ENTITIES_MAX} entities.")
            if values:
                quotas[entity] = values
            else:
                quotas.pop(entity, None)
        except QuotaError as error:
            errors[entity] = error
    if not body.validate_only and quotas != writer.metadata.client_quotas:
        try:
            await writer.save(replace(writer.metadata, client_quotas=quotas))
        except StorageError as error:
            failure = QuotaError(str(error), code_of(error))
            errors = {entity: refused or failure for entity, refused in errors.items()}
        else:
            services.quotas.update(quotas)
            changed = [_text(entity) for entity, refused in errors.items() if refused is None]
            logger.info("client quotas changed", entities=changed[:10], count=len(changed))
    return AlterClientQuotasResponse(
        entries=[_row(entity, error) async for entity, error in turns.over(errors.items())]
    )


def _changed(
    entity: QuotaEntity, entry: AlterClientQuotasRequestEntry, present: Mapping[str, float]
) -> dict[str, float]:
    """Return the quotas of an entity after a change. Raises QuotaError."""
    kinds = check_entity(entity)
    for _, name in entity:
        if name is not None and len(name.encode()) > NAME_BYTES_MAX:
            raise QuotaError(f"an entity has more than {NAME_BYTES_MAX} bytes in its name")
    values = dict(present)
    for op in entry.ops:
        if op.remove:
            values.pop(op.key, None)
        else:
            check_value(kinds, op.key, op.value)
            values[op.key] = op.value
    return values


def _row(entity: QuotaEntity, error: QuotaError | None) -> AlterClientQuotasResponseEntry:
    return AlterClientQuotasResponseEntry(
        error_code=ErrorCode.NONE if error is None else error.code,
        error_message=None if error is None else error.reason,
        entity=[
            AlterClientQuotasResponseEntity(entity_type=kind, entity_name=name)
            for kind, name in entity
        ],
    )


def _text(entity: QuotaEntity) -> str:
    """Return an entity as Kafka writes it."""
    parts = ", ".join(f"{kind}={'null' if name is None else name}" for kind, name in entity)
    return f"ClientQuotaEntity(entries={{{parts}}})"
