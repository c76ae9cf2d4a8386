"""Shared parts of the job commands: options, engines, sessions and exit codes.

Results go to standard output, as lines or as one JSON document. Errors go to standard error.
"""

import errno
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from admin.client import ApiRefusedError, UnreachableError
from admin.command import fail, json_option, refusal_text, show, with_client
from admin.rangeless_option import RangelessOption
from config import exit_codes
from config.units import parse_size
from pipeline.client.lease import LeaseRequestError
from pipeline.engines.engine import Engine, LocalEngine, StageFailedError
from pipeline.errors import JobError, as_disk_error
from pipeline.progress import ProgressReporter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")

__all__ = [
    "SparkOptions",
    "exit_on_error",
    "json_option",
    "open_engine",
    "show",
    "size_option",
    "with_broker",
    "with_engine_options",
    "with_lease_options",
    "with_partitions",
    "with_spark_options",
]


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """The command-line options of a Spark session."""

    master: str
    memory: str
    log_level: str
    settings: Mapping[str, str]

    @contextmanager
    def open_session(self, app_name: str, reporter: ProgressReporter) -> "Iterator[SparkSession]":
        """Start a session and stop it at the end of the block. Raises JobError."""
        reporter.note("starting Spark")
        session = self._start(app_name)
        try:
            yield session
        finally:
            session.stop()

    def _start(self, app_name: str) -> "SparkSession":
        from pipeline.engines.java import NoJavaError
        from pipeline.engines.spark_session import SparkSessionError, build_session

        try:
            return build_session(
                self.master,
                app_name=app_name,
                memory=self.memory,
                log_level=self.log_level,
                settings=self.settings,
            )
        except (NoJavaError, SparkSessionError) as error:
            raise JobError(str(error), exit_codes.NO_SPARK) from error


def _settings(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    result = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not sign or not name.startswith("spark."):
            raise click.BadParameter(f"expected spark.NAME=VALUE, not {text[:80]!r}")
        result[name] = value
    return result


def _checked_master(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    from pipeline.engines.spark_session import check_master

    try:
        check_master(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def with_spark_options(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options of a Spark session; the command gets them as `spark_options`."""

    @click.option(
        "--master",
        envvar="VARVE_SPARK_MASTER",
        default="local[*]",
        show_default=True,
        callback=_checked_master,
        metavar="URL",
        help="Spark master: local[N], spark://HOST:PORT or sc://HOST:PORT (VARVE_SPARK_MASTER).",
    )
    @click.option(
        "--memory",
        default="2g",
        show_default=True,
        metavar="SIZE",
        help="Memory of the driver and of each executor.",
    )
    @click.option("--spark-log", default="error", show_default=True, help="Level of the Spark log.",
                  type=click.Choice(["off", "error", "warn", "info", "debug"]))  # fmt: skip
    @click.option("--conf", "settings", multiple=True, callback=_settings, metavar="NAME=VALUE",
                  help="Spark setting. Repeatable.")  # fmt: skip
    @wraps(function)
    def run(
        *args: Any,
        master: str,
        memory: str,
        spark_log: str,
        settings: Mapping[str, str],
        **options: Any,
    ) -> None:
        spark_options = SparkOptions(master, memory, spark_log, settings)
        function(*args, spark_options=spark_options, **options)  # type: ignore[arg-type]

    return run  # type: ignore[return-value]


def with_engine_options(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options that select an engine: `engine_name`, `processes` and `spark_options`, the
    arguments of `open_engine`."""
    function = click.option(
        "--processes",
        cls=RangelessOption,
        metavar="N",
        type=click.IntRange(1, 1024),
        help="Processes of the local engine; default: one per core.",
    )(function)
    function = click.option(
        "--engine",
        "engine_name",
        type=click.Choice(["local", "spark"]),
        default="local",
        show_default=True,
        help="Run tasks in local processes or on Spark executors.",
    )(function)
    return with_spark_options(function)


def size_option(
    name: str, default: str, text: str
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return an option for a size such as 64MiB; the command gets bytes."""

    def parsed(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
        try:
            size = parse_size(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if size <= 0:
            raise click.BadParameter("must be greater than 0")
        return size

    return click.option(
        name, default=default, show_default=True, callback=parsed, metavar="SIZE", help=text
    )


def with_partitions(function: Callable[P, None]) -> Callable[P, None]:
    """Add the option that selects partitions; the command gets None for all."""

    def parsed(
        _context: click.Context, _parameter: click.Parameter, value: str | None
    ) -> list[int] | None:
        if value is None:
            return None
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
            raise click.BadParameter(f"expected numbers such as 0,3, not {value[:80]!r}")
        return sorted({int(part) for part in parts})

    return click.option(
        "--partitions",
        callback=parsed,
        metavar="N,N,...",
        help="Only these partitions; default: all.",
    )(function)


def with_lease_options(function: Callable[P, None]) -> Callable[P, None]:
    """Add how tasks read leased segments: `transport`, `task_memory` and `task_size`."""
    function = size_option("--task-size", "512MiB", "Bytes of log that one task reads.")(function)
    function = size_option("--task-memory", "1GiB", "Memory that one task uses for keys.")(function)
    return click.option(
        "--transport",
        type=click.Choice(["auto", "disk", "http"]),
        default="auto",
        show_default=True,
        help="How tasks read the log: from the broker's disk or over its HTTP address.",
    )(function)


@contextmanager
def open_engine(
    engine_name: str, processes: int | None, spark_options: SparkOptions, reporter: ProgressReporter
) -> Iterator[Engine]:
    """Open the selected engine and close it at the end of the block. Raises JobError."""
    if engine_name == "local":
        with LocalEngine(processes) as engine:
            yield engine
        return
    from pipeline.engines.spark_engine import STAGE_SETTINGS, SparkEngine

    spark_options = replace(spark_options, settings={**STAGE_SETTINGS, **spark_options.settings})
    with spark_options.open_session("varve", reporter) as session:
        yield SparkEngine(session)


def with_broker(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options that name the broker's HTTP address; the command gets a `client`."""
    requested = with_client(function)

    @wraps(requested)
    def run(*args: P.args, **options: P.kwargs) -> None:
        from config.security.token import TokenFileError

        try:
            requested(*args, **options)
        except TokenFileError as error:
            raise JobError(str(error)) from error

    return run


def exit_on_error(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line and an exit code. Apply right under the command decorator."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> None:
        # Turn both signals into exceptions, so that leases are released on the way out.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see __main__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            function(*args, **options)
        except (JobError, LeaseRequestError) as error:
            fail(str(error), error.code)
        except StageFailedError as error:
            fail(str(error), exit_codes.FAILED)
        except ApiRefusedError as error:
            fail(refusal_text(error), exit_codes.of_status(error.status))
        except UnreachableError as error:
            fail(str(error), exit_codes.UNREACHABLE)
        except OSError as error:
            if error.errno == errno.EPIPE:  # see `as_job_errors`
                raise
            fail(str(as_disk_error(error)))
        except KeyboardInterrupt:  # perhaps at the very end
            fail("interrupted; whatever was published is complete", exit_codes.INTERRUPTED)

    return run
