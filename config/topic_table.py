"""The one table of topic keys: Kafka's name, type, range, default and text.

Names, types, ranges and defaults are those of Apache Kafka 4.3 (its topic configuration
reference); keys under `varve.` are ours. Import these names from config.topic_keys.
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
CLEANER_STRATEGIES: Final = ("default", "dirty-ratio", "survivorship")
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
    """What a key does here."""

    FULL = 1  # obeyed
    NONE = 2  # accepted, stored and shown; means nothing on a single node without tiering


@dataclass(frozen=True, slots=True)
class TopicKey:
    """One key of the table. `default` and `compact_default` are canonical strings."""

    name: str
    synonym: str  # the broker-wide name
    kind: ValueKind
    default: str
    text: str
    compact_default: str | None = None  # of a compacted topic, where it differs
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""  # "bytes" or "ms": YAML may write 64MiB or 7d
    effect: Effect = Effect.FULL

    @property
    def field_name(self) -> str:
        """Name of the field of TopicConfig, where the key has an effect."""
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
        "What happens to old data: `delete` drops old segments by retention, `compact` keeps the "
        "latest record of each key, both together do both, empty keeps everything. `dedupe` is "
        "the old name of `compact`.",
        choices=POLICIES,
    )
    yield TopicKey(
        "min.cleanable.dirty.ratio",
        "log.cleaner.min.cleanable.ratio",
        ValueKind.DOUBLE,
        "0.5",
        "A compacted partition is cleaned when more than this share of its bytes has been written "
        "since the last clean.",
        minimum=0,
        maximum=1,
    )
    yield TopicKey(
        "min.compaction.lag.ms",
        "log.cleaner.min.compaction.lag.ms",
        ValueKind.LONG,
        "0",
        "A record stays uncompacted for at least this long.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "max.compaction.lag.ms",
        "log.cleaner.max.compaction.lag.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "A record waits at most this long until it may be compacted: an older one makes its "
        "partition due whatever the dirty ratio, and closes the active segment, with or without "
        "new data. The time counts from the record's timestamp or from when the record was "
        "written to this log, whichever is later. Built-in default of a compacted topic: one "
        "day, after min.compaction.lag.ms.",
        compact_default=str(DAY_MS),
        minimum=1,
        unit="ms",
    )
    yield TopicKey(
        "delete.retention.ms",
        "log.cleaner.delete.retention.ms",
        ValueKind.LONG,
        str(DAY_MS),
        "A tombstone stays readable for this long after the clean that first met it.",
        minimum=0,
        unit="ms",
    )


def _retention_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "retention.ms",
        "log.retention.ms",
        ValueKind.LONG,
        str(7 * DAY_MS),
        "With `delete`: segments whose records are all older than this are dropped; -1 is never.",
        minimum=-1,
        unit="ms",
    )
    yield TopicKey(
        "retention.bytes",
        "log.retention.bytes",
        ValueKind.LONG,
        "-1",
        "With `delete`: oldest segments are dropped while the partition is larger; -1 is never.",
        unit="bytes",
    )
    yield TopicKey(
        "file.delete.delay.ms",
        "log.segment.delete.delay.ms",
        ValueKind.LONG,
        "60000",
        "Files of a dropped segment stay on the disk for this long.",
        minimum=0,
        unit="ms",
    )


def _segment_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "segment.bytes",
        "log.segment.bytes",
        ValueKind.INT,
        str(1 << 30),
        "Largest segment file. Built-in default of a compacted topic: 64 MiB, because only closed "
        "segments can be compacted; or max.message.bytes where that is larger.",
        compact_default=str(64 * MIB),
        minimum=MIB,
        unit="bytes",
    )
    yield TopicKey(
        "segment.ms",
        "log.roll.ms",
        ValueKind.LONG,
        str(7 * DAY_MS),
        "The active segment is closed when it is older than this, even if it is not full.",
        minimum=1,
        unit="ms",
    )
    yield TopicKey(
        "segment.jitter.ms",
        "log.roll.jitter.ms",
        ValueKind.LONG,
        "0",
        "Up to this much is taken off segment.ms at random: partitions then do not roll together.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "segment.index.bytes",
        "log.index.size.max.bytes",
        ValueKind.INT,
        str(10 * MIB),
        "Largest index of a segment; a full index closes the segment.",
        minimum=4,
        unit="bytes",
    )
    yield TopicKey(
        "index.interval.bytes",
        "log.index.interval.bytes",
        ValueKind.INT,
        "4096",
        "Bytes of log between two entries of the offset index.",
        minimum=0,
        unit="bytes",
    )


def _flush_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "flush.messages",
        "log.flush.interval.messages",
        ValueKind.LONG,
        str(LONG_MAX),
        "Force the log to disk after this many records.",
        minimum=1,
    )
    yield TopicKey(
        "flush.ms",
        "log.flush.interval.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "Force the log to disk after this long.",
        minimum=0,
        unit="ms",
    )


def _record_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "max.message.bytes",
        "message.max.bytes",
        ValueKind.INT,
        "1048588",
        "Largest record batch a producer may send, as compressed.",
        minimum=0,
        unit="bytes",
    )
    yield TopicKey(
        "compression.type",
        "compression.type",
        ValueKind.STRING,
        "producer",
        "Codec of the log: `producer` keeps what the producer chose.",
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
            f"Level used where the broker or its cleaner compresses with {codec}.",
            minimum=low,
            maximum=high,
        )
    yield TopicKey(
        "message.timestamp.type",
        "log.message.timestamp.type",
        ValueKind.STRING,
        "CreateTime",
        "Whose clock a record carries: the producer's, or the broker's at append.",
        choices=TIMESTAMP_TYPES,
    )
    yield TopicKey(
        "message.timestamp.before.max.ms",
        "log.message.timestamp.before.max.ms",
        ValueKind.LONG,
        str(LONG_MAX),
        "A record whose CreateTime lies further in the past is refused.",
        minimum=0,
        unit="ms",
    )
    yield TopicKey(
        "message.timestamp.after.max.ms",
        "log.message.timestamp.after.max.ms",
        ValueKind.LONG,
        "3600000",
        "A record whose CreateTime lies further in the future is refused.",
        minimum=0,
        unit="ms",
    )


def _own_keys() -> Iterator[TopicKey]:
    yield TopicKey(
        "varve.flush.on.ack",
        "varve.flush.on.ack",
        ValueKind.BOOLEAN,
        "false",
        "An acknowledgement means that the record has been forced to disk (by group commit).",
    )
    yield TopicKey(
        "varve.cleaner.engine",
        "varve.cleaner.engine",
        ValueKind.STRING,
        "default",
        "Who compacts its partitions: `local`, the broker's workers; `spark`, jobs on Spark "
        "whatever their size; `default` is what `cleaner.engine` and `cleaner.spark.min_bytes` of "
        "the settings file say.",
        choices=CLEANER_ENGINES,
    )
    yield TopicKey(
        "varve.cleaner.strategy",
        "varve.cleaner.strategy",
        ValueKind.STRING,
        "default",
        "How the cleaner estimates the bytes that a clean of a partition removes; a high estimate "
        "shortens the wait for a worker. `dirty-ratio` counts all bytes written since the last "
        "clean; `survivorship` subtracts the share that survived earlier cleans; `default` uses "
        "`cleaner.strategy` of the settings file. Both "
        "compare `min.cleanable.dirty.ratio` with the dirty ratio.",
        choices=CLEANER_STRATEGIES,
    )
    yield TopicKey(
        "varve.cleaner.io.max.bytes.per.second",
        "varve.cleaner.io.max.bytes.per.second",
        ValueKind.LONG,
        "-1",
        "Maximum bytes per second that cleaning reads and writes in total, over all partitions of "
        "the topic; at least 65536, or -1 for no limit. The limits of the settings file apply as "
        "well. Jobs that take long because of this limit do not occupy one of `cleaner.workers`: "
        "the broker starts one more worker for them.",
        minimum=-1,
        unit="bytes",
    )
    yield TopicKey(
        "varve.decompressed.batch.bytes",
        "varve.decompressed.batch.bytes",
        ValueKind.INT,
        str(64 * MIB),
        "A batch that unpacks to more is refused at produce, so that whatever was accepted can be "
        "compacted in bounded memory.",
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
        "`compacted` offers the latest record of each key beside the log, as the read-only topic "
        "`<topic>.compacted`; the topic itself stays as it is. Set back to `none`, the view is "
        "removed.",
        choices=VIEWS,
    )
    yield TopicKey(
        "varve.view.min.bytes",
        "varve.view.min.bytes",
        ValueKind.LONG,
        str(64 * MIB),
        "The view is compacted by itself when closed segments of this many bytes have gathered "
        "behind its horizon; -1 is only on demand (`varve view compact`).",
        minimum=-1,
        unit="bytes",
    )
    yield TopicKey(
        "varve.view.null.key",
        "varve.view.null.key",
        ValueKind.STRING,
        "keep",
        "What becomes of records without a key in the view.",
        choices=NULL_KEYS,
    )
    yield TopicKey(
        "varve.view.strategy",
        "varve.view.strategy",
        ValueKind.STRING,
        "offset",
        "Which record of a key is its latest: the one with the largest offset, timestamp, or "
        "version in a header (`varve.view.version.header`); of equals the larger offset decides. "
        "Deletes are remembered for `delete.retention.ms`, so that an older record that comes "
        "late does not bring a key back. When this is changed the view is made anew of the log, if "
        "all of it is still there.",
        choices=VIEW_STRATEGIES,
    )
    yield TopicKey(
        "varve.view.version.header",
        "varve.view.version.header",
        ValueKind.STRING,
        "",
        "With the strategy `header`: the name of the header that holds a record's version, 8 "
        "bytes, big-endian, signed. A record without one ranks below all others.",
    )


def _idle_keys() -> Iterator[TopicKey]:
    """Keys that other brokers need: accepted, stored and shown."""

    boolean, long = ValueKind.BOOLEAN, ValueKind.LONG
    rows: tuple[tuple[str, str, ValueKind, str, float | None, str, str], ...] = (
        ("preallocate", "log.preallocate", boolean, "false", None, "",
         "Reserve a segment's full size when it is made."),
        ("min.insync.replicas", "min.insync.replicas", ValueKind.INT, "1", 1, "",
         "Replicas that must have a record; a single node has one."),
        ("unclean.leader.election.enable", "unclean.leader.election.enable", boolean, "false",
         None, "", "Whether a replica that is behind may lead."),
        ("leader.replication.throttled.replicas", "leader.replication.throttled.replicas",
         ValueKind.LIST, "", None, "", "Replicas throttled on the leader's side."),
        ("follower.replication.throttled.replicas", "follower.replication.throttled.replicas",
         ValueKind.LIST, "", None, "", "Replicas throttled on the follower's side."),
        ("remote.storage.enable", "remote.storage.enable", boolean, "false", None, "",
         "Tiered storage; `true` is refused, there is none."),
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
