"""Real Apache Kafka 4.3.0: the oracle for formats and behaviour, and the peer in benchmarks.

The jars come from Maven once, and Kafka is started once for an archive of its classes, which saves
a third of the start of later JVMs. `unavailable()` says why Kafka cannot be had, if
it cannot; callers then say so instead of passing silently.
"""

import signal
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.support.peers import maven
from tests.support.peers.java_programs import class_archive, java_command, quick_java
from tests.support.peers.maven import QUICK_JVM
from tests.support.peers.tools_jvm import ToolsJvm
from tests.support.ports import free_port

POM = Path(__file__).with_name("kafka-pom.xml")
LIB = maven.FOLDER / "lib"
START_SECONDS = 60
STOP_SECONDS = 30
_tools = ToolsJvm()


def unavailable() -> str | None:
    """Why Kafka cannot be run here, or None after its jars and their archive are in place."""
    return maven.unavailable(POM, LIB.name) or maven.make_once(class_archive(LIB), _archive_classes)


def _archive_classes(archive: Path) -> None:
    """Run Kafka, and let its JVM write at its end which classes it has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        kafka = start_kafka(Path(folder), jvm=(*QUICK_JVM, f"-XX:ArchiveClassesAtExit={archive}"))
        kafka.process.terminate()
        kafka.process.wait(START_SECONDS)


def run_tool(
    main_class: str, *arguments: str, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run one of Kafka's command line tools; the caller looks at the exit code and the text.

    All tools of this process run in one JVM: to start another one takes most of a tool's time.
    """
    assert maven.unavailable(POM, LIB.name) is None
    return _tools.run(java_command(LIB, "RunTools"), main_class, *arguments, timeout=timeout)


def run_program(
    main_class: str, *arguments: str, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program of Kafka's in a JVM of its own: some do their last work when it ends."""
    assert maven.unavailable(POM, LIB.name) is None
    return subprocess.run(
        [*quick_java(LIB), main_class, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def dump_log_segments(paths: list[Path]) -> str:
    """What DumpLogSegments --deep-iteration says. Run it on copies: it creates missing indexes."""
    files = ",".join(str(path) for path in paths)
    done = run_tool("org.apache.kafka.tools.DumpLogSegments", "--deep-iteration", "--files", files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@dataclass
class KafkaBroker:
    """A running Kafka in KRaft mode on loopback."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes]
    settings: dict[str, str]

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """A clean stop; killed if it takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


def start_kafka(
    directory: Path,
    settings: dict[str, str] | None = None,
    *,
    heap: str = "1g",
    jvm: Sequence[str] | None = None,
    listeners: Mapping[str, int] | None = None,
) -> KafkaBroker:
    """Format `directory` if it is new, start Kafka on it and wait until it answers.

    `listeners`: ports on localhost of more protocols, for example SASL_SSL. `jvm`: options of the
    JVM, instead of those that let it start quickly.
    """
    assert maven.unavailable(POM, LIB.name) is None
    directory.mkdir(parents=True, exist_ok=True)
    port, controller = free_port(), free_port()
    more = [f"{name}://localhost:{number}" for name, number in (listeners or {}).items()]
    advertised = ",".join([f"PLAINTEXT://127.0.0.1:{port}", *more])
    properties = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": ",".join([advertised, f"CONTROLLER://127.0.0.1:{controller}"]),
        "advertised.listeners": advertised,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(
            f"{name}:{name}" for name in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
        )
        + ",CONTROLLER:PLAINTEXT",
        "log.dirs": str(directory / "data"),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        **(settings or {}),
    }
    config = directory / "server.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    if not (directory / "data" / "meta.properties").exists():
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        done = run_tool("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config))
        assert done.returncode == 0, done.stdout + done.stderr
    size = (f"-Xmx{heap}", f"-Xms{heap}")
    java = quick_java(LIB, *size) if jvm is None else ["java", *jvm, *size, "-cp", f"{LIB}/*"]
    command = [*java, "kafka.Kafka", str(config)]
    with (directory / "kafka.log").open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=directory, start_new_session=True
        )
    broker = KafkaBroker(directory, port, process, properties)
    _wait_until_ready(broker)
    return broker


def answers(host: str, port: int) -> bool:
    """Whether a Kafka broker there answers a Metadata request with itself in it."""
    with socket.socket() as probe:
        if probe.connect_ex((host, port)) != 0:
            return False
    admin = AdminClient({"bootstrap.servers": f"{host}:{port}", "log_level": 0})
    return bool(admin.list_topics(timeout=10).brokers)


def _wait_until_ready(broker: KafkaBroker) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if broker.process.poll() is not None:
            text = (broker.directory / "kafka.log").read_text(errors="replace")
            raise AssertionError(f"Kafka ended: {text[-2000:]}")
        if answers("127.0.0.1", broker.port):
            return
        time.sleep(0.1)
    broker.kill()
    raise AssertionError(f"Kafka was not ready in {START_SECONDS} s")


@contextmanager
def running_kafka(
    directory: Path,
    settings: dict[str, str] | None = None,
    *,
    listeners: Mapping[str, int] | None = None,
) -> Iterator[KafkaBroker]:
    """A Kafka for the length of a block."""
    broker = start_kafka(directory, settings, listeners=listeners)
    try:
        yield broker
    finally:
        broker.stop()
