"""Every page and control of the console, in a browser, against a running daemon."""

import re
import signal
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from confluent_kafka import Consumer
from playwright.sync_api import Page, Route, expect

from tests.support.varve import VarveBroker, running_varve

PAGES = (
    "",
    "topics",
    "topics/customers",
    "topics/customers/0",
    "topics/clicks/0",
    "groups",
    "cleaner",
)
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
PARTITION = "#/topics/customers/0"
TOKEN = "0123456789abcdef-token"


def open_page(page: Page, broker: VarveBroker, path: str) -> None:
    page.goto(f"{broker.url}/#/{path.removeprefix('#/')}")
    expect(page.locator("h1")).to_be_visible()
    expect(page.locator(".loading")).to_have_count(0)


def api(broker: VarveBroker, partition: int = 0) -> str:
    return broker.get(f"/api/v1/cleaner/partitions/customers/{partition}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_no_serious_obstacle_for_anybody(
    page: Page, broker: VarveBroker, path: str, scheme: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    open_page(page, broker, path)
    found = Axe().run(page).response["violations"]
    serious = [entry for entry in found if entry["impact"] in ("serious", "critical")]
    assert [(entry["id"], entry["nodes"][0]["html"][:300]) for entry in serious] == []


@pytest.mark.parametrize("path", PAGES)
def test_a_phone_shows_a_page_without_scrolling_sideways(
    page: Page, broker: VarveBroker, path: str
) -> None:
    page.set_viewport_size(PHONE)
    open_page(page, broker, path)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


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
    open_page(page, broker, "cleaner")
    expect(page.get_by_role("region", name="Last jobs")).to_contain_text("customers-0")


def test_an_unknown_partition_and_a_stopped_broker_are_told(page: Page, tmp_path: Path) -> None:
    with running_varve(tmp_path) as broker:
        open_page(page, broker, "topics/none/0")
        expect(page.get_by_role("alert")).to_have_text("there is no topic none")
        open_page(page, broker, "topics")
        expect(page.get_by_text("No topics yet")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")


def test_the_frame_is_drawn_before_the_api_answers(page: Page, broker: VarveBroker) -> None:
    page.route("**/api/**", lambda _route: None)  # never answered
    page.goto(f"{broker.url}/")
    expect(page.get_by_role("navigation")).to_be_visible()
    expect(page.locator(".loading")).to_be_visible()


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


def test_a_tab_that_nobody_uses_asks_less_often(page: Page, broker: VarveBroker) -> None:
    page.add_init_script(
        """window.polls = 0;
        window.fetch = async () => {
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
        page.evaluate("sessionStorage.setItem('varve.authorization', 'Bearer an older token')")
        expect(page.get_by_role("alert")).to_have_text("wrong token")  # at the next request
        page.get_by_role("button", name="Token").click()
        page.get_by_label("Token").last.fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in to Varve")).to_be_visible()


def test_a_failed_reload_of_the_settings_is_shown_until_one_succeeds(
    page: Page, broker: VarveBroker
) -> None:
    file = broker.directory / "varve.yaml"
    settings = file.read_text()
    shown = page.get_by_text("the settings were not reloaded, the old ones stay in effect")
    open_page(page, broker, "")
    file.write_text(f"{settings}\ncleaner.workers: many\n")
    broker.process.send_signal(signal.SIGHUP)
    expect(shown).to_contain_text("cleaner.workers")
    assert broker.metric("varve_settings_reload_failed") == 1
    file.write_text(settings)
    broker.process.send_signal(signal.SIGHUP)
    expect(shown).to_have_count(0)
    assert broker.metric("varve_settings_reload_failed") == 0
