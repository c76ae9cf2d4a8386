"""Builds the Spark session of every job, with the settings that the jobs depend on.

The workers use this Python with this code on its path. With a local master nothing listens beyond
loopback; with a cluster the driver binds to the address that faces the master. Times are UTC,
Python data sources may accept filters, Arrow and Unix sockets are on, and Spark logs errors only.
The web UI is off by default.

Importing this module does not import Spark.
"""

import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from config.extras import install_command
from pipeline.atomic_write import write_atomically
from pipeline.engines.java import (
    cache_folder,
    class_archive,
    find_java,
    in_quotes,
    launcher_home,
    path_digest,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULT_BYTES_MAX: Final = 256 << 20  # of one query, on the driver: descriptors and counts
MASTER_PORT: Final = 7077  # a standalone master's, where the URL names none
CONNECT_PORT: Final = 15002  # Spark Connect's
CONNECT_SECONDS: Final = 10.0
EXECUTOR_SECONDS: Final = 60.0  # for the first executor: JVM start on a busy machine
EXECUTORS_SETTLED_SECONDS: Final = 0.5  # without another executor
EXECUTORS_POLL_SECONDS: Final = 0.1
LOCAL_MASTER: Final = re.compile(r"local(?:\[(?P<cores>\d+|\*)(?:,\s*(?P<failures>\d+))?\])?")
# Other masters of Spark: an in-process cluster for tests, and cluster managers.
OTHER_MASTERS: Final = re.compile(r"local-cluster\[[\d, ]+\]|yarn|k8s://\S+")
LOCAL_ATTEMPTS: Final = 2  # by default, local mode fails a job at the first task failure
LOG_LEVELS: Final = ("off", "error", "warn", "info", "debug")

_GIVEN_UP: Final = (
    "the cluster ended the application because its executors did not start; see their logs"
)

# Spark's messages that say where, but not why.
_NAMES_NO_CAUSE: Final = (
    "[FAILED_READ_FILE.NO_HINT]",
    "[CANNOT_MERGE_SCHEMAS]",
    "[TASK_WRITE_FAILED]",
)

# The job reports failed tasks with their reason; Spark would log stack traces.
_LOG4J: Final = """\
rootLogger.level = ${sys:varve.log:-error}
rootLogger.appenderRef.errors.ref = errors
appender.errors.type = Console
appender.errors.name = errors
appender.errors.target = SYSTEM_ERR
appender.errors.layout.type = PatternLayout
appender.errors.layout.pattern = spark: %d{HH:mm:ss} %p %c{1}: %m%n%xThrowable{short}
"""
_PYTHON: Final = """\
#!/bin/sh
# Starts Spark's workers with the daemon of pipeline/engines/spark_daemon.py in place of pyspark's.
if [ "$1 $2" = "-m pyspark.daemon" ]; then
  shift 2
  set -- -m pipeline.engines.spark_daemon "$@"
fi
exec "{python}" "$@"
"""
# Spark logs a message if the gateway's level differs from the root's.
_GATEWAY: Final = "org.apache.spark.api.python.PythonGatewayServer"
_REPORTED_BY_US: Final = {
    "context": "org.apache.spark.SparkContext",
    "executor": "org.apache.spark.executor.Executor",
    "tasks": "org.apache.spark.scheduler.TaskSetManager",
    "connect": "org.apache.spark.sql.connect",
    "datasource": "org.apache.spark.sql.execution.datasources.v2",
    "writer": "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "utils": "org.apache.spark.util.Utils",
}


class SparkSessionError(Exception):
    """The session could not be started."""


_RAISED_AS_WELL: Final = (
    "KeyboardInterrupt while sending command.",
    "Exception while sending command.",
)


def build_session(
    master: str = "local[*]",
    *,
    app_name: str = "varve",
    memory: str = "1g",
    log_level: str = "error",
    settings: Mapping[str, str] | None = None,
    archive_to: str | None = None,
) -> "SparkSession":
    """Start a session, or return the running one.

    `master` is local[N], spark://HOST:PORT, sc://HOST:PORT (Spark Connect) or another master of
    Spark. `memory` is that of the driver and of each executor, in Spark's notation. `settings` are
    Spark settings that override ours. `archive_to` makes the JVM write its class archive at exit.

    Raises NoJavaError, and SparkSessionError if the master is invalid, unreachable, or refuses.
    """
    if log_level not in LOG_LEVELS:
        raise ValueError(f"log_level is one of {', '.join(LOG_LEVELS)}, not {log_level!r}")
    try:
        check_master(master)
    except ValueError as error:
        raise SparkSessionError(f"invalid Spark master: {error}") from error
    if master.startswith("sc://"):
        return _connect(master, app_name, settings or {})
    conf = {
        **common_settings(),
        **_placement(master),
        "spark.app.name": app_name,
        "spark.driver.memory": memory,
        "spark.executor.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": os.path.join(tempfile.gettempdir(), f"varve-{os.getpid()}"),
        **(settings or {}),
    }
    _prepare_jvm(conf, log_level, archive_to)
    logging.getLogger().addFilter(is_news)
    spark = _start(conf)
    if conf["spark.master"].startswith("spark://"):
        _wait_for_executors(spark, conf["spark.executor.memory"])
    return spark


def check_master(master: str) -> None:
    """Check the form of a master. Raises ValueError.

    Spark itself takes many seconds to refuse one, and prints a stack trace.
    """
    local = LOCAL_MASTER.fullmatch(master)
    if local is not None:
        if (cores := local["cores"]) not in (None, "*") and int(cores) == 0:
            raise ValueError(f"{master} has no core; use at least local[1]")
        return
    if OTHER_MASTERS.fullmatch(master) is not None:
        return
    scheme, sign, rest = master.partition("://")
    if sign and scheme in ("spark", "sc") and rest and not re.search(r"\s", rest):
        return
    raise ValueError(f"expected local[N], spark://HOST:PORT or sc://HOST:PORT, not {master[:80]!r}")


def common_settings() -> dict[str, str]:
    """Return the settings of every session."""
    return {
        "spark.driver.maxResultSize": str(RESULT_BYTES_MAX),
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.worker.faulthandler.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
    }


def _placement(master: str) -> dict[str, str]:
    """Return the settings that depend on the master."""
    code = str(Path(__file__).resolve().parents[2])
    local = LOCAL_MASTER.fullmatch(master)
    if local is not None:
        cores = local["cores"] or "1"
        failures = local["failures"] or str(LOCAL_ATTEMPTS)
        count = os.cpu_count() or 1 if cores == "*" else int(cores)
        return {
            "spark.master": f"local[{cores},{failures}]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(2 * count),
        }
    settings = {"spark.master": master, "spark.executorEnv.PYTHONPATH": code}
    if master.startswith("spark://"):
        address = _address_facing(master)
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = address
    return settings


def _address_facing(master: str) -> str:
    """Return this machine's address on the route to the first master that answers."""
    reasons = []
    for item in master.removeprefix("spark://").split(","):  # several: one active, others standby
        try:
            parts = urlsplit(f"spark://{item}")
            host, port = parts.hostname, parts.port or MASTER_PORT
        except ValueError as error:
            raise SparkSessionError(f"{master} names no host and port: {error}") from None
        if host is None:
            raise SparkSessionError(f"{master} names no host")
        try:
            with socket.create_connection((host, port), CONNECT_SECONDS) as way:
                return str(way.getsockname()[0])
        except OSError as error:
            reasons.append(f"{item}: {error}")
    raise SparkSessionError(f"no Spark master answers: {'; '.join(reasons)}")


def _prepare_jvm(conf: dict[str, str], log_level: str, archive_to: str | None) -> None:
    """Set the environment and the options of the JVM before it starts."""
    import pyspark

    java, cache = find_java(), cache_folder()
    options = [f"-Dlog4j2.configurationFile={_log_settings(cache)}", f"-Dvarve.log={log_level}"]
    if log_level in ("off", "error"):
        options.append("-Dvarve.log.reported=off")
    archive = class_archive(
        java, cache, os.path.dirname(pyspark.__file__ or ""), pyspark.__version__
    )
    if archive_to is not None:
        options += [f"-XX:ArchiveClassesAtExit={archive_to}", "-Xlog:cds=off", "-Xlog:cds*=off"]
    elif archive.exists():
        # If the archive does not fit, the JVM ignores it; silence its warning.
        options += [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable", "-Xlog:all=error:stderr"]
    if java.feature >= 24:  # otherwise Netty, Arrow and Hadoop cause warnings
        options += ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]
    java_options = conf.get("spark.driver.extraJavaOptions", "")
    conf["spark.driver.extraJavaOptions"] = " ".join([*map(_quoted, options), java_options]).strip()
    os.environ["JAVA_HOME"] = str(launcher_home(java, cache))
    python = os.environ["PYSPARK_DRIVER_PYTHON"] = str(_python_launcher(cache))
    is_local = LOCAL_MASTER.fullmatch(conf["spark.master"]) is not None
    os.environ["PYSPARK_PYTHON"] = python if is_local else sys.executable
    # For the short-lived JVM that composes the command of the real one.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    if (address := conf.get("spark.driver.bindAddress")) is not None:
        os.environ["SPARK_LOCAL_IP"] = address
    _put_code_on_path()


def _python_launcher(cache: Path) -> Path:
    """Return the program that starts this Python with our daemon in place of pyspark's.

    The setting spark.python.daemon.module has no effect on the workers that plan queries.
    """
    path = cache / f"python-{path_digest(sys.executable)}"
    text = _PYTHON.format(python=in_quotes(sys.executable))
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text, mode=0o777)
    return path


def _put_code_on_path() -> None:
    """Let workers on this machine import this code."""
    code = str(Path(__file__).resolve().parents[2])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if code not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, code])


def _log_settings(cache: Path) -> Path:
    text = f"{_LOG4J}logger.gateway.name = {_GATEWAY}\n"
    text += "logger.gateway.level = ${sys:varve.log:-error}\n"
    for name, logger in _REPORTED_BY_US.items():
        text += f"logger.{name}.name = {logger}\n"
        text += f"logger.{name}.level = ${{sys:varve.log.reported:-${{sys:varve.log:-error}}}}\n"
    path = cache / "log4j2.properties"
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text)
    return path


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a log record is news. Py4J logs tracebacks of exceptions that it also raises,
    two for each Ctrl-C."""
    return record.msg not in _RAISED_AS_WELL


def _quoted(option: str) -> str:
    return f'"{option}"' if re.search(r"\s", option) else option


def _start(conf: Mapping[str, str]) -> "SparkSession":
    from pyspark import SparkConf
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        with _jvm_ended_on_interrupt():
            return SparkSession.builder.config(
                conf=SparkConf().setAll(list(conf.items()))
            ).getOrCreate()
    except (PySparkException, RuntimeError) as error:
        raise SparkSessionError(f"Spark did not start: {first_line(error)}") from error
    except Exception as error:
        if type(error).__name__ != "Py4JJavaError":  # py4j is imported by pyspark, not by us
            raise
        if "stopped SparkContext" in str(error):
            raise SparkSessionError(_GIVEN_UP) from error
        raise SparkSessionError(f"Spark did not start: {first_line(error)}") from error


@contextmanager
def _jvm_ended_on_interrupt() -> Iterator[None]:
    """End the JVM that is started in the block if an interrupt ends the block.

    pyspark does not expose the process until the JVM has answered. Without this, the JVM would not
    find the folder for its answer, print a stack trace, and run for ever.
    """
    from pyspark import java_gateway

    started: list[subprocess.Popen[bytes]] = []

    class NotedPopen(subprocess.Popen):  # type: ignore[type-arg]  # called with any mode
        """Record each process that starts."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(self)  # first: an interrupt may come while the process starts
            super().__init__(*arguments, **options)

    before = java_gateway.Popen
    java_gateway.Popen = NotedPopen
    try:
        yield
    except KeyboardInterrupt:
        for process in started:
            if getattr(process, "pid", None) is not None:
                process.kill()
                process.wait()
        raise
    finally:
        java_gateway.Popen = before


def _wait_for_executors(spark: "SparkSession", memory: str) -> None:
    """Wait until no more executors arrive. Without any, Spark would wait for ever."""
    context = spark.sparkContext._jsc.sc()
    began = time.monotonic()
    count, since = 0, began
    while count == 0 or time.monotonic() - since < EXECUTORS_SETTLED_SECONDS:
        if context.isStopped():
            raise SparkSessionError(_GIVEN_UP)
        now = context.getExecutorMemoryStatus().size() - 1  # the driver is included
        if now != count:
            count, since = now, time.monotonic()
        if count == 0 and time.monotonic() - began > EXECUTOR_SECONDS:
            spark.stop()
            raise SparkSessionError(
                f"no executor started within {EXECUTOR_SECONDS:g} s. A worker needs {memory} of"
                " free memory and a free core"
            )
        time.sleep(EXECUTORS_POLL_SECONDS)


def _connect(master: str, app_name: str, settings: Mapping[str, str]) -> "SparkSession":
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if find_spec("grpc") is None:
        raise SparkSessionError(f"{master} needs more packages: run {install_command('connect')}")
    try:
        parts = urlsplit(master)
        host, port = parts.hostname, parts.port or CONNECT_PORT
        # Test the port first: Connect's client retries for ten minutes.
        socket.create_connection((host or "", port), CONNECT_SECONDS).close()
    except ValueError as error:
        raise SparkSessionError(f"{master} names no host and port: {error}") from None
    except OSError as error:
        raise SparkSessionError(f"{master} does not answer: {error}") from None
    try:
        spark = SparkSession.builder.remote(master).appName(app_name).getOrCreate()
        for name, value in {**common_settings(), **settings}.items():
            # Other settings belong to the server, and Connect always uses Arrow.
            if name.startswith("spark.sql.") and ".arrow.pyspark." not in name:
                spark.conf.set(name, value)
    except PySparkException as error:
        raise SparkSessionError(f"{master} does not answer: {first_line(error)}") from error
    return spark


def first_line(error: BaseException) -> str:
    """Return the first meaningful line of an error, without its stack trace."""
    lines = [line.strip() for line in str(error).splitlines()]
    message_lines = [
        line for line in lines if line and not line.startswith(("at ", "An error occurred"))
    ]
    return (
        re.sub(r"^: (?:[\w.$]+: )?", "", message_lines[0])[:500]
        if message_lines
        else type(error).__name__
    )


def spark_reason(error: BaseException) -> str:
    """Return the first meaningful line of an error, with its root cause if it names none."""
    reason = first_line(error)
    # Py4J's own error has the exception of the JVM here, and pyspark's translation of one there.
    thrown = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if thrown is None or not reason.startswith(_NAMES_NO_CAUSE):
        return reason
    while (cause := thrown.getCause()) is not None:
        thrown = cause
    root = re.sub(r"^[\w.$]+: ", "", " ".join(thrown.toString().split()))
    return f"{reason.rstrip('.:')}: {root}"[:1000]


def stop_session(spark: "SparkSession", *, timeout_seconds: float = 60.0) -> None:
    """Stop the session and its JVM, and wait for the JVM to exit."""
    spark.stop()
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None:  # Spark Connect has no local JVM
        return
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    process.stdin.close()  # the JVM exits with its standard input
    process.wait(timeout_seconds)
