"""The listener of https: accepts connections and bounds their TLS handshakes.

asyncio's own server has no limit on handshakes that never end. Here, at most HANDSHAKES_MAX run at
a time, for at most HANDSHAKE_SECONDS; above that, a new connection replaces the oldest. So peers
that finish no handshake cannot use up file descriptors.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from broker.event_loop.loop_turns import ConnectionTurns
from broker.http.tls_transport import TlsTransport
from broker.http.transport import FindTurns
from broker.logging import RateLimitedLogger
from broker.network.acceptor import Acceptor

HANDSHAKES_MAX: Final = 128
HANDSHAKE_SECONDS: Final = 10.0
BACKLOG: Final = 128

logger = RateLimitedLogger(structlog.get_logger("broker.http"))


class TlsListener:
    """Listening sockets, and the connections whose handshake is not complete."""

    def __init__(
        self,
        connect: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        turns: ConnectionTurns,
        find_turns: FindTurns,
    ) -> None:
        """`connect` makes the protocol of a connection."""
        self.context = context  # of new connections; a reload replaces it
        self.failures = 0
        self._connect = connect
        self._turns = turns
        self._find_turns = find_turns
        self._acceptor = Acceptor(self._shake_hands)
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the first bound address. Raises OSError."""
        return await self._acceptor.listen(host, port, backlog=BACKLOG)

    async def close(self) -> None:
        """Stop listening, and close the connections whose handshake is not complete."""
        self._acceptor.close()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        if len(self._handshakes) >= HANDSHAKES_MAX:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._handshakes[task] = None
        try:
            await self._connect_over_tls(connection, peer)
        finally:
            self._handshakes.pop(task, None)

    async def _connect_over_tls(self, connection: socket.socket, peer: str) -> None:
        def failed(error: OSError) -> None:
            self.failures += 1
            reason = getattr(error, "reason", None) or str(error)
            logger.info("connection closed", subject=peer, reason=f"TLS failed: {reason}")

        transport = TlsTransport(
            self._connect(), self.context, failed, self._turns, self._find_turns
        )
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: transport, connection)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await transport.handshake_end
        except TimeoutError:
            transport.abort()
            failed(TimeoutError(f"no handshake within {HANDSHAKE_SECONDS:g} s"))
        except asyncio.CancelledError:
            transport.abort()
            raise
