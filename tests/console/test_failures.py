"""Answers that come late, broken or not at all, and what another operator does meanwhile."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from playwright.sync_api import Browser, Page, Route, expect

from broker.http.console import FOLDER
from tests.support.console import confirm, open_page
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

OFFSETS = "**/api/v1/groups/keepers/offsets"


def send(broker: VarveBroker, method: str, path: str, body: object = None) -> None:
    """A request of another operator."""
    data = json.dumps(body or {}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{broker.url}{path}", data, headers, method=method)
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture
def resumed(broker: VarveBroker) -> Iterator[None]:
    yield
    send(broker, "POST", "/api/v1/cleaner/partitions/customers/1/resume")


def test_an_answer_that_breaks_off_is_told(page: Page, broker: VarveBroker) -> None:
    page.route("**/api/v1/topics?*", lambda route: route.fulfill(body='{"topics": [{'))
    open_page(page, broker, "topics")
    expect(page.get_by_role("alert")).to_contain_text("The answer of the broker broke off")


@pytest.mark.usefixtures("own_tab")
def test_a_broker_that_hangs_is_told(page: Page, broker: VarveBroker) -> None:
    page.clock.install()
    page.route("**/api/v1/topics?*", lambda _route: None)
    page.goto(f"{broker.url}/#/topics")
    page.locator(".loading").wait_for()
    page.clock.run_for(31_000)
    expect(page.get_by_role("alert")).to_contain_text("does not answer")


def test_a_page_that_cannot_be_drawn_says_so_and_others_can(
    browser: Browser, broker: VarveBroker
) -> None:
    page = browser.new_page()
    rows = {"topics": [{"name": "of another version"}], "next": None}
    page.route("**/api/v1/topics?*", lambda route: route.fulfill(json=rows))
    page.goto(f"{broker.url}/#/topics")
    expect(page.get_by_role("alert")).to_contain_text("The console cannot show this page")
    page.get_by_role("link", name="Groups").click()
    expect(page.get_by_role("heading", name="Groups", exact=True)).to_be_visible()
    page.close()


def test_an_address_asks_for_nothing_but_a_partition(page: Page, broker: VarveBroker) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    open_page(page, broker, "topics/customers/..%2F..%2F..%2F..%2Foverview%3F")
    expect(page.get_by_role("region", name="Partitions of customers")).to_be_visible()
    assert not [url for url in asked if "overview" in url and "/api/" in url]


def preview(topic: str) -> dict[str, Any]:
    row = {"partition": 0, "before": 9, "after": 4}
    return {"group": "keepers", "topic": topic, "dry_run": True, "partitions": [row]}


def test_a_preview_that_comes_late_is_not_that_of_the_form(page: Page, broker: VarveBroker) -> None:
    held: list[Route] = []
    page.route(OFFSETS, lambda route: held.append(route))
    open_page(page, broker, "groups/keepers")
    page.get_by_label("Topic").fill("customers")
    for topic in ("clicks", "readings"):
        with page.expect_request(OFFSETS):
            page.get_by_role("button", name="Preview").click()
        page.get_by_label("Topic").fill(topic)
        with page.expect_response(OFFSETS):
            held.pop().fulfill(json=preview("late"))
        page.evaluate("new Promise((done) => setTimeout(done))")
        assert page.get_by_role("region", name="Offsets before and after").count() == 0
    with page.expect_request(OFFSETS):
        page.get_by_role("button", name="Preview").click()
    held.pop().fulfill(json=preview("readings"))
    page.get_by_role("button", name="Commit these offsets").click()
    with page.expect_request(OFFSETS) as sent:
        confirm(page, "Commit these offsets")
    assert sent.value.post_data_json == {"topic": "readings", "to": "earliest", "dry_run": False}


@pytest.mark.usefixtures("resumed")
def test_an_open_question_does_not_become_another_one(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/customers/1")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    send(broker, "POST", "/api/v1/cleaner/partitions/customers/1/pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.usefixtures("own_tab")
def test_a_form_says_that_another_operator_has_changed_the_setting(
    page: Page, broker: VarveBroker
) -> None:
    page.clock.install()
    open_page(page, broker, "topics/readings/settings")
    page.get_by_role("button", name="Change retention.bytes").click()
    page.locator("form.editor").get_by_role("textbox").fill("1GiB")
    change = {"set": {"retention.bytes": "4000000"}}
    send(broker, "PATCH", "/api/v1/topics/readings", change)
    page.clock.run_for(11_000)
    alert = page.locator("form.editor").get_by_role("alert")
    expect(alert).to_contain_text("Somebody has changed it to 4000000")
    page.get_by_role("button", name="Cancel").click()
    send(broker, "PATCH", "/api/v1/topics/readings", {"unset": ["retention.bytes"]})


def test_the_past_of_a_partition_takes_a_bounded_number_of_segments(
    page: Page, broker: VarveBroker
) -> None:
    (module,) = FOLDER.rglob("past.js")
    open_page(page, broker, "topics")
    kept = page.evaluate(
        """async (path) => {
          const { remember } = await import(path);
          const states = [];
          const segments = { length: 20_000 };
          const model = { segments, facts: { job: null } };
          for (let at = 0; at < 100; at += 1) remember(states, { ...model, fingerprint: at });
          return states.map((state) => state.fingerprint);
        }""",
        f"/console/{module.relative_to(FOLDER).as_posix()}",
    )
    assert kept == list(range(80, 100))


def test_what_a_broker_said_before_it_fell_silent_is_not_live(
    page: Page, broker: VarveBroker
) -> None:
    page.route("**/events", lambda route: route.abort())
    open_page(page, broker, "topics/customers/0")
    clean = page.get_by_role("button", name="Clean now")
    expect(clean).to_be_enabled()
    page.route("**/api/v1/cleaner/partitions/**", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(page.get_by_text("The page shows the state of")).to_be_visible()
    for button in (clean, page.get_by_role("button", name="Pause", exact=True)):
        expect(button).to_be_disabled()
    page.unroute("**/api/v1/cleaner/partitions/**")
    expect(clean).to_be_enabled()


@pytest.fixture
def passing(broker: VarveBroker) -> str:
    """A topic that another operator deletes; one clean has ended."""
    send(
        broker,
        "POST",
        "/api/v1/topics",
        {"name": "passing", "settings": {"cleanup.policy": "compact"}},
    )
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for _ in range(100):
        producer.produce("passing", b"value", b"key")
    assert producer.flush(30) == 0
    partition = "/api/v1/cleaner/partitions/passing/0"
    send(broker, "POST", f"{partition}/run", {"roll": True})
    wait_until(lambda: json.loads(broker.get(partition))["last_job"] is not None, "a clean", 60)
    return "passing"


def test_the_page_of_a_partition_whose_topic_is_deleted_keeps_its_last_state(
    page: Page, broker: VarveBroker, passing: str
) -> None:
    open_page(page, broker, f"topics/{passing}/0")
    main = page.locator("main")
    expect(main.get_by_role("button", name="Clean now")).to_be_visible()
    send(broker, "DELETE", f"/api/v1/topics/{passing}")
    expect(page.get_by_role("status").first).to_have_text("This topic was deleted.")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(main.get_by_role("button", name=re.compile("Clean now|Pause|Estimate"))).to_have_count(0)
    expect(main.get_by_role("link")).to_have_text(["Topics"])
    expect(page.locator(".strata canvas")).to_be_visible()


@pytest.mark.usefixtures("own_tab")
@pytest.mark.parametrize("tab", ["", "/settings", "/messages"])
def test_the_pages_of_a_deleted_topic_have_no_live_controls(
    page: Page, broker: VarveBroker, passing: str, tab: str
) -> None:
    page.clock.install()
    open_page(page, broker, f"topics/{passing}{tab}")
    send(broker, "DELETE", f"/api/v1/topics/{passing}")
    page.clock.run_for(60_000)
    expect(page.get_by_role("status").first).to_have_text("This topic was deleted.")
    main = page.locator("main")
    expect(main.get_by_role("button")).to_have_count(0)
    expect(main.get_by_role("link")).to_have_text(["Topics"])


def test_a_job_of_a_deleted_partition_leads_nowhere(
    page: Page, broker: VarveBroker, passing: str
) -> None:
    send(broker, "DELETE", f"/api/v1/topics/{passing}")
    open_page(page, broker, "cleaner")
    row = (
        page.get_by_role("region", name="Last jobs")
        .get_by_role("row")
        .filter(has_text=passing)
        .first
    )
    expect(row).to_contain_text("deleted")
    expect(row.get_by_role("link")).to_have_count(0)
