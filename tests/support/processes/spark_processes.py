"""Spark's processes in Python, forked from a server that has imported what they need.

Spark starts a daemon for each module that plans queries or runs tasks, and a process for each
streaming query. Each takes a second or more of processor time to import Spark's and our modules;
tasks take as much to load the kernels. With the launcher of the tests Spark starts this file
instead, as a client: it hands its files, its environment and its arguments to the server, and lives
as long as the process that is forked there. Jobs that tests start as commands have the processes of
production.
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

DAEMON: Final = "pipeline.engines.spark_daemon"  # its argument is the module of its workers
STREAM: Final = "pyspark.sql.streaming.python_streaming_source_runner"
SHARED: Final = ("pyspark.worker", STREAM, DAEMON, "pipeline.datasource.source")
MESSAGE_BYTES_MAX: Final = 64 * 1024


def write_launcher(path: Path, server: Path) -> Path:
    """Write the launcher of jobs, but with processes from the server at the socket `server`."""
    from pipeline.engines.spark_session import _PYTHON, in_quotes

    head, execute, rest = _PYTHON.format(python=in_quotes(sys.executable)).rpartition("exec ")
    client = f'"{sys.executable}" -IS "{__file__}" "{server}" "$@"'
    case = f'case "$2" in {DAEMON} | {STREAM}) exec {client} ;; esac\n'
    path.write_text(f"{head}{case}{execute}{rest}")
    path.chmod(0o755)
    return path


@contextmanager
def process_server(path: Path) -> Iterator[None]:
    """Serve at the socket `path` in a block; a client that finds no server starts the module."""
    command = [sys.executable, "-m", __name__, "serve", str(path)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE):  # it ends with its input
        yield


def _serve(path: str) -> None:
    """Fork a process for each client, until the standard input ends."""
    for module in SHARED:
        importlib.import_module(module)
    from pipeline.records.decode import warm_up

    warm_up()
    # A worker collects garbage after each task, which would visit all that is imported.
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
                _run(client)
            client.close()


def _run(client: socket.socket) -> NoReturn:
    """Be the process that Spark has started as `client`."""
    code = 1
    try:
        message, files, _, _ = socket.recv_fds(client, MESSAGE_BYTES_MAX, 3)
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        environment, (_, module, *arguments) = json.loads(message)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        client.send(b"%d" % os.getpid())
        if module == STREAM:
            _plan_stream()
        else:
            importlib.import_module(module).main()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _plan_stream() -> None:
    module = importlib.import_module(STREAM)
    with module.get_sock_file_to_executor(timeout=None) as jvm:
        module.main(jvm, jvm)


def _be_client(path: str, *arguments: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(path)
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])
        message = json.dumps([dict(os.environ), arguments]).encode()
        socket.send_fds(server, [message], [0, 1, 2])
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
        _be_client(*sys.argv[1:])
