"""Load, kills and cleaning for as long as one likes; see `run_soak`."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import AdminClient, NewTopic

from tests.soak.disturbance import Patient
from tests.soak.load import Acknowledged, Writer, check_view
from tests.soak.watch import LEFTOVERS, Watch, files_like
from tests.support.ports import free_port
from tests.support.reading import read_partitions
from tests.support.varve import start_varve
from tests.support.waiting import wait_until

MIB: Final = 1 << 20
TABLE, SYNCED, FEED = "table", "synced", "feed"
RETENTION_SECONDS: Final = 20
SMALL: Final = {
    "segment.bytes": str(MIB),
    "segment.ms": "2000",
    "min.cleanable.dirty.ratio": "0.2",
    "max.compaction.lag.ms": "2000",
    "delete.retention.ms": "5000",
    "file.delete.delay.ms": "1000",
}
TOPICS: Final = {
    TABLE: {
        **SMALL,
        "cleanup.policy": "compact",
        "retention.ms": "-1",
        "varve.cleaner.strategy": "dirty-ratio",
    },
    SYNCED: {
        **SMALL,
        "cleanup.policy": "compact",
        "varve.flush.on.ack": "true",
        "varve.cleaner.strategy": "generational",
    },
    FEED: {
        **SMALL,
        "cleanup.policy": "compact,delete",
        "retention.ms": str(RETENTION_SECONDS * 1000),
    },
}
PARTITIONS: Final = 2
SETTINGS: Final[dict[str, Any]] = {
    "cleaner": {"workers": 2, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 100},
    "checkpoint_interval_ms": 1000,
    "retention_check_interval_ms": 500,
}
KEYS: Final = 3000  # of each writer
VALUE_BYTES: Final = 1500
RECORDS_PER_SECOND: Final = 300.0  # of each writer

# What the disk may take beside what is live. A clean holds the old and the new files of a partition
# at once, and the old ones for as long as file.delete.delay.ms; what is written waits for its
# segment to close, for a worker, and for a paused partition or a restart.
COPIES: Final = 3
BEHIND_SECONDS: Final = 15
PARTITION_BYTES: Final = 3 * MIB  # an active segment, an index reserve, one being cleaned
BROKER_BYTES_MAX: Final = 600 * MIB
WORKER_BYTES_MAX: Final = 400 * MIB
# Descriptors: files of each segment, connections, and what the process has anyway.
FDS_OF_SEGMENT: Final = 4
FDS_MAX: Final = 150


@dataclass
class Soak:
    """One run."""

    directory: Path
    seed: int
    patient: Patient
    writers: list[Writer]
    watch: Watch
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    checks: int = 0
    records_read: int = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def bound_bytes(self) -> int:
        """What the data directory may take at this moment."""
        live = sum(writer.live_bytes() for writer in self.writers)
        rate = RECORDS_PER_SECOND * VALUE_BYTES * len(self.writers)
        partitions = len(self.patient.partitions)
        return int(COPIES * live + BEHIND_SECONDS * rate + partitions * PARTITION_BYTES)

    def look(self) -> None:
        """What is to hold at every moment."""
        self.watch.look(self.seconds, self.patient.broker.process.pid, self.bound_bytes)
        for writer in self.writers:
            writer.check()

    def check(self, *, final: bool = False) -> int:
        """Read everything from the start, and compare it with what was acknowledged."""
        reported: list[tuple[Writer, dict[bytes, Acknowledged]]] = [
            (writer, writer.acknowledged()) for writer in self.writers
        ]
        # Retention is as late as its timer; what is younger than this must be there.
        kept_since = time.monotonic() - RETENTION_SECONDS / 2
        view = read_partitions(self.patient.broker.bootstrap, self.patient.partitions)
        self.records_read += sum(len(records) for records in view.values())
        for records in view.values():
            offsets = [record.offset for record in records]
            assert offsets == sorted(set(offsets)), "offsets do not grow"
        for writer, reporters in reported:
            if final:
                assert all(
                    reporter.acked == writer.state[key].sent for key, reporter in reporters.items()
                )
            records = [
                record
                for (topic, _), records in view.items()
                if topic == writer.topic
                for record in records
            ]
            retained = kept_since if writer.topic == FEED else None
            check_view(writer, reporters, records, kept_since=retained)
        self.checks += 1
        compacted = {where: records for where, records in view.items() if where[0] != FEED}
        return sum(
            len(records) - len({record.key for record in records}) for records in compacted.values()
        )


def run_soak(directory: Path, minutes: float, seed: int, say: Callable[[str], None]) -> Soak:
    """Load for that long, under disturbance; AssertionError where anything does not hold.

    At checkpoints and at the end, every key's last acknowledged value is read back (or a later one
    that was sent), the disk keeps to its bound at every moment; in the end nothing is left over,
    and cleaning leaves one record of each key.
    """
    soak = _begin(directory, seed, say)
    patient, rng = soak.patient, soak.patient.rng
    end = soak.began + minutes * 60
    next_disturbance = soak.began + 5
    next_check = soak.began + min(45, minutes * 20)
    try:
        while time.monotonic() < end:
            soak.look()
            patient.resume_due()
            now = time.monotonic()
            if now >= next_disturbance:
                patient.disturb()
                next_disturbance = time.monotonic() + rng.uniform(1, 6)
            if now >= next_check:
                extra = soak.check()
                say(f"{soak.seconds:.0f} s: all there; {extra} records more than keys")
                next_check = time.monotonic() + 45
            time.sleep(0.25)
        _finish(soak)
    finally:
        if patient.broker.process.poll() is None:
            patient.broker.kill()
    return soak


def _begin(directory: Path, seed: int, say: Callable[[str], None]) -> Soak:
    rng = random.Random(seed)
    port = free_port()
    log_dirs = [str(directory / "data" / name) for name in ("first", "second")]
    settings = {**SETTINGS, "log_dirs": log_dirs, "cleaner": dict(SETTINGS["cleaner"])}
    broker = start_varve(directory, settings, port=port)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = [NewTopic(name, num_partitions=PARTITIONS, config=TOPICS[name]) for name in TOPICS]
    for future in admin.create_topics(new).values():
        future.result(30)
    partitions = [(topic, index) for topic in TOPICS for index in range(PARTITIONS)]
    patient = Patient(directory, settings, partitions, TABLE, rng, port, broker)
    writers = [
        Writer(
            topic,
            f"{topic}-{codec}",
            random.Random(rng.randrange(1 << 30)),
            KEYS,
            RECORDS_PER_SECOND,
            VALUE_BYTES,
            codec,
        )
        for topic, codec in ((TABLE, "none"), (TABLE, "zstd"), (SYNCED, "lz4"), (FEED, "none"))
    ]
    for writer in writers:
        writer.start(broker.bootstrap)
    return Soak(directory, seed, patient, writers, Watch(directory / "data"), say)


def _finish(soak: Soak) -> None:
    """Everything acknowledged is there; what was in the way is gone; the cleaner has caught up."""
    patient = soak.patient
    patient.resume_due(everything=True)
    for writer in soak.writers:
        writer.finish()
    soak.check(final=True)
    settings = patient.settings["cleaner"]
    settings["read_bytes_per_second"] = settings["write_bytes_per_second"] = None
    patient.restart_broker()
    compacted = [where for where in patient.partitions if where[0] != FEED]

    def is_clean() -> bool:
        for where in compacted:
            patient.post(where, "run", {"roll": True})
        return soak.check(final=True) == 0

    wait_until(is_clean, "one record is left of each key", 90)
    data = soak.directory / "data"
    wait_until(lambda: not files_like(data, *LEFTOVERS), "no file is left over", 60)
    soak.look()
    last = soak.watch.samples[-1]
    segments = len(files_like(data, ".log"))
    allowed = FDS_MAX + FDS_OF_SEGMENT * segments
    assert last.broker_fds <= allowed, f"{last.broker_fds} descriptors, {segments} segments"
    assert soak.watch.largest("broker_bytes") <= BROKER_BYTES_MAX, "the broker's memory"
    assert soak.watch.largest("worker_bytes") <= WORKER_BYTES_MAX, "a worker's memory"
    assert not soak.watch.over, soak.watch.over[:3]
    assert patient.note_cleans() > 0
    jobs = patient.get("/history?limit=2000")["jobs"]
    assert jobs, "no job is in the history"
    assert patient.get("")["partitions"]["quarantined"] == 0
    assert patient.broker.stop() == 0, patient.broker.log_text[-3000:]


def summary(soak: Soak) -> str:
    """The figures of a run."""
    patient, watch = soak.patient, soak.watch
    sent = sum(writer.sent for writer in soak.writers)
    written = sum(writer.sent_bytes for writer in soak.writers)
    live = sum(writer.live_bytes() for writer in soak.writers)
    cleans = patient.cleans + patient._seen_cleans
    did = ", ".join(f"{subject} {count}" for subject, count in sorted(patient.done.items()))
    return "\n".join(
        [
            f"{soak.seconds:.0f} s, {sent} records sent ({written / MIB:.0f} MiB), "
            f"{sum(writer.acked for writer in soak.writers)} acknowledged",
            f"done to it: {did}",
            f"{soak.checks} checks, {soak.records_read} records read back; {cleans:.0f} cleans",
            f"disk: at most {watch.largest('disk_bytes') / MIB:.0f} MiB, bound "
            f"{soak.bound_bytes / MIB:.0f} MiB, live {live / MIB:.0f} MiB, "
            f"in the end {watch.samples[-1].disk_bytes / MIB:.0f} MiB",
            f"at most: {watch.largest('broker_fds')} descriptors, broker "
            f"{watch.largest('broker_bytes') / MIB:.0f} MiB, worker "
            f"{watch.largest('worker_bytes') / MIB:.0f} MiB; starts took "
            f"{max(patient.start_seconds, default=0):.1f} s at most",
        ]
    )
