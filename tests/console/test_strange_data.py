"""What clients chose may be strange: times, texts, JSON and names."""

import json
import urllib.request
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.console import confirm, open_page
from tests.support.varve import VarveBroker

ANY_TIME = {"message.timestamp.after.max.ms": str((1 << 63) - 1)}
NO_DAY_MS = 1 << 62  # of no year that a calendar has
JSON_TEXT = '{"id": 9007199254740993, "id": 2, "2": [], "1": {"name": "caf\\u00e9"}}'
INDENTED = """{
  "id": 9007199254740993,
  "id": 2,
  "2": [],
  "1": {
    "name": "café"
  }
}"""


@pytest.fixture(scope="module")
def strange(broker: VarveBroker) -> str:
    """A topic with records that no well-meaning producer writes."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic("strange", 1, 1, config=ANY_TIME)]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("strange", JSON_TEXT.encode(), "a\u202e\u061cb", timestamp=NO_DAY_MS)
    producer.produce("strange", b"[" * 2000 + b"]" * 2000, b"deep")
    assert producer.flush(30) == 0
    path = f"{broker.url}/api/v1/topics/strange/partitions/0/records"
    early = json.dumps({"key": "early", "value": "x", "timestamp_ms": -(10**15)}).encode()
    request = urllib.request.Request(path, early, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()
    return "strange"


def test_a_time_of_no_day_is_shown_as_a_number(
    page: Page, broker: VarveBroker, strange: str
) -> None:
    open_page(page, broker, f"topics/{strange}/messages/0")
    rows = page.get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.nth(3)).to_contain_text("4,611,686,018,427")
    expect(rows.nth(3)).to_contain_text("a\\u202e\\u061cb")
    expect(rows.nth(1)).to_contain_text("-029719-04-05")


def test_json_keeps_its_digits_and_names(page: Page, broker: VarveBroker, strange: str) -> None:
    open_page(page, broker, f"topics/{strange}/messages/0")
    page.get_by_role("row").nth(3).get_by_role("button").click()
    expect(page.locator("pre").last).to_have_text(INDENTED)


def test_json_that_is_nested_deeply_stays_small(
    page: Page, broker: VarveBroker, strange: str
) -> None:
    open_page(page, broker, f"topics/{strange}/messages/0")
    page.get_by_role("row").nth(2).get_by_role("button").click()
    assert len(page.locator("pre").last.inner_text()) < 200_000


def test_times_of_records_are_searched_in_the_zone_in_which_they_are_shown(
    browser: Browser, broker: VarveBroker
) -> None:
    page = browser.new_page(timezone_id="Pacific/Auckland")
    open_page(page, broker, "topics/readings/messages/0")
    page.get_by_role("combobox", name="Show").select_option("time")
    page.get_by_label("Time (UTC)").fill("2026-11-26T12:00:00")
    with page.expect_request("**/records?from=2026-11-26T12%3A00%3A00.000Z*"):
        page.get_by_role("button", name="Show", exact=True).click()
    page.close()


def test_the_name_of_a_group_is_shown_with_escapes(page: Page, broker: VarveBroker) -> None:
    name = "bil\u202eling<b>"
    shown = "bil\\u202eling<b>"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    offsets = ConsumerGroupTopicPartitions(name, [TopicPartition("readings", 0, 1)])
    for future in admin.alter_consumer_group_offsets([offsets]).values():
        future.result(30)
    open_page(page, broker, "groups")
    page.get_by_role("link", name=shown).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(shown)
    page.get_by_role("button", name="Delete group").click()
    confirm(page, "Delete group", typed=shown)
    expect(page.get_by_role("link", name=shown)).to_have_count(0)
    assert "bil" not in broker.get("/api/v1/groups")


def test_older_records_are_found_behind_a_gap_that_compaction_left(
    page: Page, broker: VarveBroker
) -> None:
    offsets = [*range(10), *range(1_000_000, 1_000_050)]

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        first = 1_000_000 if query["from"] == ["latest"] else int(query["from"][0])
        found = [each for each in offsets if each >= first][: int(query["limit"][0])]
        end = found[-1] + 1 if found else 1_000_050
        route.fulfill(json={
            "records": list(map(record, found)), "first_offset": first, "next_offset": end,
            "log_start_offset": 0, "end_offset": 1_000_050, "scanned_bytes": 1,
            "done": end == 1_000_050, "unreadable": [],
        })  # fmt: skip

    page.route("**/records?*", answer)
    open_page(page, broker, "topics/readings/messages/0")
    expect(page.get_by_role("cell", name="1,000,049")).to_be_visible()
    page.get_by_role("button", name="Older").click()
    expect(page.get_by_role("row").nth(1)).to_contain_text("▸ 0")


def record(offset: int) -> dict[str, Any]:
    """A record of the API's answer."""
    return {"offset": offset, "timestamp_ms": 0, "key": "k", "value": "v", "key_bytes": 1,
            "value_bytes": 1, "headers": [], "headers_left_out": 0, "truncated": [],
            "delete_horizon_ms": None}  # fmt: skip


def test_only_partitions_that_are_served_can_be_chosen(page: Page, broker: VarveBroker) -> None:
    served = [
        {"partition": number, "log_start_offset": 0, "log_end_offset": 0} for number in (1, 2)
    ]
    rows = {"partitions": served, "partition_count": 4, "view": False, "next": None}
    page.route("**/cleaner/partitions?*", lambda route: route.fulfill(json=rows))
    open_page(page, broker, "topics/readings/messages/1")
    options = page.get_by_role("combobox", name="Partition").locator("option")
    expect(options).to_have_text(["all", "1", "2"])
