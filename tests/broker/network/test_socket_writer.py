"""The sending half of a connection, over real socket pairs and real files."""

import asyncio
import fcntl
import os
import random
import socket
import struct
import sys
from pathlib import Path

import pytest

from broker.network.socket_writer import (
    CALLS_PER_TURN,
    MAX_SENDFILE_BYTES,
    UNSENT_BYTES_MAX,
    Part,
    SocketWriter,
)
from storage.env import RealEnv
from storage.segments.fetch_slice import FetchSlice
from tests.support.broker.sockets import receive_exactly

SEED = 20260101


class Ends:
    """A writer on one end of a socket pair, a reader on the other."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        for end in (self.ours, self.theirs):
            end.setblocking(False)
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.drained = asyncio.Event()
        self.errors: list[OSError] = []
        self.failed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.writer = SocketWriter(loop, self.ours.fileno(), self.drained.set, self._failed)

    def _failed(self, error: OSError) -> None:
        self.errors.append(error)
        self.failed.set()

    def close(self) -> None:
        self.writer.close()
        self.ours.close()
        self.theirs.close()


async def test_bytes_and_file_ranges_leave_in_the_order_given_whatever_the_client_takes(
    tmp_path: Path,
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    content = rng.randbytes(300_000)
    (tmp_path / "log").write_bytes(content)
    file = RealEnv().open(str(tmp_path / "log"))
    parts: list[Part] = []
    expected = bytearray()
    for _ in range(40):
        if rng.random() < 0.5:
            data = rng.randbytes(rng.randrange(1, 5000))
            parts.append(data)
            expected += data
        else:
            position = rng.randrange(len(content))
            length = rng.randrange(0, min(50_000, len(content) - position) + 1)
            parts.append(FetchSlice(file, position, length))
            expected += content[position : position + length]
    ends = Ends()
    ends.writer.write(parts)
    assert not ends.writer.idle
    assert await receive_exactly(ends.theirs, len(expected)) == expected
    await ends.drained.wait()
    assert ends.writer.idle
    assert ends.writer.bytes_sent == len(expected)
    ends.close()


async def test_a_small_response_behind_a_pending_one_does_not_overtake_it() -> None:
    ends = Ends()
    ends.writer.write_bytes(b"a" * 100_000)
    ends.writer.write_bytes(b"b")
    assert await receive_exactly(ends.theirs, 100_001) == b"a" * 100_000 + b"b"
    ends.close()


async def test_a_client_that_is_gone_is_one_error_and_nothing_is_sent_after() -> None:
    ends = Ends()
    ends.theirs.close()
    ends.writer.write_bytes(b"x")
    ends.writer.write_bytes(b"y")
    assert [type(error) for error in ends.errors] == [BrokenPipeError]
    assert ends.writer.closed
    ends.close()


async def test_a_file_that_is_shorter_than_promised_fails_the_connection(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"short")
    file = RealEnv().open(str(tmp_path / "log"))
    ends = Ends()
    ends.writer.write([FetchSlice(file, 0, 100)])
    assert await receive_exactly(ends.theirs, 5) == b"short"
    await ends.failed.wait()
    assert len(ends.errors) == 1
    assert ends.writer.closed
    ends.close()


@pytest.mark.parametrize(
    ("length", "at_once"),
    [(1, CALLS_PER_TURN), (1 << 20, MAX_SENDFILE_BYTES)],
    ids=["small ranges", "large ranges"],
)
async def test_a_client_that_takes_everything_at_once_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, at_once: int
) -> None:
    (tmp_path / "log").write_bytes(b"x" * length)
    file = RealEnv().open(str(tmp_path / "log"))
    ends = Ends()
    monkeypatch.setattr(os, "sendfile", lambda _out, _in, _position, count: count)
    ranges = 3 * at_once // length
    ends.writer.write([FetchSlice(file, 0, length) for _ in range(ranges)])
    assert ends.writer.bytes_sent == at_once
    await ends.drained.wait()
    assert ends.writer.bytes_sent == ranges * length
    ends.close()


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_NOTSENT_LOWAT and SIOCOUTQNSD are Linux's")
async def test_the_kernel_queues_little_beyond_what_the_client_can_receive(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (8 << 20))
    file = RealEnv().open(str(tmp_path / "log"))
    sock, remote = tcp_pair()
    loop = asyncio.get_running_loop()
    drained = asyncio.Event()
    writer = SocketWriter(loop, sock.fileno(), drained.set, lambda error: None)
    writer.write([FetchSlice(file, 0, 8 << 20)])
    assert not writer.idle
    # One buffer of the socket (64 KiB) may be begun while the limit is not reached yet.
    assert unsent_bytes(sock) <= UNSENT_BYTES_MAX + (64 << 10)
    received = 0
    while received < 8 << 20:
        received += len(await loop.sock_recv(remote, 1 << 20))
    await drained.wait()
    writer.close()
    sock.close()
    remote.close()


async def test_a_peer_that_has_left_is_noticed_behind_its_unread_bytes() -> None:
    sock, remote = tcp_pair()
    writer = SocketWriter(asyncio.get_running_loop(), sock.fileno(), list, lambda error: None)
    remote.send(b"a request")
    assert not writer.peer_has_left
    remote.close()
    assert writer.peer_has_left
    writer.close()
    assert writer.peer_has_left
    sock.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends over loopback, both non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
    sock.setblocking(False)
    remote.setblocking(False)
    return sock, remote


def unsent_bytes(connection: socket.socket) -> int:
    """What the kernel holds and has not transmitted yet (SIOCOUTQNSD, tcp(7))."""
    return int(struct.unpack("i", fcntl.ioctl(connection, 0x894B, b"\0" * 4))[0])
