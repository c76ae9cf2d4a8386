"""Handler of FindCoordinator: this broker coordinates all groups and transactions."""

from broker.event_loop.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.acls import Operation, ResourceType
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    FindCoordinatorResponseCoordinator,
)

KEY_TYPE_GROUP = 0
KEY_TYPE_TRANSACTION = 1
UNKNOWN_KEY_TYPE = "this broker coordinates groups and transactions only"


async def find_coordinator(
    context: RequestContext, header: RequestHeader, body: FindCoordinatorRequest
) -> FindCoordinatorResponse:
    """FindCoordinator 0-6: return this broker for groups and transactional ids."""
    batched = header.api_version >= 4
    keys = body.coordinator_keys if batched else [body.key]
    result, turns, created = [], Turns(), None
    for key in keys:
        await turns.take()
        refusal = _key_refusal(context, key, body.key_type)
        if refusal is ErrorCode.NONE and created is None:
            created = await _create_internal_topic(context, body.key_type)
        result.append(_coordinator_of(context, key, body.key_type, refusal or created or refusal))
    if batched:
        return FindCoordinatorResponse(coordinators=result)
    only = result[0]
    return FindCoordinatorResponse(
        error_code=only.error_code,
        error_message=only.error_message,
        node_id=only.node_id,
        host=only.host,
        port=only.port,
    )


def _key_refusal(context: RequestContext, key: str, key_type: int) -> ErrorCode:
    if key_type == KEY_TYPE_GROUP and not context.may_group(Operation.DESCRIBE, key):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    if key_type == KEY_TYPE_TRANSACTION and not context.may(
        Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, key
    ):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return ErrorCode.NONE


async def _create_internal_topic(context: RequestContext, key_type: int) -> ErrorCode:
    if key_type == KEY_TYPE_GROUP:
        return await context.wait_offsets_topic()
    if key_type == KEY_TYPE_TRANSACTION:
        return await context.wait_transaction_topic()
    return ErrorCode.NONE


def _coordinator_of(
    context: RequestContext, key: str, key_type: int, created: ErrorCode
) -> FindCoordinatorResponseCoordinator:
    error, text = created, None
    if key_type not in (KEY_TYPE_GROUP, KEY_TYPE_TRANSACTION):
        error, text = ErrorCode.INVALID_REQUEST, UNKNOWN_KEY_TYPE
    elif error is ErrorCode.NONE and key_type == KEY_TYPE_GROUP:
        error = context.coordinator.availability(key)
    elif error is ErrorCode.NONE:
        error = context.transactions.availability(key)
    if error not in (ErrorCode.NONE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS):
        return FindCoordinatorResponseCoordinator(
            key=key, node_id=-1, host="", port=-1, error_code=error, error_message=text
        )
    # A partition that is still loading is found all the same; the group APIs say "retry".
    return FindCoordinatorResponseCoordinator(
        key=key, node_id=context.node_id, host=context.host, port=context.port
    )
