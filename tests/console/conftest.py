"""A browser, and a daemon with topics of every kind. A machine without Chromium skips the tests."""

import shutil
from collections.abc import Iterator

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.console import BROWSERS
from tests.support.varve import VarveBroker, running_varve

SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200}}
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
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
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


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab whose errors fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda line: errors.append(line.text) if "Content Security" in line.text else None,
    )
    page.set_default_timeout(30_000)
    yield page
    context.close()
    assert errors == []
