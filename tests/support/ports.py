"""Ports for servers that a test starts as processes.

They come from below the range that the kernel gives to outgoing connections and to `bind` with port
0: nothing else on this machine takes such a port between the moment it is chosen and the moment the
server listens on it, or while a killed server is started again.
"""

import itertools
import os
import random
import socket
from typing import Final

FIRST_PORT: Final = 10_000
PORT_COUNT: Final = 20_000  # up to 30,000; Linux gives 32,768 and above

# Two test processes begin at different places; a port that is taken is passed over.
_offsets = itertools.count(random.Random(os.getpid()).randrange(PORT_COUNT))


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens, another one each time."""
    for offset in itertools.islice(_offsets, PORT_COUNT):
        port = FIRST_PORT + offset % PORT_COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORT_COUNT} is free")
