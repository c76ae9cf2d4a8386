"""Bytes that change under a running broker, and what operators do about them: skip and truncate."""

from itertools import pairwise

from broker.damage.log_repair import (
    NotDamagedError,
    SkipRefusedError,
    TruncationRefusedError,
)
from storage.errors import CorruptBatchError
from storage.format.batch import BatchHeader, verify_crc, walk_headers
from storage.format.filenames import LOG, file_name
from storage.log.log import Log
from tests.sim.model import CRC_END, PartitionModel
from tests.sim.world import World
from tests.support.broker.broker_in_memory import log_repair_of

REFUSALS = (NotDamagedError, SkipRefusedError, TruncationRefusedError)


class Repairs:
    """Damages logs and repairs them, and tells the models what may be lost."""

    def __init__(self, world: World) -> None:
        self._world = world

    def rot(self, name: str, where: float, bit: int) -> None:
        """Flip one bit in a batch of a closed segment that no start verifies again."""
        model, partition = self._world.models.get(name), self._world.served(name)
        if model is None or partition is None or model.deleting:
            return
        log = partition.log
        log.flush()
        self._world.broker.manager.table.checkpoint_begin().run()
        facts = log.segment_facts()
        flushed = [
            fact.base_offset
            for fact, following in pairwise(facts)
            if following.base_offset <= log.recovery_point
        ]
        with self._world.env.without_faults():
            targets = [
                (base, position, header)
                for base in flushed
                for position, header in self._plain_batches(f"{log.directory}/{_log_name(base)}")
            ]
            if targets:
                base, position, header = targets[int(where * len(targets))]
                path = f"{log.directory}/{_log_name(base)}"
                at = position + CRC_END + bit // 8 % (header.size_bytes - CRC_END)
                self._flip(path, at, bit % 8)
                # A header that is damaged already says what it likes.
                model.damaged.setdefault(header.base_offset, header.next_offset)
                self._world.has_rot = True

    def _plain_batches(self, path: str) -> list[tuple[int, BatchHeader]]:
        """Batches outside of transactions: the loss of a marker changes what others mean."""
        return [
            (position, header)
            for position, header in _headers(self._read(path))
            if not header.is_control and not header.is_transactional
        ]

    def _read(self, path: str) -> bytes:
        try:
            return self._world.env.read_file(path)
        except FileNotFoundError:
            return b""

    def _flip(self, path: str, at: int, bit: int) -> None:
        file = self._world.env.open(path, write=True)
        try:
            file.pwrite(bytes([file.pread(1, at)[0] ^ 1 << bit]), at)
        finally:
            file.close()
        self._world.note(f"    flipped: {path} at {at}")
        self._world.seen["flipped"] += 1

    async def skip(self, name: str) -> None:
        """Verify a log and skip the damage in it, as `varve log verify` and `varve log skip` do."""
        partition = self._world.served(name)
        if partition is None:
            return
        repair = log_repair_of(self._world.env, self._world.broker)
        try:
            await repair.verify(partition, None, None)
            for damage in partition.log.damage.ranges:
                await repair.skip(partition, damage.first_offset)
                self._world.seen["skipped"] += 1
        except REFUSALS as error:
            self._world.note(f"    refused: {error}")
        self._world.has_news = True

    async def truncate(self, name: str, share: float) -> None:
        """Cut a log, as `varve log truncate --force` does: inside a batch, in front of it then."""
        offset = await self._truncate(name, share=share)
        if offset is not None:
            await self._truncate(name, offset=offset)

    async def _truncate(
        self, name: str, *, share: float = 0.0, offset: int | None = None
    ) -> int | None:
        """Return where the batch begins that the offset is inside, if that was refused."""
        model, partition = self._world.models.get(name), self._world.served(name)
        if model is None or partition is None or model.deleting:
            return None
        log = partition.log
        start = log.log_start_offset
        if offset is None:
            offset = start + int((log.log_end_offset - start) * share)
        batch = self._batch_over(log, offset)
        model.cutting, model.flushed = offset, log.recovery_point
        try:
            await log_repair_of(self._world.env, self._world.broker).truncate(
                partition, offset, force=True
            )
        except REFUSALS as error:
            model.cutting, model.flushed = None, 0
            self._world.note(f"    refused: {error}")
            return None if batch is None else max(start, batch.base_offset)
        model.cutting, model.flushed = None, 0
        log = partition.log  # another one if the replica was moved meanwhile
        if log.log_end_offset > offset:
            raise model.fail("truncated", f"the log ends at {log.log_end_offset}, not at {offset}")
        if batch is not None and offset > start:
            raise model.fail("truncated", f"offset {offset} is in the batch at {batch.base_offset}")
        self._check_kept(model, log.log_end_offset, offset)
        model.cut(offset)
        if not self._world.env.happened and self._world.env.full is None:
            model.cut_end = offset  # without room, only the recovery point shows it
        self._world.seen["truncated"] += 1
        self._world.has_news = True
        return None

    def _batch_over(self, log: Log, offset: int) -> BatchHeader | None:
        """The batch that has records below the offset, and others from it on."""
        with self._world.env.without_faults():
            for facts in log.segment_facts():
                data = self._read(f"{log.directory}/{_log_name(facts.base_offset)}")
                for position, header in _headers(data):
                    is_over = header.base_offset < offset < header.next_offset
                    if is_over and verify_crc(data, position, header):
                        return header
        return None

    @staticmethod
    def _check_kept(model: PartitionModel, end_offset: int, offset: int) -> None:
        """No batch below the offset goes."""
        for batch in model.history:
            if end_offset <= batch.base and batch.header.next_offset <= offset:
                raise model.fail("truncated", f"the batch at {batch.base} went, below {offset}")


def _headers(data: bytes) -> list[tuple[int, BatchHeader]]:
    """The headers of a whole file; none if one of them is damaged."""
    try:
        return list(walk_headers(data))
    except CorruptBatchError:
        return []


def _log_name(base_offset: int) -> str:
    return file_name(base_offset, LOG)
