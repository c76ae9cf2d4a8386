"""Sealed files: what comes out is what went in, or an error."""

import pytest

from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format.sealed_json import seal, unseal

PAYLOAD = {"a": 1, "text": "ünï\ncode", "list": [1, [2, None]], "empty": {}}


def test_what_was_sealed_is_unsealed() -> None:
    assert unseal("m", 3, seal("m", 3, PAYLOAD), "p") == PAYLOAD
    assert unseal("m", 3, seal("m", 2, PAYLOAD), "p") == PAYLOAD


def test_a_cut_a_longer_and_a_changed_file_are_refused() -> None:
    data = seal("m", 1, PAYLOAD)
    harmed = [data[:length] for length in range(len(data))]
    harmed += [data + b"\n", data + b"x", data * 2]
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            harmed.append(bytes(changed))
    for item in harmed:
        with pytest.raises(CorruptCheckpointError):
            unseal("m", 1, item, "p")


def test_a_newer_version_is_told_from_damage() -> None:
    with pytest.raises(NewerFormatError) as caught:
        unseal("m", 1, seal("m", 2, PAYLOAD), "p")
    assert (caught.value.path, caught.value.version, caught.value.known) == ("p", 2, 1)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"m 1 2 3\n", b"m -1 2 00000000\n{}", b"m \xff 2 0\n{}", b"other 1 0 0\n"]
)
def test_what_is_no_sealed_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        unseal("m", 1, data, "p")


def test_another_kind_of_file_and_version_zero_are_refused() -> None:
    for data in (seal("other", 1, PAYLOAD), seal("m", 0, PAYLOAD), seal("m", 1, [1])):  # type: ignore[arg-type]
        with pytest.raises(CorruptCheckpointError):
            unseal("m", 1, data, "p")
