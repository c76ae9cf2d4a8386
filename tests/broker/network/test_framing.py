import random
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from broker.network import framing
from broker.network.framing import (
    FIRST_BYTES,
    INITIAL_BYTES,
    MIN_READ_BYTES,
    RETAINED_BYTES,
    FrameReader,
)
from protocol.api import ApiKey
from protocol.errors import ProtocolError
from protocol.limits import RequestLimits
from tests.support.draws import cases


def framed(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def deliver(reader: FrameReader, data: bytes | memoryview) -> int:
    """Give the reader as much as it takes in one read; -> how much that was."""
    room = reader.get_buffer(65536)
    used = min(len(room), len(data))
    room[:used] = data[:used]
    reader.buffer_updated(used)
    return used


def read_all(reader: FrameReader, data: bytes, chunk: int = 1 << 20) -> list[bytes]:
    frames: list[bytes] = []
    while data:
        data = data[deliver(reader, data[:chunk]) :]
        while (frame := reader.next_frame()) is not None:
            frames.append(bytes(frame))
    return frames


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
def test_frames_come_out_as_they_went_in_however_the_bytes_arrive(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 7, 300, 5_000, 70_000, 300_000)) for _ in range(60)]
    payloads = [rng.randbytes(size) for size in sizes]
    stream = b"".join(map(framed, payloads))
    reader = FrameReader()
    actual: list[bytes] = []
    while stream:
        chunk = rng.choice((1, 3, 4, 5, 100, 4_096, 65_536, 1 << 20))
        stream = stream[deliver(reader, stream[:chunk]) :]
        while (frame := reader.next_frame()) is not None:
            actual.append(bytes(frame))
    assert actual == payloads


def test_a_frame_is_a_writable_view_of_the_receive_buffer() -> None:
    reader = FrameReader()
    deliver(reader, framed(b"abcd") + framed(b"efgh"))
    frame = reader.next_frame()
    assert frame is not None
    assert not frame.readonly
    frame[:2] = b"XY"
    assert bytes(frame) == b"XYcd"
    following = reader.next_frame()
    assert following is not None
    assert bytes(following) == b"efgh"


def test_later_pipelined_requests_survive_while_an_earlier_one_is_held() -> None:
    reader = FrameReader()
    payloads = [bytes([n]) * 100 for n in range(32)]
    deliver(reader, b"".join(map(framed, payloads)) + framed(b"last")[:5])
    owned = reader.next_frame()
    assert owned is not None
    owned[:] = b"\xff" * 100  # a log stamps what it holds, and no more than that
    assert [bytes(frame) for frame in iter(reader.next_frame, None)] == payloads[1:]
    assert deliver(reader, b"ast") == 3
    last = reader.next_frame()
    assert last is not None
    assert bytes(last) == b"last"


def test_a_held_frame_outlives_a_buffer_that_had_to_grow() -> None:
    reader = FrameReader()
    big = framed(bytes(300_000))
    first = framed(b"held" * 10)
    deliver(reader, first + big[: INITIAL_BYTES - len(first)])
    owned = reader.next_frame()
    assert owned is not None
    reader.get_buffer(0)  # grows into another buffer
    assert bytes(owned) == b"held" * 10


@pytest.mark.parametrize("size", [-1, -(2**31), 1_001, 2**31 - 1])
def test_a_size_out_of_bounds_is_refused_before_anything_is_allocated(size: int) -> None:
    reader = FrameReader(max_frame_bytes=1_000)
    deliver(reader, struct.pack(">i", size) + b"x" * 10)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=str(size)):
            reader.next_frame()
    assert reader.allocated_bytes == FIRST_BYTES


def test_a_frame_of_exactly_the_limit_is_accepted() -> None:
    reader = FrameReader(max_frame_bytes=200_000)
    assert read_all(reader, framed(bytes(200_000))) == [bytes(200_000)]


def limit_of(api_key: int) -> int:
    return RequestLimits(100 << 20, 10_000).of(api_key).frame_bytes


@pytest.mark.parametrize("api_key", [ApiKey.HEARTBEAT, ApiKey.API_VERSIONS, 999, -1])
def test_a_large_frame_of_an_api_with_small_requests_is_refused_at_its_first_bytes(
    api_key: int,
) -> None:
    reader = FrameReader(100 << 20, limit_of)
    deliver(reader, struct.pack(">i", 90 << 20))
    assert reader.next_frame() is None  # the API is not known yet
    deliver(reader, struct.pack(">h", api_key))
    with pytest.raises(ProtocolError, match=f"API {api_key} has at most 65536"):
        reader.next_frame()
    assert reader.allocated_bytes == FIRST_BYTES


@pytest.mark.parametrize(
    ("api_key", "largest"),
    [(ApiKey.PRODUCE, 100 << 20), (ApiKey.FETCH, 4 << 20), (ApiKey.SYNC_GROUP, 16 << 20)],
)
def test_a_frame_of_the_largest_size_of_its_api_is_received(api_key: int, largest: int) -> None:
    reader = FrameReader(100 << 20, limit_of)
    deliver(reader, struct.pack(">ih", largest, api_key))
    assert reader.next_frame() is None
    if largest < 100 << 20:
        reader = FrameReader(100 << 20, limit_of)
        deliver(reader, struct.pack(">ih", largest + 1, api_key))
        with pytest.raises(ProtocolError, match=str(largest + 1)):
            reader.next_frame()


def test_memory_follows_what_was_received_and_not_what_was_announced() -> None:
    reader = FrameReader()
    deliver(reader, struct.pack(">i", 100 << 20))
    assert reader.next_frame() is None
    received = 4
    for _ in range(400):
        received += deliver(reader, bytes(4096))
        assert reader.next_frame() is None
        assert reader.allocated_bytes <= max(INITIAL_BYTES, 4 * received)
    assert received > 1 << 20


@pytest.mark.parametrize("size", [5 << 20, 90 << 20])
def test_growing_copies_two_megabytes_at_most(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    received = 0
    copied: list[int] = []

    def empty(count: int, dtype: type) -> object:
        copied.append(received)
        return np.zeros(count, dtype)

    monkeypatch.setattr(framing, "np", SimpleNamespace(empty=empty, uint8=np.uint8))
    reader, view = FrameReader(), memoryview(framed(bytes(size)))
    while received < size + 4:
        received += deliver(reader, view[received : received + (1 << 20)])
    assert reader.next_frame() is not None
    assert 0 < max(copied) <= 2 << 20
    assert len(copied) <= 3


def test_growing_costs_no_more_than_the_frame_and_its_half() -> None:
    size = 8 << 20
    reader = FrameReader()
    data = framed(bytes(size))
    tracemalloc.start()
    try:
        view = memoryview(data)
        while view:
            room = reader.get_buffer(0)
            used = min(len(room), len(view), 65_536)
            room[:used] = view[:used]
            reader.buffer_updated(used)
            view = view[used:]
            del room
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.next_frame() is not None
    assert reader.allocated_bytes == size + 4
    assert peak < 1.6 * size


def test_a_huge_frame_gives_its_buffer_back() -> None:
    reader = FrameReader()
    read_all(reader, framed(bytes(RETAINED_BYTES * 2)))
    assert reader.allocated_bytes > RETAINED_BYTES
    reader.get_buffer(0)
    assert reader.allocated_bytes == INITIAL_BYTES


def test_a_usual_big_frame_keeps_its_buffer_for_the_next() -> None:
    reader = FrameReader()
    read_all(reader, framed(bytes(1 << 20)))
    retained = reader.allocated_bytes
    for _ in range(5):
        assert len(read_all(reader, framed(bytes(1 << 20)))) == 1
    assert reader.allocated_bytes == retained <= RETAINED_BYTES


def test_a_client_that_sends_little_keeps_a_small_buffer() -> None:
    reader = FrameReader()
    for _ in range(1000):
        deliver(reader, framed(bytes(1000)))
        assert reader.next_frame() is not None
    assert reader.allocated_bytes == FIRST_BYTES


@pytest.mark.parametrize("size", [FIRST_BYTES - 4, FIRST_BYTES, 10 * FIRST_BYTES])
def test_a_client_that_fills_its_first_buffer_gets_a_larger_one(size: int) -> None:
    reader = FrameReader()
    read_all(reader, framed(bytes(size)))
    assert len(reader.get_buffer(0)) == INITIAL_BYTES


def test_there_is_always_a_good_part_of_the_buffer_to_read_into() -> None:
    reader = FrameReader()
    whole = framed(bytes(1000))
    stream = whole * 500
    room = reader.get_buffer(0)
    assert len(room) == FIRST_BYTES
    while stream:
        used = min(len(room), len(stream))
        room[:used] = stream[:used]
        reader.buffer_updated(used)
        stream = stream[used:]
        while reader.next_frame() is not None:
            pass
        room = reader.get_buffer(0)
        assert len(room) >= MIN_READ_BYTES
    assert reader.allocated_bytes == INITIAL_BYTES


def test_a_trimmed_buffer_keeps_what_came_of_the_next_frame_and_no_more() -> None:
    first, following = framed(bytes(300_000)), framed(b"x" * 200_000)
    reader = FrameReader()
    assert read_all(reader, first) == [bytes(300_000)]
    data = framed(b"y" * 1_000) + following[:100_000]
    deliver(reader, data)
    assert reader.next_frame() is not None
    assert reader.next_frame() is None
    reader.trim()
    assert reader.allocated_bytes == 100_000
    assert reader.growth() > 0
    assert read_all(reader, following[100_000:]) == [b"x" * 200_000]
    reader.trim()
    assert reader.allocated_bytes == INITIAL_BYTES


def test_a_frame_that_is_being_received_keeps_its_room() -> None:
    reader = FrameReader()
    read_all(reader, framed(bytes(300_000))[:200_000])
    allocated = reader.allocated_bytes
    reader.trim()
    assert reader.allocated_bytes == allocated
