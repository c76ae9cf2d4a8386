"""Comparing a broker with the models of its partitions; for the rules see model.py."""

import errno
from collections.abc import Iterator
from contextlib import suppress

from broker.erasure.model import ErasureState
from broker.topics.partition import Partition
from broker.views.views import ViewCursor
from storage.errors import CorruptBatchError, DamagedSegmentError, StorageError
from storage.format.batch import Record, decode_records, verify_crc, walk_headers
from tests.sim.model import (
    READ_BYTES,
    Gone,
    LifeEndedError,
    PartitionModel,
    RuleError,
    whole_batches,
)
from tests.sim.operations import Operations
from tests.sim.world import World
from tests.support.cleaner.history import Batch, committed

SETTLE_SECONDS = 25.0  # virtual, at the end: timers, views and the cleaner go on by themselves
LOG_CHANGED = "its log was changed"  # the default reason of a pause
UNVERIFIED = "UnverifiedOutputError"  # of cleaner.verify
NO_ROOM = "cannot be verified"  # for the keys of the log


class Checks:
    """Reads logs and views as clients do. Raises RuleError, LifeEndedError."""

    def __init__(self, world: World, operations: Operations) -> None:
        self._world = world
        self._operations = operations

    def check_health(self) -> None:
        """Directories and partitions are served unless the disk failed."""
        faults = self._world.env.happened
        offline = [
            directory
            for directory in self._world.broker.manager.table.directories
            if not directory.is_online
        ]
        if offline and not any(fault.number == errno.EIO for fault in faults):
            raise RuleError(
                "directory", f"offline without a disk fault: {offline[0].offline_reason}"
            )
        if offline or any(fault.number == errno.EIO for fault in faults):
            raise LifeEndedError("power")  # an operator sees to the disk
        for record in self._world.broker.pool.history.newest(limit=20):
            # Changes of a topic, leases and operators give other reasons.
            if record.outcome == "aborted" and record.reason == LOG_CHANGED:
                raise RuleError("undisturbed", f"{record.job_id} was aborted needlessly")
            if self._world.has_rot:
                continue  # bytes may change between a clean and its verification
            if UNVERIFIED in record.reason and NO_ROOM not in record.reason:
                raise RuleError("verified", f"{record.job_id}: {record.reason}")
        for name, model in self._world.models.items():
            topic = self._world.broker.topics.get(name)
            if topic is None or not topic.offline or model.deleting or faults:
                continue
            if model.files_lost or model.is_damaged:
                continue
            raise RuleError("partition", f"{name} is offline: {topic.offline}")

    async def check_start(self) -> None:
        """After a start: what must be there is, and what was decided stays so."""
        self.check_health()
        # Nothing damages the checkpoint here, and no other broker cleans. But if the state in one
        # data directory is lost, that in the one where the log was before is older.
        events = ["view discarded", "view may have deleted keys"]
        if not (self._world.script.loses_state and self._world.seen["move"]):
            events.append("cleaner checkpoint lowered")
        for event in events:
            if self._world.seen[event]:
                raise RuleError("checkpoint", event)
        for name, model in list(self._world.models.items()):
            topic = self._world.broker.topics.get(name)
            existing = topic is not None and topic.topic_id == model.topic_id
            if not existing and (model.deleting or not model.topic_id):
                # Its deletion, or its creation, was cut off or finished.
                del self._world.models[name]
                if topic is not None:
                    created = PartitionModel(model.where, topic.topic_id)
                    created.log = self._world.broker.manager.table.logs.get(model.where)
                    self._world.models[name] = created
                    self._world.note_config(name)
                continue
            if not existing:
                raise model.fail("acknowledged", "the topic has gone")
            model.deleting = False
            self._world.note_config(name)
            partition = self._world.served(name)
            if partition is None:
                continue
            log = model.log = partition.log
            if model.is_damaged:
                continue  # that it was opened is all
            start, log._state.log_start_offset = (
                log.log_start_offset,
                min(log.log_start_offset, log.segments.first_base_offset),
            )
            try:
                batches = self._batches(model, partition)
            finally:
                log._state.log_start_offset = start
            model.reopened(batches, log.log_end_offset)
            self._world.seen["open at a start"] += log.producers.open_transaction() is not None
            if not self._world.script.leaves_open:
                await self._operations.end_transactions(name)
        self.check_all()

    def check_all(self) -> None:
        """Compare every partition and view. Faults hit the broker, not these reads."""
        with self._world.env.without_faults():
            self._compare()

    def _compare(self) -> None:
        for name, model in self._world.models.items():
            partition = self._world.served(name)
            if partition is None or model.deleting or partition.log.topic_id != model.topic_id:
                continue
            if model.is_damaged:
                continue
            self._check_log(model, partition)
            self._check_view(model, partition)
            self._check_erasures(model, partition)

    def _check_erasures(self, model: PartitionModel, partition: Partition) -> None:
        """No file has a value of a key whose erasure is complete."""
        for erasure in self._world.broker.erasures.all():
            key = self._world.erased_keys.get(erasure.erasure_id)
            is_complete = erasure.state is ErasureState.COMPLETE
            if key is None or not is_complete or erasure.topic_id != model.topic_id:
                continue
            assert erasure.parts[0].end_offset is not None
            end = min(erasure.parts[0].end_offset, model.lowest_cut)
            for path, record in self._records_on_disk(partition.log.directory):
                if record.key == key and record.value is not None and record.offset < end:
                    raise model.fail("erased", f"{path} has a value of {key!r}: {record.offset}")
            self._world.seen["erasure checked"] += 1

    def _records_on_disk(self, folder: str) -> Iterator[tuple[str, Record]]:
        env = self._world.env
        for name in env.listdir(folder):
            path = f"{folder}/{name}"
            if env.is_dir(path):
                yield from self._records_on_disk(path)
            elif ".log" in name:
                data = env.read_file(path)
                with suppress(CorruptBatchError):  # rotten since, as a wrong checksum is
                    for at, header in walk_headers(data):
                        if verify_crc(data, at, header):
                            yield from (
                                (path, record) for record in decode_records(data, header, at)
                            )

    def _batches(self, model: PartitionModel, partition: Partition) -> list[Batch]:
        """Every batch of the log."""
        log = partition.log
        results: list[Batch] = []
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            try:
                part = log.reader.read(offset, READ_BYTES, end_offset=log.log_end_offset)
                batches, end = whole_batches(part, model.damaged)
            except DamagedSegmentError as error:
                offset = self._past_damage(model, offset, error)
                continue
            except AssertionError as error:
                raise model.fail("readable", f"offset {offset}: {error}") from error
            if end < 0:
                break
            results += batches
            offset = end
        return results

    def _past_damage(self, model: PartitionModel, offset: int, error: DamagedSegmentError) -> int:
        """Where a reader that meets damage at an offset goes on: at the next batch ever written.

        A damaged range reaches to the batch after it, over offsets that a clean removed. If whole
        batches were in it, the last records of their keys are missing.
        """
        if not model.damaged:
            raise model.fail("damaged", f"offset {offset}: {error}") from error
        self._world.seen["damage met"] += 1
        bases = (batch.base for batch in model.history if batch.base > offset)
        return next(bases, offset + 1)

    def _check_log(self, model: PartitionModel, partition: Partition) -> None:
        log = partition.log
        batches = self._batches(model, partition)
        model.take_in_pending(batches)
        model.forget_cleaned(batches)
        model.check_written(batches)
        start, stable = log.log_start_offset, log.last_stable_offset
        clock = self._world.env.clock
        seen = committed(batches, log.reader.aborted_transactions(start, stable), start, stable)
        model.check_stable(
            start, stable, None if log.config.varve_flush_on_ack else log.high_watermark
        )
        model.check_kept(batches, start, stable, clock)
        model.check_committed(seen)
        model.check_latest(seen, start, stable, clock)

    def _check_view(self, model: PartitionModel, partition: Partition) -> None:
        view = self._world.broker.views.partition(partition.partition)
        if view is None or view.is_opening:
            return
        if view.log.failure is not None:
            if self._world.env.happened:
                return  # until the next start, and said so
            raise model.fail("readable", f"its view: {view.log.failure}")
        log, cursor = partition.log, ViewCursor(view.log)
        stable = log.last_stable_offset
        seen: list[Record] = []
        offset = 0
        while offset < stable:
            try:
                part = cursor.read(offset, READ_BYTES, end_offset=stable)
                batches, end = whole_batches(part, model.damaged)
            except DamagedSegmentError as error:
                offset = self._past_damage(model, offset, error)
                continue
            except StorageError as error:
                raise model.fail("readable", f"its view at {offset}: {error}") from error
            if end < 0:
                break
            aborted = cursor.aborted_transactions(offset, end)
            seen += committed(batches, aborted, offset, stable)
            offset = end
        ledger, start = view.log.ledger, max(log.log_start_offset, model.log_start_max)
        gone = ((0, start),)
        if ledger is not None:
            manifest = ledger.manifest
            gone = ((0, manifest.first_offset), (manifest.horizon, start), *manifest.missed)
        model.check_committed(seen)
        if log.config.varve_view_strategy == "offset":
            model.check_view(seen, stable, Gone(gone))
        else:
            by_version = log.config.varve_view_strategy == "header"
            model.check_ranked_view(
                seen, stable, Gone(gone), view.log.horizon, by_version=by_version
            )
            self._world.seen["ranked views checked"] += 1
        self._world.seen["views checked"] += 1
