"""A browser, and a daemon with topics of every kind. A machine without Chromium skips the tests."""

import shutil
from collections.abc import Iterator

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, sync_playwright

from tests.support.console import BROWSERS
from tests.support.varve import VarveBroker, running_varve

SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200}}
# The last two take a sixth of the processor time: a process less, no function compiled ahead.
CHROMIUM_OPTIONS = ["--no-sandbox", "--in-process-gpu", "--js-flags=--max-lazy"]
VIEWPORT: ViewportSize = {"width": 1280, "height": 900}
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    # Nothing is cleaned before a test asks for it.
    "min.cleanable.dirty.ratio": "1.0",
}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("console"), SETTINGS) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        new = [
            NewTopic("customers", 2, 1, config=CONFIG),
            NewTopic("clicks", 1, 1, config={"cleanup.policy": "delete"}),
            NewTopic("readings", 2, 1, config={"cleanup.policy": "delete"}),
            NewTopic("clocks", 2, 1, config={"cleanup.policy": "delete"}),
            NewTopic("prices", 1, 1, config={"varve.view": "compacted"}),
        ]
        for future in admin.create_topics(new).values():
            future.result(30)
        producer = Producer({"bootstrap.servers": running.bootstrap})
        for number in range(8000):
            key = b"customer-%d" % (number % 50)
            producer.produce("customers", b"x" * 500, key, partition=0)
        for number in range(200):
            producer.produce("readings", b"%d" % number, partition=0)
            producer.produce("prices", b"%d" % number, b"%d" % (number % 10))
        assert producer.flush(30) == 0
        offsets = [TopicPartition("customers", 0, 2000)]
        group = ConsumerGroupTopicPartitions("keepers", offsets)
        for future in admin.alter_consumer_group_offsets([group]).values():
            future.result(30)
        yield running


class Tab:
    """A tab of the browser that collects the errors of its pages."""

    def __init__(self, browser: Browser) -> None:
        self.errors: list[str] = []
        self._context = browser.new_context(viewport=VIEWPORT)
        self.page = self._context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note_refusal)

    def _note_refusal(self, line: ConsoleMessage) -> None:
        if "Content Security" in line.text:
            self.errors.append(line.text)

    def reset(self) -> None:
        """Leave the page, and what a test may have changed."""
        self.page.unroute_all(behavior="ignoreErrors")  # of answers to a page that is left
        self.page.goto("about:blank")
        self.page.set_viewport_size(VIEWPORT)
        self.page.emulate_media(color_scheme="light")
        self.page.mouse.move(0, 0)

    def close(self) -> None:
        self._context.close()


@pytest.fixture(scope="package")
def shared_tab(browser: Browser) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.close()


@pytest.fixture
def own_tab() -> None:
    """Give the test a tab that no other uses: a clock and scripts cannot be taken back."""


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, shared_tab: Tab) -> Iterator[Page]:
    """A page whose errors fail the test: of the tab of all tests, or of its `own_tab`.

    A tab costs the start of a process, and the first load of the console's modules.
    """
    is_own = "own_tab" in request.fixturenames
    tab = Tab(browser) if is_own else shared_tab
    yield tab.page
    if is_own:
        tab.close()
    else:
        tab.reset()
    errors, tab.errors[:] = [*tab.errors], []
    assert errors == []
