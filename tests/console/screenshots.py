"""Make the pictures of the console in docs/images: `python -m tests.console.screenshots [NAME...]`.

Starts a broker with topics, groups, users and a log that was cleaned once, and takes a picture of
each page in the system's Chromium. Look at the pictures before you commit them.
"""

import json
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.console import BROWSERS, open_page
from tests.support.varve import VarveBroker, running_varve

IMAGES: Final = Path(__file__).parents[2] / "docs/images"
HOUR_MS: Final = 3_600_000
SEED: Final = 5
SETTINGS: Final = {
    "cleaner": {"workers": 2, "dedupe_buffer_bytes": "16MiB"},
    "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
}
COMPACT: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",
    "max.compaction.lag.ms": str(96 * HOUR_MS),  # nothing is cleaned before it is asked for
}
TOPICS: Final = {
    "customers": (3, COMPACT),
    "accounts": (2, COMPACT),
    "prices": (1, {"varve.view": "compacted", "varve.view.strategy": "timestamp"}),
    "orders": (4, {"cleanup.policy": "delete", "retention.ms": str(7 * 24 * HOUR_MS)}),
    "sessions": (2, {**COMPACT, "cleanup.policy": "compact,delete"}),
    "parcels": (1, COMPACT),
}
ACLS: Final = (
    ("User:ada", "read", "topic", "literal", "customers"),
    ("User:ada", "read", "group", "prefixed", "billing-"),
    ("User:loader", "write", "topic", "prefixed", "customers"),
    ("User:monitoring", "describe", "cluster", "literal", "kafka-cluster"),
)


def api(broker: VarveBroker, method: str, path: str, body: object = None) -> None:
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(f"{broker.url}{path}", data, headers, method=method)
    urllib.request.urlopen(request, timeout=30).close()


def produce(broker: VarveBroker, topic: str, count: int, keys: int, begin_hours: float) -> None:
    """Produce records of 250 to 400 bytes that are spread over the hours up to now."""
    source = random.Random(f"{SEED} {topic} {count}")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
    now_ms = int(time.time() * 1000)
    for number in range(count):
        key = int(keys * source.random() ** 2)
        value = json.dumps({"id": key, "balance": number, "note": "x" * source.randint(200, 350)})
        producer.produce(
            topic,
            None if source.random() < 0.03 else value.encode(),
            b"%s-%d" % (topic[:-1].encode(), key),
            partition=0,
            timestamp=now_ms - int(begin_hours * HOUR_MS * (1 - number / count)),
        )
        producer.poll(0)
    assert producer.flush(60) == 0


def send_traffic(broker: VarveBroker, stopping: threading.Event) -> None:
    """Produce orders, now more and now fewer, so that the chart of the overview has a shape."""
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    source = random.Random(SEED)
    while not stopping.wait(0.25):
        for number in range(source.randint(20, 200)):
            producer.produce("orders", b"x" * 500, b"%d" % number)
        producer.flush(10)


def clean(broker: VarveBroker, topic: str) -> None:
    path = f"/api/v1/cleaner/partitions/{topic}/0"
    api(broker, "POST", f"{path}/run", {"roll": True})
    for _ in range(200):
        explanation = json.loads(broker.get(path))
        is_done = explanation["requested_offset"] is None and explanation["job"] is None
        if is_done and explanation["last_job"] is not None:
            return
        time.sleep(0.1)
    raise AssertionError(f"{topic} was not cleaned")


def fill(broker: VarveBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = [NewTopic(name, count, 1, config=config) for name, (count, config) in TOPICS.items()]
    for future in admin.create_topics(new).values():
        future.result(60)
    produce(broker, "accounts", 90_000, 14_000, 60)
    clean(broker, "accounts")
    produce(broker, "accounts", 40_000, 20_000, 2)
    for topic, count in (("customers", 30_000), ("sessions", 9_000), ("orders", 12_000)):
        produce(broker, topic, count, 900, 20)
    api(broker, "POST", "/api/v1/topics/sessions/erasures", {"key": "session-12"})
    clean(broker, "customers")
    produce(broker, "customers", 4_000, 900, 1)
    produce(broker, "prices", 3_000, 40, 10)
    for group, offset in (("billing-invoices", 80_000), ("search-index", 130_000), ("audit", 100)):
        offsets = [TopicPartition("accounts", 0, offset)]
        asked = ConsumerGroupTopicPartitions(group, offsets)
        for future in admin.alter_consumer_group_offsets([asked]).values():
            future.result(30)
    for number, user in enumerate(("ada", "loader", "monitoring")):
        mechanism = "SCRAM-SHA-256" if number == 2 else "SCRAM-SHA-512"
        body = {"password": "change-me", "mechanism": mechanism}
        api(broker, "PUT", f"/api/v1/users/{user}", body)
    for principal, operation, kind, pattern, name in ACLS:
        entry = {"principal": principal, "operation": operation, "resource_type": kind}
        api(
            broker, "POST", "/api/v1/acls", entry | {"pattern_type": pattern, "resource_name": name}
        )
    api(broker, "POST", "/api/v1/view/partitions/prices/0/compact")
    api(broker, "POST", "/api/v1/cleaner/partitions/sessions/0/pause")
    lease = {"topic": "customers", "partitions": [0], "purpose": "read", "ttl_seconds": 3600}
    api(broker, "POST", "/api/v1/remote-compactions", lease)


def read_version_history(page: Page) -> None:
    page.get_by_role("combobox", name="Show").select_option("key")
    page.get_by_role("searchbox", name="Key").fill("account-7")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("status").filter(has_text="versions of this key").wait_for()
    page.get_by_role("row").nth(2).get_by_role("button").click()


def refuse_a_value(page: Page) -> None:
    page.get_by_role("button", name="Change delete.retention.ms").click()
    page.locator("form.editor").get_by_role("textbox").fill("2 moons")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("alert").wait_for()
    page.mouse.wheel(0, 300)


def preview_offsets(page: Page) -> None:
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("region", name="Offsets before and after").wait_for()


def show_survival(page: Page) -> None:
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_role("table").filter(has_text="Alive").wait_for()


def fill_in_a_topic(page: Page) -> None:
    page.get_by_label("Name").fill("invoices")
    page.get_by_label("cleanup.policy").select_option("compact")
    page.get_by_label("Another setting").select_option("max.compaction.lag.ms")


def nothing(_page: Page) -> None:
    """Show the page as it opens."""


# The name of a picture, its page, the colours, and what is done before it is taken.
PICTURES: Final[dict[str, tuple[str, str, Callable[[Page], None]]]] = {
    "strata": ("topics/accounts/0", "light", nothing),
    "overview": ("", "light", nothing),
    "topics": ("topics", "light", nothing),
    "topic": ("topics/accounts", "light", show_survival),
    "erasures": ("topics/sessions/erasures", "light", nothing),
    "create-topic": ("create-topic", "light", fill_in_a_topic),
    "settings": ("topics/customers/settings", "light", refuse_a_value),
    "messages-dark": ("topics/accounts/messages/0", "dark", read_version_history),
    "cleaner-dark": ("cleaner", "dark", nothing),
    "groups": ("groups", "light", nothing),
    "group": ("groups/billing-invoices", "light", preview_offsets),
    "views": ("views", "light", nothing),
    "leases": ("leases", "light", nothing),
    "access-dark": ("access", "dark", nothing),
    "broker-settings": ("settings", "light", nothing),
    "settings-file": ("settings/file", "light", nothing),
    "audit": ("audit", "light", nothing),
}


def take(browser: Browser, broker: VarveBroker, name: str) -> None:
    path, scheme, prepare = PICTURES[name]
    context = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
    page = context.new_page()
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    open_page(page, broker, path)
    prepare(page)
    page.wait_for_timeout(9000 if name == "overview" else 1500)  # its chart needs some samples
    page.screenshot(path=IMAGES / f"console-{name}.png", full_page=name == "strata")
    context.close()


def main(names: list[str]) -> None:
    if unknown := set(names) - PICTURES.keys():
        sys.exit(f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    program = next(filter(None, map(shutil.which, BROWSERS)))
    with (
        tempfile.TemporaryDirectory() as directory,
        running_varve(Path(directory) / "varve", SETTINGS) as broker,
        sync_playwright() as playwright,
    ):
        fill(broker)
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "dashboard"})
        consumer.subscribe(["orders"])
        consumer.poll(10)
        traffic = threading.Thread(
            target=send_traffic, args=(broker, stopping := threading.Event())
        )
        traffic.start()
        try:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for name in names or PICTURES:
                take(browser, broker, name)
            browser.close()
        finally:
            stopping.set()
            traffic.join()
        consumer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
