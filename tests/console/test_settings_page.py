"""The page of the broker's settings."""

import json
import signal
from functools import partial

from playwright.sync_api import Locator, Page, expect

from tests.support.console import open_page
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until


def row_of(page: Page, setting: str) -> Locator:
    heading = page.get_by_role("heading", name=setting, exact=True)
    return page.get_by_role("listitem").filter(has=heading)


def last_reload(broker: VarveBroker) -> object:
    return json.loads(broker.get("/api/v1/settings"))["reload"]


def is_reloaded(broker: VarveBroker, before: object) -> bool:
    return last_reload(broker) != before


def test_a_setting_is_changed_and_taken_back(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "settings")
    page.get_by_label("Name contains").fill("log.cleaner.backoff")
    row = row_of(page, "log.cleaner.backoff.ms")
    expect(row).to_contain_text("settings file")
    page.get_by_role("button", name="Change log.cleaner.backoff.ms").click()
    row.get_by_role("textbox").fill("3 weeks")
    page.get_by_role("button", name="Save").click()
    expect(row.get_by_role("alert")).to_contain_text("with a unit: ms, s, min, h, d")
    row.get_by_role("textbox").fill("1 ms")
    page.get_by_role("button", name="Save").click()
    expect(row.get_by_role("alert")).to_contain_text("log.cleaner.backoff.ms")
    row.get_by_role("textbox").fill("3s")
    page.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("set on the broker")
    expect(row).to_contain_text("3000")
    settings = json.loads(broker.get("/api/v1/cleaner"))["settings"]
    assert settings["backoff_ms"] == 3000
    page.get_by_role("button", name="Change log.cleaner.backoff.ms").click()
    page.get_by_role("button", name="Use the default, 200").click()
    expect(row).not_to_contain_text("set on the broker")
    # Settings that only the file can change have no button.
    page.get_by_label("Name contains").fill("listeners")
    expect(row_of(page, "advertised.listeners")).to_be_visible()
    expect(page.get_by_role("button", name="Change advertised.listeners")).to_have_count(0)


def test_the_settings_file_and_its_last_reload_are_shown(page: Page, broker: VarveBroker) -> None:
    file = broker.directory / "varve.yaml"
    settings = file.read_text()
    open_page(page, broker, "settings/file")
    expect(row_of(page, "http")).to_contain_text(broker.url.removeprefix("http://"))
    expect(row_of(page, "http")).to_contain_text("A change needs a restart")
    expect(row_of(page, "advertise")).to_contain_text("empty")
    for text, shown in (
        ("delete_topics: perhaps", "delete_topics"),
        ("delete_topics: false", "it changed delete_topics"),
        ("shutdown_timeout_ms: 9s", "will take effect at the next start: shutdown_timeout_ms"),
        ("", "nothing changed"),
    ):
        before = last_reload(broker)
        file.write_text(f"{settings}\n{text}\n")
        broker.process.send_signal(signal.SIGHUP)
        wait_until(partial(is_reloaded, broker, before), "the settings are reloaded")
        page.reload()
        expect(page.locator(".notice").filter(has_text=shown)).to_be_visible(timeout=15_000)
