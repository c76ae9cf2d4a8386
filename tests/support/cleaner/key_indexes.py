"""Let logs of small records be cleaned by key indexes, as those of large records are."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from cleaner.engine.selective import index_size, resolve


@contextmanager
def small_records_are_indexed(
    indexed_bytes: int = 0, unindexed_share_max: float = 1.0
) -> Iterator[None]:
    """Lower the limits of index_size.py and resolve.py for logs of a few small records."""
    with (
        patch.object(index_size, "INDEXED_BYTES", indexed_bytes),
        patch.object(resolve, "UNINDEXED_SHARE_MAX", unindexed_share_max),
    ):
        yield
