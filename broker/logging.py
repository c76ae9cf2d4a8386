"""What the daemon writes to standard error: one structlog event per line.

JSON when standard error is no terminal, aligned text when it is. Lines of libraries that use the
standard library's logging come out the same way. A reader that went away (a closed pipe) never
stops the broker: such lines are counted and dropped.
"""

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

Format = Literal["auto", "json", "text"]

# Libraries whose debug lines would drown ours.
_QUIET_LIBRARIES = ("asyncio", "aiohttp", "numba", "urllib3")


class LogStream:
    """A text stream that survives the loss of its reader; `lines_lost` counts what was dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lines_lost = 0

    def write(self, text: str) -> int:
        """Write one line."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # closed pipe or closed file: nobody is left to be told
            self.lines_lost += 1
            return 0

    def flush(self) -> None:
        """Push the line out."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lines_lost += 1

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return self._stream.isatty()


def configure(
    level: str = "info", form: Format = "auto", stream: TextIO | None = None
) -> LogStream:
    """Set up logging for this process. `level` is debug, info, warning or error."""
    output = LogStream(stream or sys.stderr)
    as_text = form == "text" or (form == "auto" and output.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *_rendering(as_text, output.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=lambda *names: _NamedLogger(output, *names),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(as_text, output.isatty()),
            ],
        )
    )
    logging.basicConfig(level=numeric, handlers=[handler], force=True)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(numeric, logging.WARNING))
    return output


class _NamedLogger(structlog.WriteLogger):
    """Writes to the stream; remembers the name it was asked for, which becomes `logger`."""

    def __init__(self, output: LogStream, name: str = "varve") -> None:
        super().__init__(output)  # type: ignore[arg-type]  # write and flush are all it uses
        self.name = name


def _rendering(as_text: bool, colors: bool) -> list[Processor]:
    """Tracebacks without local variables: those hold the records of strangers."""
    if as_text:
        return [
            structlog.dev.ConsoleRenderer(
                colors=colors, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    return [
        structlog.processors.ExceptionRenderer(frames),
        structlog.processors.JSONRenderer(default=repr),
    ]
