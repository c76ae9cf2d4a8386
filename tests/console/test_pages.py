"""Every page and control of the console, in a browser, against a running daemon."""

import re
import signal
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.console import box_of, cramped_dialogs, open_page
from tests.support.draws import cases
from tests.support.varve import VarveBroker, running_varve

PAGES = (
    "",
    "topics",
    "topics/customers",
    "topics/customers/0",
    "topics/clicks/0",
    "topics/customers/messages",
    "topics/customers/messages/0",
    "topics/prices.compacted",
    "topics/customers/settings",
    "create-topic",
    "groups",
    "groups/keepers",
    "views",
    "cleaner",
    "leases",
    "access",
    "settings",
    "settings/file",
    "audit",
)
# A color scheme has a color for each role, and these pages have nearly every role.
DARK_PAGES = cases(few=("", "topics/customers/0", "topics/customers/settings"), many=PAGES)
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
PARTITION = "#/topics/customers/0"
TOKEN = "0123456789abcdef-token"


def api(broker: VarveBroker, partition: int = 0) -> str:
    return broker.get(f"/api/v1/cleaner/partitions/customers/{partition}")


def test_every_page_fits_a_phone(page: Page, broker: VarveBroker) -> None:
    page.set_viewport_size(PHONE)
    widths = {}
    for path in PAGES:
        follow_link(page, broker, path)
        widths[path] = page.evaluate("document.documentElement.scrollWidth")
    assert {path: width for path, width in widths.items() if width > PHONE["width"]} == {}


def test_every_dialog_shows_the_whole_of_its_texts_and_inputs(
    page: Page, broker: VarveBroker
) -> None:
    cramped, dialogs = [], 0
    for path in (*PAGES, "topics/customers/erasures"):
        follow_link(page, broker, path)
        dialogs += page.locator("dialog").count()
        for width in (1280, 1000, 390):
            page.set_viewport_size({"width": width, "height": 900})
            cramped += [(path, width, part) for part in cramped_dialogs(page)]
    assert cramped == []
    assert dialogs > 10


def test_no_page_has_a_serious_obstacle_for_anybody(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "")
    page.evaluate(AXE_SCRIPT)
    obstacles = {}
    for path in PAGES:
        follow_link(page, broker, path)
        page.emulate_media(color_scheme="light")
        obstacles[path, "light"] = serious_obstacles(page)
        if path in DARK_PAGES:
            page.emulate_media(color_scheme="dark")
            obstacles[path, "dark"] = serious_obstacles(page, runOnly=["color-contrast"])
    assert {place: found for place, found in obstacles.items() if found} == {}


def follow_link(page: Page, broker: VarveBroker, path: str) -> None:
    """Open a page in a tab that may show another one of the console, which is not loaded again."""
    page.evaluate("document.querySelector('h1')?.remove()")  # the one of the next page is awaited
    open_page(page, broker, path)


def serious_obstacles(page: Page, **options: object) -> list[tuple[str, str]]:
    """Return the rule and the element of each obstacle that axe finds."""
    run = "(options) => axe.run(options).then((results) => results.violations)"
    violations = page.evaluate(run, {"resultTypes": ["violations"], **options})
    serious = [entry for entry in violations if entry["impact"] in ("serious", "critical")]
    return [(entry["id"], entry["nodes"][0]["html"][:300]) for entry in serious]


def test_a_phone_shows_the_whole_width_of_a_record(page: Page, broker: VarveBroker) -> None:
    page.set_viewport_size(PHONE)
    open_page(page, broker, "topics/customers/messages/0")
    page.get_by_role("row").nth(1).get_by_role("button").click()
    box = page.locator("pre").last.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= PHONE["width"]


def test_a_phone_shows_the_rows_of_a_list_one_below_the_other(
    page: Page, broker: VarveBroker
) -> None:
    page.set_viewport_size(PHONE)
    cut = []
    for path in ("topics", "topics/customers", "groups", "cleaner", "audit"):
        follow_link(page, broker, path)
        widths = page.locator(".scroll").evaluate_all(
            "(tables) => tables.map((table) => [table.scrollWidth, table.clientWidth])"
        )
        cut += [(path, whole, seen) for whole, seen in widths if whole > seen]
    assert cut == []


def test_a_phone_shows_all_links_in_columns(page: Page, broker: VarveBroker) -> None:
    page.set_viewport_size({"width": 390, "height": 740})
    open_page(page, broker, "")
    places = [box_of(link) for link in page.locator("header nav a").all()]
    assert len(places) == 9
    first_row = {place["x"] for place in places if place["y"] == places[0]["y"]}
    assert {place["x"] for place in places} == first_row


def test_a_phone_shows_the_whole_path_of_a_disk_and_the_times_of_records(
    page: Page, broker: VarveBroker
) -> None:
    page.set_viewport_size(PHONE)
    open_page(page, broker, "")
    path = page.locator(".disk .path")
    expect(path).to_have_text(str(broker.directory / "data"))
    assert path.evaluate("(part) => part.scrollWidth <= part.clientWidth")
    open_page(page, broker, "topics/customers/messages/0")
    time = page.get_by_role("row").nth(1).locator(".phone")
    expect(time).to_be_visible()
    assert box_of(time)["width"] <= 100, "keys and values need the room"


def test_a_phone_shows_the_button_of_a_setting_beside_its_value(
    page: Page, broker: VarveBroker
) -> None:
    page.set_viewport_size({"width": 390, "height": 740})
    open_page(page, broker, "topics/customers/settings")
    row = page.get_by_role("listitem").filter(
        has=page.get_by_role("heading", name="retention.ms", exact=True)
    )
    parts = (".settingvalue", "button", ".help")
    value, button, text = (box_of(row.locator(part)) for part in parts)
    assert button["x"] >= value["x"] + value["width"]
    assert value["y"] < button["y"] + button["height"] / 2 < value["y"] + value["height"]
    assert text["y"] >= button["y"] + button["height"] + 4


def test_a_rate_is_shown_with_the_second_answer_and_until_then_that_it_is_measured(
    page: Page, broker: VarveBroker
) -> None:
    asked: list[Route] = []

    def answer_the_first(route: Route) -> None:
        asked.append(route)
        if len(asked) == 1:
            route.continue_()

    page.route("**/api/v1/overview", answer_the_first)
    page.route("**/events/**", lambda route: route.abort())
    with page.expect_request(lambda request: "api/v1/overview" in request.url and bool(asked)):
        open_page(page, broker, "")
        expect(page.locator(".rates")).to_have_text("Measuring …")
    page.evaluate("0")  # the route of the second request is known by now
    asked[1].continue_()
    expect(page.locator(".rates")).to_contain_text(re.compile(r"In \d.*/s"))
    expect(page.locator(".chart canvas")).to_be_visible()


def test_the_way_from_the_overview_to_the_strata_of_a_partition(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "")
    expect(page.get_by_text("nothing needs attention")).to_be_visible()
    page.get_by_role("link", name="Topics").first.click()
    page.get_by_label("Name contains").fill("cust")
    expect(page.get_by_role("link", name="clicks")).to_have_count(0)
    page.get_by_role("link", name="customers").click()
    page.get_by_role("link", name="0", exact=True).click()
    picture = page.get_by_role("img").filter(has=page.locator("xpath=self::canvas"))
    expect(picture).to_have_attribute("aria-label", re.compile("segments, .* dirty"))


@pytest.mark.usefixtures("own_tab")
def test_a_link_that_is_followed_before_the_first_frame_opens_its_page(
    page: Page, broker: VarveBroker
) -> None:
    page.add_init_script(
        """new MutationObserver((_changes, observer) => {
          if (!document.querySelector("h1")) return;
          observer.disconnect();
          location.hash = "#/groups";
        }).observe(document, { childList: true, subtree: true });"""
    )
    page.goto(f"{broker.url}/#/cleaner")
    expect(page.get_by_role("heading", level=1)).to_have_text("Groups")


def test_a_group_is_listed_with_its_lag(page: Page, broker: VarveBroker) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["customers"])
    message = consumer.poll(30)
    assert message is not None
    consumer.commit(message, asynchronous=False)
    open_page(page, broker, "groups")
    row = page.get_by_role("row").filter(has_text="readers")
    expect(row).to_contain_text("Stable")
    expect(row).to_contain_text("7,999")  # of 8,000 offsets
    consumer.close()
    expect(row).to_contain_text("Empty")


def test_arrow_keys_read_out_the_segments(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, PARTITION)
    canvas, reading = page.locator("canvas"), page.locator(".reading")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(reading).to_contain_text("Offsets 0 to")
    page.keyboard.press("End")
    expect(reading).to_contain_text("active")
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Zoom out")).to_be_enabled()


def test_a_partition_is_paused_and_resumed_after_a_question(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, PARTITION)
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert '"paused": false' in api(broker)
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    assert '"paused": true' in api(broker)
    open_page(page, broker, "")
    expect(page.get_by_text("1 partition paused by an operator")).to_be_visible()
    open_page(page, broker, PARTITION)
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    assert '"paused": false' in api(broker)


def test_everything_is_paused_and_resumed_on_the_page_of_the_cleaner(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "cleaner")
    page.get_by_role("button", name="Pause all").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause all").click()
    page.get_by_role("button", name="Resume all").wait_for()
    assert '"paused": true' in api(broker, 1)
    page.get_by_role("button", name="Resume all").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume all").click()
    expect(page.get_by_role("button", name="Resume all")).to_have_count(0)
    assert '"paused": false' in api(broker, 1)


def test_a_log_shrinks_before_the_eyes_of_who_cleans_it(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, PARTITION)
    expect(page.locator(".legend")).to_contain_text("dirty")
    page.get_by_role("button", name="Clean now").click()
    page.get_by_role("dialog").get_by_role("button", name="Clean now").click()
    expect(page.locator(".facts")).to_contain_text("finished")
    expect(page.locator(".headline")).to_contain_text("KiB")
    # The picture of before is still there.
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator(".replay output")).not_to_have_text("live")
    page.get_by_role("button", name="Back to live").click()
    expect(page.locator(".replay output")).to_have_text("live")
    # A page that is opened later has it from the broker.
    open_page(page, broker, "cleaner")
    page.reload()
    open_page(page, broker, PARTITION)
    picture = page.locator(".strata canvas")
    segments = re.compile(r"^(\d+) segments?")
    now = segments.match(str(picture.get_attribute("aria-label")))
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    expect(page.locator(".replay output")).not_to_have_text("live")
    expect(page.locator(".replay")).to_contain_text("The picture shows")
    before = segments.match(str(picture.get_attribute("aria-label")))
    assert now is not None
    assert before is not None
    assert int(before[1]) > int(now[1])
    open_page(page, broker, "cleaner")
    expect(page.get_by_role("region", name="Last jobs")).to_contain_text("customers-0")


def test_an_unknown_partition_and_a_stopped_broker_are_told(page: Page, tmp_path: Path) -> None:
    with running_varve(tmp_path) as broker:
        open_page(page, broker, "topics/none/0")
        expect(page.get_by_role("status")).to_contain_text("there is no topic none")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("main").get_by_role("link", name="none")).to_have_count(0)
        page.locator("main").get_by_role("link", name="topics", exact=True).click()
        open_page(page, broker, "topics")
        expect(page.get_by_text("No topics yet")).to_be_visible()
        expect(page.locator("main code")).to_contain_text(f"demo --bootstrap {broker.bootstrap} ")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(page.get_by_text("No topics yet")).to_have_count(0)


def test_a_topic_is_created_edited_and_deleted(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics")
    page.get_by_role("link", name="Create topic").click()
    page.get_by_role("heading", name="Create a topic").wait_for()  # the list has a name, too
    page.get_by_label("Name").fill("new parcels")
    page.get_by_label("cleanup.policy").select_option("compact")
    page.get_by_role("button", name="Create topic").click()
    expect(page.locator("label.wrong")).to_contain_text("topic name 'new parcels'")
    page.get_by_label("Name").fill("parcels")
    page.get_by_label("Another setting").select_option("min.cleanable.dirty.ratio")
    ratio = page.get_by_label("min.cleanable.dirty.ratio", exact=True)
    ratio.fill("7")
    page.get_by_role("button", name="Create topic").click()
    expect(page.get_by_role("alert")).to_contain_text("'7' is above 1")
    ratio.fill("0.7")
    page.get_by_role("button", name="Create topic").click()
    expect(page.get_by_role("heading", name="parcels")).to_be_visible()

    tabs = page.get_by_role("navigation", name="Topic", exact=True)
    tabs.get_by_role("link", name="Settings").click()
    expect(row_of(page, "cleanup.policy")).to_contain_text("set on this topic")
    page.get_by_role("button", name="Change delete.retention.ms").click()
    field = row_of(page, "delete.retention.ms").get_by_role("textbox")
    expect(field).to_be_focused()
    expect(page.get_by_role("button", name="Save")).to_be_disabled()  # nothing is changed yet
    field.fill("2h")
    page.get_by_role("button", name="Save").click()
    expect(row_of(page, "delete.retention.ms")).to_contain_text("7200000")
    page.get_by_role("button", name="Change min.cleanable.dirty.ratio").click()
    page.get_by_role("button", name="Use the default").click()
    expect(row_of(page, "min.cleanable.dirty.ratio")).not_to_contain_text("set on this topic")
    page.get_by_role("button", name="Change the number of partitions").click()
    page.locator("#edit-partitions").fill("3")
    page.get_by_role("button", name="Save").click()
    expect(row_of(page, "Partitions")).to_contain_text("3")
    config = broker.get("/api/v1/topics/parcels")
    assert '"partitions": 3' in config
    assert '"value": "7200000"' in config

    page.get_by_role("button", name="Delete topic").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Delete topic")).to_be_disabled()
    dialog.get_by_role("textbox").fill("parcels")
    dialog.get_by_role("button", name="Delete topic").click()
    expect(page.get_by_role("heading", name="Topics", exact=True)).to_be_visible()
    assert "parcels" not in broker.get("/api/v1/topics")


def row_of(page: Page, setting: str) -> Locator:
    heading = page.get_by_role("heading", name=setting, exact=True)
    return page.get_by_role("listitem").filter(has=heading)


@pytest.mark.usefixtures("own_tab")
def test_two_people_who_edit_a_setting_learn_of_each_other(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/clicks/settings")
    page.clock.install()  # the page asks no more by itself
    page.get_by_role("button", name="Change retention.ms").click()
    row_of(page, "retention.ms").get_by_role("textbox").fill("3d")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    resource = ConfigResource(ResourceType.TOPIC, "clicks")
    resource.add_incremental_config(
        ConfigEntry("retention.ms", "5000", incremental_operation=AlterConfigOpType.SET)
    )
    admin.incremental_alter_configs([resource])[resource].result(30)
    page.get_by_role("button", name="Save").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("clicks has changed since you read it: retention.ms is 5000")


def test_every_version_of_a_key_is_shown_with_what_became_of_it(
    page: Page, broker: VarveBroker
) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in (b"first", b'{"second": [1, 2]}', None):
        producer.produce("clicks", value, b"ada")
    producer.produce("clicks", b"\x1b[31m<script>alert(1)</script>", b"\xff\xfe")
    assert producer.flush(30) == 0
    open_page(page, broker, "topics/clicks/messages/0")
    newest = page.get_by_role("row").nth(1)
    expect(newest).to_contain_text("ff fe")
    expect(newest).to_contain_text("\\u001b[31m<script>alert(1)</script>")
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("ada")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("3 versions of this key")
    rows = page.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("deleted; the next clean decides how long")
    expect(rows.nth(2)).to_contain_text("superseded by offset 2")
    expect(rows.nth(3)).to_contain_text("superseded by offset 1")
    rows.nth(2).get_by_role("button").click()
    expect(page.locator("pre").last).to_have_text(re.compile(r'{\s+"second"'))
    page.get_by_role("searchbox", name="Key").fill("nobody")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No record has this key")).to_be_visible()


def test_records_are_browsed_and_one_is_produced(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/readings/messages/0")
    show = page.get_by_role("combobox", name="Show")
    show.select_option("offset")
    page.get_by_label("Offset", exact=True).fill("100")
    page.get_by_role("button", name="Show", exact=True).click()
    first = page.get_by_role("row").nth(1)
    expect(first).to_contain_text("100")
    page.get_by_role("button", name="Newer").click()
    expect(first).to_contain_text("150")
    page.get_by_role("button", name="Older").click()
    expect(first).to_contain_text("100")
    page.get_by_role("combobox", name="Partition").select_option("1")
    expect(page.get_by_text("No records yet")).to_be_visible()
    page.get_by_role("button", name="Produce").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Key").fill("by hand")
    dialog.get_by_role("textbox", name="Value").fill("hello")
    dialog.get_by_role("button", name="Produce").click()
    expect(first).to_contain_text("hello")
    expect(first).to_contain_text("by hand")


def test_the_offsets_of_a_group_are_previewed_and_moved(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "groups")
    page.get_by_role("link", name="keepers").click()
    expect(page.get_by_role("region", name="Committed offsets")).to_contain_text("2,000")
    page.get_by_label("Partition", exact=True).fill("0")
    page.get_by_role("combobox", name="To", exact=True).select_option("offset")
    page.get_by_label("Offset", exact=True).fill("500")
    page.get_by_role("button", name="Preview").click()
    preview = page.get_by_role("region", name="Offsets before and after")
    expect(preview).to_contain_text("reads 1,500 offsets again")
    assert '"committed_offset": 2000' in broker.get("/api/v1/groups/keepers")
    page.get_by_role("button", name="Commit these offsets").click()
    page.get_by_role("dialog").get_by_role("button", name="Commit these offsets").click()
    expect(page.get_by_role("status")).to_contain_text("The offsets are committed")
    assert '"committed_offset": 500' in broker.get("/api/v1/groups/keepers")
    page.get_by_role("button", name="Delete group").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("keepers")
    page.get_by_role("dialog").get_by_role("button", name="Delete group").click()
    expect(page.get_by_role("heading", name="Groups", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="keepers")).to_have_count(0)


def test_a_paused_partition_is_resumed_in_the_queue_of_the_cleaner(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/customers/1")
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    open_page(page, broker, "cleaner")
    row = page.get_by_role("row").filter(has_text="customers-1")
    expect(row).to_contain_text("An operator paused it.")
    page.get_by_role("button", name="Resume customers-1").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(row).to_have_count(0)
    assert '"paused": false' in api(broker, 1)


def test_the_cost_of_the_next_clean_is_shown_for_each_slack(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, PARTITION)
    page.get_by_role("button", name="Estimate", exact=True).click()
    expect(page.get_by_role("heading", name="How long records live")).to_be_visible()
    figures = page.get_by_role("table").filter(has_text="Freed")
    cost = {"read_bytes": 9, "written_bytes": 5, "freed_bytes": 4, "seconds": 1}
    slacks = [
        {**cost, "slack": slack, "freed_bytes": freed} for slack, freed in ((0.25, 4), (1, 1))
    ]
    ratio = {"ratio": 0.5, "log_bytes": 9, "new_bytes": 4, "read_bytes": 3, "written_bytes": 2}
    answer = {
        **cost, "selective": True, "slack": 0.25, "by_slack": slacks, "survival": [],
        "dirty_ratio": 0.5, "by_dirty_ratio": [ratio],
    }  # fmt: skip
    page.route("**/estimate", lambda route: route.fulfill(json=answer))
    page.get_by_role("button", name="Estimate again").click()
    expect(figures.get_by_role("row")).to_have_count(3)
    expect(figures.locator(".chosen")).to_contain_text("0.25")
    expect(page.get_by_text("No clean has counted live records yet")).to_be_visible()
    nothing = dict.fromkeys(("read_bytes", "written_bytes", "freed_bytes", "seconds"), 0)
    page.route("**/estimate", lambda route: route.fulfill(json=answer | nothing))
    page.get_by_role("button", name="Estimate again").click()
    expect(page.get_by_text("There is nothing to clean now.")).to_be_visible()
    expect(figures).to_have_count(0)
    expect(page.get_by_role("region", name="Costs of other dirty ratios")).to_contain_text("0.5")


def test_how_long_records_live_is_shown_for_a_partition_and_a_topic(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, PARTITION)
    page.get_by_role("button", name="Clean now").click()
    page.get_by_role("dialog").get_by_role("button", name="Clean now").click()
    expect(page.locator(".facts")).to_contain_text("finished")
    figures = page.get_by_role("table").filter(has_text="Alive")
    page.get_by_role("button", name="Estimate", exact=True).click()
    expect(figures.get_by_role("row")).to_have_count(2)
    expect(figures).to_contain_text("below 1 min")
    open_page(page, broker, "topics/customers")
    show = page.get_by_role("region", name="Partitions of customers").locator("xpath=..")
    show.get_by_role("button", name="Show", exact=True).click()
    expect(figures).to_contain_text("below 1 min")

    def answer(route: Route) -> None:
        if "/0/" in route.request.url:
            rows = [(0, 50, 50), (3_600_000, 300, 70)]
        elif "/1/" in route.request.url:
            rows = [(3_600_000, 100, 30)]
        keys = ("age_ms", "written", "alive")
        route.fulfill(json={"survival": [dict(zip(keys, row, strict=True)) for row in rows]})

    page.route("**/estimate", answer)
    page.get_by_role("button", name="Count again").click()
    hour = figures.get_by_role("row").nth(2)
    expect(hour).to_contain_text("from 1.0 h")
    expect(hour).to_contain_text("25 %")
    expect(hour).to_contain_text("400")
    page.route("**/1/estimate", lambda route: route.fulfill(status=409, json={"detail": "closed"}))
    page.get_by_role("button", name="Count again").click()
    expect(hour).to_contain_text("23 %")  # of the partitions that have an answer


def test_an_unknown_page_is_told(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "bogus")
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    expect(page.get_by_role("navigation").locator("[aria-current]")).to_have_count(0)


def test_a_clean_that_leaves_something_or_grows_is_told_so(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "")
    texts = page.evaluate(
        """async () => {
          const { reduction } = await import("/console/format.js");
          return [99.97, 99.765, 59.4, 0.2, -0.1, -4.2, 100].map(reduction);
        }"""
    )
    assert [text.replace("\u00a0", " ") for text in texts] == [
        "99.9 % less", "99.8 % less", "59 % less", "0 % less", "0 % less", "4 % more", "100 % less",
    ]  # fmt: skip


def test_a_change_is_found_in_the_audit_log(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/customers/settings")
    page.get_by_role("button", name="Change flush.ms").click()
    row_of(page, "flush.ms").get_by_role("textbox").fill("9d")
    page.get_by_role("button", name="Save").click()
    expect(row_of(page, "flush.ms")).to_contain_text("777600000")
    open_page(page, broker, "audit")
    page.get_by_label("Contains").fill("flush.ms")
    event = page.get_by_role("row").nth(1)
    expect(event).to_contain_text("change settings")
    expect(event).to_contain_text("resource_type: TOPIC")
    expect(event).to_contain_text("User:ANONYMOUS")
    expect(event).to_contain_text("777600000")
    page.get_by_label("Contains").fill("nobody did this")
    expect(page.get_by_text("None of the events matches")).to_be_visible()


def test_the_frame_is_drawn_before_the_api_answers(page: Page, broker: VarveBroker) -> None:
    page.route("**/api/**", lambda _route: None)  # never answered
    page.goto(f"{broker.url}/")
    expect(page.get_by_role("navigation")).to_be_visible()
    expect(page.locator(".loading")).to_be_visible()


def test_a_topic_that_would_lose_records_is_compacted_after_a_warning_only(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/readings/settings")
    page.get_by_role("button", name="Change cleanup.policy").click()
    row = row_of(page, "cleanup.policy")
    row.get_by_role("combobox").select_option("compact")
    page.get_by_role("button", name="Save").click()
    expect(row.get_by_role("alert")).to_contain_text(
        # Another test may have produced one with a key.
        re.compile(r"200 of 20[01] records of readings have no key\. A clean of a compacted topic")
    )
    expect(row.get_by_role("alert")).to_contain_text("Save again to change it anyway.")
    assert '"cleanup_policy": ["delete"]' in broker.get("/api/v1/cleaner/partitions/readings/1")
    page.get_by_role("button", name="Cancel").click()
    expect(row).to_contain_text("delete")


def test_a_long_list_is_shown_a_page_at_a_time(page: Page, broker: VarveBroker) -> None:
    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        first = "after" not in query
        row = {"name": "t-1" if first else "t-2", "cleanup_policy": [], "live_bytes": None}
        route.fulfill(json={"topics": [row], "next": "t-1" if first else None})

    page.route("**/api/v1/topics?*", answer)
    open_page(page, broker, "topics")
    expect(page.get_by_role("link", name="t-1")).to_be_visible()
    expect(page.get_by_role("link", name="t-2")).to_have_count(0)
    page.get_by_role("button", name="Show more topics").click()
    expect(page.get_by_role("link", name="t-2")).to_be_visible()
    expect(page.get_by_role("button", name="Show more topics")).to_have_count(0)


def test_a_page_without_permission_says_so(page: Page, broker: VarveBroker) -> None:
    reason = "User:carla needs DESCRIBE on the cluster"
    page.route(
        "**/api/v1/groups?*", lambda route: route.fulfill(status=403, json={"detail": reason})
    )
    open_page(page, broker, "groups")
    expect(page.get_by_role("alert")).to_contain_text("You may not see this")
    expect(page.get_by_role("alert")).to_contain_text(reason)


@pytest.mark.usefixtures("own_tab")
def test_a_tab_that_nobody_uses_asks_less_often(page: Page, broker: VarveBroker) -> None:
    page.add_init_script(
        """window.polls = 0;
        window.fetch = async (path) => {
          if (path.includes("/events")) return new Response("{}", { status: 503 });
          window.polls += 1;
          return new Response('{"topics": [], "next": null}');
        };"""
    )
    page.clock.install()
    open_page(page, broker, "topics")

    def polls_in(seconds: int) -> int:
        before = page.evaluate("window.polls")
        for _ in range(seconds):
            page.clock.run_for(1000)
        return int(page.evaluate("window.polls")) - before

    busy = polls_in(40)
    page.clock.run_for(60_000)
    idle = polls_in(40)
    assert 0 < idle < busy / 2
    page.keyboard.press("Shift")
    assert polls_in(40) > 2 * idle


def test_the_console_asks_for_credentials_and_forgets_them(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    with running_varve(tmp_path / "varve", {"http_token_file": str(secret)}) as broker:
        page.goto(f"{broker.url}/")
        page.get_by_role("button", name="Token").click()
        page.get_by_label("Token").last.fill("a wrong token")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("wrong token")
        page.get_by_label("Token").last.fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        assert page.evaluate("localStorage.length") == 0
        for document, text in (("Metrics", "varve_ready 1.0"), ("OpenAPI", '"openapi"')):
            page.get_by_role("link", name=document).click()
            expect(page.locator("body")).to_contain_text(text)
            page.go_back()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.evaluate("sessionStorage.setItem('varve.authorization', 'Bearer an older token')")
        expect(page.get_by_role("alert")).to_have_text("wrong token")  # at the next request
        page.get_by_role("button", name="Token").click()
        page.get_by_label("Token").last.fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in to Varve")).to_be_visible()


def test_a_user_signs_in_with_a_password(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("correct horse")
    sasl = {"users": {"ada": {"file": str(secret)}}, "failure_delay_ms": 10}
    with running_varve(tmp_path / "varve", {"http_users": True, "sasl": sasl}) as broker:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        page.goto(f"{broker.url}/#/topics")
        page.get_by_role("button", name="Token").click()
        assert asked.count("/api/v1/topics") == 1, "the first answer shows the form"
        page.get_by_role("button", name="User").click()
        page.get_by_label("User", exact=True).last.fill("ada")
        page.get_by_label("Password").fill("correct horse")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Topics", exact=True)).to_be_visible()


def test_a_failed_reload_of_the_settings_is_shown_until_one_succeeds(
    page: Page, broker: VarveBroker
) -> None:
    file = broker.directory / "varve.yaml"
    settings = file.read_text()
    shown = page.get_by_text("settings not reloaded, the old ones stay in effect")
    open_page(page, broker, "")
    file.write_text(f"{settings}\ncleaner.workers: many\n")
    broker.process.send_signal(signal.SIGHUP)
    expect(shown).to_contain_text("cleaner.workers")
    assert broker.metric("varve_settings_reload_failed") == 1
    file.write_text(settings)
    broker.process.send_signal(signal.SIGHUP)
    expect(shown).to_have_count(0)
    assert broker.metric("varve_settings_reload_failed") == 0
