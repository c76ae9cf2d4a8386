"""Kafka's command line tools administrate the running daemon. All of them share one JVM."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.peers.kafka import run_program, run_tool
from tests.support.reading import read_topics
from tests.support.shown_commands import ROOT, all_commands
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

TOOLS = "org.apache.kafka.tools."
TOPICS, CONFIGS = TOOLS + "TopicCommand", "kafka.admin.ConfigCommand"
GROUPS = TOOLS + "consumer.group.ConsumerGroupCommand"
# The classes of the programs that the documents show.
PROGRAMS = {
    "kafka-acls.sh": TOOLS + "AclCommand",
    "kafka-configs.sh": CONFIGS,
    "kafka-delete-records.sh": TOOLS + "DeleteRecordsCommand",
    "kafka-log-dirs.sh": TOOLS + "LogDirsCommand",
    "kafka-reassign-partitions.sh": TOOLS + "reassign.ReassignPartitionsCommand",
}
Tool = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def broker(real_kafka: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    directory = tmp_path_factory.mktemp("tools")
    settings = {
        "log_dirs": [str(directory / "data"), str(directory / "second")],
        "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    }
    with running_varve(directory, settings) as running:
        yield running


@pytest.fixture(scope="module")
def tool(broker: VarveBroker) -> Tool:
    """Run a tool with `--bootstrap-server` and these arguments; the exit code and the output."""

    def run(main_class: str, *arguments: str) -> tuple[int, str]:
        server = ("--bootstrap-server", broker.bootstrap)
        is_last = main_class == TOOLS + "ClusterTool"  # it wants its command first
        done = run_tool(main_class, *(arguments + server if is_last else server + arguments))
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def topic(tool: Tool) -> str:
    code, output = tool(TOPICS, "--create", "--topic", "orders", "--partitions", "2")
    assert code == 0, output
    return "orders"


def test_kafka_acls(tool: Tool) -> None:
    acls = TOOLS + "AclCommand"
    anna = ("--allow-principal", "User:anna", "--operation", "Read", "--topic", "accounts")
    for words in (
        ("--add", *anna, "--operation", "Write"),
        ("--add", "--deny-principal", "User:bob", "--operation", "All", "--topic", "accounts-",
         "--resource-pattern-type", "prefixed"),
        ("--remove", *anna, "--force"),
    ):  # fmt: skip
        code, output = tool(acls, *words)
        assert code == 0, output
    listed = tool(acls, "--list")[1]
    assert re.findall(
        r"principal=(\S+), host=\*, operation=(\w+), permissionType=(\w+)", listed
    ) in (
        [("User:anna", "WRITE", "ALLOW"), ("User:bob", "ALL", "DENY")],
        [("User:bob", "ALL", "DENY"), ("User:anna", "WRITE", "ALLOW")],
    )


def test_kafka_topics(tool: Tool, topic: str) -> None:
    assert topic in tool(TOPICS, "--list")[1].split()
    code, output = tool(TOPICS, "--describe", "--topic", topic)
    assert (code, output.count("Leader: 1")) == (0, 2), output
    topic_id = re.search(r"TopicId: (\S+)", output)
    assert topic_id is not None
    assert "PartitionCount: 2" in tool(TOPICS, "--describe", "--topic-id", topic_id[1])[1]
    tool(TOPICS, "--create", "--topic", "short-lived", "--config", "cleanup.policy=compact")
    assert tool(TOPICS, "--alter", "--topic", "short-lived", "--partitions", "3")[0] == 0
    described = tool(TOPICS, "--describe", "--topic", "short-lived")[1]
    assert "PartitionCount: 3" in described
    assert "cleanup.policy=compact" in described
    assert tool(TOPICS, "--delete", "--topic", "short-lived")[0] == 0
    assert "short-lived" not in tool(TOPICS, "--list")[1]


def test_kafka_configs_of_topics_and_brokers(tool: Tool, topic: str) -> None:
    entity = ("--entity-type", "topics", "--entity-name", topic)
    assert tool(CONFIGS, "--alter", "--add-config", "retention.ms=4000000", *entity)[0] == 0
    assert "retention.ms=4000000" in tool(CONFIGS, "--describe", *entity)[1]
    assert tool(CONFIGS, "--alter", "--delete-config", "retention.ms", *entity)[0] == 0
    entity = ("--entity-type", "brokers", "--entity-name", "1")
    assert tool(CONFIGS, "--alter", "--add-config", "log.cleaner.threads=2", *entity)[0] == 0
    described = tool(CONFIGS, "--describe", "--all", *entity)[1]
    assert "DYNAMIC_BROKER_CONFIG:log.cleaner.threads=2" in described
    for name in (
        "message.max.bytes", "log.retention.hours", "log.retention.ms", "num.partitions",
        "log.segment.bytes", "log.dirs", "auto.create.topics.enable", "min.insync.replicas",
        "compression.type", "log.cleaner.enable", "unclean.leader.election.enable",
        "default.replication.factor", "offsets.retention.minutes", "group.max.size",
        "process.roles", "controller.quorum.voters", "security.inter.broker.protocol",
        "inter.broker.listener.name", "broker.rack", "log.retention.minutes", "log.roll.hours",
        "log.dir", "quota.window.num", "super.users",
    ):  # fmt: skip
        assert re.search(rf"^\s+{re.escape(name)}=", described, re.MULTILINE), name


@pytest.mark.parametrize(
    ("entity", "expected", "change", "refusal"),
    [
        (
            ("groups", "billing"),
            "consumer.session.timeout.ms=45000",
            "consumer.session.timeout.ms=50000",
            "groups.consumer_session_timeout_ms in the settings file",
        ),
        (("broker-loggers", "1"), "root=INFO", "root=DEBUG", "logging.level in the settings file"),
        (
            ("client-metrics", "mine"),
            "interval.ms=300000",
            "interval.ms=1000",
            "no metrics of clients",
        ),
    ],
)
def test_kafka_configs_describes_what_it_cannot_change(
    tool: Tool, entity: tuple[str, str], expected: str, change: str, refusal: str
) -> None:
    words = ("--entity-type", entity[0], "--entity-name", entity[1])
    code, output = tool(CONFIGS, "--describe", "--all", *words)
    assert (code, expected in output) == (0, True), output
    code, output = tool(CONFIGS, "--alter", "--add-config", change, *words)
    assert code != 0
    assert refusal in output


@pytest.mark.parametrize(
    ("entity", "config"),
    [
        (("--entity-type", "users", "--entity-name", "x"), "producer_byte_rate=1000.0"),
        (("--entity-type", "users", "--entity-default"), "consumer_byte_rate=2000.0"),
        (("--entity-type", "clients", "--entity-name", "app"), "request_percentage=50.0"),
        (
            ("--entity-type", "users", "--entity-name", "x", "--entity-type", "clients",
             "--entity-default"),
            "controller_mutation_rate=5.0",
        ),
        (("--entity-type", "ips", "--entity-name", "10.0.0.7"), "connection_creation_rate=10.0"),
    ],
)  # fmt: skip
def test_kafka_configs_of_quotas(tool: Tool, entity: tuple[str, ...], config: str) -> None:
    assert tool(CONFIGS, "--alter", "--add-config", config, *entity)[0] == 0
    code, output = tool(CONFIGS, "--describe", *entity)
    assert code == 0
    assert config in output
    key = config.partition("=")[0]
    assert tool(CONFIGS, "--alter", "--delete-config", key, *entity)[0] == 0
    assert config not in tool(CONFIGS, "--describe", *entity)[1]


def test_kafka_features(tool: Tool) -> None:
    command = TOOLS + "FeatureCommand"
    described = tool(command, "describe")[1]
    assert re.search(r"metadata.version\s.*FinalizedVersionLevel: 4.3-IV0", described), described
    assert re.search(r"transaction.version\s.*FinalizedVersionLevel: 2", described)
    code, output = tool(command, "downgrade", "--feature", "transaction.version=1")
    assert (code, "transaction.version was downgraded to 1" in output) == (0, True)
    assert re.search(r"transaction.version\s.*Level: 1", tool(command, "describe")[1])
    assert tool(command, "upgrade", "--feature", "transaction.version=2")[0] == 0
    code, output = tool(command, "upgrade", "--feature", "metadata.version=99")
    assert (code, "only supports versions 30-30" in output) == (1, True)


def test_tools_that_produce_consume_and_look_at_offsets(tool: Tool, topic: str) -> None:
    code, output = tool(
        TOOLS + "ProducerPerformance", "--topic", topic, "--num-records", "500", "--record-size",
        "100", "--throughput", "-1", "--command-property", "acks=all",
    )  # fmt: skip
    assert (code, "500 records sent" in output) == (0, True), output
    code, output = tool(TOOLS + "GetOffsetShell", "--topic", topic)
    assert code == 0
    assert sum(int(line.rpartition(":")[2]) for line in output.split()) == 500


def test_verifiable_clients(tool: Tool, broker: VarveBroker) -> None:
    """They write their result when their JVM ends, so each has its own."""
    server = ("--bootstrap-server", broker.bootstrap, "--topic", "verified")
    done = run_program(
        TOOLS + "VerifiableProducer", *server, "--max-messages", "50", "--acks", "-1"
    )
    assert json.loads(done.stdout.splitlines()[-1])["acked"] == 50, done.stdout + done.stderr
    done = run_program(
        TOOLS + "VerifiableConsumer", *server, "--group-id", "verifier", "--max-messages", "50",
        "--reset-policy", "earliest",
    )  # fmt: skip
    consumed = [json.loads(line) for line in done.stdout.splitlines() if "records_consumed" in line]
    assert sum(line["count"] for line in consumed) == 50, done.stdout + done.stderr
    groups = tool(GROUPS, "--list")[1]
    assert "verifier" in groups.split()


def test_kafka_consumer_groups(tool: Tool, broker: VarveBroker) -> None:
    tool(TOPICS, "--create", "--topic", "grouped", "--partitions", "2")
    tool(TOPICS, "--create", "--topic", "grouped-too", "--partitions", "1")
    server = {"bootstrap.servers": broker.bootstrap}
    producer = Producer(server)
    for number in range(20):
        producer.produce("grouped", b"%d" % number, partition=number % 2)
    producer.produce("grouped-too", b"x")
    assert producer.flush(30) == 0
    consumer = Consumer({**server, "group.id": "workers", "client.id": "worker-app"})
    offsets = [TopicPartition("grouped", index, 4) for index in range(2)]
    consumer.commit(offsets=[*offsets, TopicPartition("grouped-too", 0, 1)], asynchronous=False)
    consumer.subscribe(["grouped"])
    group = ("--group", "workers")

    def run(*words: str) -> str:
        code, output = tool(GROUPS, *words)
        assert code == 0, output
        return output

    def rows() -> dict[tuple[str, int], tuple[str, str, str]]:
        """Topic and partition -> committed offset, log end offset, lag."""
        found = re.findall(
            r"^workers\s+(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)",
            run("--describe", *group), re.MULTILINE,
        )  # fmt: skip
        return {(topic, int(index)): tuple(numbers) for topic, index, *numbers in found}

    wait_until(lambda: consumer.poll(0.1) is not None, "the consumer is a member", 30)
    assert rows()["grouped", 1] == ("4", "10", "6")
    members = run("--describe", *group, "--members", "--verbose")
    assert re.search(r"^workers\s+worker-app-\S+\s+\S+\s+worker-app\s+2\b", members, re.MULTILINE)
    assert "grouped(0,1)" in members or "grouped:0,1" in members, members
    state = run("--describe", *group, "--state")
    assert re.search(r"^workers\s+\S+:\d+\s+\(1\)\s+range\s+Stable\s+1", state, re.MULTILINE), state
    listed = run("--list", "--state", "Stable")
    assert re.search(r"^workers\s+Stable", listed, re.MULTILINE), listed
    _, output = tool(GROUPS, "--reset-offsets", *group, "--topic", "grouped", "--to-earliest",
                        "--execute")  # fmt: skip
    assert "inactive" in output, output
    _, output = tool(GROUPS, "--delete", *group)
    assert "GroupNotEmptyException" in output, output
    _, output = tool(GROUPS, "--delete-offsets", *group, "--topic", "grouped")
    assert "GroupSubscribedToTopicException" in output, output
    consumer.close()
    assert re.search(r"\bEmpty\s+0", run("--describe", *group, "--state"))
    reset = ("--reset-offsets", *group, "--topic")
    for words, expected in (
        (("grouped", "--to-earliest"), ("0", "0")),
        (("grouped", "--to-latest"), ("10", "10")),
        (("grouped", "--shift-by", "-3"), ("7", "7")),
        (("grouped:0", "--to-offset", "5"), ("5", "7")),
        (("grouped", "--to-datetime", "2000-01-01T00:00:00.000"), ("0", "0")),
        (("grouped", "--by-duration", "PT0S"), ("10", "10")),
    ):
        run(*reset, *words, "--execute")
        assert tuple(rows()["grouped", index][0] for index in range(2)) == expected, words
    run(*reset, "grouped", "--to-earliest", "--dry-run")
    assert rows()["grouped", 0][0] == "10"
    exported = run(*reset, "grouped", "--to-current", "--export", "--dry-run")
    assert {"grouped,0,10", "grouped,1,10"} <= set(exported.split()), exported
    assert "grouped-too" in run("--delete-offsets", *group, "--topic", "grouped-too")
    assert ("grouped-too", 0) not in rows()
    assert "was successful" in run("--delete", *group)
    assert "workers" not in run("--list").split()


def test_tools_that_describe_the_cluster(tool: Tool, broker: VarveBroker) -> None:
    code, output = tool(TOOLS + "MetadataQuorumCommand", "describe", "--status")
    assert (code, re.search(r"LeaderId:\s+1\b", output) is not None) == (0, True), output
    code, output = tool(TOOLS + "MetadataQuorumCommand", "describe", "--replication")
    assert (code, "Leader" in output) == (0, True), output
    assert "Cluster ID: " in tool(TOOLS + "ClusterTool", "cluster-id")[1]
    code, output = tool(TOOLS + "BrokerApiVersionsCommand")
    assert (code, "AlterReplicaLogDirs(34): 1 to 2" in output) == (0, True)


def test_a_replica_moves_between_log_directories(
    tool: Tool, broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    def homes() -> dict[str, str]:
        output = tool(TOOLS + "LogDirsCommand", "--describe", "--topic-list", topic)[1]
        described: Any = json.loads(output[output.index("{") :])
        return {
            row["partition"]: directory["logDir"]
            for directory in described["brokers"][0]["logDirs"]
            for row in directory["partitions"]
        }

    before = homes()
    target = next(
        directory
        for directory in (str(broker.data), str(broker.directory / "second"))
        if directory != before[f"{topic}-0"]
    )
    values = read_topics(broker.bootstrap, [topic])
    plan = tmp_path / "move.json"
    row = {"topic": topic, "partition": 0, "replicas": [1], "log_dirs": [target]}
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
    command = (TOOLS + "reassign.ReassignPartitionsCommand", "--reassignment-json-file", str(plan))
    code, output = tool(*command, "--execute")
    assert (code, "Successfully started moving log directory" in output) == (0, True), output
    wait_until(lambda: homes()[f"{topic}-0"] == target, "the replica has moved")
    code, output = tool(*command, "--verify")
    assert (code, "is complete" in output) == (0, True), output
    assert read_topics(broker.bootstrap, [topic]) == values


def test_delegation_tokens_are_refused(tool: Tool, tmp_path: Path) -> None:
    config = tmp_path / "client.properties"
    config.write_text("")
    code, output = tool(
        TOOLS + "DelegationTokenCommand", "--describe", "--command-config", str(config)
    )
    assert (code, "Delegation Token requests are not allowed" in output) == (1, True), output


def test_the_commands_with_kafkas_tools_in_the_documents_run(
    tool: Tool, broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    target = str(broker.directory / "second")
    move = shown_json("docs/how-to/move-a-partition.md").replace("/disk2/varve", target)
    (tmp_path / "move.json").write_text(move)
    deletion = shown_json("docs/how-to/runbooks.md").replace("clicks", topic)
    (tmp_path / "clicks.json").write_text(deletion.replace("300000", "0"))
    (tmp_path / "admin.properties").write_text("")
    shown = [command for command in all_commands() if command.program.startswith("kafka-")]
    assert {command.program for command in shown} == PROGRAMS.keys()
    for command in shown:
        words = list(command.words[1:])
        at = words.index("--bootstrap-server")
        del words[at : at + 2]
        names = [word.removeprefix("/dev/shm/") for word in words]
        files = {path.name for path in tmp_path.iterdir()}
        words = [str(tmp_path / word) if word in files else word for word in names]
        code, output = tool(PROGRAMS[command.program], *words)
        assert (code, "error: " in output) == (0, False), (command.text, output)


def shown_json(page: str) -> str:
    """Return the only block of JSON on a page."""
    (block,) = re.findall(r"```json\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return str(block)
