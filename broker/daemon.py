"""The process of `varve serve`: its signals, what it prints and tells systemd, its exit code."""

import asyncio
import errno
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from broker.app import Broker
from broker.banner import ReadyFacts, is_open
from broker.event_loop.directory_threads import THREADS_MAX
from broker.lifecycle import systemd
from broker.lifecycle.reload import SECRETS_ERRORS
from broker.logging import may_print, writes_text
from broker.network.acceptor import ListenError
from broker.network.listener import raise_file_limit
from broker.topics.topics import TopicError
from broker.tracing import TracingError
from broker.version import installed_version
from config import exit_codes
from config.security.token import read_token
from config.settings import Settings
from storage.env import RealEnv
from storage.errors import LogDirectoryError, OpeningStoppedError, StorageError
from storage.kernels import COMPILING, is_first_compilation

logger = structlog.get_logger("broker.daemon")

# How long a thread that runs Python code, such as a search for a key, may keep the interpreter lock
# when the event loop wakes up and waits for it; the default is 5 ms.
SWITCH_SECONDS = 0.0005

START_ERRORS = (
    *(StorageError, OSError, TopicError, TracingError),
    *SECRETS_ERRORS,
)


def run(settings: Settings, load: Callable[[], Settings] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit code.

    `load` reads the settings file again at SIGHUP; without it SIGHUP stops the broker.
    """
    raise_file_limit()
    # The log shows where each thread was if the process crashes or the watchdog ends it (SIGABRT).
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:  # not available on this platform
        return asyncio.run(_serve(settings, load))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, load))


async def _serve(settings: Settings, load: Callable[[], Settings] | None) -> int:
    try:
        path = settings.http_token_file
        token = None if path is None else await asyncio.to_thread(read_token, path)
        threads = partial(ThreadPoolExecutor, THREADS_MAX, "disk")
        broker = Broker(settings, RealEnv(), token=token, load=load, disk_threads=threads)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, broker.request_stop)
        loop.add_signal_handler(signal.SIGHUP, broker.request_reload)
        if is_first_compilation():
            logger.info("first start", note=COMPILING)
        await broker.start()
    except OpeningStoppedError:
        logger.info("stopped during recovery")
        return exit_codes.DONE
    except START_ERRORS as error:
        reason = _reason(error, settings)
        if sys.stderr.isatty() and writes_text(settings.logging.format, is_terminal=True):
            sys.stderr.write(f"varve: cannot start: {reason}\n")
        else:
            logger.error("cannot start", reason=reason)
        return exit_codes.FAILED
    facts = ready_facts(broker)
    if may_print(settings.logging.format, output=sys.stdout, errors=sys.stderr):
        sys.stdout.write(f"{facts.text()}\n")
        sys.stdout.flush()
    systemd.notify("READY=1\nSTATUS=serving clients")
    logger.info("ready", **facts.fields())
    await broker.wait_stopped()
    systemd.notify("STOPPING=1")
    logger.info("stopping")
    await broker.stop()
    logger.info("stopped")
    if broker.has_hung_threads:  # the interpreter would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes.DONE)
    return exit_codes.DONE


def _reason(error: Exception, settings: Settings) -> str:
    """Return why the start failed, and what to do about it if that is known."""
    if isinstance(error, ListenError):
        return f"{error}. {_remedy(error, settings)}"
    if isinstance(error, LogDirectoryError):
        reason = re.sub(r"^\[Errno \d+\] ", "", error.reason)
        return f"the data directory {error.directory} cannot be used: {reason}"
    return str(error) or repr(error)  # an OSError without arguments has no text


def _remedy(error: ListenError, settings: Settings) -> str:
    """Return what to do about an address that the broker cannot listen on."""
    option = "--http" if error.address == settings.http else "--listen"
    stop = "Stop the program that uses it, or set" if error.errno == errno.EADDRINUSE else "Set"
    return f"{stop} another address with {option}"


def ready_facts(broker: Broker) -> ReadyFacts:
    """Return what the daemon tells a person and the log when the broker is ready."""
    topics = [topic for topic in broker.topics if not topic.is_internal]  # as the console counts
    settings = broker.settings
    return ReadyFacts(
        version=installed_version(),
        listeners=tuple(broker.addresses),
        http=broker.http.address,
        http_scheme=broker.http.scheme,
        log_dirs=tuple(settings.log_dirs),
        topics=len(topics),
        partitions=sum(topic.partition_count for topic in topics),
        is_open=is_open(settings),
    )
