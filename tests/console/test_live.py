"""Pages follow the streams of events, and poll where there is none."""

import re
import urllib.request
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from playwright.sync_api import Page, Response, expect
from playwright.sync_api import TimeoutError as BrowserTimeoutError

from tests.support.console import open_page
from tests.support.varve import VarveBroker

PARTITION = "topics/customers/1"
POLL_MS = 1500  # of the page without events
STEP_MS = 50
CHANGED = "event: changed\ndata: {}\n\n"


def send(broker: VarveBroker, action: str) -> None:
    url = f"{broker.url}/api/v1/cleaner/partitions/customers/1/{action}"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(autouse=True)
def resumed(broker: VarveBroker) -> Iterator[None]:
    yield
    send(broker, "resume")


@pytest.mark.usefixtures("own_tab")
def test_a_change_is_shown_before_the_page_would_have_polled(
    page: Page, broker: VarveBroker
) -> None:
    with page.expect_response("**/events") as stream:
        open_page(page, broker, PARTITION)
    assert stream.value.status == 200
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    page.clock.install()
    send(broker, "pause")
    resume = page.get_by_role("button", name="Resume")
    for _ in range(POLL_MS // STEP_MS):
        page.clock.run_for(STEP_MS)
        try:
            resume.wait_for(timeout=200)
        except BrowserTimeoutError:
            continue
        return
    raise AssertionError("the page did not follow the stream")


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("", "events/overview"),
        ("topics", "events/topics"),
        ("topics/customers", "topics/customers/events"),
        ("groups", "events/groups"),
        ("groups/keepers", "events/groups"),
        ("cleaner", "cleaner/events"),
    ],
)
def test_a_page_follows_its_stream(page: Page, broker: VarveBroker, path: str, stream: str) -> None:
    with page.expect_response(f"**/api/v1/{stream}") as response:
        open_page(page, broker, path)
    assert response.value.status == 200


@pytest.mark.usefixtures("own_tab")
def test_a_page_that_hears_of_changes_all_the_time_asks_no_more_often_than_it_would_poll(
    page: Page, broker: VarveBroker
) -> None:
    page.clock.install()
    page.route(
        "**/events/topics",
        lambda route: route.fulfill(content_type="text/event-stream", body=CHANGED * 20),
    )
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url) if "/topics?" in sent.url else None)
    open_page(page, broker, "topics")
    for _ in range(20):  # real time passes, too; the page would poll after 4 s
        page.clock.run_for(100)
    assert len(asked) == 1, asked


def test_the_newest_records_follow_the_log(page: Page, broker: VarveBroker) -> None:
    open_page(page, broker, "topics/readings/messages/1")
    expect(page.get_by_text("No records yet")).to_be_visible()
    page.get_by_label("Follow").check()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in ("first", "second"):
        producer.produce("readings", value.encode(), partition=1)
        assert producer.flush(30) == 0
        expect(page.get_by_role("cell", name=value)).to_be_visible()
    expect(page.get_by_role("row").nth(1)).to_contain_text("second")  # the newest comes first


def test_a_page_that_follows_a_fast_producer_stays_at_the_end_and_says_what_it_skips(
    page: Page, broker: VarveBroker
) -> None:
    open_page(page, broker, "topics/readings/messages/0")
    page.get_by_label("Follow").check()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(20_000):
        producer.produce("readings", b"fast %d" % number, partition=0)
    assert producer.flush(30) == 0
    expect(page.get_by_role("row").nth(1)).to_contain_text("fast 19999")
    expect(page.get_by_role("status").first).to_contain_text(re.compile(r"\d records skipped"))


def test_without_a_stream_the_page_polls(page: Page, broker: VarveBroker) -> None:
    page.route("**/events", lambda route: route.fulfill(status=503, json={"detail": "no place"}))
    open_page(page, broker, PARTITION)
    send(broker, "pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()


@pytest.mark.usefixtures("own_tab")
def test_a_page_that_follows_the_log_is_as_fast_while_nobody_touches_it(
    page: Page, broker: VarveBroker
) -> None:
    def is_read(response: Response) -> bool:
        return "/records?" in response.url and str(2**53 - 1) not in response.url

    page.clock.install()
    page.route("**/events", lambda route: route.fulfill(status=503, json={"detail": "no place"}))
    open_page(page, broker, "topics/readings/messages/0")
    with page.expect_response(is_read):
        page.get_by_label("Follow").check()
    page.clock.run_for(61_000)
    for _ in range(3):
        with page.expect_response(is_read, timeout=3000):  # else it takes 5 s
            page.clock.run_for(1100)


@pytest.mark.usefixtures("own_tab")
def test_times_age_while_the_stream_says_nothing(page: Page, broker: VarveBroker) -> None:
    page.clock.install()
    with page.expect_response("**/events"):
        open_page(page, broker, PARTITION)
    page.clock.run_for(2000)  # the page has heard that the stream began
    for _ in range(3):
        with page.expect_response("**/cleaner/partitions/customers/1", timeout=6000):
            page.clock.run_for(6000)
