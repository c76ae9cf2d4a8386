"""A Spark standalone cluster on loopback: a master and workers, each a process of its own.

The workers' executors may be kept from reading what others own (`blind`): they run as the same user
without the right to pass over permissions. That needs root, who has that right to give up.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from pipeline.atomic_write import write_atomically
from pipeline.engines.java import cache_folder, find_java, launcher_home
from tests.support.peers.maven import QUICK_JVM

ROOT = Path(__file__).parents[2]
START_SECONDS = 60
STOP_SECONDS = 20
OTHER_USER = 65534  # nobody
JARS = Path(pyspark.__file__).parent / "jars"
EXECUTOR_SETTINGS = {"spark.executor.extraJavaOptions": " ".join(QUICK_JVM)}
LOG = """\
rootLogger.level = info
rootLogger.appenderRef.all.ref = all
appender.all.type = Console
appender.all.name = all
appender.all.target = SYSTEM_ERR
appender.all.layout.type = PatternLayout
appender.all.layout.pattern = %p %c{1}: %m%n
"""


def can_blind() -> bool:
    """Whether workers can be kept from reading what others own."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


@dataclass
class Cluster:
    """A running cluster. `master` is what a session is started with."""

    folder: Path
    blind: bool
    master: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_java(self, name: str, main: str, *arguments: str, rights: Sequence[str] = ()) -> None:
        """A master or a worker."""
        home = launcher_home(find_java(), cache_folder())
        self.start(
            name,
            [
                *(*rights, str(home / "bin/java"), "-Xmx256m", *self.options),
                *("-cp", f"{JARS}/*", main),
                *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments),
            ],
        )

    @property
    def options(self) -> list[str]:
        """Of every JVM."""
        settings = self.folder / "log4j2.properties"
        write_atomically(settings, LOG)
        return [*QUICK_JVM, f"-Dlog4j2.configurationFile={settings}"]

    def start(self, name: str, command: list[str]) -> None:
        """Any process."""
        home = launcher_home(find_java(), cache_folder())
        environ = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "JAVA_HOME": str(home),
            "SPARK_HOME": str(JARS.parent),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_SCALA_VERSION": "2.13",  # as Spark's own scripts set it
        }
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=environ,
                start_new_session=True,
            )

    def wait_for(self, name: str, pattern: str) -> re.Match[str]:
        """Until a process has said something."""
        deadline = time.monotonic() + START_SECONDS
        while (match := re.search(pattern, self.log(name))) is None:
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with {code}: {self.log(name)[-3000:]}"
            assert time.monotonic() < deadline, f"{name}: {self.log(name)[-3000:]}"
            time.sleep(0.05)
        return match

    def stop(self) -> None:
        """End every process, the executors with their workers."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def kill_executors(self) -> int:
        """kill -9 to every executor that runs; returns how many there were."""
        workers = {process.pid for process in self.processes.values()}
        return sum(1 for pid in children(workers) if kill(pid))


def children(parents: set[int]) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) in parents:
            yield int(folder.name)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def running_cluster(
    folder: Path, workers: int = 2, memory: str = "1g", *, blind: bool = False
) -> Iterator[Cluster]:
    """A master and `workers` with one core each, for the length of a block."""
    cluster = Cluster(folder, blind)
    folder.mkdir(parents=True, exist_ok=True)
    package = "org.apache.spark.deploy"
    rights = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if blind else ()
    try:
        cluster.start_java("master", f"{package}.master.Master")
        cluster.master = cluster.wait_for("master", r"Starting Spark master at (\S+)")[1]
        names = [f"worker-{index}" for index in range(workers)]
        for name in names:
            options = ("--cores", "1", "--memory", memory, "--work-dir", str(folder / name))
            main = f"{package}.worker.Worker"
            cluster.start_java(name, main, *options, cluster.master, rights=rights)
        for name in names:
            cluster.wait_for(name, "Successfully registered with master")
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def running_connect_server(folder: Path) -> Iterator[str]:
    """Spark Connect with two cores, for the length of a block; yields its master URL."""
    cluster = Cluster(folder, blind=False)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    try:
        cluster.start(
            "connect",
            [
                *(str(JARS.parent / "bin/spark-submit"), "--master", "local[2,2]"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *("--driver-memory", "1g", "--driver-java-options", " ".join(cluster.options)),
                *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
                "spark-internal",
            ],
        )
        match = cluster.wait_for("connect", r"Spark Connect server started at: (\S+)")
        yield f"sc://{match[1]}"
    finally:
        cluster.stop()
