"""Reads from sockets without a transport."""

import asyncio
import socket


async def receive_exactly(end: socket.socket, count: int) -> bytes:
    """Return the next bytes of a socket that does not block."""
    loop, received = asyncio.get_running_loop(), bytearray()
    while len(received) < count:
        received += await loop.sock_recv(end, count - len(received))
    return bytes(received)
