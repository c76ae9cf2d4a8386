"""One connection to a broker, and how long it waits."""

import socket
import struct
import threading
from contextlib import suppress

import pytest

from config.address import Address
from protocol.client.connection import BlockingConnection


def test_an_answer_that_comes_in_drops_is_given_up_at_its_deadline() -> None:
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(struct.pack(">i", 1 << 20))
            while not over.wait(0.02):
                with suppress(OSError):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        connection = BlockingConnection(Address("127.0.0.1", listener.getsockname()[1]), "me")
        try:
            with pytest.raises(TimeoutError):
                connection.handshake(0.3)
        finally:
            over.set()
            thread.join()
            connection.close()
