"""Opens the logs at the start of the broker.

Recovery may take minutes, so it runs in a thread: meanwhile health checks are answered, progress is
reported, and a stop takes effect.
"""

import asyncio
from typing import Final

import structlog

from broker.lifecycle import systemd
from broker.lifecycle.readiness import Readiness
from storage.manager.log_manager import ConfigOf, LogManager
from storage.manager.open_report import OpenReport

PROGRESS_SECONDS: Final = 5.0  # between two log lines of a long recovery

logger = structlog.get_logger("broker.log_opening")


async def open_logs(manager: LogManager, config_of: ConfigOf, readiness: Readiness) -> OpenReport:
    """Open every log; return and log what was recovered.

    Raises the errors of `LogManager.load`; OpeningStoppedError if the broker is asked to stop.
    """
    unclean = manager.unclean_directories
    if unclean:
        logger.warning("log recovery started", reason="unclean shutdown", directories=list(unclean))
    opening = asyncio.create_task(asyncio.to_thread(manager.load, config_of))
    stopping = asyncio.create_task(readiness.wait_stopping())
    try:
        while not opening.done():
            tasks = (opening,) if readiness.is_stopping else (opening, stopping)
            await asyncio.wait(tasks, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if readiness.is_stopping:
                manager.stop_opening()
            elif not opening.done():
                _report_progress(manager)
    finally:
        stopping.cancel()
        manager.stop_opening()  # also if this task was cancelled
    report = await opening
    for event, fields in report.routine_lines():
        logger.info(event, **fields)
    for event, fields in report.lines():
        logger.warning(event, **fields)
    return report


def _report_progress(manager: LogManager) -> None:
    done, total = manager.opening.done, manager.opening.total
    logger.info("log recovery progressed", partitions=done, of=total)
    systemd.notify(f"STATUS=recovering {done} of {total} partitions")
