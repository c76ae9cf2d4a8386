"""The page of the erasures of a topic."""

import re

from confluent_kafka import Producer
from playwright.sync_api import Page, expect

from admin.client import ApiClient, partition_path
from tests.support.console import confirm, open_page, row_with
from tests.support.varve import VarveBroker


def request(page: Page, key: str, within_seconds: str, topic: str = "customers") -> None:
    page.get_by_role("button", name="Erase a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key").fill(key)
    dialog.get_by_label("Deadline").select_option(within_seconds)
    expect(dialog.get_by_role("button", name="Erase a key")).to_be_disabled()
    dialog.get_by_label("to confirm").fill(topic)
    confirm(page, "Erase a key")


def test_a_key_is_erased_and_its_receipt_is_shown(page: Page, broker: VarveBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("customers", b"secret", b"ada", partition=1)
    assert producer.flush(30) == 0
    open_page(page, broker, "topics/customers/erasures")
    expect(page.get_by_text("No key was erased")).to_be_visible()
    request(page, "ada", "3600")
    row = row_with(page, "no value below offset 2")
    expect(row).to_contain_text("complete")
    expect(row).to_contain_text("the key stays in a tombstone until")
    expect(row.get_by_role("button")).to_have_count(0)


def test_an_erasure_that_found_nothing_shows_what_was_searched(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/customers/erasures")
    request(page, "never written", "3600")
    row = page.get_by_role("row").nth(1)
    expect(row).to_contain_text("complete")
    expect(row).to_contain_text(
        re.compile(r"0: no value below offset \d+,?\d*\s*\d+ files? searched")
    )


def test_an_erasure_that_waits_says_why_and_is_cancelled(page: Page, broker: VarveBroker) -> None:
    client = ApiClient(broker.url)
    client.post(f"{partition_path('customers', 0)}/pause")
    open_page(page, broker, "topics/customers/erasures")
    request(page, "customer-7", "86400")
    row = row_with(page, "at risk")
    expect(row).to_contain_text("It will miss the deadline unless the obstacle ends in time.")
    row.get_by_role("button", name="Cancel erasure").click()
    confirm(page, "Cancel erasure")
    expect(row_with(page, "User:ANONYMOUS cancelled it")).to_have_count(1)
    client.post(f"{partition_path('customers', 0)}/resume")


def test_a_topic_that_is_not_compacted_refuses(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/clicks/erasures")
    request(page, "ada", "86400", "clicks")
    expect(page.get_by_role("alert")).to_contain_text("clicks is not compacted")


def test_the_partitions_of_an_erasure_are_in_their_order(page: Page, broker: VarveBroker) -> None:
    receipt = {"files": 1, "at_ms": 0, "tombstones": 0, "tombstones_until_ms": 0}
    part = {"risk": None, "waits_for": "", "end_offset": 9, "receipt": receipt}
    partitions = [
        part | {"partition": number, "tombstone_offset": 7 if number in (1, 3) else None}
        for number in (3, 0, 2, 1)
    ]
    row = {"id": "e", "key_digest": "0" * 64, "requested_by": "User:ada", "requested_ms": 1}
    row |= {"state": "complete", "deadline_ms": 1, "reason": "", "partitions": partitions}
    page.route("**/customers/erasures", lambda route: route.fulfill(json={"erasures": [row]}))
    open_page(page, broker, "topics/customers/erasures")
    text = page.get_by_role("row").nth(1).inner_text()
    assert re.findall(r"(\d): no value below", text) == ["0", "1", "2", "3"]
