"""The settings of the group coordinator."""

from dataclasses import dataclass, field

from broker.groups.live_consumer_group import ConsumerRules
from broker.groups.model import GroupRules

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
    max_protocols: int = 64  # clients send 1 to 4
    max_member_metadata_bytes: int = 1024 * 1024  # the group's record holds that of all members
    max_metadata_bytes: int = 256 * 1024 * 1024  # of the members of all groups, in memory
    append_timeout_ms: int = 5_000  # offsets.commit.timeout.ms
