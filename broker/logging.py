"""The log of the daemon on standard error: one structlog event per line.

Lines are aligned text on a terminal, otherwise JSON. In systemd's journal they have a priority, by
which `journalctl -p` selects. Libraries that use the standard library's logging get the same
format. A closed pipe never stops the broker: its lines are counted and dropped.

Lines that a client can cause at will go through a `RateLimitedLogger`, so that no client can fill
the disk with them.
"""

import asyncio
import errno
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from config.printable import printable

Format = Literal["auto", "json", "text"]

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}
# Of syslog: at the beginning of a line, `<4>` tells systemd the priority (sd-daemon(3)).
_PRIORITIES: Final = {
    "debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2,
}  # fmt: skip
AUDIT: Final = "audit"  # the logger of the audit log
# The events of the audit log that stay in memory. One has up to a hundred settings of 300
# characters, so their text is bounded, too.
RECENT_EVENTS_MAX: Final = 2000
RECENT_CHARACTERS_MAX: Final = 4 << 20
TEXT_FIELDS_MAX: Final = 10  # of an info line for people: three lines of a terminal
_COMMON_FIELDS: Final = frozenset(
    {"event", "level", "logger", "timestamp", "suppressed", "repeated"}
)
# Libraries whose debug lines would drown ours.
_QUIET_LIBRARIES = ("asyncio", "aiohttp", "numba", "urllib3")

# The text renderer shows a value with one of these as its repr.
_REPR_SHOWN: Final = frozenset(" \t=\r\n\"'")

# The limit of one event and subject (a client's address): a burst, then one line a second. An
# address that floods the broker causes about 20 MB of log a day; the closed connections of an
# ordinary day are all logged.
LINES_PER_BURST: Final = 100
LINES_PER_SECOND: Final = 1.0
# The limit of one event over all subjects: ten addresses can flood the broker without hiding the
# lines of others, and any number of addresses causes at most about 200 MB a day.
EVENT_LINES_PER_BURST: Final = 1000
EVENT_LINES_PER_SECOND: Final = 10.0
SUBJECTS_MAX: Final = 1000  # in memory, 200 bytes each; the least recently used is dropped
# `info_unless_repeated` only counts a line if it has written an equal one within this time.
REPEAT_SECONDS: Final = 60.0
REPEATED_MAX: Final = 1000  # lines in memory, 1 KB each; the oldest is dropped


@dataclass(slots=True)
class _PrincipalEvents:
    """The last events of one principal, with their numbers."""

    events: deque[tuple[int, str]] = field(default_factory=deque)
    characters: int = 0


class RecentEvents:
    """The last events of a log, as JSON; each has a number, which rises.

    Above the limits, the principal with the most characters loses its oldest event. So a principal
    with many events does not displace those of others.
    """

    def __init__(self) -> None:
        self._principals: dict[str, _PrincipalEvents] = {}
        self._events = 0
        self._characters = 0
        self._count = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event; drop older ones above the limits."""
        text = json.dumps(event, default=repr)
        self._count += 1
        own = self._principals.setdefault(str(event.get("principal", "")), _PrincipalEvents())
        own.events.append((self._count, text))
        own.characters += len(text)
        self._events += 1
        self._characters += len(text)
        while self._events > RECENT_EVENTS_MAX or self._characters > RECENT_CHARACTERS_MAX:
            self._drop_oldest_of_largest()

    def _drop_oldest_of_largest(self) -> None:
        name, largest = max(self._principals.items(), key=lambda item: item[1].characters)
        size = len(largest.events.popleft()[1])
        largest.characters -= size
        self._events -= 1
        self._characters -= size
        if not largest.events:
            del self._principals[name]

    def newest(self, before: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield number and JSON of the events, the newest first; only those `before` a number."""
        all_events = chain.from_iterable(own.events for own in self._principals.values())
        for number, text in sorted(all_events, reverse=True):
            if before is None or number < before:
                yield number, text


recent_audit_events: Final = RecentEvents()  # of this process, which has one audit log


class LogStream:
    """A text stream that survives the loss of its reader; `lines_lost` counts dropped lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lines_lost = 0

    def write(self, text: str) -> int:
        """Write one line."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # closed pipe or closed file
            self.lines_lost += 1
            return 0

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lines_lost += 1

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()


def open_audit_file(path: str) -> TextIO:
    """Open the file of the audit log, to append to it. Raises OSError.

    An ordinary open of a pipe waits for a reader. Without a reader, this is an error.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "no process reads this pipe", path) from None
        raise
    os.set_blocking(fd, True)
    return open(fd, "a", buffering=1, encoding="utf-8")


def configure(
    level: str = "info",
    form: Format = "auto",
    stream: TextIO | None = None,
    *,
    audits: bool = True,
    audit_stream: TextIO | None = None,
) -> LogStream:
    """Set up logging for this process. `level` is debug, info, warning or error.

    The lines of the audit log do not depend on `level`; `audit_stream` receives them as JSON.
    """
    output = LogStream(stream or sys.stderr)
    audit_output = output if audit_stream is None else LogStream(audit_stream)
    as_text = writes_text(form, output.isatty())
    rendering = _rendering(as_text, output.isatty())
    if _is_journal(stream or sys.stderr):
        rendering.append(_add_priority)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            _LevelFilter(numeric, audits=audits),
            *shared,
            _remember_audit_events,
            _Renderer(
                rendering,
                rendering if audit_stream is None else _rendering(False, False),
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(min(numeric, logging.INFO)),
        logger_factory=lambda *names: _NamedLogger(
            audit_output if names == (AUDIT,) else output, *names
        ),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *rendering,
            ],
        )
    )
    logging.basicConfig(level=numeric, handlers=[handler], force=True)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(numeric, logging.WARNING))
    return output


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd has connected the stream to its journal."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _add_priority(_logger: object, method: str, line: Any) -> str:
    return f"<{_PRIORITIES.get(method, _PRIORITIES['info'])}>{line}"


class _LevelFilter:
    """Drops lines below the level; those of the audit log only if it is off."""

    def __init__(self, level: int, *, audits: bool) -> None:
        self._level = level
        self._audits = audits

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if getattr(logger, "name", "") == AUDIT:
            is_written = self._audits
        else:
            is_written = _LEVELS[method] >= self._level
        if not is_written:
            raise structlog.DropEvent
        return event


def _remember_audit_events(
    logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if getattr(logger, "name", "") == AUDIT:
        recent_audit_events.add(event)
    return event


class _Renderer:
    """Renders the lines of the audit log in their own way."""

    def __init__(self, processors: Sequence[Processor], of_audit: Sequence[Processor]) -> None:
        self._processors = processors
        self._of_audit = of_audit

    def __call__(self, logger: object, method: str, event: Any) -> Any:
        is_audit = getattr(logger, "name", "") == AUDIT
        for processor in self._of_audit if is_audit else self._processors:
            event = processor(logger, method, event)
        return event


@dataclass(slots=True)
class _Allowance:
    """How many lines may be written now, and how many were suppressed."""

    lines: float
    updated: float  # seconds of the clock
    suppressed: int = 0

    def refill(self, now: float, *, burst: float, per_second: float) -> None:
        """Add the lines of the time since the last call."""
        self.lines = min(burst, self.lines + (now - self.updated) * per_second)
        self.updated = now


@dataclass(slots=True)
class _Repeated:
    """A line, and how many equal ones followed it."""

    event: str
    subject: str
    fields: dict[str, Hashable]
    until: float  # seconds of the clock; from then on, an equal line is written
    count: int = 0


class RateLimitedLogger:
    """Limits the rate of lines of each event and subject; counts the suppressed lines.

    A subject is the cause of the lines, such as the address of a client: a subject with many lines
    does not hide the lines of another. The first line after a gap has the number of suppressed
    lines as the field `suppressed`.

    `info_unless_repeated` counts equal lines, so that they do not use up the rate of their subject.
    While they repeat, it writes the line again every REPEAT_SECONDS, with their number as the field
    `repeated`.
    """

    suppressed_total = 0  # over all loggers of the process, for the metrics

    def __init__(
        self, logger: FilteringBoundLogger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._events: dict[str, _Allowance] = {}  # bounded by the number of events in the code
        self._subjects: dict[tuple[str, str], _Allowance] = {}  # least recently used first
        self._repeated: dict[Hashable, _Repeated] = {}  # oldest first

    def info(self, event: str, *, subject: str = "", **fields: object) -> None:
        """Write a line at level info, or count it."""
        allowance = self._take(event, subject)
        if allowance is not None:
            self._logger.info(event, **self._with_gap(allowance, fields))

    def info_unless_repeated(self, event: str, *, subject: str = "", **fields: Hashable) -> None:
        """Write a line at level info, or count it. Call it in the event loop."""
        key, now = (event, *fields.items()), self._clock()
        repeated = self._repeated.get(key)
        if repeated is not None and now < repeated.until:
            RateLimitedLogger.suppressed_total += 1
            if not repeated.count:
                loop = asyncio.get_running_loop()
                loop.call_later(repeated.until - now, self._repeat, repeated)
            repeated.count += 1
            return
        allowance = self._take(event, subject)
        if allowance is None:
            return
        if repeated is not None:
            self._write_repeated(self._repeated.pop(key))
        self._repeated[key] = _Repeated(event, subject, fields, now + REPEAT_SECONDS)
        if len(self._repeated) > REPEATED_MAX:
            self._write_repeated(self._repeated.pop(next(iter(self._repeated))))
        self._logger.info(event, **self._with_gap(allowance, dict(fields)))

    def write_repeated(self) -> None:
        """Write the numbers of equal lines that were not written yet."""
        for repeated in self._repeated.values():
            self._write_repeated(repeated)

    def _repeat(self, repeated: _Repeated) -> None:
        """Write the number of equal lines, or try again later."""
        if repeated.count:
            repeated.until = self._clock() + REPEAT_SECONDS
            if self._take(repeated.event, repeated.subject) is None:
                asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._repeat, repeated)
            else:
                self._write_repeated(repeated)

    def _write_repeated(self, repeated: _Repeated) -> None:
        if repeated.count:
            self._logger.info(repeated.event, **repeated.fields, repeated=repeated.count)
            repeated.count = 0

    def error(self, event: str, *, subject: str = "", **fields: object) -> None:
        """Write a line at level error, or count it."""
        allowance = self._take(event, subject)
        if allowance is not None:
            self._logger.error(event, **self._with_gap(allowance, fields))

    def _take(self, event: str, subject: str) -> _Allowance | None:
        """Return the allowance that the line was taken from; None if it may not be written."""
        now = self._clock()
        own = self._subjects.pop((event, subject), None) or _Allowance(LINES_PER_BURST, now)
        self._subjects[event, subject] = own
        shared = self._events.setdefault(event, _Allowance(EVENT_LINES_PER_BURST, now))
        own.refill(now, burst=LINES_PER_BURST, per_second=LINES_PER_SECOND)
        shared.refill(now, burst=EVENT_LINES_PER_BURST, per_second=EVENT_LINES_PER_SECOND)
        if len(self._subjects) > SUBJECTS_MAX:
            del self._subjects[next(iter(self._subjects))]
        if own.lines < 1 or shared.lines < 1:
            own.suppressed += 1
            RateLimitedLogger.suppressed_total += 1
            return None
        own.lines -= 1
        shared.lines -= 1
        return own

    @staticmethod
    def _with_gap(allowance: _Allowance, fields: dict[str, object]) -> dict[str, object]:
        if allowance.suppressed:
            fields["suppressed"] = allowance.suppressed
            allowance.suppressed = 0
        return fields


def writes_text(form: Format, is_terminal: bool) -> bool:
    """Return whether log lines are text for people rather than JSON."""
    return form == "text" or (form == "auto" and is_terminal)


def may_print(form: Format, *, output: TextIO, errors: TextIO) -> bool:
    """Return whether text for people may be written to `output` beside the log on `errors`.

    A collector (Docker, journald, a shell's `2>&1`) reads both streams as one: a line of text
    would corrupt its JSON input. Text is safe where the log is text as well, and on
    a terminal that the log does not go to.
    """
    if writes_text(form, errors.isatty()):
        return True
    return output.isatty() and not errors.isatty()


class _NamedLogger(structlog.WriteLogger):
    """Writes to the stream; its name becomes the field `logger`."""

    def __init__(self, output: LogStream, name: str = "varve") -> None:
        super().__init__(output)  # type: ignore[arg-type]  # write and flush are all it uses
        self.name = name


def _escape_control_characters(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape control characters in names that clients chose (groups, members).

    The renderer escapes values with spaces itself. JSON has no control characters.
    """
    for key, value in event.items():
        if isinstance(value, str) and not _REPR_SHOWN & set(value):
            event[key] = printable(value)
    return event


def _shorten(logger: object, _method: str, event: MutableMapping[str, Any]) -> Any:
    """Keep the first fields of an info line for people; JSON has all of them."""
    if event.get("level") == "info" and getattr(logger, "name", "") != AUDIT:
        for name in [name for name in event if name not in _COMMON_FIELDS][TEXT_FIELDS_MAX:]:
            del event[name]
    return event


def _rendering(as_text: bool, colors: bool) -> list[Processor]:
    """Return the last processors. Tracebacks omit local variables, which may contain records."""
    if as_text:
        return [
            _shorten,
            _escape_control_characters,
            structlog.dev.ConsoleRenderer(
                colors=colors, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    return [
        structlog.processors.ExceptionRenderer(frames),
        structlog.processors.JSONRenderer(default=repr),
    ]
