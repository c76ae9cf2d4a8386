"""Reloads the settings file at SIGHUP while the broker serves clients.

Rules. A file with an error changes nothing, and each error is logged with file, line and key. If a
topic of the file cannot be created, for lack of room for example, all else is in effect. The
outcome of the last reload is kept for metrics, the overview and systemd.
Dynamic settings override the file's. The log names each key that a dynamic setting overrides, and
each key that takes effect at the next start only. Reloads run one at a time; all signals that
arrive during one cause one more, and all that arrive during the start cause one when it ends.

A thread reads and checks the file, with the function that the start uses: checking thousands of
topics would block the event loop for too long.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import structlog
from pydantic import ValidationError

from broker.lifecycle import systemd
from broker.security.oauthbearer import JwksError
from broker.security.sasl import SaslSecrets, read_sasl_secrets
from broker.security.tls import ServerTls, TlsError, load_server_tls
from broker.topics.topics import TopicError
from config.loader import ConfigFileError
from config.reload import Reloaded, hidden_keys, reloaded
from config.security.secrets import SecretError
from config.security.token import TokenFileError, read_token
from config.settings import Settings
from storage.directory.cluster_metadata import ClusterMetadata
from storage.errors import StorageError

LISTED_MAX: Final = 100  # keys or errors that the log lists
STATUS_CHARS_MAX: Final = 360  # of a problem in systemd's status; the log has all of it

Load = Callable[[], Settings]


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """The contents of the files that the settings name."""

    token: bytes | None  # of the HTTP API
    tls: ServerTls | None
    sasl: SaslSecrets = field(default_factory=SaslSecrets)


# Returns why a topic of the file was not created; None if all topics exist.
Apply = Callable[[Settings, Secrets], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class LastReload:
    """The result of the last reload; the keys are those of the settings file.

    A start that could not create all topics of the file counts as one.
    """

    at_ms: int  # wall time
    failure: str | None  # the first error; None if the reload succeeded
    changed: tuple[str, ...] = ()  # keys that took effect
    needs_restart: tuple[str, ...] = ()  # keys that differ from those in effect until a restart
    is_in_effect: bool = False  # the file; a failure concerns the creation of its topics only

    @property
    def problem(self) -> str | None:
        """Return what the failure means; None if the reload succeeded."""
        if self.failure is None:
            return None
        if self.is_in_effect:
            return f"settings in effect, but not all topics created: {self.failure}"
        return f"settings not reloaded, the old ones stay in effect: {self.failure}"


# What `read_secrets` raises.
SECRETS_ERRORS: Final = (TokenFileError, TlsError, SecretError, JwksError)
# Errors in the file, and errors of the changes that it asks for.
_RELOAD_ERRORS: Final = (
    ConfigFileError,
    *SECRETS_ERRORS,
    TopicError,
    ValidationError,
    StorageError,
)

logger = structlog.get_logger("broker.reload")


def read_secrets(settings: Settings) -> Secrets:
    """Read the files. Raises TokenFileError, TlsError, SecretError, JwksError."""
    return Secrets(
        token=_read_token(settings),
        tls=load_server_tls(settings.tls),
        sasl=read_sasl_secrets(settings.sasl),
    )


def _read_token(settings: Settings) -> bytes | None:
    path = settings.http_token_file
    try:
        return None if path is None else read_token(path)
    except TokenFileError as error:
        raise TokenFileError(f"http_token_file: {error}") from None


def secret_problems(settings: Settings) -> list[str]:
    """Return a text for each part of the secrets that `read_secrets` could not read."""
    problems = []
    for read in (
        lambda: _read_token(settings),
        lambda: load_server_tls(settings.tls),
        lambda: read_sasl_secrets(settings.sasl),
    ):
        try:
            read()
        except SECRETS_ERRORS as error:
            problems.append(str(error))
    return problems


class Reloader:
    """Reads the file on request and applies the settings that can change at run time."""

    def __init__(
        self,
        load: Load,
        apply: Apply,
        running: Callable[[], Settings],
        metadata: Callable[[], ClusterMetadata],
        *,
        wall_ms: Callable[[], int],
    ) -> None:
        self._wall_ms = wall_ms
        self._load = load
        self._apply = apply
        self._running = running
        self._metadata = metadata
        self.certificate_refused = False  # by the last reload, which kept the old one
        self.last: LastReload | None = None
        self._requested = False
        self._has_started = False
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Return what the failure of the last reload means; None if it succeeded."""
        return None if self.last is None else self.last.problem

    def note_start(self, failure: str) -> None:
        """Note why the start did not create a topic of the file."""
        self.last = LastReload(self._wall_ms(), failure, is_in_effect=True)

    def start(self) -> None:
        """Carry out requests from now on: the broker has applied the settings of its start."""
        self._has_started = True
        if self._requested:
            self.request()

    def request(self) -> None:
        """Start a reload, or one more after the present one; before `start`, note the request."""
        self._requested = True
        if self._has_started and self._task is None:
            self._task = asyncio.create_task(self._work(), name="reload")

    async def stop(self) -> None:
        """Wait for the present reload and start no other."""
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
                except Exception as error:
                    # Supervised: the old settings stay in effect, and the next signal works.
                    logger.exception("settings not reloaded")
                    self.last = LastReload(self._wall_ms(), f"internal error: {error!r}")
                systemd.notify(f"READY=1\nSTATUS={_status(self.problem)}")
        finally:
            self._task = None

    async def reload(self) -> bool:
        """Read and apply the file; log the errors and return False if there was one."""
        try:
            file, secrets, result = await asyncio.to_thread(self._read)
            failure = await self._apply(result.settings, secrets)
        except _RELOAD_ERRORS as error:
            # Another error does not tell whether the certificate is good now.
            self.certificate_refused |= isinstance(error, TlsError)
            reasons = _reasons(error)
            for reason in reasons[:LISTED_MAX]:
                logger.error("settings not reloaded", reason=reason)
            self.last = LastReload(self._wall_ms(), reasons[0])
            return False
        self.certificate_refused = False
        self.last = LastReload(
            self._wall_ms(),
            failure,
            result.changed[:LISTED_MAX],
            result.fixed[:LISTED_MAX],
            is_in_effect=True,
        )
        if failure is not None:
            logger.error("topics of the settings file not created", reason=failure)
        self._log_outcome(result, file)
        return failure is None

    def _read(self) -> tuple[Settings, Secrets, Reloaded]:
        file = self._load()
        return file, read_secrets(file), reloaded(self._running(), file)

    def _log_outcome(self, outcome: Reloaded, file: Settings) -> None:
        metadata = self._metadata()
        topics = {name: entry.dynamic for name, entry in metadata.topics.items()}
        hidden = list(hidden_keys(file, topics, metadata.broker_dynamic))
        for item in hidden[:LISTED_MAX]:
            logger.warning(
                "setting overridden by a dynamic setting",
                key=item.key,
                value=item.value,
                by=item.by,
                dynamic_value=item.dynamic_value,
            )
        for key in outcome.fixed[:LISTED_MAX]:
            logger.warning("setting needs restart", key=key)
        logger.info(
            "settings reloaded",
            changed=list(outcome.changed[:LISTED_MAX]),
            changes=len(outcome.changed),
            overridden=len(hidden),
            needs_restart=len(outcome.fixed),
        )


def _status(problem: str | None) -> str:
    """Return the line that `systemctl status` shows after a reload."""
    line = " ".join((problem or "settings reloaded").split())
    return f"serving clients; {line[:STATUS_CHARS_MAX]}"


def _reasons(error: Exception) -> list[str]:
    """Return a text for each error."""
    if isinstance(error, ConfigFileError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, ValidationError):
        return [str(detail["msg"]) for detail in error.errors()]
    return [str(error)]
