"""What `varve erase` prints about an erasure, and how long it waits for one."""

from typing import Any

import pytest
from click.testing import CliRunner

from admin.client import ApiClient
from admin.http.erase import erase
from admin.http.erase_text import erasure_lines, erasures_lines, progress_text


def erasure(part: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "0a1b",
        "topic": "orders",
        "key_digest": "ff00",
        "state": "open",
        "reason": "",
        "requested_by": "User:ada",
        "requested_ms": 0,
        "deadline_ms": 86_400_000,
        "ended_ms": None,
        "partitions": [
            {
                "partition": 0,
                "end_offset": None,
                "tombstone_offset": None,
                "receipt": None,
                "waits_for": None,
                "records_left": None,
                "files_left": None,
                "expected_ms": None,
                "risk": None,
                **part,
            }
        ],
        **changes,
    }


def test_an_open_erasure_says_what_is_left_and_what_it_waits_for() -> None:
    part = {"waits_for": "it waits for its turn", "records_left": 1_200, "files_left": 3}
    lines = erasure_lines(erasure(part))
    assert lines[0] == "erasure 0a1b of orders, key digest ff00"
    assert lines[-1] == "  orders-0: 1,200 values in 3 files; it waits for its turn"


def test_a_wait_for_a_receipt_shows_what_the_erasure_waits_for() -> None:
    part = {"waits_for": "the partition is paused"}
    assert progress_text(erasure(part)) == "erasure 0a1b: orders-0: the partition is paused"
    assert progress_text(erasure({})) == "erasure 0a1b: requested"


def test_an_erasure_that_will_be_late_says_why() -> None:
    lines = erasure_lines(erasure({"waits_for": "its turn", "risk": "rate", "expected_ms": 0}))
    assert lines[-1].startswith("    It will miss the deadline at the present rate")
    assert "expected to be done 19" in lines[-1]


def test_a_receipt_says_what_was_searched_and_how_long_the_key_stays() -> None:
    receipt = {"at_ms": 0, "files": 12, "tombstones": 1, "tombstones_until_ms": 86_400_000}
    part = {"end_offset": 5_000, "tombstone_offset": 4_999, "receipt": receipt}
    lines = erasure_lines(erasure(part, state="complete", ended_ms=0))
    assert lines[1] == "  complete: no value of the key is left"
    assert lines[-1].startswith("  orders-0: no value is left below offset 5,000. 12 files ")
    assert ". The key itself stays in 1 tombstone, at least until " in lines[-1]


def test_a_key_without_a_value_is_not_reported_as_erased() -> None:
    receipt = {"at_ms": 0, "files": 2, "tombstones": 0, "tombstones_until_ms": None}
    part = {"end_offset": 5_000, "receipt": receipt}
    lines = erasure_lines(erasure(part, state="complete", ended_ms=0))
    assert lines[1] == "  complete: no value of this key was found, so nothing was erased"
    assert lines[-1].startswith("  orders-0: no value was found below offset 5,000. 2 files ")


def test_a_void_erasure_says_why() -> None:
    lines = erasure_lines(erasure({}, state="void", reason="topic orders was deleted", ended_ms=0))
    assert lines[1] == "  void: topic orders was deleted"
    assert len(lines) == 3


def test_without_an_erasure_one_line_says_so() -> None:
    assert erasures_lines({"erasures": []}) == ["No erasure of this topic or key is known."]


@pytest.mark.parametrize(
    ("polled", "code", "error"),
    [
        (
            erasure({"risk": "overdue"}),
            1,
            "erasure 0a1b has no receipt by the deadline; it goes on (--status shows it)",
        ),
        (erasure({}, state="cancelled"), 1, "erasure 0a1b is cancelled"),
        (erasure({}, state="complete"), 0, ""),
    ],
)
def test_a_wait_ends_with_the_erasure_or_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, polled: dict[str, Any], code: int, error: str
) -> None:
    monkeypatch.setattr(ApiClient, "post", lambda *_: erasure({}))
    monkeypatch.setattr(ApiClient, "get", lambda *_: polled)
    result = CliRunner().invoke(erase, ["orders", "--key", "a", "--wait"])
    assert result.exit_code == code
    assert result.stderr == (f"varve: {error}\n" if error else "")
