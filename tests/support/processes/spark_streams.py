"""Processes that plan Spark's streams, forked from a server that has imported their modules.

Spark starts one for each streaming query, outside of its daemons; it imports for a second of
processor time. With the launcher of the tests Spark starts this file instead, as a client: it hands
its files and its environment to the server, and lives as long as the process that is forked there.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

MODULE: Final = "pyspark.sql.streaming.python_streaming_source_runner"
MESSAGE_BYTES_MAX: Final = 64 * 1024


@contextmanager
def stream_server(path: Path) -> Iterator[None]:
    """Serve at the socket `path` in a block; a client that finds no server starts the module."""
    command = [sys.executable, "-m", __name__, "serve", str(path)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE):  # it ends with its input
        yield


def _serve(path: str) -> None:
    """Fork a process for each client, until the standard input ends."""
    importlib.import_module(MODULE)
    importlib.import_module("pipeline.datasource.source")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _plan_stream(client)
            client.close()


def _plan_stream(client: socket.socket) -> NoReturn:
    """Be the process that Spark has started as `client`."""
    code = 1
    try:
        message, files, _, _ = socket.recv_fds(client, MESSAGE_BYTES_MAX, 3)
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(json.loads(message))
        client.send(b"%d" % os.getpid())
        module = importlib.import_module(MODULE)
        with module.get_sock_file_to_executor(timeout=None) as jvm:
            module.main(jvm, jvm)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_client(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(path)
        except OSError:
            os.execv(sys.executable, [sys.executable, "-m", MODULE])
        socket.send_fds(server, [json.dumps(dict(os.environ)).encode()], [0, 1, 2])
        pid = int(server.recv(MESSAGE_BYTES_MAX))

        def terminate(*_: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

        signal.signal(signal.SIGTERM, terminate)
        server.recv(1)  # it never sends again, and closes its end with its exit


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _be_client(sys.argv[1])
