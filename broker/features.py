"""The features of KIP-584 that this broker has: their levels, and which changes are possible; pure.

`metadata.version` has one level, that of Apache Kafka 4.3: there is no older form of the metadata.
`transaction.version` decides which protocol transactional clients follow, and `group.version`
whether the consumer rebalance protocol is available. Their levels are in the metadata. Checks and
texts are those of Kafka's controller.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

GROUP_VERSION: Final = "group.version"


class Feature(NamedTuple):
    """The supported levels of a feature, and the level of a new cluster."""

    lowest: int
    highest: int
    default: int


FEATURES: Final[Mapping[str, Feature]] = {
    GROUP_VERSION: Feature(0, 1, 1),
    "metadata.version": Feature(30, 30, 30),  # 4.3-IV0
    "transaction.version": Feature(0, 2, 2),
}


class UpgradeType(IntEnum):
    """How a feature may change (UpdateFeatures)."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


class FeatureUpdate(NamedTuple):
    """One row of a request."""

    name: str
    level: int
    upgrade_type: int


class FeatureError(Exception):
    """A change that is refused; none of the request's changes is made."""


def levels(stored: Mapping[str, int]) -> dict[str, int]:
    """Return the level of each feature; stored levels that are not supported do not count."""
    result = {name: feature.default for name, feature in FEATURES.items()}
    for name, level in stored.items():
        feature = FEATURES.get(name)
        if feature is not None and feature.lowest <= level <= feature.highest:
            result[name] = level
    return result


def plan_update(
    stored: Mapping[str, int], updates: Sequence[FeatureUpdate], node_id: int
) -> dict[str, int]:
    """Return the levels to store after an update. Raises FeatureError."""
    present, changed = levels(stored), dict(stored)
    for update in updates:
        reason = _refusal(present, update, node_id)
        if reason is not None:
            raise FeatureError(
                "The update failed for all features since the following feature had an error: "
                f"Invalid update version {update.level} for feature {update.name[:200]}. {reason}"
            )
        changed[update.name] = update.level
    return changed


def _refusal(present: Mapping[str, int], update: FeatureUpdate, node_id: int) -> str | None:
    feature = FEATURES.get(update.name)
    if update.upgrade_type not in tuple(UpgradeType):
        return "The controller does not support the given upgrade type."
    if update.level < 0:
        return "A feature version cannot be less than 0."
    if feature is None:
        return f"Local controller {node_id} does not support this feature."
    if not feature.lowest <= update.level <= feature.highest:
        return (
            f"Local controller {node_id} only supports versions {feature.lowest}-{feature.highest}"
        )
    if update.level < present[update.name] and update.upgrade_type == UpgradeType.UPGRADE:
        return (
            "Can't downgrade the version of this feature without setting the upgrade type to "
            "either safe or unsafe downgrade."
        )
    return None
