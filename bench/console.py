"""What the console, the HTTP API and a start cost, beside the goals for them.

    python -m bench.console [--rounds 5] [--only paint strata status metrics start unclean cost]

Every part but `status` uses a daemon of its own, and pages are shown by the system's Chromium
without a screen.

- paint: a new browser without a cache opens a page of a broker with 1,000 partitions. "first paint"
  is First Contentful Paint, "with data" the moment at which the figures or rows are on the page.
- strata: the picture of a partition with 2,000 segments: frames while the pointer moves over it,
  while it is zoomed, and while the slider goes through its past, with an input in each frame. The
  browser draws at most 60 frames a second; "script" is the time that the page's own code takes for
  one, as the median.
- status: requests about 10,000 partitions. A process has three open files for each partition, more
  than many machines allow, so this broker keeps its files in memory; its HTTP server is real.
- metrics: a scrape with 1,000 partitions.
- start: from the start of the process until it is ready, with 1,000 partitions after a clean stop.
- unclean: the same after kill -9 with 10 GB in ten logs of one segment each, which was never synced
  by the broker: every byte is read and checked.
- cost: processor time of the broker while one page is open and its user active, less that without,
  idle and while a client writes 500 records a second.

"loop" is processor time of the thread of the event loop, "hold" the longest time that one step of
a request occupied it. A hold is wall-clock time, so on a busy machine it includes that of others.
Every figure is the median of the rounds, except the longest frame and the hold: the longest of all.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Browser, Page, sync_playwright

from bench.report import markdown_table
from tests.support.console import BROWSERS
from tests.support.varve import VarveBroker, start_varve

PARTITIONS: Final = 1_000
TOPICS: Final = 100  # that they are spread over
SEGMENTS: Final = 2_000
SEGMENT_BYTES: Final = 1 << 20
MANY_PARTITIONS: Final = 10_000
UNCLEAN_BYTES: Final = 10_000_000_000
UNCLEAN_LOGS: Final = 10
PAGE_MS: Final = 60_000.0  # to open a page on a busy machine
FRAME_SECONDS: Final = 3.0
COST_SECONDS: Final = 20.0
RECORDS_PER_SECOND: Final = 500
SCRAPES: Final = 5  # of a round

# Counts frames while an input happens in each.
COUNT_FRAMES: Final = """async ([seconds, kind]) => {
  const canvas = document.querySelector(".strata canvas");
  const box = canvas.getBoundingClientRect();
  const slider = document.querySelector(".replay input");
  const zoom = [...document.querySelectorAll(".zoom button")];
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const inputs = {
    point: (frame) => canvas.dispatchEvent(new PointerEvent("pointermove",
      { clientX: box.left + (frame * 7) % box.width, clientY: box.top + 90, bubbles: true })),
    zoom: (frame) => zoom[frame % 16 < 8 ? 2 : 0].click(),
    scrub: (frame) => {
      set.call(slider, frame % Number(slider.max));
      slider.dispatchEvent(new Event("input", { bubbles: true }));
    },
  };
  const next = () => new Promise(requestAnimationFrame);
  let last = await next(), frames = 0, longest = 0;
  const work = [];
  const begin = last;
  while (last - begin < 1000 * seconds) {
    const started = performance.now();
    inputs[kind](frames);
    await null;  // the page renders in a microtask
    await null;
    work.push(performance.now() - started);
    const now = await next();
    longest = Math.max(longest, now - last);
    frames += 1;
    last = now;
  }
  work.sort((a, b) => a - b);
  return [frames / (last - begin) * 1000, longest, work[work.length >> 1]];
}"""

# When the page was painted first; the entry may follow the data.
FIRST_PAINT: Final = """new Promise((resolve) => {
  new PerformanceObserver((list) => {
    const paint = list.getEntriesByName("first-contentful-paint")[0];
    if (paint) resolve(paint.startTime);
  }).observe({ type: "paint", buffered: true });
})"""

# Notes when the page has its data.
NOTE_DATA: Final = """window.shownAt = new Promise((resolve) => {
  new MutationObserver((_, observer) => {
    if (document.querySelector("dl.figures, main table tbody tr")) {
      observer.disconnect();
      requestAnimationFrame(() => resolve(performance.now()));
    }
  }).observe(document, { childList: true, subtree: true });
});"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    goal: str = ""


def ready_broker(directory: Path, settings: Mapping[str, Any] | None = None) -> VarveBroker:
    """Start a daemon with an interpreter of its own, as a user does."""
    return start_varve(directory, dict(settings or {}), environment=dict(os.environ))


@contextmanager
def broker_in(directory: Path) -> Iterator[VarveBroker]:
    broker = ready_broker(directory)
    try:
        yield broker
    finally:
        broker.stop()


def create(broker: VarveBroker, topics: int, partitions: int, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    new = [NewTopic(f"topic-{i}", partitions, 1, config=config) for i in range(topics)]
    for future in admin.create_topics(new, request_timeout=300).values():
        future.result(300)


def fill(broker: VarveBroker) -> None:
    """Create the topics with PARTITIONS partitions and some records in each."""
    partitions = PARTITIONS // TOPICS
    create(broker, TOPICS, partitions, **{"cleanup.policy": "compact"})
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for topic in range(TOPICS):
        for number in range(10 * partitions):
            producer.produce(f"topic-{topic}", b"x" * 100, b"%d" % number, number % partitions)
    assert producer.flush(60) == 0


def loop_seconds(pid: int) -> float:
    """Return the processor time of the event loop's thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def process_seconds(pid: int) -> float:
    """Return the processor time of all threads that run now."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def hold_ms(url: str, route: str) -> float:
    """Return the longest hold of the loop by a route since the broker's start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("varve_http_longest_hold_seconds") and f'route="{route}"' in line:
                return 1000 * float(line.rpartition(" ")[2])
    raise AssertionError(f"no request of {route} was counted")


def milliseconds(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ms"


# Parts ----------------------------------------------------------------------------------------


def paint(browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill(broker)
        for name, path in (("overview", ""), ("topics", "topics")):
            first, full, loop = list[float](), list[float](), list[float]()
            for _ in range(rounds + 1):  # the first one makes the browser load its own code
                page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
                page.add_init_script(NOTE_DATA)
                began = loop_seconds(broker.process.pid)
                page.goto(f"{broker.url}/#/{path}")
                full.append(page.evaluate("window.shownAt"))
                loop.append(1000 * (loop_seconds(broker.process.pid) - began))
                first.append(page.evaluate(FIRST_PAINT))
                page.context.close()
            yield Row(f"{name}: first paint", milliseconds(first[1:]), "300 ms")
            yield Row(f"{name}: with data", milliseconds(full[1:]), "300 ms")
            yield Row(f"{name}: loop", milliseconds(loop[1:]))


def fill_segments(broker: VarveBroker) -> None:
    """Write SEGMENTS segments, and clean once in between, so that the picture has every kind."""
    config = {"cleanup.policy": "compact", "segment.bytes": str(SEGMENT_BYTES)}
    create(broker, 1, 1, **config, **{"min.cleanable.dirty.ratio": "0.9"})
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
    segments = f"{broker.url}/api/v1/topics/topic-0/partitions/0/segments"
    value = os.urandom(8_000)
    number = 0
    while len(get(segments)["segments"]) < SEGMENTS:
        # In steps, which the broker observes every ten seconds: the slider has a past.
        for _ in range(SEGMENTS * SEGMENT_BYTES // 8_000 // 10):
            producer.produce("topic-0", value, b"%d" % number)
            number += 1
            producer.poll(0)
        assert producer.flush(60) == 0
        time.sleep(10)


def strata(browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill_segments(broker)
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(f"{broker.url}/#/topics/topic-0/0")
        page.locator(".replay input").wait_for(timeout=PAGE_MS)
        for kind, what in (("point", "pointer"), ("zoom", "zoom"), ("scrub", "slider")):
            runs = [page.evaluate(COUNT_FRAMES, [FRAME_SECONDS, kind]) for _ in range(rounds)]
            rate = statistics.median(run[0] for run in runs)
            longest = max(run[1] for run in runs)
            script = statistics.median(run[2] for run in runs)
            figure = f"{rate:.0f}/s, longest {longest:.0f} ms, script {script:.1f} ms"
            yield Row(f"picture: frames, {what}", figure, "60/s")
        page.context.close()


def status(_browser: Browser, _directory: Path, rounds: int) -> Iterator[Row]:
    command = [sys.executable, "-m", "bench.console", "--serve-in-memory"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().decode().strip()
        for route, query in (
            ("/api/v1/cleaner", ""),
            ("/api/v1/overview", ""),
            ("/api/v1/topics", "?limit=1000"),
            ("/api/v1/cleaner/partitions", "?limit=5000"),
        ):
            wall, loop = list[float](), list[float]()
            for _ in range(rounds):
                began, busy = time.perf_counter(), loop_seconds(process.pid)
                get_all(f"{url}{route}", query)
                wall.append(1000 * (time.perf_counter() - began))
                loop.append(1000 * (loop_seconds(process.pid) - busy))
            figure = f"{milliseconds(wall)}, loop {milliseconds(loop)}"
            figure += f", hold {hold_ms(url, route):.1f} ms"
            yield Row(f"{route}, 10,000 partitions", figure, "200 ms, hold 5 ms")
        process.stdin.close()


def get_all(url: str, query: str) -> None:
    """Read every page of a list."""
    answer = get(f"{url}{query}")
    while answer.get("next") is not None:
        answer = get(f"{url}{query}&after={answer['next']}")


async def serve_in_memory() -> None:
    """Serve 10,000 partitions, whose files are in memory, until standard input ends."""
    from tests.support.broker.broker_in_memory import broker_in_memory
    from tests.support.storage.memory_env import MemoryEnv

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    topics = {
        f"topic-{number}": {"partitions": 10, "keys": {"cleanup.policy": "compact"}}
        for number in range(MANY_PARTITIONS // 10)
    }
    async with broker_in_memory(MemoryEnv(seed=1), topics=topics) as broker:
        print(f"http://{broker.http.address}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def metrics(_browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill(broker)
        wall, loop = list[float](), list[float]()
        for _ in range(rounds):
            began, busy = time.perf_counter(), loop_seconds(broker.process.pid)
            for _ in range(SCRAPES):
                size = len(broker.get("/metrics"))
            wall.append(1000 * (time.perf_counter() - began) / SCRAPES)
            loop.append(1000 * (loop_seconds(broker.process.pid) - busy) / SCRAPES)
        hold = hold_ms(broker.url, "/metrics")
        figure = f"{milliseconds(loop)}, in all {milliseconds(wall)}, hold {hold:.1f} ms"
        yield Row(f"/metrics, 1,000 partitions ({size // 1000} KB): loop", figure, "50 ms")


def start(_browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill(broker)
    yield from starts("start, 1,000 partitions", "2 s", directory, rounds, VarveBroker.stop)


def fill_large(broker: VarveBroker) -> None:
    """Write UNCLEAN_BYTES, one active segment in each log."""
    config = {"cleanup.policy": "delete", "segment.bytes": str(2_000_000_000)}
    create(broker, UNCLEAN_LOGS, 1, **config)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
    value = os.urandom(10_000)
    for number in range(UNCLEAN_BYTES // len(value)):
        producer.produce(f"topic-{number % UNCLEAN_LOGS}", value, b"%d" % number)
        producer.poll(0.1 if len(producer) > 5_000 else 0)
    assert producer.flush(120) == 0


def unclean(_browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill_large(broker)
        broker.kill()
    yield from starts("start after kill -9, 10 GB", "10 s", directory, rounds, VarveBroker.kill)


def starts(
    what: str, goal: str, directory: Path, rounds: int, end: Callable[[VarveBroker], object]
) -> Iterator[Row]:
    wall, busy = list[float](), list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        broker = ready_broker(directory)
        wall.append(time.perf_counter() - began)
        busy.append(process_seconds(broker.process.pid))
        end(broker)
    figure = f"{statistics.median(wall):.2f} s, processor {statistics.median(busy):.2f} s"
    yield Row(what, figure, goal)


def cost(browser: Browser, directory: Path, rounds: int) -> Iterator[Row]:
    with broker_in(directory) as broker:
        fill(broker)
        for load, rate in (("idle", 0), (f"{RECORDS_PER_SECOND} records/s", RECORDS_PER_SECOND)):
            with writes(broker, rate):
                measured = [costs(browser, broker) for _ in range(rounds)]
            for name in PAGES:
                share = statistics.median(pages[name][0] for pages in measured)
                requests = statistics.median(pages[name][1] for pages in measured)
                figure = f"{share:.2%} of a core, {requests:.1f} requests/s"
                yield Row(f"open page {name}, {load}", figure, "1 %")


PAGES: Final = {
    "overview": "",
    "topics": "topics",
    "topic": "topics/topic-0",
    "partition": "topics/topic-0/0",
    "cleaner": "cleaner",
}


def costs(browser: Browser, broker: VarveBroker) -> dict[str, tuple[float, float]]:
    """Return the share of a core that each open page costs, and its requests per second."""
    figures = {}
    for name, path in PAGES.items():
        without = broker_share(broker, None)
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(f"{broker.url}/#/{path}")
        page.locator("main h2, main dl, main table").first.wait_for(timeout=PAGE_MS)
        asked: list[str] = []
        page.on("request", lambda sent, asked=asked: asked.append(sent.url))
        share = broker_share(broker, page) - without
        figures[name] = (share, len(asked) / COST_SECONDS)
        page.context.close()
    return figures


def broker_share(broker: VarveBroker, page: Page | None) -> float:
    """Return the processor time of the broker in some seconds, as a share of a core."""
    before, began = process_seconds(broker.process.pid), time.perf_counter()
    while time.perf_counter() - began < COST_SECONDS:
        time.sleep(0.5)
        if page is not None:
            page.mouse.move(600, 500 + time.perf_counter() % 10)
    seconds = time.perf_counter() - began
    return (process_seconds(broker.process.pid) - before) / seconds


@contextmanager
def writes(broker: VarveBroker, rate: int) -> Iterator[None]:
    """Write so many records a second in a thread."""
    stopping = threading.Event()

    def write() -> None:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
        while rate and not stopping.wait(0.1):
            for number in range(rate // 10):
                producer.produce(f"topic-{number % TOPICS}", b"x" * 100, b"%d" % number)
            producer.poll(0)
        producer.flush(10)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


PARTS: Final = {
    part.__name__: part for part in (paint, strata, status, metrics, start, unclean, cost)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--serve-in-memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_in_memory:
        asyncio.run(serve_in_memory())
        return
    program = next(filter(None, map(shutil.which, BROWSERS)))
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in arguments.only:
            with tempfile.TemporaryDirectory(prefix="varve-bench-") as directory:
                for row in PARTS[name](browser, Path(directory), arguments.rounds):
                    load = f"{os.getloadavg()[0]:.1f}"
                    print(f"{row.what}: {row.figure} (load average {load})", flush=True)
                    rows.append([row.what, row.figure, row.goal, load])
        browser.close()
    print(markdown_table(["", "Varve", "goal", "load"], rows))


if __name__ == "__main__":
    main()
