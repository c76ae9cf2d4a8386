"""How much of new data survives a clean: learned from cleans, used to guess what one will gain.

Pure. The ratio is that of Kafka's wiki page on log cleaner improvements ("Estimate Survivorship
Ratio"): size after = clean bytes + survivorship x dirty bytes. It starts at 0, as if everything
were an update; each clean's observation moves it by `alpha`.
"""


def observed(bytes_before: int, bytes_after: int, dirty_bytes: int) -> float:
    """What a finished clean says, 0..1: the share of the dirty section that was new."""
    assert dirty_bytes > 0
    clean_bytes = max(0, bytes_before - dirty_bytes)
    return min(1.0, max(0.0, (bytes_after - clean_bytes) / dirty_bytes))


def updated(ratio: float, observations: int, observation: float, alpha: float) -> float:
    """The ratio after one more observation; the first one is taken as it is."""
    assert 0 < alpha <= 1
    assert 0 <= observation <= 1
    if observations == 0:
        return observation
    return alpha * observation + (1 - alpha) * ratio


def garbage_bytes(dirty_bytes: int, ratio: float) -> float:
    """What a clean is expected to remove."""
    return dirty_bytes * (1 - ratio)


def gain_per_byte(clean_bytes: int, dirty_bytes: int, ratio: float) -> float:
    """Expected shrinkage per byte of I/O, 0..0.5: the clean section is read once, the dirty one
    twice (once to index its keys), and what survives is written.

    With ratio 0 this is half the dirty ratio, so that partitions of both strategies compare.
    """
    read = clean_bytes + 2 * dirty_bytes
    written = clean_bytes + ratio * dirty_bytes
    return garbage_bytes(dirty_bytes, ratio) / (read + written) if read else 0.0
