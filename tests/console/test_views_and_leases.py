"""The pages of compacted views and of leases."""

import json
import os
import re
import urllib.request

from confluent_kafka import Producer
from playwright.sync_api import Page, expect

from tests.support.console import IO_LIMIT, box_of, confirm, limit_io, open_page, row_with
from tests.support.varve import VarveBroker


def test_a_view_is_compacted_and_rebuilt_after_a_question(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "views")
    row = row_with(page, "prices-0")
    expect(row).to_contain_text("never")
    page.get_by_role("button", name="Compact the view of prices-0").click()
    confirm(page, "Compact")
    expect(row).to_contain_text("done")
    (view,) = json.loads(broker.get("/api/v1/view?topic=prices"))["views"]
    assert (view["horizon"], view["ledger_records"]) == (200, 10)
    expect(row).not_to_contain_text("never")
    page.get_by_role("button", name="Rebuild the view of prices-0").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Rebuild")).to_be_disabled()
    confirm(page, "Rebuild", typed="prices")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_view_is_created_and_deleted(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "views")
    page.get_by_role("button", name="Create view").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Topic").fill("nowhere")
    dialog.get_by_role("button", name="Create view").click()
    expect(dialog.get_by_role("alert")).to_contain_text("nowhere")
    dialog.get_by_label("Topic").fill("readings")
    dialog.get_by_label("The latest record of a key has").select_option("timestamp")
    dialog.get_by_role("button", name="Create view").click()
    expect(row_with(page, "readings-1")).to_contain_text("latest by timestamp")
    page.get_by_role("searchbox").fill("readings")
    expect(row_with(page, "prices-0")).to_have_count(0)
    page.get_by_role("button", name="Delete the views of readings").first.click()
    confirm(page, "Delete", typed="readings")
    expect(page.get_by_text("None of the views matches")).to_be_visible()
    assert "readings" not in broker.get("/api/v1/view")


def test_a_running_compaction_of_a_view_is_aborted(page: Page, broker: VarveBroker) -> None:
    (before,) = json.loads(broker.get("/api/v1/view?topic=prices"))["views"]
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(2000):
        producer.produce("prices", os.urandom(1000), b"%d" % number)
    assert producer.flush(30) == 0
    limit_io(broker, {"set": {IO_LIMIT: 128 << 10}})  # a compaction of 2 MB takes half a minute
    try:
        open_page(page, broker, "views")
        page.get_by_role("button", name="Compact the view of prices-0").click()
        confirm(page, "Compact")
        row = row_with(page, "prices-0")
        expect(row).to_contain_text("running")
        page.get_by_role("button", name="Abort the compaction of prices-0").click()
        confirm(page, "Abort")
        expect(row).to_contain_text("aborted")
    finally:
        limit_io(broker, {"unset": [IO_LIMIT]})
    (view,) = json.loads(broker.get("/api/v1/view?topic=prices"))["views"]
    assert (view["state"], view["horizon"]) == ("aborted", before["horizon"])


def test_a_lease_shows_until_when_it_lasts_and_is_released(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "leases")
    expect(page.get_by_text("No partition is leased")).to_be_visible()
    body = json.dumps({"topic": "customers", "partitions": [0], "purpose": "read"}).encode()
    request = urllib.request.Request(
        f"{broker.url}/api/v1/remote-compactions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        lease = json.loads(response.read())["compaction_id"]
    row = row_with(page, lease)
    expect(row).to_contain_text("customers")
    expect(row).to_contain_text(re.compile(r"in \d+ (s|min), unless renewed"))
    page.get_by_role("button", name="Release customers").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(row).to_have_count(1)
    page.get_by_role("button", name="Release customers").click()
    confirm(page, "Release")
    expect(page.get_by_text("No partition is leased")).to_be_visible()
    page.get_by_label("Show leases that have ended").check()
    expect(row).to_contain_text("abandoned")


def test_the_links_of_a_view_are_in_one_line(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "views")
    links = row_with(page, "prices-0").locator("small a")
    expect(links).to_have_count(2)
    first, second = map(box_of, links.all())
    assert first["y"] == second["y"]
