"""The picture of a partition: a log that shrinks is seen to shrink."""

from itertools import count

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Page, expect

from admin.client import ApiClient, partition_path
from tests.console.conftest import CONFIG
from tests.support.console import confirm, open_page
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

NUMBERS = count()


def produce(broker: VarveBroker, topic: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(records):
        producer.produce(topic, b"x" * 500, b"key-%d" % (number % 50))
    assert producer.flush(30) == 0


@pytest.fixture
def topic(broker: VarveBroker) -> str:
    """A topic whose only partition has 4 MB of 50 keys."""
    name = f"shrinking-{next(NUMBERS)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1, config=CONFIG)])[name].result(30)
    produce(broker, name, 8000)
    return name


def clean(page: Page) -> None:
    page.get_by_role("button", name="Clean now").click()
    confirm(page, "Clean now")


def width(page: Page) -> float:
    """Return the share of the picture that the log takes: the end of its last segment."""
    canvas = page.locator(".strata canvas")
    canvas.focus()
    page.keyboard.press("End")
    boxes = canvas.bounding_box(), page.locator(".layers .frame").bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    return (boxes[1]["x"] + boxes[1]["width"] - boxes[0]["x"]) / boxes[0]["width"]


def test_a_log_is_drawn_on_one_scale_unless_it_is_to_fill_the_width(
    page: Page, broker: VarveBroker, topic: str
) -> None:
    open_page(page, broker, f"topics/{topic}/0")
    fill = page.get_by_role("button", name="Fill the width")
    assert width(page) > 0.99
    expect(fill).to_have_count(0)
    clean(page)
    expect(fill).to_have_attribute("aria-pressed", "false")
    assert width(page) < 0.1
    fill.click()
    assert width(page) > 0.99
    fill.click()
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    expect(page.locator(".replay output")).not_to_have_text("live")
    assert width(page) > 0.99


def test_a_page_that_is_opened_after_a_clean_knows_how_large_the_log_was(
    page: Page, broker: VarveBroker, topic: str
) -> None:
    client, path = ApiClient(broker.url), partition_path(topic, 0)
    client.post(f"{path}/run", {"roll": True})
    wait_until(lambda: client.get(path)["last_jobs"] != [], "a clean")
    open_page(page, broker, f"topics/{topic}/0")
    assert width(page) < 0.1


def test_a_small_clean_does_not_hide_a_large_one(
    page: Page, broker: VarveBroker, topic: str
) -> None:
    open_page(page, broker, f"topics/{topic}/0")
    clean(page)
    facts = page.locator(".facts")
    expect(facts).to_contain_text("finished")
    large = facts.locator("dd").nth(1).inner_text()
    assert large.startswith("3.")
    produce(broker, topic, 10)
    clean(page)
    expect(page.locator(".earlier")).to_contain_text(large)
