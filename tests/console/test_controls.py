"""Controls for a special state: a clean that runs, a quarantine, long lists; every button."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Page, Route, expect

from admin.client import ApiClient, partition_path
from tests.support.console import IO_LIMIT, box_of, confirm, limit_io, open_page, row_with
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

STATIC = Path(__file__).parents[2] / "broker/http/static"
SLOW = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",
}


@pytest.fixture(scope="module")
def slow(broker: VarveBroker) -> str:
    """A topic of 4 MB, of which a clean keeps most: it may read no more than that."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic("slow", 1, 1, config=SLOW)]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(4000):
        producer.produce("slow", os.urandom(1000), b"%d" % (number % 3500))
    assert producer.flush(30) == 0
    return "slow"


@pytest.fixture
def cleaning(page: Page, broker: VarveBroker, slow: str) -> Iterator[None]:
    """The page of its partition while a clean runs, which takes half a minute or more."""
    limit_io(broker, {"set": {IO_LIMIT: 128 << 10}})
    open_page(page, broker, f"topics/{slow}/0")
    page.get_by_role("button", name="Clean now").click()
    confirm(page, "Clean now")
    page.get_by_role("button", name="Abort").wait_for()
    yield
    limit_io(broker, {"unset": [IO_LIMIT]})
    broker.get(f"/api/v1/cleaner/partitions/{slow}/0")  # the broker survived


@pytest.mark.usefixtures("cleaning")
def test_a_running_clean_is_aborted(page: Page, broker: VarveBroker) -> None:
    page.get_by_role("button", name="Abort").click()
    confirm(page, "Abort")
    expect(page.locator(".facts")).to_contain_text("aborted")
    expect(page.get_by_role("button", name="Abort")).to_have_count(0)
    assert json.loads(broker.get("/api/v1/cleaner/partitions/slow/0"))["job"] is None


def kill_worker(broker: VarveBroker) -> None:
    """End the worker that cleans, or the next one that does."""
    pids: list[int] = []

    def cleans() -> bool:
        workers = json.loads(broker.get("/api/v1/cleaner"))["workers"]
        pids.extend(worker["pid"] for worker in workers if worker["job"] is not None)
        return bool(pids)

    wait_until(cleans, "a clean")
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.usefixtures("cleaning")
def test_a_quarantined_partition_is_tried_again(page: Page, broker: VarveBroker) -> None:
    kill_worker(broker)
    page.get_by_role("button", name="Retry").click()
    confirm(page, "Retry")
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
    page.get_by_role("button", name="Abort").wait_for()  # it is being cleaned again
    page.get_by_role("button", name="Abort").click()
    confirm(page, "Abort")
    expect(page.locator(".facts")).to_contain_text("aborted")


@pytest.mark.usefixtures("cleaning")
def test_a_quarantined_partition_is_tried_again_from_the_queue(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "cleaner")
    kill_worker(broker)
    row = page.get_by_role("region", name="Waiting and paused").get_by_role("row")
    expect(row.filter(has_text="slow-0")).to_contain_text("Cleaning failed")
    page.get_by_role("button", name="Retry slow-0").click()
    confirm(page, "Retry")
    expect(page.locator(".workers")).to_contain_text("slow-0")  # it is being cleaned again
    open_page(page, broker, "topics/slow/0")
    page.get_by_role("button", name="Abort").click()
    confirm(page, "Abort")
    expect(page.locator(".facts")).to_contain_text("aborted")


def test_the_whole_log_is_shown_again_after_a_zoom(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/customers/0")
    zoom_out = page.get_by_role("button", name="Zoom out")
    expect(zoom_out).to_be_disabled()
    expect(page.get_by_role("button", name="Whole log")).to_be_disabled()
    for _ in range(2):
        page.get_by_role("button", name="Zoom in").click()
    zoom_out.click()
    expect(zoom_out).to_be_enabled()
    page.get_by_role("button", name="Whole log").click()
    expect(zoom_out).to_be_disabled()


def test_the_frame_is_around_the_segment_under_the_pointer(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/customers/0")
    box = page.locator(".strata canvas").bounding_box()
    assert box is not None
    frame = page.locator(".strata .frame")
    for share in (0.1, 0.9):
        x = box["x"] + share * box["width"]
        page.mouse.move(x, box["y"] + 90)
        place = frame.bounding_box()
        assert place is not None
        assert place["x"] - 1 <= x <= place["x"] + place["width"] + 1
    page.mouse.move(0, 0)
    expect(frame).to_have_count(0)


def test_the_table_of_segments_shows_more_of_them(page: Page, broker: VarveBroker) -> None:
    def many(route: Route) -> None:
        answer = route.fetch().json()
        rows = [[10 * at, 10 * at + 10, 500, 1, 2, -1, -1] for at in range(300)]
        route.fulfill(json={**answer, "segments": rows})

    page.route("**/segments?*", many)
    open_page(page, broker, "topics/customers/0")
    segments = page.get_by_role("region", name="Segments").get_by_role("row")
    expect(segments).to_have_count(0)
    page.get_by_text("Segments as a table").click()
    expect(segments).to_have_count(201)
    page.get_by_role("button", name="Show more").click()
    expect(segments).to_have_count(301)


def test_a_search_for_a_key_is_stopped(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/customers/messages/0")
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("customer-1")
    page.route("**/records?*", lambda _route: None)  # the broker searches on
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Show", exact=True)).to_be_visible()


def test_a_waiting_partition_is_paused_from_the_queue(page: Page, broker: VarveBroker) -> None:
    waiting = {
        "topic": "customers", "partition": 1, "state": "waiting", "position": 1, "reasons": [],
        "dirty_bytes": 1, "dirty_ratio": 1, "live_bytes": None,
    }  # fmt: skip
    page.route(
        "**/cleaner/queue?*",
        lambda route: route.fulfill(json={"queue": [waiting], "next": "customers-1"}),
    )
    open_page(page, broker, "cleaner")
    page.get_by_role("button", name="Pause customers-1").click()
    confirm(page, "Pause")
    expect(page.get_by_role("dialog")).to_have_count(0)
    client, path = ApiClient(broker.url), partition_path("customers", 1)
    assert client.get(path)["paused"] is True
    client.post(f"{path}/resume")
    with page.expect_response("**/cleaner/queue?*after=customers-1"):
        page.get_by_role("button", name="Show more partitions").click()


def test_the_page_of_a_topic_shows_more_partitions(page: Page, broker: VarveBroker) -> None:
    def in_pages(route: Route) -> None:
        rows = route.fetch().json()["partitions"]
        is_first = "after=" not in route.request.url
        page_of_rows = rows[:1] if is_first else rows[1:]
        route.fulfill(json={"partitions": page_of_rows, "next": "0" if is_first else None})

    page.route("**/cleaner/partitions?*", in_pages)
    open_page(page, broker, "topics/customers")
    rows = page.get_by_role("region", name="Partitions of customers").get_by_role("row")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Show more partitions").click()
    expect(rows).to_have_count(3)


def test_a_tombstone_is_produced_and_more_versions_of_its_key_are_shown(
    page: Page, broker: VarveBroker
) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(60):
        producer.produce("readings", b"%d" % number, b"often", partition=1)
    assert producer.flush(30) == 0
    open_page(page, broker, "topics/readings/messages/1")
    page.get_by_role("button", name="Produce").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Key").fill("often")
    dialog.get_by_role("checkbox", name="Tombstone").check()
    expect(dialog.get_by_role("textbox", name="Value")).to_be_disabled()
    confirm(page, "Produce")
    expect(page.get_by_role("row").nth(1)).to_contain_text("tombstone")
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("often")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("61 versions of this key")
    expect(page.get_by_role("row")).to_have_count(51)
    page.get_by_role("button", name="Show more versions").click()
    expect(page.get_by_role("row")).to_have_count(62)


def test_internal_topics_and_changed_settings_are_shown_alone_on_request(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics")
    expect(page.get_by_role("link", name="__consumer_offsets")).to_have_count(0)
    page.get_by_label("Show internal topics").check()
    expect(page.get_by_role("link", name="__consumer_offsets")).to_be_visible()
    open_page(page, broker, "topics/customers/settings")
    usual = page.get_by_role("heading", name="retention.ms", exact=True)
    expect(usual).to_be_visible()
    page.get_by_label("Only what is set").check()
    expect(usual).to_have_count(0)
    expect(page.get_by_role("heading", name="segment.bytes", exact=True)).to_be_visible()


def test_a_setting_is_taken_back_before_a_topic_is_created(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "create-topic")
    page.get_by_label("Another setting").select_option("retention.ms")
    field = page.get_by_label("retention.ms", exact=True)
    expect(field).to_be_visible()
    page.get_by_role("button", name="Use the default of retention.ms").click()
    expect(field).to_have_count(0)
    page.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("heading", name="Topics", exact=True)).to_be_visible()


def test_every_button_is_pressed_by_a_test() -> None:
    scripts = [path for path in STATIC.rglob("*.js") if "vendor" not in path.parts]
    code = "\n".join(path.read_text() for path in scripts)
    texts = re.findall(r">([^<>]*)</button>", code)
    texts += re.findall(r"const ACTIONS = \{(.*?)\};", code, re.DOTALL)
    texts += re.findall(r'<button[^<]* aria-label="([^"]+)"', code)
    labels = set(re.findall(r'<\$\{Action\}.*? label="([^"]+)"', code, re.DOTALL))
    for text in texts:
        labels |= set(re.findall(r'"([A-Z][\w ]+)"', text)) or {text.partition("$")[0].strip()}
    assert {"Retry", "Sign in", "Zoom out", "Estimate again", "Commit these offsets"} < labels
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    pressed = re.findall(r'(?:name=|confirm\(page, )"([^"]+)"', tests)
    unpressed = {
        label
        for label in labels
        if label[:1].isalpha()  # the others have names such as Zoom in
        and not any(name.startswith(label) for name in pressed)
    }
    assert unpressed == set()


@pytest.fixture
def young(broker: VarveBroker) -> str:
    """A topic whose records are younger than its lag."""
    config = {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000"}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic("young", 1, 1, config=config)]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for _ in range(100):
        producer.produce("young", b"value", b"key")
    assert producer.flush(30) == 0
    return "young"


def test_a_clean_that_cannot_start_is_told_with_its_reason(
    page: Page, broker: VarveBroker, young: str
) -> None:
    open_page(page, broker, f"topics/{young}/0")
    expect(page.locator(".headline")).to_contain_text(re.compile(r"segments?, offsets 0 to 99"))
    page.get_by_role("button", name="Clean now").click()
    confirm(page, "Clean now")
    notice = page.locator(".notice")
    expect(notice).to_contain_text("No clean starts.")
    expect(notice).to_contain_text("younger than min.compaction.lag.ms")
    open_page(page, broker, "topics")
    expect(row_with(page, young)).to_contain_text("not cleanable yet")
    open_page(page, broker, f"topics/{young}")
    reason = page.locator("td[data-title='Blocked by']")
    expect(reason).to_contain_text("min.compaction.lag.ms")


def test_a_clean_of_an_empty_partition_is_told_why_it_does_nothing(
    page: Page, broker: VarveBroker
) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = NewTopic("hollow", 1, 1, config={"cleanup.policy": "compact"})
    for future in admin.create_topics([new]).values():
        future.result(30)
    open_page(page, broker, "topics/hollow/0")
    page.get_by_role("button", name="Clean now").click()
    confirm(page, "Clean now")
    notice = page.locator(".notice")
    expect(notice).to_have_text("There is nothing to clean: the partition is empty.")
    expect(page.locator("section > .buttons > button.main")).to_have_count(0)
    buttons = box_of(page.locator("section > .buttons"))
    assert box_of(notice)["y"] >= buttons["y"] + buttons["height"] + 8


def test_a_setting_that_is_set_to_its_default_is_shown_as_such(
    page: Page, broker: VarveBroker
) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = NewTopic("usual", 1, 1, config={"retention.ms": "604800000", "segment.ms": "86400000"})
    for future in admin.create_topics([new]).values():
        future.result(30)
    open_page(page, broker, "topics/usual/settings")
    page.get_by_label("Only what is set").check()
    shown = page.locator(".settings .tag")
    expect(shown).to_have_text(["set on this topic, to its default", "set on this topic"])
