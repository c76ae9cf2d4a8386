"""Large messages are decoded and encoded in slices, with the result of one step."""

import random

import pytest

from broker.handlers.dispatch import WHOLE_BYTES_MAX
from protocol import codec
from protocol import messages as m
from protocol.api import APIS, ApiKey
from protocol.errors import ProtocolError, RowLimitError
from protocol.limits import ROWS as ROWS_MAX
from protocol.table_compiler import ELEMENTS_PER_SLICE
from tests.support.protocol.messages import api_name, random_body, versions_of
from tests.support.protocol.slices import drained


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_in_slices_a_message_is_what_it_is_as_a_whole(api_key: int) -> None:
    rng = random.Random(api_key)
    for case in versions_of(api_key) * 3:
        request = random_body(rng, *case, "request")
        frame = codec.encode_request(*case, 7, "me", request)[4:]
        header = codec.read_header(frame)
        assert drained(codec.decode_body_sliced(header, frame, ROWS_MAX))[0] == request, case
        response = random_body(rng, *case, "response")
        whole = codec.encode_response(*case, 7, response)
        sliced, _ = drained(codec.encode_response_sliced(*case, 7, response))
        assert b"".join(sliced) == whole, case


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_a_message_cut_anywhere_is_refused_in_slices_too(api_key: int) -> None:
    for case in versions_of(api_key):
        body = random_body(random.Random(str(case)), *case, "request", width=2)
        frame = codec.encode_request(*case, 7, "me", body)[4:]
        header = codec.read_header(frame)
        for length in range(header.body_position, min(len(frame), 400)):
            with pytest.raises(ProtocolError):
                drained(codec.decode_body_sliced(header, frame[:length], ROWS_MAX))


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (ApiKey.DELETE_GROUPS, 2, m.DeleteGroupsRequest(groups_names=["g"] * 10_000)),
        (ApiKey.DELETE_GROUPS, 1, m.DeleteGroupsRequest(groups_names=["g"] * 10_000)),
        (
            ApiKey.OFFSET_FETCH,
            6,
            m.OffsetFetchRequest(
                topics=[m.OffsetFetchRequestTopic(name="t", partition_indexes=[1] * 10_000)]
            ),
        ),
        (
            ApiKey.DELETE_RECORDS,
            2,
            m.DeleteRecordsRequest(
                topics=[
                    m.DeleteRecordsRequestTopic(
                        name="t", partitions=[m.DeleteRecordsRequestPartition()] * 10
                    )
                ]
                * 1_000
            ),
        ),
    ],
)
def test_decoding_pauses_after_each_slice(key: int, version: int, body: m.Message) -> None:
    frame = codec.encode_request(key, version, 1, None, body)[4:]
    decoded, pauses = drained(codec.decode_body_sliced(codec.read_header(frame), frame, ROWS_MAX))
    assert decoded == body
    assert pauses >= 10_000 // ELEMENTS_PER_SLICE


def test_encoding_pauses_after_each_slice() -> None:
    rows = [m.FindCoordinatorResponseCoordinator(key=f"g{index}") for index in range(10_000)]
    body = m.FindCoordinatorResponse(coordinators=rows)
    parts, pauses = drained(codec.encode_response_sliced(ApiKey.FIND_COORDINATOR, 4, 1, body))
    assert b"".join(parts) == codec.encode_response(ApiKey.FIND_COORDINATOR, 4, 1, body)
    assert pauses == 10_000 // ELEMENTS_PER_SLICE


def test_decoding_pauses_after_long_strings() -> None:
    body = m.FindCoordinatorRequest(coordinator_keys=["x" * 16_000] * 100)
    frame = codec.encode_request(ApiKey.FIND_COORDINATOR, 4, 1, None, body)[4:]
    decoded, pauses = drained(codec.decode_body_sliced(codec.read_header(frame), frame, ROWS_MAX))
    assert decoded == body
    assert pauses >= 100 * 16_000 // (256 << 10)


def test_encoding_pauses_after_long_strings() -> None:
    """A slice has 256 KiB, and a string more."""
    keys = [f"{index}".ljust(16_000) for index in range(100)]
    rows = [m.FindCoordinatorResponseCoordinator(key=key) for key in keys]
    body = m.FindCoordinatorResponse(coordinators=rows)
    slices = codec.encode_response_sliced(ApiKey.FIND_COORDINATOR, 4, 1, body)
    parts, _ = drained(slices)
    assert b"".join(parts) == codec.encode_response(ApiKey.FIND_COORDINATOR, 4, 1, body)
    assert max(map(len, parts)) < (256 << 10) + 20_000


def test_a_request_in_slices_has_a_largest_number_of_elements() -> None:
    body = m.DeleteGroupsRequest(groups_names=[""] * (ROWS_MAX + 1))
    frame = codec.encode_request(ApiKey.DELETE_GROUPS, 2, 1, None, body)[4:]
    assert len(frame) > WHOLE_BYTES_MAX  # one that is decoded at one stroke cannot have as many
    with pytest.raises(RowLimitError, match="groups_names"):
        drained(codec.decode_body_sliced(codec.read_header(frame), frame, ROWS_MAX))
    body.groups_names.pop()
    frame = codec.encode_request(ApiKey.DELETE_GROUPS, 2, 1, None, body)[4:]
    assert drained(codec.decode_body_sliced(codec.read_header(frame), frame, ROWS_MAX))[0] == body
