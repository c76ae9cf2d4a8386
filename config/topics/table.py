"""The table of topic configs: name, type, range, default and documentation.

Names, types, ranges and defaults are those of Apache Kafka 4.3 (its topic configuration
reference); configs under `varve.` are ours. Import these names from config.topics.keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
DAY_MS: Final = 86_400_000
MIB: Final = 1 << 20

POLICIES: Final = ("compact", "delete")
CODECS: Final = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
TIMESTAMP_TYPES: Final = ("CreateTime", "LogAppendTime")
CLEANER_ENGINES: Final = ("default", "local", "spark")
CLEANER_STRATEGIES: Final = ("default", "dirty-ratio", "survivorship", "generational")
VIEWS: Final = ("none", "compacted")
NULL_KEYS: Final = ("keep", "drop")
VIEW_STRATEGIES: Final = ("offset", "timestamp", "header")


class ValueKind(IntEnum):
    """Type of a value; the numbers of DescribeConfigs' `config_type` (version 3 and later)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class Effect(IntEnum):
    """Whether a config has an effect in this broker."""

    FULL = 1  # it has the effect that Kafka documents
    NONE = 2  # accepted, stored and shown; it concerns replication or tiered storage


@dataclass(frozen=True, slots=True)
class TopicKey:
    """One topic config. `default` and `compact_default` are canonical strings."""

    name: str
    synonym: str  # the broker-wide name
    kind: ValueKind
    default: str
    text: str
    compact_default: str | None = None  # of a compacted topic, if it differs
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""  # "bytes" or "ms": the settings file accepts 64MiB or 7d
    effect: Effect = Effect.FULL

    @property
    def field_name(self) -> str:
        """Return the name of the field in TopicConfig, if the config has an effect."""
        return self.name.replace(".", "_")


def _table() -> Iterator[TopicKey]:
    yield from _compaction_keys()
    yield from _retention_keys()
    yield from _segment_keys()
    yield from _flush_keys()
    yield from _record_keys()
    yield from _own_keys()
    yield from _view_keys()
    yield from _idle_keys()


def _compaction_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "cleanup.policy",
        "log.cleanup.policy",
        ValueKind.LIST,
        "delete",
        "What happens to old data: `delete` deletes old segments by retention, `compact` keeps the "
        "latest record of each key. A topic can have both. An empty value keeps everything. "
        "The broker reads `dedupe`, an old name, as `compact`.",
        choices=POLICIES,
    )
    yield TopicKey(
        "min.cleanable.dirty.ratio",
        "log.cleaner.min.cleanable.ratio",
        ValueKind.DOUBLE,
        "0.5",
        "The cleaner cleans a partition when more than this share of its bytes was written since "
        "the last clean. The strategy `generational` cleans earlier, because the garbage that it "
        "leaves takes a part of this share.",
        minimum=0,
        maximum=1,
    )
    yield TopicKey(
        "min.compaction.lag.ms",
        "log.cleaner.min.compaction.lag.ms",
        ValueKind.LONG,
        "0",
        "The minimum time that a record stays uncompacted.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "max.compaction.lag.ms",
        "log.cleaner.max.compaction.lag.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "The maximum time that a record stays uncompacted, from its timestamp or its append to "
        "this log, whichever is later. After it, the cleaner rolls the active segment and cleans "
        "the partition whatever its dirty ratio. Built-in default of a compacted topic: one day "
        "more than min.compaction.lag.ms.",
        compact_default=str(DAY_MS),
        minimum=1,
        unit="ms",
    )
    yield TopicKey(
        "delete.retention.ms",
        "log.cleaner.delete.retention.ms",
        ValueKind.LONG,
        str(DAY_MS),
        "How long a tombstone stays after the next clean of the whole log.",
        minimum=0,
        unit="ms",
    )


def _retention_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "retention.ms",
        "log.retention.ms",
        ValueKind.LONG,
        str(7 * DAY_MS),
        "With `delete`: delete segments whose records are all older than this; -1 for never.",
        minimum=-1,
        unit="ms",
    )
    yield TopicKey(
        "retention.bytes",
        "log.retention.bytes",
        ValueKind.LONG,
        "-1",
        "With `delete`: delete the oldest segments while the partition is larger than this; "
        "-1 for never.",
        unit="bytes",
    )
    yield TopicKey(
        "file.delete.delay.ms",
        "log.segment.delete.delay.ms",
        ValueKind.LONG,
        "60000",
        "How long the files of a deleted segment stay on disk. For the directory of a deleted "
        "partition, the broker-wide value applies.",
        minimum=0,
        unit="ms",
    )


def _segment_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "segment.bytes",
        "log.segment.bytes",
        ValueKind.INT,
        str(1 << 30),
        "Maximum size of a segment file. Built-in default of a compacted topic: 64 MiB (or "
        "max.message.bytes, if that is larger), because the cleaner compacts closed segments only.",
        compact_default=str(64 * MIB),
        minimum=MIB,
        unit="bytes",
    )
    yield TopicKey(
        "segment.ms",
        "log.roll.ms",
        ValueKind.LONG,
        str(7 * DAY_MS),
        "Roll the active segment when it is older than this, even if it is not full. So that a "
        "short time does not make many small segments, a partition rolls at most ten segments "
        "below 1 MiB in a row because of their age, and then one every 10 s.",
        minimum=1,
        unit="ms",
    )
    yield TopicKey(
        "segment.jitter.ms",
        "log.roll.jitter.ms",
        ValueKind.LONG,
        "0",
        "Subtract a random time up to this from segment.ms, so that partitions do not roll at the "
        "same time.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "segment.index.bytes",
        "log.index.size.max.bytes",
        ValueKind.INT,
        str(10 * MIB),
        "Maximum size of a segment's index; the segment rolls when its index is full. Varve uses "
        "at least 16 KiB.",
        minimum=4,
        unit="bytes",
    )
    yield TopicKey(
        "index.interval.bytes",
        "log.index.interval.bytes",
        ValueKind.INT,
        "4096",
        "Bytes between two entries of the offset index. Varve uses at least 1,024, so that indexes "
        "take little memory, and at most 32,768, so that a search for an offset reads few batches.",
        minimum=0,
        unit="bytes",
    )


def _flush_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "flush.messages",
        "log.flush.interval.messages",
        ValueKind.LONG,
        str(LONG_MAX),
        "Flush the log to disk after this many records.",
        minimum=1,
    )
    yield TopicKey(
        "flush.ms",
        "log.flush.interval.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "Flush the log to disk after this time.",
        minimum=0,
        unit="ms",
    )


def _record_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "max.message.bytes",
        "message.max.bytes",
        ValueKind.INT,
        "1048588",
        "Maximum size of a record batch, after compression.",
        minimum=0,
        unit="bytes",
    )
    yield TopicKey(
        "compression.type",
        "compression.type",
        ValueKind.STRING,
        "producer",
        "Compression codec of the log; `producer` keeps the codec of the producer.",
        choices=CODECS,
    )
    for codec, default, low, high in (
        ("gzip", "-1", -1, 9),
        ("lz4", "9", 1, 17),
        ("zstd", "3", -131072, 22),
    ):
        yield TopicKey(
            f"compression.{codec}.level",
            f"compression.{codec}.level",
            ValueKind.INT,
            default,
            f"The level when the broker or its cleaner compresses with {codec}.",
            minimum=low,
            maximum=high,
        )
    yield TopicKey(
        "message.timestamp.type",
        "log.message.timestamp.type",
        ValueKind.STRING,
        "CreateTime",
        "The timestamp of a record: set by the producer, or by the broker at append.",
        choices=TIMESTAMP_TYPES,
    )
    yield TopicKey(
        "message.timestamp.before.max.ms",
        "log.message.timestamp.before.max.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "Reject a record whose CreateTime is further in the past.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "message.timestamp.after.max.ms",
        "log.message.timestamp.after.max.ms",
        ValueKind.LONG,
        "3600000",
        "Reject a record whose CreateTime is further in the future.",
        minimum=0,
        unit="ms",
    )


def _own_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "varve.flush.on.ack",
        "varve.flush.on.ack",
        ValueKind.BOOLEAN,
        "false",
        "Acknowledge a record only after it is flushed to disk; one flush covers all records that "
        "wait.",
    )
    yield TopicKey(
        "varve.cleaner.engine",
        "varve.cleaner.engine",
        ValueKind.STRING,
        "default",
        "What cleans the partitions: `local`, the broker's workers; `spark`, Spark jobs, whatever "
        "the size; `default`, what `cleaner.engine` and `cleaner.spark.min_bytes` of the settings "
        "file say. A client that sets `spark` needs ALTER_CONFIGS on the cluster.",
        choices=CLEANER_ENGINES,
    )
    yield TopicKey(
        "varve.cleaner.strategy",
        "varve.cleaner.strategy",
        ValueKind.STRING,
        "default",
        "What a clean rewrites. `generational`: only the segments with the most garbage "
        "(`varve.compaction.slack`), if the records of the partition take 320 bytes or more on the "
        "disk and it has no transactions; otherwise as `dirty-ratio`. `dirty-ratio`, as in Kafka, "
        "and `survivorship`: every segment that changes. `default`: `cleaner.strategy` of the "
        "settings file, which also says how the strategies order cleans.",
        choices=CLEANER_STRATEGIES,
    )
    yield TopicKey(
        "varve.compaction.slack",
        "varve.compaction.slack",
        ValueKind.DOUBLE,
        "0.5",
        "With the strategy `generational`: the superseded bytes that a clean may leave, as a share "
        "of the live bytes; a lower value writes more. With a `min.cleanable.dirty.ratio` of r, a "
        "value above 0.75 r / (1 - r) works like 0.75 r / (1 - r).",
        minimum=0,
        maximum=100,
    )
    yield TopicKey(
        "varve.cleaner.io.max.bytes.per.second",
        "varve.cleaner.io.max.bytes.per.second",
        ValueKind.LONG,
        "-1",
        "Maximum average of bytes per second that cleaning reads and writes, over all partitions "
        "of the topic; at least 65536, or -1 for no limit. The next clean of the topic waits until "
        "its average is within the limit; requested cleans neither wait nor count.",
        minimum=-1,
        unit="bytes",
    )
    yield TopicKey(
        "varve.decompressed.batch.bytes",
        "varve.decompressed.batch.bytes",
        ValueKind.INT,
        str(64 * MIB),
        "Maximum decompressed size of a batch. The broker rejects a larger one at produce, so that "
        "the cleaner can compact every accepted batch in bounded memory.",
        minimum=MIB,
        maximum=1 << 30,
        unit="bytes",
    )


def _view_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "varve.view",
        "varve.view",
        ValueKind.STRING,
        "none",
        "`compacted` adds a compacted view: the read-only topic `<topic>.compacted` with the "
        "latest record of each key. The topic itself does not change. `none` removes the view.",
        choices=VIEWS,
    )
    yield TopicKey(
        "varve.view.min.bytes",
        "varve.view.min.bytes",
        ValueKind.LONG,
        str(64 * MIB),
        "Compact the view when closed segments of this size are not yet in it; -1 for on demand "
        "only (`varve view compact`).",
        minimum=-1,
        unit="bytes",
    )
    yield TopicKey(
        "varve.view.null.key",
        "varve.view.null.key",
        ValueKind.STRING,
        "keep",
        "Whether the view keeps or drops records without a key.",
        choices=NULL_KEYS,
    )
    yield TopicKey(
        "varve.view.strategy",
        "varve.view.strategy",
        ValueKind.STRING,
        "offset",
        "Which record of a key is the latest: the one with the largest offset, timestamp, or "
        "version in a header (`varve.view.version.header`); the larger offset breaks a tie. "
        "The view keeps deletes for `delete.retention.ms`, so that an older record that arrives "
        "late does not bring a key back. A change rebuilds the view from the log, if the log is "
        "still complete.",
        choices=VIEW_STRATEGIES,
    )
    yield TopicKey(
        "varve.view.version.header",
        "varve.view.version.header",
        ValueKind.STRING,
        "",
        "With the strategy `header`: the name of the header that has the version of a record, 8 "
        "bytes, big-endian, signed. A record without this header ranks below all others.",
    )


def _idle_keys() -> Iterator[TopicKey]:
    """Yield configs that concern replication or tiered storage: accepted, stored and shown."""
    boolean, long = ValueKind.BOOLEAN, ValueKind.LONG
    rows: tuple[tuple[str, str, ValueKind, str, float | None, str, str], ...] = (
        ("preallocate", "log.preallocate", boolean, "false", None, "",
         "Allocate the full size of a segment file at its creation."),
        ("min.insync.replicas", "min.insync.replicas", ValueKind.INT, "1", 1, "",
         "Without effect, whatever the value: a single node acknowledges with one replica."),
        ("unclean.leader.election.enable", "unclean.leader.election.enable", boolean, "false",
         None, "", "Whether a replica that is not in sync may become leader."),
        ("leader.replication.throttled.replicas", "leader.replication.throttled.replicas",
         ValueKind.LIST, "", None, "", "Replicas throttled on the leader's side."),
        ("follower.replication.throttled.replicas", "follower.replication.throttled.replicas",
         ValueKind.LIST, "", None, "", "Replicas throttled on the follower's side."),
        ("remote.storage.enable", "remote.storage.enable", boolean, "false", None, "",
         "Tiered storage; `true` is rejected, because this broker has none."),
        ("local.retention.ms", "log.local.retention.ms", long, "-2", -2, "ms",
         "Retention by time on local disks under tiered storage."),
        ("local.retention.bytes", "log.local.retention.bytes", long, "-2", -2, "bytes",
         "Retention by size on local disks under tiered storage."),
        ("remote.log.copy.disable", "remote.log.copy.disable", boolean, "false", None, "",
         "Stop copying to tiered storage."),
        ("remote.log.delete.on.disable", "remote.log.delete.on.disable", boolean, "false",
         None, "", "Delete tiered data when tiering is switched off."),
    )  # fmt: skip
    for name, synonym, kind, default, minimum, unit, text in rows:
        yield TopicKey(name, synonym, kind, default, text, minimum=minimum, unit=unit,
                       effect=Effect.NONE)  # fmt: skip


TOPIC_KEYS: Final[dict[str, TopicKey]] = {key.name: key for key in _table()}
