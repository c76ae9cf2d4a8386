"""Faults planted into the files of a stopped broker: valid batches, checksums and manifests that
tell of something that never was."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from crc32c import crc32c

from admin.client import ApiClient, partition_path
from storage.format.batch import Record, build_batch, decode_records, walk_headers
from storage.view.manifest import LedgerSegment, decode_manifest, encode_manifest
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

VIEW_ROOT = "/api/v1/view"
SECONDS = 60
START_MS = 1_700_000_000_000
VIEW = {"varve_view": "compacted", "varve_view_min_bytes": "-1"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
Rows = list[Record]
Plant = Callable[[dict[int, Rows]], None]  # changes the records of each partition


def client_of(broker: VarveBroker) -> ApiClient:
    return ApiClient(f"http://127.0.0.1:{broker.http_port}")


def make_topic(broker: VarveBroker, name: str, partitions: int = 2, **keys: str) -> None:
    config = {"retention.ms": "-1", **{key.replace("_", "."): text for key, text in keys.items()}}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(SECONDS)


def write(
    broker: VarveBroker,
    topic: str,
    rows: Iterable[tuple[int, bytes | None, bytes | None, int, Any]],
    codec: str = "none",
) -> None:
    """Produce rows of partition, key, value, timestamp and headers, in this order."""
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "compression.type": codec}
    )
    for partition, key, value, timestamp, headers in rows:
        producer.produce(
            topic, value, key, partition=partition, timestamp=timestamp, headers=headers
        )
    assert producer.flush(SECONDS) == 0


def compact_view(broker: VarveBroker, topic: str, partition: int) -> int:
    """Make the view up to the present end of the log -> its horizon."""
    client = client_of(broker).below(VIEW_ROOT)
    path = partition_path(topic, partition)
    before = client.get(path)
    client.post(f"{path}/compact")

    def is_made() -> bool:
        now = client.get(path)
        assert not now["failed"], now
        return bool(
            now["compactions"] > before["compactions"] or now["horizon"] == now["log_end_offset"]
        )

    wait_until(is_made, "the view is compacted", SECONDS)
    return int(client.get(path)["horizon"])


def clean(broker: VarveBroker, topic: str, partition: int) -> int:
    """Roll and clean a partition -> where it is clean up to."""
    client = client_of(broker)
    path = partition_path(topic, partition)
    end = client.get(path)["log_end_offset"]
    client.post(f"{path}/run", {"roll": True})
    wait_until(lambda: (client.get(path)["first_dirty_offset"] or 0) >= end, "clean", SECONDS)
    return int(end)


def copied(source: Path, target: Path) -> Path:
    """The data directory of a stopped broker, once more."""
    shutil.copytree(source / "data", target / "data")
    return target


def append_raw(data: Path, topic: str, partition: int, batches: Sequence[bytes]) -> None:
    """After the last batch of a log, as if the broker had been killed directly after."""
    folder = data / f"{topic}-{partition}"
    with max(folder.glob("*.log")).open("ab") as file:
        file.write(b"".join(batches))
    for name in (".kafka_cleanshutdown", "recovery-point-offset-checkpoint"):
        (data / name).unlink(missing_ok=True)


def decoded(path: Path) -> Rows:
    data = path.read_bytes()
    rows: Rows = []
    for at, header in walk_headers(data):
        if not header.is_control:
            rows += decode_records(data, header, at)
    return rows


def original_rows(data: Path, topic: str, partition: int) -> Rows:
    files = sorted((data / f"{topic}-{partition}").glob("*.log"))
    return [row for path in files for row in decoded(path)]


def encoded(rows: Rows, *, codec: int = 0, **options: Any) -> bytes:
    """Batches of ten records."""
    return b"".join(
        bytes(build_batch(rows[at : at + 10], codec=codec, **options))
        for at in range(0, len(rows), 10)
    )


def plant_in_ledgers(data: Path, topic: str, plant: Plant) -> None:
    """Rewrite the ledgers of all partitions with other records."""
    folders = {
        int(path.parent.parent.name.rpartition("-")[2]): path.parent
        for path in data.glob(f"{topic}-*/varve.view/manifest")
    }
    manifests = {
        n: decode_manifest((folder / "manifest").read_bytes(), "") for n, folder in folders.items()
    }
    rows = {
        n: [
            row
            for ledger_segment in manifests[n].segments
            for row in decoded(
                folder / manifests[n].compaction_id / f"{ledger_segment.base_offset:020d}.log"
            )
        ]
        for n, folder in folders.items()
    }
    plant(rows)
    for n, folder in folders.items():
        manifest, home = manifests[n], folder / manifests[n].compaction_id
        for old in home.glob("0*"):
            old.unlink()
        content = encoded(sorted(rows[n], key=lambda row: row.offset), codec=4)
        (home / f"{0:020d}.log").write_bytes(content)
        segment = LedgerSegment(0, manifest.horizon, len(content), crc32c(content))
        changed = replace(manifest, segments=(segment,), records=len(rows[n]))
        (folder / "manifest").write_bytes(encode_manifest(changed))


def plant_in_log(data: Path, topic: str, partition: int, change: Callable[[Rows], Rows],
                 **options: Any) -> None:  # fmt: skip
    """Rewrite the first segment of a log with other records."""
    path = min((data / f"{topic}-{partition}").glob("*.log"))
    path.write_bytes(encoded(sorted(change(decoded(path)), key=lambda row: row.offset), **options))
    for kind in ("index", "timeindex", "txnindex"):
        path.with_suffix(f".{kind}").unlink(missing_ok=True)
