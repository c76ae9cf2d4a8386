"""A Spark standalone cluster on loopback: a master and workers, each a process of its own.

The workers' executors may be kept from reading what others own (`blind`): they run as the same user
without the right to pass over permissions. That needs root, who has that right to give up.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from pipeline.java import cache_folder, find_java, launcher_home, write_whole

START_SECONDS = 60
STOP_SECONDS = 20
OTHER_USER = 65534  # nobody
JARS = Path(pyspark.__file__).parent / "jars"
# Of the executors, in tests: the compiler that starts fast.
EXECUTOR_SETTINGS = {"spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
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

    def start(self, name: str, main: str, *arguments: str, rights: tuple[str, ...] = ()) -> None:
        java = find_java()
        settings = self.folder / "log4j2.properties"
        write_whole(settings, LOG)
        home = launcher_home(java, cache_folder())
        command = [
            *(*rights, str(home / "bin/java"), "-Xmx256m", "-XX:TieredStopAtLevel=1"),
            *(f"-Dlog4j2.configurationFile={settings}", "-cp", f"{JARS}/*", main),
            *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments),
        ]
        environ = {
            **os.environ,
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
        while (found := re.search(pattern, self.log(name))) is None:
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with {code}: {self.log(name)[-3000:]}"
            assert time.monotonic() < deadline, f"{name}: {self.log(name)[-3000:]}"
            time.sleep(0.05)
        return found

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
        cluster.start("master", f"{package}.master.Master")
        cluster.master = cluster.wait_for("master", r"Starting Spark master at (\S+)")[1]
        names = [f"worker-{index}" for index in range(workers)]
        for name in names:
            options = ("--cores", "1", "--memory", memory, "--work-dir", str(folder / name))
            main = f"{package}.worker.Worker"
            cluster.start(name, main, *options, cluster.master, rights=rights)
        for name in names:
            cluster.wait_for(name, "Successfully registered with master")
        yield cluster
    finally:
        cluster.stop()
