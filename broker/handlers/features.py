"""UpdateFeatures (KIP-584)."""

from dataclasses import replace

import structlog

from broker.event_loop.loop_turns import Turns
from broker.features import FeatureError, FeatureUpdate, UpgradeType, levels, plan_update
from broker.handlers.security.acls import DENIED
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
    UpdateFeaturesResponseResult,
)
from storage.errors import StorageError

logger = structlog.get_logger("broker.features")


async def update_features(
    context: RequestContext, header: RequestHeader, body: UpdateFeaturesRequest
) -> UpdateFeaturesResponse:
    """Change the levels of features, all or none; answers when the change is durable."""
    if not context.may_cluster(Operation.ALTER):
        return UpdateFeaturesResponse(
            error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, error_message=DENIED
        )
    writer = context.services.metadata_writer
    return await writer.run(context.client, _update, context, header, body)


async def _update(
    context: RequestContext, header: RequestHeader, body: UpdateFeaturesRequest
) -> UpdateFeaturesResponse:
    writer = context.services.metadata_writer
    updates = []
    async for row in Turns().over(body.feature_updates):
        upgrade_type = row.upgrade_type
        if header.api_version == 0 and row.allow_downgrade:
            upgrade_type = UpgradeType.SAFE_DOWNGRADE
        updates.append(FeatureUpdate(row.feature, row.max_version_level, upgrade_type))
    stored = writer.metadata.features
    try:
        changed = plan_update(stored, updates, context.services.node_id)
        if changed != stored and not body.validate_only:
            await writer.save(replace(writer.metadata, features=changed))
            logger.info("features changed", levels=levels(changed))
    except FeatureError as error:
        return UpdateFeaturesResponse(
            error_code=ErrorCode.INVALID_UPDATE_VERSION, error_message=str(error)
        )
    except StorageError as error:
        return UpdateFeaturesResponse(error_code=code_of(error), error_message=str(error))
    results = [UpdateFeaturesResponseResult(feature=update.name) for update in updates]
    return UpdateFeaturesResponse(results=results)
