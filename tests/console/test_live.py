"""Pages follow the streams of events, and poll where there is none."""

import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as BrowserTimeoutError

from tests.support.console import open_page
from tests.support.varve import VarveBroker

PARTITION = "topics/customers/1"
POLL_MS = 1500  # of the page without events
STEP_MS = 50


def send(broker: VarveBroker, action: str) -> None:
    url = f"{broker.url}/api/v1/cleaner/partitions/customers/1/{action}"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(autouse=True)
def resumed(broker: VarveBroker) -> Iterator[None]:
    yield
    send(broker, "resume")


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


def test_without_a_stream_the_page_polls(page: Page, broker: VarveBroker) -> None:
    page.route("**/events", lambda route: route.fulfill(status=503, json={"detail": "no place"}))
    open_page(page, broker, PARTITION)
    send(broker, "pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
