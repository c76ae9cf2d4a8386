"""An operator's abort of a transaction that no coordinator ends."""

from collections.abc import Callable

from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.topics.end_transaction import NoTransactionError, abort_hanging
from broker.topics.partition import Partition
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.markers import TransactionalOffsets


class HangingTransactions:
    """Aborts hanging transactions, and refuses to abort those that the coordinator will end."""

    def __init__(
        self,
        transactions: TransactionCoordinator,
        offsets: TransactionalOffsets,
        wall_ms: Callable[[], int],
    ) -> None:
        self._transactions = transactions
        self._offsets = offsets
        self._wall_ms = wall_ms

    async def abort(self, partition: Partition, producer_id: int) -> int:
        """Abort the open transaction of a producer durably; return the offset of the marker.

        Raises NoTransactionError if there is none or if it is not hanging, and StorageError.
        """
        topic_partition = partition.partition
        owner = await self._transactions.find_open(topic_partition, producer_id)
        if owner is not None:
            raise NoTransactionError(
                f"the transaction of producer {producer_id} on {topic_partition} is not hanging:"
                f" the broker ends it with transactional id {owner[:100]!r}, after its timeout at"
                " the latest"
            )
        offset = await abort_hanging(partition, producer_id, self._wall_ms())
        if topic_partition.topic == OFFSETS_TOPIC:
            self._offsets.end_transaction(topic_partition.partition, producer_id, commit=False)
        return offset
