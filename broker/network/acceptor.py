"""Accepts connections, several in each iteration of the event loop.

uvloop's own server accepts one. While hundreds of connections send requests all the time, an
iteration takes 50 ms, so a new connection waited 5 s behind a hundred others. The limits of
connections, also for each address, are in listener.py.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import structlog

from broker.logging import RateLimitedLogger
from config.address import Address

# In one iteration; setting up a connection takes 0.1 ms.
ACCEPTED_AT_ONCE: Final = 32
NO_SUCH_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
ACCEPT_RETRY_SECONDS: Final = 0.1  # after an error such as too many open files

logger = RateLimitedLogger(structlog.get_logger("broker.listener"))

# Serves a connection, which it owns from now on, of the client at this address.
Accepted = Callable[[socket.socket, str], Coroutine[Any, Any, None]]


class ListenError(OSError):
    """The broker cannot listen on `address`."""

    def __init__(self, address: Address, error: OSError) -> None:
        # Python adds the address to the reason of the system, but not to that of a name service.
        is_of_name = isinstance(error, socket.gaierror)
        reason = error.strerror if is_of_name else os.strerror(error.errno or 0)
        super().__init__(error.errno, f"cannot listen on {address}: {reason}")
        self.address = address

    def __str__(self) -> str:
        """Return the reason without the number of the error."""
        return str(self.strerror)


class Acceptor:
    """Listening sockets, and the connections that are being set up."""

    def __init__(self, accepted: Accepted) -> None:
        self._accepted = accepted
        self._sockets: list[socket.socket] = []
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, *, backlog: int) -> tuple[str, int]:
        """Listen on all addresses of a host; return the first bound one. Raises ListenError."""
        loop = asyncio.get_running_loop()
        try:
            listening = await _open_sockets(host, port, backlog)
        except OSError as error:
            raise ListenError(Address(host, port), error) from error
        self._sockets += listening
        for opened in listening:
            loop.add_reader(opened, self._accept, opened)
        bound = listening[0].getsockname()
        return str(bound[0]), int(bound[1])

    def close(self) -> None:
        """Stop listening, and close the connections that are being set up."""
        loop = asyncio.get_running_loop()
        for retry in self._retries.values():
            retry.cancel()
        for listening in self._sockets:
            loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()
        for task in tuple(self._tasks):
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("accept failed", reason=error.strerror or str(error))
                self._pause(listening)
                return
            connection.setblocking(False)
            with suppress(OSError):  # the peer has gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(self._set_up(connection, str(peer[0])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _set_up(self, connection: socket.socket, peer: str) -> None:
        try:
            await self._accepted(connection, peer)
        except asyncio.CancelledError:
            connection.close()
            raise
        except Exception as error:
            logger.error("connection not set up", subject=peer, exc_info=error)
            connection.close()

    def _pause(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._retries[listening] = loop.call_later(
            ACCEPT_RETRY_SECONDS, loop.add_reader, listening, self._accept, listening
        )


async def _open_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of a host. Raises OSError."""
    rows = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listening: list[socket.socket] = []
    unusable: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(rows):
        try:
            new = socket.create_server(address, family=family, backlog=backlog)
        except OSError as error:
            if error.errno in NO_SUCH_ADDRESS:  # of several, as on a system without IPv6
                unusable = error
                continue
            for opened in listening:
                opened.close()
            raise
        new.setblocking(False)
        listening.append(new)
    if unusable is not None and not listening:
        raise unusable
    return listening
