"""The settings of the group coordinator."""

from dataclasses import dataclass, field

from broker.groups.classic.model import GroupRules
from broker.groups.live_consumer_group import ConsumerRules
from config.settings import GroupSettings

WEEK_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator, named as Kafka's broker settings where Kafka has them."""

    rules: GroupRules = field(default_factory=GroupRules)
    consumer_rules: ConsumerRules = field(default_factory=ConsumerRules)
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    offsets_retention_ms: int = WEEK_MS  # offsets.retention.minutes
    offset_metadata_max_bytes: int = 4_096
    # Kafka has none of the following bounds.
    max_groups: int = 100_000
    max_protocols: int = 8  # clients send 1 to 4; a join looks at those of all members
    max_member_metadata_bytes: int = 1024 * 1024  # the group's record holds that of all members
    max_metadata_bytes: int = 256 * 1024 * 1024  # of the members of all groups, in memory
    max_offsets_bytes: int = 1024 * 1024 * 1024  # committed offsets of all groups, in memory
    append_timeout_ms: int = 5_000  # offsets.commit.timeout.ms

    @classmethod
    def of(cls, groups: GroupSettings) -> "CoordinatorSettings":
        """Return the settings that the section `groups` of the settings file says."""
        policy = groups.consumer_migration_policy
        return cls(
            rules=GroupRules(
                initial_rebalance_delay_ms=groups.initial_rebalance_delay_ms,
                max_group_size=groups.members,
            ),
            consumer_rules=ConsumerRules(
                session_timeout_ms=groups.consumer_session_timeout_ms,
                heartbeat_interval_ms=groups.consumer_heartbeat_interval_ms,
                max_size=groups.members,
                allows_upgrade=policy in ("bidirectional", "upgrade"),
                allows_downgrade=policy in ("bidirectional", "downgrade"),
            ),
            group_min_session_timeout_ms=groups.min_session_timeout_ms,
            group_max_session_timeout_ms=groups.max_session_timeout_ms,
            offsets_retention_ms=groups.offsets_retention_minutes * 60_000,
            offset_metadata_max_bytes=groups.offset_metadata_bytes,
        )
