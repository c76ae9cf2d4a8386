"""Opens the logs at the start of the broker.

Recovery may take minutes, so it runs in a thread: meanwhile health checks are answered, progress is
reported, and a stop takes effect.
"""

import asyncio

import structlog

from broker.lifecycle import systemd
from broker.lifecycle.readiness import Readiness
from storage.manager.log_manager import ConfigOf, LogManager
from storage.manager.open_report import OpenReport
from storage.manager.opening import OpeningProgress

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
    reports = systemd.ProgressReports()
    try:
        while not opening.done():
            tasks = (opening,) if readiness.is_stopping else (opening, stopping)
            await asyncio.wait(
                tasks, timeout=systemd.PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if readiness.is_stopping:
                manager.stop_opening()
            elif not opening.done():
                _report_progress(manager.opening, reports)
    finally:
        stopping.cancel()
        manager.stop_opening()  # also if this task was cancelled
    report = await opening
    for event, fields in report.routine_lines():
        logger.info(event, **fields)
    for event, fields in report.lines():
        logger.warning(event, **fields)
    return report


def _report_progress(opening: OpeningProgress, reports: systemd.ProgressReports) -> None:
    logger.info("log recovery progressed", partitions=opening.done, of=opening.total)
    done = opening.done, sum(opening.remaining_segments.values())
    reports.report(f"recovering {opening.done} of {opening.total} partitions", done)
