"""Frames inside kernels: what is unpacked there is what storage/format/compression.py unpacks."""

import lz4.frame
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.kernels.codecs.lz4 import (
    UNHANDLED,
    frame_bytes_max,
    pack_frame,
    packer_address,
    unpack_frame,
    unpacker_address,
)
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.codecs.zstd import frame_bound
from cleaner.engine.kernels.compile import Bytes
from storage.errors import CorruptBatchError, DecompressionLimitError
from storage.format.compression import LZ4, ZSTD, compress, decompress, decompress_zstd_frame
from tests.support.draws import cases

PROPERTY = settings(max_examples=cases(few=30, many=300), deadline=None)
LIMIT = 1 << 20
CONTENTS = st.binary(max_size=300) | st.builds(
    lambda piece, count: piece * count, st.binary(min_size=1, max_size=40), st.integers(1, 5000)
)
UNSET = 0xEE


def with_slack(data: bytes) -> Bytes:
    return np.frombuffer(data + bytes(SLACK_BYTES), dtype=np.uint8)


def unpacked_lz4(frame: bytes, room: int) -> bytes | None:
    """Return what the kernel writes; check that it writes nothing outside of its room."""
    target = np.full(room + 2 * SLACK_BYTES, UNSET, dtype=np.uint8)
    address = unpacker_address()
    count = unpack_frame(address, with_slack(frame), 0, len(frame), target, SLACK_BYTES, room)
    assert (target[:SLACK_BYTES] == UNSET).all()
    assert (target[SLACK_BYTES + room :] == UNSET).all()
    return None if count == UNHANDLED else target[SLACK_BYTES:][:count].tobytes()


def changed(draw: st.DataObject, frame: bytes) -> bytes:
    """The frame cut, extended, or with some bytes changed."""
    out = bytearray(frame)
    for _ in range(draw.draw(st.integers(0, 3))):
        if out:
            place = draw.draw(st.integers(0, min(len(out) - 1, 60)) | st.integers(0, len(out) - 1))
            out[place] = draw.draw(st.integers(0, 255))
    return bytes(out[: draw.draw(st.integers(0, len(out)) | st.just(len(out)))]) + draw.draw(
        st.sampled_from([b"", b"", b"\0", frame])
    )


@PROPERTY
@given(CONTENTS)
def test_what_is_packed_as_lz4_is_the_same_bytes(content: bytes) -> None:
    room = np.zeros(frame_bytes_max(len(content)) + SLACK_BYTES, dtype=np.uint8)
    end = pack_frame(packer_address(), with_slack(content), 0, len(content), room, 0)
    assert room[:end].tobytes() == compress(LZ4, content)
    assert unpacked_lz4(room[:end].tobytes(), len(content) + 10) == content


@PROPERTY
@given(st.data(), CONTENTS, st.integers(0, 300_000))
def test_a_foreign_lz4_frame_unpacks_as_it_should_or_not_at_all(
    data: st.DataObject, content: bytes, room: int
) -> None:
    frame = changed(data, compress(LZ4, content))
    actual = unpacked_lz4(frame, room)
    if actual is not None:
        assert actual == decompress(LZ4, frame, LIMIT)


@pytest.mark.parametrize(
    "options",
    [
        {"content_checksum": True},
        {"block_checksum": True},
        {"store_size": True},
        {"block_size": lz4.frame.BLOCKSIZE_MAX1MB},
        {"block_linked": True},
    ],
)
def test_other_lz4_frames_are_left_to_others(options: dict[str, int]) -> None:
    plain = {"block_linked": False, "store_size": False, "block_size": 4}
    frame = lz4.frame.compress(bytes(100_000), **{**plain, **options})
    assert unpacked_lz4(frame, 200_000) is None


def test_without_the_library_nothing_is_unpacked_here() -> None:
    frame = compress(LZ4, b"content")
    target = np.zeros(200, dtype=np.uint8)
    assert unpack_frame(0, with_slack(frame), 0, len(frame), target, 0, 100) == UNHANDLED


@PROPERTY
@given(st.data(), CONTENTS, st.booleans(), st.booleans())
def test_a_zstd_frame_never_unpacks_to_more_than_its_bound(
    data: st.DataObject, content: bytes, sized: bool, checked: bool
) -> None:
    packer = zstandard.ZstdCompressor(write_content_size=sized, write_checksum=checked)
    stream = packer.compressobj()
    whole = packer.compress(content) if sized else stream.compress(content) + stream.flush()
    frame = changed(data, whole)
    bound = int(frame_bound(with_slack(frame), 0, len(frame), LIMIT))
    assert 0 <= bound <= LIMIT
    try:
        expected = decompress(ZSTD, frame, LIMIT)
    except (CorruptBatchError, DecompressionLimitError):
        if bound > 0:
            with pytest.raises(CorruptBatchError):
                decompress_zstd_frame(memoryview(frame), bound)
    else:
        if bound > 0:
            assert len(expected) <= bound
            assert decompress_zstd_frame(memoryview(frame), bound) == expected
        if frame == whole and len(frame) >= 14 and content:
            assert bound > 0, "the common frames are for the kernel"
