"""Kafka's own DumpLogSegments reads every file we write, of every codec, and has nothing to say.

Its quirks are no complaints: it calls the gaps that compaction leaves "non-consecutive", takes the
first offset of any segment but the first for one, and cannot read an empty log.
"""

import re
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from storage.format.checkpoints import decode_offsets
from storage.model import TopicPartition
from tests.support.draws import cases
from tests.support.peers.kafka import run_tool
from tests.support.peers.killed_kafka import ADOPTER_SETTINGS, CODECS, TOPICS, KilledKafka
from tests.support.reading import View, read_topics
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

RECORDS = 1600
KEYS = 150
SUFFIXES = (".log", ".index", ".timeindex", ".txnindex", ".snapshot")
PLAIN = tuple(f"plain-{codec}" for codec in CODECS)
TABLES = tuple(f"table-{codec}" for codec in CODECS)
NEVER = {"min.cleanable.dirty.ratio": "1.0", "max.compaction.lag.ms": "9223372036854775807"}
AT_ONCE = {"min.cleanable.dirty.ratio": "0", "max.compaction.lag.ms": "1", "segment.ms": "100"}
HARMLESS = re.compile(r"^SLF4J: ")


@dataclass
class Dump:
    """What the tool said: offsets of the records it found by folder, and what it did not like."""

    offsets: dict[str, list[int]]
    complaints: list[str]
    files: set[str]  # suffixes it was shown


def dump(data: Path, folders: list[str]) -> Dump:
    """Run the tool on every segment file of these partition folders of a copy."""
    paths = [
        path
        for folder in folders
        for path in sorted((data / folder).iterdir())
        if path.suffix in SUFFIXES and not (path.suffix == ".log" and path.stat().st_size == 0)
    ]
    done = run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--deep-iteration",
        "--files",
        ",".join(str(path) for path in paths),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    offsets: dict[str, list[int]] = defaultdict(list)
    complaints: list[str] = []
    folder = ""
    shown = 0
    for line in done.stdout.splitlines():
        if line.startswith("Dumping "):
            folder = Path(line.removeprefix("Dumping ")).parent.name
            shown += 1
        elif match := re.match(r"^\| offset: (\d+) ", line):
            offsets[folder].append(int(match[1]))
        elif "isvalid: false" in line or "invalid bytes" in line or "Could not" in line:
            complaints.append(line)
    assert shown == len(paths), f"{shown} of {len(paths)} files were read"
    complaints += [
        line
        for line in done.stderr.splitlines()
        if line.strip() and not HARMLESS.match(line) and not is_quirk(line, data)
    ]
    return Dump(offsets, complaints, {path.suffix for path in paths})


def is_quirk(line: str, data: Path) -> bool:
    """Gaps, which the tool names for compacted logs and at the start of later segments."""
    if re.match(r"^  (-?\d+) is followed by \d+$", line):
        return True  # judged below: the offsets are compared with those that are served
    return bool(re.match(rf"^Non-consecutive offsets in {re.escape(str(data))}/", line))


def folders_of(data: Path) -> list[str]:
    """The partition folders that are served: not Kafka's metadata log, not what is deleted."""
    return sorted(
        path.name
        for path in data.iterdir()
        if path.is_dir()
        and re.fullmatch(r".+-\d+", path.name)
        and not path.name.startswith("__cluster_metadata")
    )


def assert_readable(data: Path, served: View, suffixes: set[str]) -> None:
    """No complaint, and the tool saw in these partitions what the clients saw."""
    output = dump(data, folders_of(data))
    assert not output.complaints, "\n".join(output.complaints[:10])
    assert suffixes <= output.files
    for (topic, partition), records in served.items():
        results = output.offsets[f"{topic}-{partition}"]
        assert results == [record.offset for record in records], f"{topic}-{partition}"


def create(broker: VarveBroker) -> None:
    small = {"segment.bytes": "1048576"}
    new = [NewTopic(topic, config=small) for topic in PLAIN]
    new += [NewTopic(t, config={**small, **NEVER, "cleanup.policy": "compact"}) for t in TABLES]
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics(new).values():
        future.result(30)


def fill(broker: VarveBroker) -> None:
    for codec in CODECS:
        for idempotent in (False, True):
            producer = Producer(
                {
                    "bootstrap.servers": broker.bootstrap,
                    "compression.type": codec,
                    "enable.idempotence": idempotent,
                    "linger.ms": 10,
                    "batch.num.messages": 100,
                    "log_level": 0,
                }
            )
            for number in range(RECORDS // 2):
                noise = (number * 2654435761 % 2**64).to_bytes(8, "big").hex().encode()
                value = None if number % 97 == 0 else noise * 8 + b"%d" % number * 180
                for topic in (f"plain-{codec}", f"table-{codec}"):
                    headers = [("n", b"1"), ("none", None)] if number % 3 == 0 else None
                    producer.produce(topic, value, f"key-{number % KEYS}", headers=headers)
            assert producer.flush(60) == 0


def clean_all(broker: VarveBroker) -> None:
    """Let the cleaner at the tables, and wait until each was cleaned up to its last segment."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for topic in TABLES:
        changes = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in AT_ONCE.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
        admin.incremental_alter_configs([resource])[resource].result(30)
        producer.produce(topic, b"last", b"last")
    assert producer.flush(30) == 0

    def cleaned() -> bool:
        view = read_topics(broker.bootstrap, TABLES)
        return all(len(records) <= KEYS + 2 for records in view.values())

    wait_until(cleaned, "every table is down to a record per key")


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.fixture(scope="module")
def copies(
    real_kafka: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, View]]:
    """The data directory before cleaning, after it, and after a stop, with what was served."""
    directory = tmp_path_factory.mktemp("dump")
    results: dict[str, tuple[Path, View]] = {}
    with running_varve(directory / "broker", ADOPTER_SETTINGS) as broker:
        create(broker)
        fill(broker)
        view = read_topics(broker.bootstrap, PLAIN + TABLES)
        assert all(len(records) == RECORDS for records in view.values())
        results["before"] = copied(broker.data, directory / "before"), view
        clean_all(broker)
        view = read_topics(broker.bootstrap, PLAIN + TABLES)
        results["after"] = copied(broker.data, directory / "after"), view
    results["stopped"] = copied(broker.data, directory / "stopped"), view
    return results


# Each starts a JVM. The plain topics are logs that were never cleaned, in all three.
@pytest.mark.parametrize("when", cases(few=["stopped"], many=["before", "after", "stopped"]))
def test_kafkas_tool_reads_every_segment_without_a_complaint(
    copies: dict[str, tuple[Path, View]], when: str
) -> None:
    data, view = copies[when]
    several = [topic for topic in PLAIN if len(list((data / f"{topic}-0").glob("*.log"))) > 1]
    assert "plain-none" in several, "the test is about rolled segments too"
    assert_readable(data, view, {".log", ".index", ".timeindex", ".snapshot"})


def test_cleaning_is_noted_in_a_checkpoint_in_kafkas_format(
    copies: dict[str, tuple[Path, View]],
) -> None:
    data, view = copies["stopped"]
    text = (data / "cleaner-offset-checkpoint").read_bytes()
    offsets = decode_offsets(text)
    for topic in TABLES:
        assert offsets[TopicPartition(topic, 0)] > RECORDS - KEYS
        assert offsets[TopicPartition(topic, 0)] <= view[topic, 0][-1].offset + 1


def test_kafkas_tool_reads_what_recovery_of_a_killed_kafka_made_of_it(
    killed_kafka: KilledKafka, tmp_path: Path
) -> None:
    killed_kafka.copy_to(tmp_path / "broker")
    with running_varve(tmp_path / "broker", ADOPTER_SETTINGS) as broker:
        view = read_topics(broker.bootstrap, TOPICS)
    data = copied(broker.data, tmp_path / "copy")
    output = dump(data, folders_of(data))
    assert not output.complaints, "\n".join(output.complaints[:10])
    assert output.files == set(SUFFIXES)
    for (topic, partition), records in view.items():
        # The tool shows the markers of transactions too, and what lies before the log start.
        first = records[0].offset
        offsets = {offset for offset in output.offsets[f"{topic}-{partition}"] if offset >= first}
        assert offsets >= {record.offset for record in records}


def test_the_tool_does_complain_about_a_damaged_segment(
    copies: dict[str, tuple[Path, View]], tmp_path: Path
) -> None:
    """Otherwise silence above would mean nothing."""
    source, _ = copies["before"]
    data = tmp_path / "copy"
    shutil.copytree(source / "plain-none-0", data / "plain-none-0")
    log = data / "plain-none-0" / "00000000000000000000.log"
    damaged = bytearray(log.read_bytes())
    damaged[200] ^= 1
    log.write_bytes(damaged)
    index = data / "plain-none-0" / "00000000000000000000.index"
    entries = bytearray(index.read_bytes())
    entries[3] ^= 1
    index.write_bytes(entries)
    assert len(dump(data, ["plain-none-0"]).complaints) > 1
