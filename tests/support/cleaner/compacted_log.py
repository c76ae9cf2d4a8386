"""A real log that is written to by several producers, cleaned, published and opened anew."""

from dataclasses import dataclass

from cleaner.engine.clean import run_clean
from cleaner.job import CleanJob, CleanReport, SourceSegment
from config.topics.keys import TopicConfig
from storage.env import mkdir_durably
from storage.format import filenames
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchHeader,
    ControlType,
    Record,
    build_batch,
    decode_records,
    marker_record,
    read_header,
    walk_headers,
)
from storage.format.txn_index import TxnIndexEntry
from storage.log.log import Log
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.support.cleaner.cleaning import Recorder, clean_job
from tests.support.storage.logs import FOLDER, NOW_MS, open_log
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

DELETE_RETENTION_MS = 10_000
CONFIG = TopicConfig(cleanup_policy=("compact",), segment_bytes=1 << 30, index_interval_bytes=0)
SLOT_BYTES = 24


@dataclass
class Producer:
    """What a client remembers between its batches."""

    producer_id: int
    is_transactional: bool = True
    epoch: int = 0
    sequence: int = 0
    starts_over: bool = False  # with sequence 0 in each batch, as Kafka's group coordinator does


class CompactedLog:
    """One partition with nobody around it. `dirty` is what the checkpoint would say."""

    def __init__(self, seed: int = 0, config: TopicConfig = CONFIG) -> None:
        self.env = MemoryEnv(seed)
        self.config = config
        self.log: Log = open_log(self.env, config)
        self.now_ms = NOW_MS
        self.dirty = 0
        self.runs = 0
        self.groups_replaced = 0

    # Writing

    def put(
        self, *pairs: tuple[str | None, str | None], by: Producer | None = None, codec: int = 0
    ) -> int:
        """Append one batch of keys and values; its base offset."""
        records = [
            Record(
                at,
                self.now_ms,
                None if key is None else key.encode(),
                None if value is None else value.encode(),
            )
            for at, (key, value) in enumerate(pairs)
        ]
        fields: dict[str, int] = {}
        if by is not None:
            if by.starts_over:
                by.sequence = 0
            fields = {
                "producer_id": by.producer_id,
                "producer_epoch": by.epoch,
                "base_sequence": by.sequence,
                "attributes": TRANSACTIONAL if by.is_transactional else 0,
            }
            by.sequence += len(records)
        batch = build_batch(records, codec=codec, **fields)
        if by is not None and by.starts_over:
            # Its appends are checked by nobody; the log takes what was written before.
            self.log.producers.states._producers.pop(by.producer_id, None)
        return self.append(batch, in_transaction=by is not None and by.is_transactional)

    def append(self, batch: bytearray, *, in_transaction: bool = False) -> int:
        header = read_header(batch)
        info = self.log.append(batch, header, now_ms=self.now_ms, in_transaction=in_transaction)
        return info.first_offset

    def write(self, *keys: str, by: Producer | None = None) -> int:
        """Append a batch with a value for each key."""
        return self.put(*((key, f"{key}@{self.log.log_end_offset}") for key in keys), by=by)

    def end(self, producer: Producer, kind: ControlType, *, coordinator_epoch: int = 0) -> int:
        """Append the producer's marker; its offset."""
        batch = build_batch(
            [marker_record(kind, coordinator_epoch, self.now_ms)],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            attributes=TRANSACTIONAL | CONTROL,
        )
        return self.append(batch)

    def commit(self, producer: Producer) -> int:
        return self.end(producer, ControlType.COMMIT)

    def abort(self, producer: Producer) -> int:
        return self.end(producer, ControlType.ABORT)

    def roll(self) -> None:
        self.log.roll(self.now_ms)

    # Cleaning

    def sources(self) -> tuple[SourceSegment, ...]:
        """All closed segments."""
        return tuple(
            SourceSegment(
                facts.base_offset,
                facts.next_base_offset,
                facts.size_bytes,
                facts.last_modified_ms,
                facts.largest_timestamp_ms,
                facts.content_id,
            )
            for facts in self.log.segment_facts()[:-1]
        )

    def job(self, *, keys: int | None = None, singly: bool = False, **changes: object) -> CleanJob:
        """A clean of all closed segments; `keys`: what the map holds, `singly`: a group each."""
        end = changes.get("end_offset", self.log.segment_facts()[-1].base_offset)
        sources = [source for source in self.sources() if source.next_base_offset <= end]  # type: ignore[operator]
        groups: object = changes.pop("groups", [sources])
        if singly:
            groups = [(source,) for source in sources]
        self.runs += 1
        first = self.log.log_start_offset
        settings: dict[str, object] = {
            "directory": FOLDER,
            "generation": self.log.generation,
            "job_id": f"run{self.runs}",
            "first_dirty_offset": max(self.dirty, first),
            "end_offset": end,
            "log_start_offset": first,
            "log_end_offset_is_end": end == self.log.log_end_offset,
            "now_ms": self.now_ms,
            "delete_retention_ms": DELETE_RETENTION_MS,
            "last_records": tuple(
                (producer, epoch, last)
                for producer, (epoch, last) in self.log.producers.last_records().items()
            ),
            "aborted": tuple(self.log.reader.aborted_transactions(first, end)),  # type: ignore[arg-type]
        }
        if keys is not None:
            settings["dedupe_buffer_bytes"] = (keys + 1) * SLOT_BYTES
        return clean_job(groups, **(settings | changes))  # type: ignore[arg-type]

    def clean(self, **changes: object) -> CleanReport:
        """Clean all closed segments and move the checkpoint; see `job`."""
        report = self.publish(self.job(**changes))  # type: ignore[arg-type]
        self.dirty = report.next_dirty_offset
        return report

    def publish(self, job: CleanJob) -> CleanReport:
        """Carry out a job and publish every group, as the broker does."""
        control = Recorder()
        report = run_clean(self.env, job, control)
        for group in control.groups:
            facts = {facts.base_offset: facts for facts in self.log.segment_facts()}
            outputs = [group.output] if group.output is not None else []
            sources = [facts[base] for base in group.source_base_offsets]
            plan = plan_swap(FOLDER, sources, outputs)
            self.log.flush()
            self.log.swap.pin(group.source_base_offsets)
            execute_swap(self.env, plan)
            self.log.swap.attach(plan, self.log.swap.open_outputs(plan))
        self.groups_replaced = len(control.groups)
        return report

    def clean_expired(self, *base_offsets: int) -> CleanReport:
        """A job over these segments for what has expired; over all of them if none is named."""
        sources = [source for source in self.sources() if source.base_offset in base_offsets]
        groups = tuple((source,) for source in sources or self.sources())
        end = groups[-1][-1].next_base_offset
        return self.clean(groups=groups, expired_only=True, first_dirty_offset=end, end_offset=end)

    def pass_retention(self) -> None:
        """Let the horizons pass that were given until now."""
        self.now_ms += DELETE_RETENTION_MS + 1

    # Looking

    def batches(self) -> list[tuple[BatchHeader, list[Record]]]:
        """Every batch of the log, checked to be readable, in order."""
        result = []
        offset = self.log.log_start_offset
        while offset < self.log.log_end_offset:
            data = self.log.reader.read(offset, 1 << 24, end_offset=self.log.log_end_offset).read()
            if not data:
                break
            for position, header in walk_headers(data):
                result.append((header, decode_records(data, header, position)))
                offset = header.next_offset
        return result

    def offsets(self) -> list[int]:
        """Of all records, markers included."""
        return [record.offset for _, records in self.batches() for record in records]

    def last_offsets(self) -> list[int]:
        """Of all batches, empty ones included."""
        return [header.last_offset for header, _ in self.batches()]

    def markers(self) -> list[int]:
        """The offsets of the control records."""
        return [
            record.offset
            for header, records in self.batches()
            if header.is_control
            for record in records
        ]

    def latest(self) -> dict[str, tuple[int, str]]:
        """What a read_committed consumer has at last: key -> (offset, value)."""
        aborted = self.aborted()
        state: dict[str, tuple[int, str]] = {}
        for header, records in self.batches():
            gone = header.is_transactional and any(
                entry.producer_id == header.producer_id
                and entry.first_offset <= header.last_offset
                and header.base_offset <= entry.last_offset
                for entry in aborted
            )
            for record in [] if gone or header.is_control else records:
                assert record.key is not None
                key = record.key.decode()
                state.pop(key, None)
                if record.value is not None:
                    state[key] = (record.offset, record.value.decode())
        return state

    def aborted(self) -> list[TxnIndexEntry]:
        return self.log.reader.aborted_transactions(0, self.log.log_end_offset)

    def txn_files(self) -> list[int]:
        """The segments that have a transaction index on disk, by base offset."""
        return [
            parsed.base_offset
            for name in self.env.listdir(FOLDER)
            if (parsed := filenames.parse_file_name(name)) is not None
            and parsed.kind == filenames.TXN_INDEX
        ]

    def reopened(self) -> "CompactedLog":
        """The log as another broker finds it that has nothing but its `.log` files."""
        env = MemoryEnv()
        mkdir_durably(env, FOLDER)
        for name in self.env.listdir(FOLDER):
            if name.endswith(filenames.LOG):
                put(env, f"{FOLDER}/{name}", self.env.read_file(f"{FOLDER}/{name}"))
        other = CompactedLog.__new__(CompactedLog)
        other.__dict__.update(self.__dict__)
        other.env = env
        other.log = open_log(env, self.config, log_start_offset=self.log.log_start_offset)
        return other
