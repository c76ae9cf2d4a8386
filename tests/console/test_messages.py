"""The page of the records: all partitions, one of them, a view, and a record that is produced."""

import json

from aiokafka.partitioner import murmur2
from confluent_kafka import Producer
from playwright.sync_api import Page, expect

from tests.support.console import confirm, open_page, row_with
from tests.support.varve import VarveBroker

PHONE = {"width": 390, "height": 844}


def produce(broker: VarveBroker, topic: str, partition: int, *records: tuple[bytes, bytes]) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for key, value in records:
        producer.produce(topic, value, key, partition=partition)
    assert producer.flush(30) == 0


def test_a_key_has_the_partition_of_kafkas_default_partitioner(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics")
    keys = ["", "a", "ab", "abc", "lamp-7", "customer-42", "gr\u00fc\u00df", "\U0001f980 of key"]
    found = page.evaluate(
        """(keys) => import("/console/parts/partitions.js").then((module) =>
          keys.map((key) => module.partitionOfKey(key, 1000)))""",
        keys,
    )
    assert found == [(murmur2(key.encode()) & 0x7FFFFFFF) % 1000 for key in keys]


def test_the_records_of_all_partitions_are_shown_by_time_and_followed(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/clocks/messages")
    expect(page.get_by_text("No records yet")).to_be_visible()
    page.get_by_label("Follow").check()
    for number in range(4):
        produce(broker, "clocks", number % 2, (b"k", b"tick %d" % number))
        expect(page.get_by_role("row").nth(1)).to_contain_text(f"tick {number}")
    expect(page.get_by_role("row").nth(4)).to_contain_text("tick 0")
    expect(page.get_by_role("status").first).to_contain_text("newest records of 2 partitions")
    show = page.get_by_role("combobox", name="Show")
    expect(show.locator("option")).not_to_contain_text(["From an offset"])
    show.select_option("earliest")
    expect(page.get_by_role("row").nth(1)).to_contain_text("tick 0")
    page.get_by_role("combobox", name="Partition").select_option("1")
    expect(page.get_by_role("row")).to_have_count(3)


def test_every_version_of_a_key_is_found_in_whichever_partition_it_is(
    page: Page, broker: VarveBroker
) -> None:
    usual = (murmur2(b"lamp-7") & 0x7FFFFFFF) % 2
    produce(broker, "readings", 1 - usual, (b"lamp-7", b"astray"))
    produce(broker, "readings", usual, (b"lamp-7", b"on"), (b"lamp-7", b"off"))
    open_page(page, broker, "topics/readings/messages")
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("lamp-7")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("3 versions of this key; 2 partitions")
    rows = page.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("off")  # of the usual partition, which is searched first
    expect(rows.nth(1)).to_contain_text("latest")
    expect(rows.nth(2)).to_contain_text("superseded")
    expect(rows.nth(3)).to_contain_text("astray")
    expect(rows.nth(3)).to_contain_text("latest")


def test_a_record_goes_to_the_partition_of_its_key_unless_one_is_chosen(
    page: Page, broker: VarveBroker
) -> None:
    usual = (murmur2(b"chair-3") & 0x7FFFFFFF) % 2
    for choice, place in (("", usual), (str(1 - usual), 1 - usual)):
        open_page(page, broker, f"topics/readings/messages/{1 - usual}")
        page.get_by_role("button", name="Produce").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox", name="Key").fill("chair-3")
        dialog.get_by_role("textbox", name="Value").fill(f"to {place}")
        expect(dialog.get_by_text(f"Partition {usual}, as Kafka's")).to_be_visible()
        dialog.get_by_role("combobox", name="Partition").select_option(choice)
        confirm(page, "Produce")
        expect(page.get_by_role("dialog")).to_have_count(0)
        records = broker.get(f"/api/v1/topics/readings/partitions/{place}/records?key=chair-3")
        assert [row["value"] for row in json.loads(records)["records"]] == [f"to {place}"]
    page.get_by_role("button", name="Produce").click()
    expect(page.get_by_role("dialog").get_by_role("textbox", name="Key")).to_have_value("")


def test_a_click_on_a_row_shows_the_whole_record(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/prices/messages")
    page.get_by_role("row").nth(1).get_by_role("cell").last.click()
    expect(page.locator("pre").last).to_be_visible()
    page.get_by_role("row").nth(1).get_by_role("button").press("Enter")
    expect(page.locator("pre")).to_have_count(0)


def test_a_phone_shows_every_character_of_a_short_record(page: Page, broker: VarveBroker) -> None:
    produce(broker, "clocks", 0, (b"ticket-00000000300", b'{"n":300,"state":"open"}'))
    page.set_viewport_size(PHONE)
    open_page(page, broker, "topics/clocks/messages/0")
    expect(row_with(page, "ticket-00000000300")).to_be_visible()
    assert cut_parts(page) == []
    page.get_by_role("combobox", name="Partition").select_option("")
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("ticket-00000000300")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("status").first).to_contain_text("1 version of this key")
    assert cut_parts(page) == []


def cut_parts(page: Page) -> list[str]:
    """Return the parts of the table of records that have more than they show."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".scroll, .twolines")].filter((part) =>
          part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight + 1
        ).map((part) => part.outerHTML.slice(0, 100))"""
    )
    return found


def test_a_view_is_opened_and_its_records_are_read(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/prices")
    page.get_by_role("link", name="View of prices").click()
    expect(page.get_by_role("heading", name="prices.compacted")).to_be_visible()
    expect(row_with(page, "prices-0")).to_be_visible()
    page.get_by_role("link", name="Messages", exact=True).click()
    expect(page.get_by_role("row").nth(1)).to_contain_text("199")
    expect(page.get_by_role("button", name="Produce")).to_have_count(0)
    open_page(page, broker, "topics/none.compacted")
    expect(page.get_by_text("there is no topic none.compacted")).to_be_visible()


def test_a_topic_that_is_not_compacted_has_no_figures_of_cleans(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/clicks")
    expect(page.get_by_role("columnheader", name="Size")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Dirty")).to_have_count(0)
    open_page(page, broker, "topics/clicks/0")
    expect(page.get_by_role("heading", name="Why")).to_be_visible()
    expect(page.get_by_text("Last cleans")).to_have_count(0)
