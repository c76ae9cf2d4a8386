"""Status messages to systemd: the datagram of sd_notify(3), for units of `Type=notify`.

This module replaces a dependency: one package on PyPI has had no release since 2017, the other
needs systemd's C headers to install.

The watchdog (sd_watchdog_enabled(3)): systemd kills and restarts a broker that sends no WATCHDOG=1
within WATCHDOG_USEC. A task on the event loop sends it, so a loop that hangs sends none.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

import structlog

logger = structlog.get_logger("broker.systemd")

ALIVE: Final = "WATCHDOG=1"
PROGRESS_SECONDS: Final = 5.0  # between two reports of a long start or stop
EXTENSION_SECONDS: Final = 60  # for which one partition may take without progress
# systemd's manual recommends half of the period: one late message does not end the broker.
MESSAGES_PER_PERIOD: Final = 2


def notify(state: str) -> bool:
    """Send `state` ("READY=1", "STOPPING=1", "STATUS=..."); return whether systemd received it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True


class ProgressReports:
    """Tells systemd how far a start or stop is, and extends its timeout while that goes on.

    systemd kills a service that takes longer than TimeoutStartSec or TimeoutStopSec, unless it
    sends EXTEND_TIMEOUT_USEC again and again (sd_notify(3)). After a kill the next start recovers.
    """

    def __init__(self, send: Callable[[str], object] = notify) -> None:
        self._send = send
        self._done: object = None

    def report(self, status: str, done: object) -> None:
        """Send a status; `done` differs from that of the last call if the work goes on."""
        lines = [f"STATUS={status}"]
        if done != self._done:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1_000_000}")
        self._done = done
        self._send("\n".join(lines))


def watchdog_seconds(environment: Mapping[str, str], pid: int) -> float | None:
    """Return the period of the watchdog; None if systemd watches no process, or another one."""
    watched, period = environment.get("WATCHDOG_PID", str(pid)), environment.get("WATCHDOG_USEC")
    if watched != str(pid) or period is None or not period.isascii() or not period.isdigit():
        return None
    return int(period) / 1e6 or None


def start_watchdog(unhealthy_because: Callable[[], str | None]) -> asyncio.Task[None] | None:
    """Begin to send WATCHDOG=1; return the task, None if systemd does not watch this process."""
    period = watchdog_seconds(os.environ, os.getpid())
    if period is None:
        return None
    return asyncio.create_task(notify_watchdog(period, unhealthy_because), name="watchdog")


async def notify_watchdog(
    period_seconds: float,
    unhealthy_because: Callable[[], str | None],
    send: Callable[[str], object] = notify,
) -> None:
    """Send WATCHDOG=1 twice a period as long as the broker is healthy; runs until cancelled."""
    reported: str | None = None
    while True:
        reason = unhealthy_because()
        if reason is None:
            send(ALIVE)
        elif reason != reported:
            logger.error("watchdog not notified", reason=reason, restart_in_seconds=period_seconds)
        reported = reason
        await asyncio.sleep(period_seconds / MESSAGES_PER_PERIOD)
