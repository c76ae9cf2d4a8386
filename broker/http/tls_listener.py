"""The listener of https: accepts connections and bounds their TLS handshakes.

asyncio's own server has no limit on handshakes that never end. Here, at most HANDSHAKES_MAX run at
a time, for at most HANDSHAKE_SECONDS; above that, a new connection replaces the oldest. So peers
that finish no handshake cannot use up file descriptors.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from broker.logging import RateLimitedLogger

HANDSHAKES_MAX: Final = 128
HANDSHAKE_SECONDS: Final = 10.0
BACKLOG: Final = 128
ACCEPT_RETRY_SECONDS: Final = 1.0  # after an error such as too many open files

logger = RateLimitedLogger(structlog.get_logger("broker.http"))


class TlsListener:
    """Listening sockets, and the connections whose handshake is not complete."""

    def __init__(
        self, connect: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext
    ) -> None:
        """`connect` makes the protocol of a connection."""
        self.context = context  # of new connections; a reload replaces it
        self.failures = 0
        self._connect = connect
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the first bound address. Raises OSError."""
        loop = asyncio.get_running_loop()
        for family, _, _, _, address in await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listening = socket.create_server(
                (str(address[0]), int(address[1])), family=family, backlog=BACKLOG
            )
            listening.setblocking(False)
            self._sockets.append(listening)
            self._accepting.append(asyncio.create_task(self._accept(listening), name="https"))
        bound = self._sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Stop listening, and close the connections whose handshake is not complete."""
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except OSError as error:
                logger.error("accept failed", reason=error.strerror or str(error))
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                next(iter(self._handshakes)).cancel()
            task = asyncio.create_task(self._shake_hands(connection, str(peer[0])))
            self._handshakes[task] = None
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)

    async def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.setblocking(False)
            with suppress(OSError):  # the peer has gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                connection,
                ssl=self.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except OSError as error:  # of TLS too
            self.failures += 1
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            logger.info("connection closed", subject=peer, reason=f"TLS failed: {reason}")
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
