"""Settings in effect: the settings file with the dynamic settings of clients over it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import structlog

from broker.topics.topics import TopicError
from config.broker_keys import BrokerLimits, broker_limits, cleaner_settings
from config.settings import CleanerSettings, Settings
from config.topics.keys import (
    InvalidTopicConfigError,
    TopicConfig,
    TopicLayers,
    is_left_by_file,
    resolve,
)
from protocol.errors import ErrorCode
from storage.directory.partition_placement import TAKEN_OVER
from storage.manager.log_manager import LogManager

logger = structlog.get_logger("broker.topics")

# Internal topics are compacted whatever the defaults are; small segments keep them small.
INTERNAL_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    name: {"cleanup.policy": "compact", "segment.bytes": str(100 << 20)}
    for name in ("__consumer_offsets", "__transaction_state")
}


class EffectiveSettings:
    """Settings of topics, of the cleaner and of connections, by layer and resolved."""

    def __init__(self, file: Settings, manager: LogManager) -> None:
        self.file = file  # replaced by a reload
        self._manager = manager
        # What `cleaner` returned for which settings: each new segment asks for it.
        self._last_cleaner: tuple[Settings | None, Mapping[str, str], CleanerSettings] = (
            None,
            {},
            file.cleaner,
        )

    def layers(
        self,
        topic: str,
        dynamic: Mapping[str, str],
        *,
        taken_over: bool,
        file: Settings | None = None,
        broker_dynamic: Mapping[str, str] | None = None,
    ) -> TopicLayers:
        """Return the layers of a topic's settings; the topic need not exist.

        `file`, `broker_dynamic`: take these settings instead of those in effect.
        """
        file = file or self.file
        metadata = self._manager.metadata
        if broker_dynamic is None:
            broker_dynamic = metadata.broker_dynamic
        layers = replace(
            file.layers(topic),
            dynamic={**INTERNAL_SETTINGS.get(topic, {}), **dynamic},
            broker_dynamic=broker_dynamic,
            taken_over=taken_over and topic not in INTERNAL_SETTINGS,
        )
        entry = metadata.topics.get(topic)
        if entry is None or topic in file.topics:
            return layers
        return replace(layers, left_by_file=is_left_by_file(layers, entry.file_retention))

    def topic_config(self, topic: str) -> TopicConfig:
        """Return the settings of a topic; a topic that is not in the metadata counts as taken over.

        If the settings contradict each other by now (a default changed), return the defaults with
        an unknown cleanup policy, so that this mistake deletes nothing.
        """
        entry = self._manager.metadata.topics.get(topic)
        dynamic = entry.dynamic if entry else {}
        taken_over = entry is None or entry.created_by == TAKEN_OVER
        try:
            return resolve(self.layers(topic, dynamic, taken_over=taken_over))
        except InvalidTopicConfigError as error:
            logger.error(
                "topic settings rejected",
                topic=topic,
                reason=f"{error}: cleaning and retention are disabled",
            )
            return TopicConfig(policy_known=False)

    def limits(self) -> BrokerLimits:
        """Return the broker's limits."""
        return broker_limits(self.file, self._manager.metadata.broker_dynamic)

    def cleaner(self) -> CleanerSettings:
        """Return the cleaner's settings.

        If file and dynamic settings contradict each other by now (the file changed between two
        starts), return the file's: a broker that does not start cannot be reconfigured.
        """
        file, dynamic = self.file, self._manager.metadata.broker_dynamic
        last_file, last_dynamic, settings = self._last_cleaner
        if file is last_file and dynamic is last_dynamic:
            return settings
        try:
            settings = self.check_cleaner(file, dynamic)
        except TopicError as error:
            logger.error("dynamic cleaner settings ignored", reason=str(error))
            settings = file.cleaner
        self._last_cleaner = (file, dynamic, settings)
        return settings

    @staticmethod
    def check_cleaner(file: Settings, dynamic: Mapping[str, str]) -> CleanerSettings:
        """Return the cleaner's settings of a file and dynamic settings. Raises TopicError."""
        try:
            return cleaner_settings(file, dynamic)
        except InvalidTopicConfigError as error:
            raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from error


def resolve_layers(layers: TopicLayers) -> TopicConfig:
    """Return the settings that result from the layers. Raises TopicError."""
    try:
        return resolve(layers)
    except InvalidTopicConfigError as error:
        raise TopicError(ErrorCode.INVALID_CONFIG, str(error)) from error
