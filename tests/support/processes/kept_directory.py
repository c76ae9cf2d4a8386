"""Keep the data directory of a release: `python -m tests.support.processes.kept_directory VERSION`.

Run it once with each release, and never again: a test opens all of them with the present version.
"""

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from admin.client import ApiClient
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

KEPT: Final = Path(__file__).parents[2] / "golden/data_directories"
SETTINGS: Final = {
    # Nothing in the directory may expire, however many years later it is opened.
    "groups": {"offsets_partitions": 1, "offsets_retention_minutes": (1 << 31) - 1},
    "transactions": {"state_partitions": 1},
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"},
}
KEYS: Final = 10
RECORDS: Final = 200  # of each topic
COMMITTED: Final = 150


def make(directory: Path) -> Path:
    """Fill a data directory with a file of every kind and return it, after a clean stop."""
    with running_varve(directory, SETTINGS) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        compact = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
        new = [
            NewTopic("customers", 1, 1, config={**compact, "segment.bytes": str(1 << 20)}),
            NewTopic("prices", 1, 1, config={"varve.view": "compacted", "retention.ms": "-1"}),
        ]
        for future in admin.create_topics(new).values():
            future.result(30)
        settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": "loader"}
        producer = Producer(settings)
        producer.init_transactions()
        producer.begin_transaction()
        for number in range(RECORDS):
            for topic in ("customers", "prices"):
                producer.produce(topic, b"%d" % number, b"%d" % (number % KEYS))
        producer.commit_transaction()
        offsets = [TopicPartition("customers", 0, COMMITTED)]
        group = ConsumerGroupTopicPartitions("readers", offsets)
        for future in admin.alter_consumer_group_offsets([group]).values():
            future.result(30)
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        user = UserScramCredentialUpsertion("ada", info, b"change-me")
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(30)
        client = ApiClient(broker.url)
        client.post("/partitions/customers/0/run", {"roll": True})
        views = client.below("/api/v1/view")
        views.post("/partitions/prices/0/compact")
        wait_until(lambda: client.get("/history")["jobs"], "a clean has finished")
        wait_until(lambda: views.get("")["views"][0]["state"] == "done", "the view is compacted")
        return broker.data


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = make(Path(directory))
        KEPT.mkdir(parents=True, exist_ok=True)
        with tarfile.open(KEPT / f"{version}.tar.xz", "x:xz") as archive:
            archive.add(data, "data")


if __name__ == "__main__":
    main(sys.argv[1])
