"""Batches of some bytes are large in a test: they are written in parts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from broker.handlers import produce
from broker.topics import partition
from storage.segments import segment


@contextmanager
def large_batches(large_bytes: int, part_bytes: int) -> Iterator[None]:
    """Batches above `large_bytes` are written in parts of `part_bytes`, for a block."""
    with ExitStack() as stack:
        for module in (produce, partition):
            stack.enter_context(mock.patch.object(module, "LARGE_BATCH_BYTES", large_bytes))
        for module in (partition, segment):
            stack.enter_context(mock.patch.object(module, "PART_BYTES", part_bytes))
        yield
