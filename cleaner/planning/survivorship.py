"""Estimate how much of new data survives a clean, from earlier cleans. Pure.

The ratio is that of Kafka's wiki page on log cleaner improvements ("Estimate Survivorship
Ratio"): size after = clean bytes + survivorship x dirty bytes. It starts at 0, as if everything
were an update; each clean's observation moves it by `alpha`.
"""


def observed(bytes_before: int, bytes_after: int, dirty_bytes: int) -> float:
    """Return the share of the dirty section that survived a clean, 0..1."""
    assert dirty_bytes > 0
    clean_bytes = max(0, bytes_before - dirty_bytes)
    return min(1.0, max(0.0, (bytes_after - clean_bytes) / dirty_bytes))


def updated(ratio: float, observations: int, observation: float, alpha: float) -> float:
    """Return the ratio after one more observation; the first one counts fully."""
    assert 0 < alpha <= 1
    assert 0 <= observation <= 1
    if observations == 0:
        return observation
    return alpha * observation + (1 - alpha) * ratio


def garbage_bytes(dirty_bytes: int, ratio: float) -> float:
    """Return how many bytes a clean is expected to remove."""
    return dirty_bytes * (1 - ratio)


def gain_per_byte(clean_bytes: int, dirty_bytes: int, ratio: float) -> float:
    """Return the expected shrinkage per byte of I/O, 0..0.5.

    A clean reads the clean section once and the dirty one twice, and writes the survivors. With
    ratio 0 this is half the dirty ratio, so that partitions of both strategies compare.
    """
    read = clean_bytes + 2 * dirty_bytes
    written = clean_bytes + ratio * dirty_bytes
    return garbage_bytes(dirty_bytes, ratio) / (read + written) if read else 0.0
