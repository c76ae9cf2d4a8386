"""The picture of a partition: a log that shrinks is seen to shrink."""

import re
import time
from itertools import count

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from playwright.sync_api import Browser, Page, expect

from admin.client import ApiClient, partition_path
from tests.console.conftest import CONFIG
from tests.support.console import box_of, confirm, open_page
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


def test_the_slider_reaches_the_size_that_the_frame_names(
    page: Page, broker: VarveBroker, topic: str
) -> None:
    client, path = ApiClient(broker.url), partition_path(topic, 0)
    size_bytes = client.get(path)["size_bytes"]
    client.post(f"{path}/run", {"roll": True})
    wait_until(lambda: client.get(path)["last_jobs"] != [], "a clean")
    open_page(page, broker, f"topics/{topic}/0")
    picture = page.get_by_role("img", name=f"{size_bytes / (1 << 20):.1f} MiB at ")
    expect(picture).to_be_visible()
    page.get_by_role("slider").focus()
    page.keyboard.press("End")
    widths = []
    for _ in range(int(page.get_by_role("slider").get_attribute("max") or 0)):
        page.get_by_role("slider").focus()
        page.keyboard.press("ArrowLeft")
        widths.append(width(page))
    assert max(widths) > 0.99


def test_the_past_shows_what_was_not_cleanable_then(page: Page, broker: VarveBroker) -> None:
    name, lag = f"lagging-{next(NUMBERS)}", "min.compaction.lag.ms"
    client, path = ApiClient(broker.url), partition_path(name, 0)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = NewTopic(name, 1, 1, config={**CONFIG, lag: "3600000"})
    admin.create_topics([new])[name].result(30)
    produce(broker, name, 8000)
    rows = f"/partitions?topic={name}"
    wait_until(lambda: (client.get(rows)["partitions"][0]["waiting_bytes"] or 0) > 3e6, "a scan")
    broker.get(f"/api/v1/topics/{name}/partitions/0/history")  # observes it
    change = ConfigEntry(lag, "0", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(30)
    client.post(f"{path}/run", {"roll": True})
    wait_until(lambda: client.get(path)["last_jobs"] != [], "a clean")
    with page.expect_response("**/history"):  # until then, the page has only what it saw itself
        open_page(page, broker, f"topics/{name}/0")
    legend = page.locator(".legend")
    expect(legend).not_to_contain_text("not cleanable yet")
    slider = page.get_by_role("slider")
    slider.focus()
    legends = []
    for _ in range(int(slider.get_attribute("max") or 0)):
        page.keyboard.press("ArrowLeft")
        legends.append(legend.inner_text())
    assert any("not cleanable yet" in text and "dirty" not in text for text in legends), legends


def test_the_past_has_no_list_between_two_swaps_of_one_clean(
    page: Page, broker: VarveBroker
) -> None:
    def change(at_ms: int, job_id: str | None, removed: list[object], added: list[int]) -> object:
        return {
            "at_ms": at_ms, "first_dirty_offset": 100, "end_offset": 200, "job_id": job_id,
            "active": [200, 200, 0, -1], "removed": removed, "added": added,
        }  # fmt: skip

    clean, dirty = [0, 100, 5 << 20, 5], [100, 200, 8 << 20, 6]
    # The clean segment has only keys of the dirty one, so its group has no output.
    steps = [
        {"present": [[100, 200, 4 << 20, 5, 6, -1, -1], [200, 200, 0, -1, -1, -1, -1]]},
        change(30_000, "job", [dirty], [100]),
        change(20_000, "job", [clean], []),
        change(10_000, None, [], [200]),
    ]
    answer = {"steps": steps, "since_ms": 1}
    page.route("**/history", lambda route: route.fulfill(json=answer))
    open_page(page, broker, "topics/customers/1")
    slider = page.get_by_role("slider")
    expect(slider).to_have_attribute("max", "2")
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".replay output")).to_have_text("00:00:20 UTC")
    picture = page.locator(".strata canvas")
    expect(picture).to_have_attribute("aria-label", re.compile("^3 segments, 13.0 MiB"))


def pixel(page: Page, share: float) -> list[int]:
    """Return the colour of the picture in the middle of its height, at a share of its width."""
    return list(
        page.locator(".strata canvas").evaluate(
            """(canvas, share) => [...canvas.getContext("2d").getImageData(
              Math.floor(canvas.width * share), Math.floor(canvas.height * 0.435), 1, 1).data]""",
            share,
        )
    )


def draw(page: Page, broker: VarveBroker, *segments: tuple[int, float]) -> None:
    """Open a page of these segments: MiB and the age of the newest record in seconds."""
    now_ms = int(time.time() * 1000)
    rows = [
        [n, n + 1, size << 20, now_ms, now_ms - int(1000 * age), -1, -1]
        for n, (size, age) in enumerate(segments)
    ]
    log = {"log_start_offset": 0, "log_end_offset": len(rows), "view_horizon": None}
    page.route("**/segments?*", lambda route: route.fulfill(json={"segments": rows, **log}))
    open_page(page, broker, "topics/clicks/0")
    expect(page.locator(".strata canvas")).to_have_attribute(
        "aria-label", re.compile(f"^{len(rows)} segments")
    )


def test_the_colour_of_a_lone_closed_segment_is_the_same_at_every_age(
    page: Page, broker: VarveBroker
) -> None:
    draw(page, broker, (8, 2), (1, 0))
    young = pixel(page, 0.4)
    page.unroute("**/segments?*")
    page.goto("about:blank")
    draw(page, broker, (8, 3600), (1, 3600))
    assert pixel(page, 0.4) == young


def test_segments_of_nearly_the_same_age_have_nearly_the_same_colour(
    page: Page, broker: VarveBroker
) -> None:
    draw(page, broker, (8, 3660), (8, 3600), (1, 0))
    older, younger = pixel(page, 0.2), pixel(page, 0.7)
    assert older != younger
    assert max(abs(a - b) for a, b in zip(older, younger, strict=True)) < 60


def test_an_empty_active_segment_is_an_outline(page: Page, broker: VarveBroker) -> None:
    draw(page, broker, (8, 60), (0, 0))
    canvas = page.locator(".strata canvas")
    box = box_of(canvas)
    paper = pixel(page, 1 - 3 / box["width"])
    expect(page.locator(".legend")).to_contain_text("active segment, an outline while it is empty")
    page.unroute("**/segments?*")
    page.goto("about:blank")
    draw(page, broker, (8, 60), (1, 0))
    assert pixel(page, 1 - 3 / box["width"]) != paper
    assert paper[3] == 0, "nothing is drawn in it"


def test_a_finger_taps_a_segment_and_its_facts_stay(browser: Browser, broker: VarveBroker) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    open_page(page, broker, "topics/customers/0")
    reading = page.locator(".reading")
    expect(reading).to_have_text("Tap a segment to see what it is.")
    page.locator(".strata canvas").tap()
    expect(reading).to_contain_text("newest record")
    context.close()


def test_the_command_that_rolls_a_segment_is_marked_as_one(page: Page, broker: VarveBroker) -> None:
    name = f"small-{next(NUMBERS)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1, config=CONFIG)])[name].result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(name, key=b"k", value=b"v")
    assert producer.flush(30) == 0
    open_page(page, broker, f"topics/{name}/0")
    code = page.locator(".sentences code")
    expect(code).to_have_text(f"varve cleaner run {name} 0 --roll")


def test_an_empty_partition_is_drawn_as_empty(page: Page, broker: VarveBroker) -> None:
    name = f"empty-{next(NUMBERS)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1, config=CONFIG)])[name].result(30)
    open_page(page, broker, f"topics/{name}/0")
    assert width(page) < 0.1
    expect(page.locator(".reading")).to_have_text("Active, empty, next offset 0.")
    expect(page.get_by_text(re.compile(r"^Earlier states: none since 20.* UTC\."))).to_be_visible()
    page.get_by_text("Segments as a table").click()
    expect(page.get_by_role("row").nth(1)).to_contain_text("empty")


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
