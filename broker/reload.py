"""SIGHUP: the settings file is read anew while clients are served.

Rules. All or nothing: a file with an error changes nothing, and each error is told with file, line
and key. Dynamic settings stay over the file's, and each key that they hide is named; so is each key
that takes effect only at the next start. One reload at a time; signals that come meanwhile are one
more reload.

The file is read and checked in one thread, by the same function as at the start: reading is the
least of it, parsing and checking some thousand topics take longer than the loop may be held for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from pydantic import ValidationError

from broker import systemd
from broker.topics.topics import TopicError
from config.loader import ConfigFileError
from config.reload import Reloaded, hidden_keys, reloaded
from config.settings import Settings
from config.token import TokenFileError, read_token
from storage.directory.cluster_metadata import ClusterMetadata
from storage.errors import StorageError

NAMED_MAX: Final = 100  # keys or problems that are named one by one; more would not be read

Load = Callable[[], Settings]
Apply = Callable[[Settings, bytes | None], Awaitable[None]]

# What the file can be wrong about, and what can be in the way of what it asks for.
UNUSABLE: Final = (ConfigFileError, TokenFileError, TopicError, ValidationError, StorageError)

logger = structlog.get_logger("broker.reload")


class Reloader:
    """Reads the file when it is asked to, and hands over what takes effect."""

    def __init__(
        self,
        load: Load,
        apply: Apply,
        running: Callable[[], Settings],
        metadata: Callable[[], ClusterMetadata],
    ) -> None:
        self._load = load
        self._apply = apply
        self._running = running
        self._metadata = metadata
        self._requested = False
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Read the file; returns at once."""
        self._requested = True
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="reload")

    async def stop(self) -> None:
        """Begin no other reload, and wait for the one under way."""
        self._requested = False
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _work(self) -> None:
        try:
            while self._requested:
                self._requested = False
                systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
                try:
                    await self.reload()
                except Exception:
                    # Supervised: the daemon goes on as it was, and the next signal is heard.
                    logger.exception("settings not reloaded")
                systemd.notify("READY=1")
        finally:
            self._task = None

    async def reload(self) -> bool:
        """Read the file and let it take effect; False if it cannot be used, which is told."""
        try:
            file, token = await asyncio.to_thread(self._read)
            result = reloaded(self._running(), file)
            await self._apply(result.settings, token)
        except (
            ConfigFileError,
            TokenFileError,
            TopicError,
            ValidationError,
            StorageError,
        ) as error:
            for reason in _reasons(error)[:NAMED_MAX]:
                logger.error("settings not reloaded", reason=reason)
            return False
        self._log_outcome(result, file)
        return True

    def _read(self) -> tuple[Settings, bytes | None]:
        file = self._load()
        path = file.http_token_file
        return file, None if path is None else read_token(path)

    def _log_outcome(self, value: Reloaded, file: Settings) -> None:
        metadata = self._metadata()
        topics = {name: entry.dynamic for name, entry in metadata.topics.items()}
        hidden = list(hidden_keys(file, topics, metadata.broker_dynamic))
        for item in hidden[:NAMED_MAX]:
            logger.warning(
                "hidden by a dynamic setting",
                key=item.key,
                value=item.value,
                by=item.by,
                dynamic_value=item.dynamic_value,
            )
        for key in value.fixed[:NAMED_MAX]:
            logger.warning("takes effect at the next start only", key=key)
        logger.info(
            "settings reloaded",
            changed=list(value.changed[:NAMED_MAX]),
            changes=len(value.changed),
            hidden=len(hidden),
            fixed=len(value.fixed),
        )


def _reasons(error: Exception) -> list[str]:
    """One text for each problem."""
    if isinstance(error, ConfigFileError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, ValidationError):
        return [str(detail["msg"]) for detail in error.errors()]
    return [str(error)]
