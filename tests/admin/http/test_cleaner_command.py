"""What `varve cleaner` does if the broker refuses a request about some partitions of a topic."""

import json

import pytest
from click.testing import CliRunner, Result

from admin.client import ApiClient, ApiRefusedError, Json
from admin.http.cleaner import cleaner
from admin.http.views import view


def estimated(
    monkeypatch: pytest.MonkeyPatch,
    refused: dict[int, tuple[int, str]],
    *options: str,
    is_offline: bool = False,
) -> Result:
    """Estimate a topic of two partitions, of which the broker refuses some."""

    def get(_client: ApiClient, path: str, **_query: object) -> Json:
        if path == "/partitions":
            return {"partitions": [{"partition": 0}, {"partition": 1}], "next": None}
        number = int(path.split("/")[3])
        if number in refused and path.endswith("/estimate"):
            raise ApiRefusedError(*refused[number])
        if not path.endswith("/estimate"):
            return {
                "topic": "orders",
                "partition": number,
                "end_offset": None if is_offline else 0,
                "to_clean": False,
                "blocked_by": "active segment",
                "obstacle": "It has 156 B.",
            }
        figures = dict.fromkeys(("read_bytes", "written_bytes", "freed_bytes", "seconds"), 0)
        lists = {"groups": [], "by_slack": [], "by_dirty_ratio": [], "survival": []}
        return {"topic": "orders", "partition": number, "selective": False, **figures, **lists}

    monkeypatch.setattr(ApiClient, "get", get)
    return CliRunner().invoke(cleaner, ["estimate", "orders", *options])


NOTHING = (409, "orders-1 has no closed segment that can be cleaned")


def test_an_estimate_says_what_to_do_about_partitions_with_nothing_to_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = estimated(monkeypatch, {1: NOTHING})
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "orders-0: there is nothing to clean now.",
        "orders-1: nothing can be cleaned now. It has 156 B.",
    ]
    assert estimated(monkeypatch, {0: NOTHING, 1: NOTHING}, "--survival").exit_code == 0
    (_, row) = json.loads(estimated(monkeypatch, {1: NOTHING}, "--json").stdout)["partitions"]
    assert (row["partition"], row["obstacle"][:12]) == (1, "nothing can ")


def test_an_estimate_fails_for_another_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimated(monkeypatch, {1: (503, "starting")}).exit_code == 1
    offline = estimated(monkeypatch, {1: (409, "orders-1 is offline")}, is_offline=True)
    assert (offline.exit_code, offline.stderr) == (1, "varve: orders-1 is offline\n")


def test_a_clean_of_a_topic_fails_if_one_partition_cannot_be_cleaned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def post(_client: ApiClient, path: str, *_: object) -> Json:
        obstacle = "it is paused" if path.endswith("/1/run") else None
        blocked_by = obstacle and "paused by an operator"
        answer = {
            "to_clean": False,
            "size_bytes": 1,
            "obstacle": obstacle,
            "blocked_by": blocked_by,
        }
        return {"requested_offset": None, "rolled": False, **answer}

    partitions = {"partitions": [{"partition": 0}, {"partition": 1}], "next": None}
    monkeypatch.setattr(ApiClient, "get", lambda *_, **__: partitions)
    monkeypatch.setattr(ApiClient, "post", post)
    result = CliRunner().invoke(cleaner, ["run", "orders", "--wait"])
    assert "orders-1: " in result.stderr
    assert result.exit_code == 1


def test_a_refused_clean_prints_its_reason_and_no_empty_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def post(_client: ApiClient, path: str, *_: object) -> Json:
        raise ApiRefusedError(409, "it is paused")

    partitions = {"partitions": [{"partition": 0}], "next": None}
    monkeypatch.setattr(ApiClient, "get", lambda *_, **__: partitions)
    monkeypatch.setattr(ApiClient, "post", post)
    result = CliRunner().invoke(cleaner, ["run", "orders", "--wait"])
    assert (result.stdout, result.stderr) == ("", "varve: it is paused\n")


def test_a_pause_of_all_partitions_says_that_later_ones_are_cleaned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ApiClient, "post", lambda *_: {"changed": 2})
    result = CliRunner().invoke(cleaner, ["pause", "--all"])
    assert result.stdout == (
        "2 partitions: each is paused; partitions that are created later are cleaned\n"
    )


def test_a_view_of_one_partition_is_named_as_in_the_cleaner_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(_client: ApiClient, _path: str, **_query: object) -> Json:
        raise ApiRefusedError(404, "there is no topic orders-3")

    def post(_client: ApiClient, path: str, *_: object) -> Json:
        assert path == "/partitions/orders/3/abort"
        return {"topic": "orders", "partition": 3, "changed": True}

    monkeypatch.setattr(ApiClient, "get", get)
    monkeypatch.setattr(ApiClient, "post", post)
    result = CliRunner().invoke(view, ["abort", "orders-3"])
    assert result.stdout == "orders-3: compaction aborted\n"


def test_the_status_of_views_names_the_topic_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ApiClient, "get", lambda *_, **__: {"views": [], "next": None})
    of_topic = CliRunner().invoke(view, ["status", "orders"])
    assert of_topic.stdout == "orders has no view (varve.view=compacted).\n"
    of_all = CliRunner().invoke(view, ["status"])
    assert of_all.stdout == "No topic has a view (varve.view=compacted).\n"
