"""Every family of clients does what an application does, without and with security.

Each client creates a compacted topic, produces with every codec, writes a tombstone, reads as a
group member, and continues from its committed offsets. An independent reader then compares.
"""

import asyncio
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiokafka
import kafka
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioTopic
from aiokafka.helpers import create_ssl_context
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.admin import NewTopic as PythonTopic

from tests.support.certificates import Authority
from tests.support.draws import cases, only_in_ci
from tests.support.peers import connect_worker, maven, other_programs, schema_registry
from tests.support.peers.java_programs import java_command
from tests.support.peers.schema_registry import running_registry
from tests.support.ports import free_port
from tests.support.reading import read_topics
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

CLIENTS_POM = Path(__file__).parents[1] / "support" / "peers" / "kafka-clients-pom.xml"
USER, PASSWORD = "anna", "correct-horse"
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
KEYS = 50
COMPACTED = {"cleanup.policy": "compact"}
JAVA_SECONDS = 150
BUILD_SECONDS = other_programs.FETCH_SECONDS + 150  # the first test of a client builds its program

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass(frozen=True)
class Listener:
    """How clients reach one listener of the broker."""

    protocol: str
    bootstrap: str
    ca: str
    truststore: str

    @property
    def is_secure(self) -> bool:
        return self.protocol == "SASL_SSL"

    def librdkafka(self, **more: str) -> dict[str, str]:
        security = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": self.ca,
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }
        base = {"bootstrap.servers": self.bootstrap, **(security if self.is_secure else {})}
        return base | more

    def java(self) -> dict[str, str]:
        login = "org.apache.kafka.common.security.scram.ScramLoginModule"
        security = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{login} required username="{USER}" password="{PASSWORD}";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.truststore,
        }
        return {"bootstrap.servers": self.bootstrap, **(security if self.is_secure else {})}

    def kafka_python(self) -> dict[str, object]:
        security = {
            "security_protocol": "SASL_SSL",
            "ssl_cafile": self.ca,
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": USER,
            "sasl_plain_password": PASSWORD,
        }
        return {"bootstrap_servers": self.bootstrap, **(security if self.is_secure else {})}

    def aiokafka(self) -> dict[str, object]:
        if not self.is_secure:
            return {"bootstrap_servers": self.bootstrap}
        security = self.kafka_python() | {"ssl_context": create_ssl_context(cafile=self.ca)}
        del security["ssl_cafile"]
        return security


@pytest.fixture(scope="session")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Listener]]:
    """One daemon with both listeners."""
    folder = tmp_path_factory.mktemp("matrix")
    authority = Authority(folder)
    password = authority.write("password", PASSWORD.encode())
    addresses = {name: f"localhost:{free_port()}" for name in ("PLAINTEXT", "SASL_SSL")}
    settings = {
        "listeners": [f"{name}://{address}" for name, address in addresses.items()],
        "tls": {"certificate_file": authority.write("server.pem", authority.leaf("broker").pem())},
        "sasl": {"mechanisms": ["SCRAM-SHA-512"], "users": {USER: {"file": password}}},
        "groups": {"offsets_partitions": 4},
        "transactions": {"state_partitions": 4},
    }
    with running_varve(folder, settings):
        yield {
            name: Listener(name, address, authority.path, authority.path)
            for name, address in addresses.items()
        }


@pytest.fixture(params=cases(few=["SASL_SSL"], many=["PLAINTEXT", "SASL_SSL"]))
def listener(request: pytest.FixtureRequest, listeners: dict[str, Listener]) -> Listener:
    return listeners[request.param]


@pytest.fixture
def topic() -> str:
    return f"matrix-{uuid.uuid4().hex[:12]}"


def records(codec: str) -> list[tuple[bytes, bytes | None]]:
    """What one producer sends: a value of each key, and one tombstone."""
    values: list[tuple[bytes, bytes | None]] = [
        (b"k%d" % key, f"{codec}-{key}".encode()) for key in range(KEYS)
    ]
    return [*values, (b"k0", None)]


SENT = sum(len(records(codec)) for codec in CODECS)
LAST = dict(records(CODECS[-1]))


def last_values(listener: Listener, topic: str) -> dict[bytes | None, bytes | None]:
    """The last committed value of each key, by an independent reader."""
    view = read_topics(
        listener.bootstrap, [topic], "read_committed", security=listener.librdkafka()
    )
    return {record.key: record.value for records in view.values() for record in records}


def test_confluent_kafka(listener: Listener, topic: str) -> None:
    admin = AdminClient(listener.librdkafka())
    admin.create_topics([NewTopic(topic, 1, 1, config=COMPACTED)])[topic].result(30)
    for codec in CODECS:
        producer = Producer(listener.librdkafka(**{"compression.type": codec}))
        for key, value in records(codec):
            producer.produce(topic, value, key)
        assert producer.flush(30) == 0

    def consume(count: int) -> int:
        config = listener.librdkafka(**{"group.id": topic, "auto.offset.reset": "earliest"})
        consumer = Consumer(config | {"enable.auto.commit": False})
        consumer.subscribe([topic])
        seen = 0
        while seen < count:
            messages = consumer.consume(count - seen, 30)
            assert messages
            assert not any(message.error() for message in messages)
            seen += len(messages)
        consumer.commit(asynchronous=False)
        consumer.close()
        return seen

    assert consume(SENT - 1) == SENT - 1
    assert consume(1) == 1
    assert last_values(listener, topic) == LAST


def test_kafka_python(listener: Listener, topic: str) -> None:
    admin = kafka.KafkaAdminClient(**listener.kafka_python())
    admin.create_topics([PythonTopic(topic, 1, 1, topic_configs=COMPACTED)])
    admin.close()
    for codec in CODECS:
        compression = None if codec == "none" else codec
        producer = kafka.KafkaProducer(compression_type=compression, **listener.kafka_python())
        futures = [producer.send(topic, value, key) for key, value in records(codec)]
        for future in futures:
            future.get(30)
        producer.close()

    def consume(count: int) -> int:
        consumer = kafka.KafkaConsumer(
            topic, group_id=topic, auto_offset_reset="earliest", enable_auto_commit=False,
            max_poll_records=count, consumer_timeout_ms=30_000, **listener.kafka_python(),
        )  # fmt: skip
        seen = sum(1 for _, _ in zip(range(count), consumer, strict=False))
        consumer.commit()
        consumer.close()
        return seen

    assert consume(SENT) == SENT
    assert last_values(listener, topic) == LAST


async def test_aiokafka(listener: Listener, topic: str) -> None:
    async with asyncio.timeout(120):
        admin = AIOKafkaAdminClient(**listener.aiokafka())
        await admin.start()
        await admin.create_topics([AioTopic(topic, 1, 1, topic_configs=COMPACTED)])
        await admin.close()
        for codec in CODECS:
            compression = None if codec == "none" else codec
            async with aiokafka.AIOKafkaProducer(
                compression_type=compression, enable_idempotence=True, **listener.aiokafka()
            ) as producer:
                for key, value in records(codec):
                    await producer.send(topic, value, key)
        for first, count in ((0, SENT - 1), (SENT - 1, 1)):
            async with aiokafka.AIOKafkaConsumer(
                topic, group_id=topic, auto_offset_reset="earliest", enable_auto_commit=False,
                **listener.aiokafka(),
            ) as consumer:  # fmt: skip
                offsets = [(await consumer.getone()).offset for _ in range(count)]
                assert offsets == list(range(first, first + count))
                partition = aiokafka.TopicPartition(topic, 0)
                await consumer.commit({partition: first + count})
    assert last_values(listener, topic) == LAST


def test_kcat_with_an_old_librdkafka(listener: Listener, topic: str, tmp_path: Path) -> None:
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed: apt-get install kcat")
    config = tmp_path / "kcat.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in listener.librdkafka().items()))
    kcat = ["kcat", "-F", str(config)]
    admin = AdminClient(listener.librdkafka())  # kcat creates no topics
    admin.create_topics([NewTopic(topic, 1, 1, config=COMPACTED)])[topic].result(30)
    for codec in CODECS:
        lines = "".join(
            f"{key.decode()}:{(value or b'').decode()}\n" for key, value in records(codec)
        )
        send = [
            *kcat,
            "-P",
            "-t",
            topic,
            "-p",
            "0",
            "-K:",
            "-Z",
            "-X",
            f"compression.codec={codec}",
        ]
        subprocess.run(send, input=lines, text=True, timeout=60, check=True)
    read = [*kcat, "-C", "-t", topic, "-e", "-q", "-o", "beginning", "-f", "%k\n"]
    done = subprocess.run(read, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == SENT
    # A group member ends after its number of messages; the next one continues.
    for first, count in ((0, SENT - 1), (SENT - 1, 1)):
        member = [*kcat, "-q", "-X", "auto.offset.reset=earliest", "-c", str(count), "-f", "%o\n"]
        done = subprocess.run(
            [*member, "-G", topic, topic], capture_output=True, text=True, timeout=60, check=True
        )
        assert [int(line) for line in done.stdout.split()] == list(range(first, first + count))
    assert last_values(listener, topic) == LAST


def output_of(client: str, listener: Listener, **names: str) -> list[str]:
    """Run a program of tests/support/peers; return the lines of its output."""
    reason = other_programs.unavailable(client)
    if reason is not None:
        pytest.skip(f"{client} cannot be run here: {reason}")
    options = {"bootstrap": listener.bootstrap, **names}
    if listener.is_secure:
        options |= {"ca": listener.ca, "user": USER, "password": PASSWORD}
    done = subprocess.run(
        [*other_programs.command(client), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize("client", cases(few=["kafkajs"], many=["kafkajs", "franz_go"]))
def test_clients_in_javascript_and_go(listener: Listener, topic: str, client: str) -> None:
    lines = output_of(client, listener, topic=topic, group=topic)
    assert lines == ["described 1 compact", "read 15", "continued 6"]
    expected: dict[bytes, bytes | None] = {b"k%d" % key: b"last" for key in range(10)}
    assert last_values(listener, topic) == expected | {b"k0": None}


@only_in_ci("the tests of the codecs read the layouts that it uses; it is built in a minute")
@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.xdist_group("rust client")  # one worker builds it, once
def test_a_client_in_rust(listener: Listener, topic: str) -> None:
    """It has no groups, and creates topics without settings; it uses the oldest versions."""
    admin = AdminClient(listener.librdkafka())
    admin.create_topics([NewTopic(topic, 1, 1, config=COMPACTED)])[topic].result(30)
    lines = output_of("rskafka", listener, topic=topic, created=f"{topic}-created")
    assert lines == ["partitions 1", "read 51 with 51 headers to 51", "created"]
    assert len(admin.list_topics(f"{topic}-created", 30).topics[f"{topic}-created"].partitions) == 2
    expected: dict[bytes, bytes | None] = {b"k%d" % key: b"Zstd" for key in range(10)}
    assert last_values(listener, topic) == expected | {b"k0": None}


def java(jars: Path, main: str, *arguments: str) -> str:
    """Run a program of tests/support/java; return its output."""
    command = java_command(jars, main, *arguments)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=JAVA_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def properties(listener: Listener, tmp_path: Path) -> str:
    """A properties file with the connection."""
    path = tmp_path / "client.properties"
    path.write_text("".join(f"{key}={value}\n" for key, value in listener.java().items()))
    return str(path)


@pytest.mark.parametrize("version", cases(few=["4.3.0"], many=["2.8.2", "3.9.1", "4.3.0"]))
def test_java_clients(listener: Listener, topic: str, properties: str, version: str) -> None:
    jars = f"clients-{version}"
    reason = maven.unavailable(CLIENTS_POM, jars, (f"kafka.version={version}",))
    if reason is not None:
        pytest.skip(f"Kafka's clients {version} cannot be run here: {reason}")
    output = java(maven.FOLDER / jars, "ClientRound", properties, topic)
    assert output.split() == ["read", "1005", "continued", "1"]
    expected: dict[bytes, bytes | None] = {b"k%d" % key: b"zstd-3" for key in range(KEYS)}
    expected |= dict.fromkeys((b"k%d" % key for key in range(5)), None)
    assert last_values(listener, topic) == expected | {b"k7": b"last"}


@pytest.fixture(scope="session")
def kafka_apps() -> Path:
    reason = maven.unavailable(connect_worker.POM, connect_worker.JARS.name)
    if reason is not None:
        pytest.skip(f"Kafka Streams and Connect cannot be run here: {reason}")
    return connect_worker.JARS


@contextmanager
def running_java(log: Path, command: list[str]) -> Iterator[None]:
    """Run a program that ends when its standard input does; its output goes to a file."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        yield
        process.communicate(timeout=JAVA_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, log.read_text()[-3000:]


def committed_records(admin: AdminClient, group: str) -> int:
    """How many records of its topics a group has processed."""
    future = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
    return sum(partition.offset for partition in future.result(30).topic_partitions)


@only_in_ci("test_kill_transactions.py kills a Java client; Streams takes three JVMs")
def test_kafka_streams_counts_exactly_once_although_it_is_killed(
    listener: Listener, topic: str, properties: str, kafka_apps: Path
) -> None:
    admin = AdminClient(listener.librdkafka())
    source, sink = f"{topic}-in", f"{topic}-out"
    for future in admin.create_topics([NewTopic(name, 2, 1) for name in (source, sink)]).values():
        future.result(30)
    producer = Producer(listener.librdkafka())
    for number in range(1000):
        producer.produce(source, b"x", b"k%d" % (number % 20))
    assert producer.flush(30) == 0
    state, log = (Path(properties).with_name(name) for name in ("state", "streams.log"))
    run = ("CountByKey", properties, topic, source, sink, str(state))
    assert "counted" in java(kafka_apps, *run, "700")
    for number in range(1000):
        producer.produce(source, b"x", b"k%d" % (number % 20))
    assert producer.flush(30) == 0
    with running_java(log, java_command(kafka_apps, *run)):
        wait_until(lambda: committed_records(admin, topic) == 2000, "all are counted", JAVA_SECONDS)
    assert last_values(listener, sink) == {b"k%d" % key: b"100" for key in range(20)}


@only_in_ci("test_kill_transactions.py has the rule; Connect takes a JVM and a minute")
def test_kafka_connect_moves_a_file_through_a_topic_exactly_once(
    listener: Listener, topic: str, kafka_apps: Path, tmp_path: Path
) -> None:
    lines = [f"line {number}" for number in range(500)]
    source, sink = tmp_path / "source.txt", tmp_path / "sink.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    with connect_worker.running_connect(tmp_path / "connect", listener.java()) as worker:
        stream = "org.apache.kafka.connect.file.FileStream"
        worker.create(
            "source",
            {"connector.class": f"{stream}SourceConnector", "tasks.max": "1", "topic": topic,
             "file": str(source), "exactly.once.support": "required"},
        )  # fmt: skip
        worker.create(
            "sink",
            {"connector.class": f"{stream}SinkConnector", "tasks.max": "1", "topics": topic,
             "file": str(sink)},
        )  # fmt: skip
        wait_until(
            lambda: sink.exists() and sink.read_text().splitlines() == lines,
            "the sink has every line once",
            90,
        )


@only_in_ci("test_java_clients uses the same client; the registry is two more JVMs")
@pytest.mark.timeout(2 * schema_registry.START_SECONDS + 60)  # it starts twice
def test_a_schema_registry_that_is_killed_finds_its_schemas_again(
    listeners: dict[str, Listener], topic: str, tmp_path: Path
) -> None:
    reason = schema_registry.unavailable()
    if reason is not None:
        pytest.skip(f"Apicurio Registry cannot be run here: {reason}")
    schemas = [
        {"type": "record", "name": "Order", "fields": [{"name": name, "type": "long"}]}
        for name in ("id", "customer")
    ]
    plain, secure = (listeners[name].java() for name in ("PLAINTEXT", "SASL_SSL"))
    with running_registry(tmp_path / "first", plain, topic) as registry:
        numbers = [registry.register(f"orders-{n}", schema) for n, schema in enumerate(schemas)]
    with running_registry(tmp_path / "second", secure, topic) as registry:
        assert [registry.schema(number) for number in numbers] == schemas
