"""The first clean after a start compiles nothing: a worker that says it is ready has all kernels.

In a process of its own, because other tests compile kernels in this one.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECONDS = 110
PROGRAM = """
import gc
import sys
from dataclasses import replace

# As cleaner/workers/worker.py does before it reports that it is ready.
from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.engine.verify_job import verify_groups

warm_up()

from numba.core.dispatcher import Dispatcher


def compiled():
    dispatchers = [item for item in gc.get_objects() if isinstance(item, Dispatcher)]
    names = [f"{item.py_func.__module__}.{item.py_func.__name__}" for item in dispatchers]
    return {name: len(item.signatures) for name, item in zip(names, dispatchers)}


from cleaner.job import ViewOrder, ViewRules
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from storage.format.batch import ControlType

ready = compiled()
assert len(ready) > 30, ready


def check(shape):
    grown = {name: count for name, count in compiled().items() if count > ready.get(name, 0)}
    grown = {name: count for name, count in grown.items() if name.startswith("cleaner.")}
    print(shape, sorted(grown))


def fill(log, codec=0):
    log.put(("a", "1"), ("b", "2"), ("c", "x" * 300), codec=codec)
    log.put(("a", "3"), ("b", None), codec=codec)
    log.put(("d", "4"), codec=codec)
    log.roll()


def run(log, **changes):
    report = log.clean(**changes)
    assert report.next_dirty_offset == log.dirty
    return report


for codec, name in enumerate(("plain", "gzip", "snappy", "lz4", "zstd")):
    log = CompactedLog()
    fill(log, codec)
    assert run(log).passes == 1
    fill(log, codec)
    run(log)
    log.pass_retention()
    assert log.clean_expired().tombstones_removed
    check(f"{name}, tombstones, expiry")

log = CompactedLog()
bank = Producer(7)
for end in (ControlType.COMMIT, ControlType.ABORT):
    log.put(("a", "1"), ("b", "2"), by=bank)
    log.end(bank, end)
    log.put(("a", "2"), by=Producer(9, is_transactional=False, starts_over=True))
log.put(("c", "2"), by=bank, codec=4)
log.end(bank, ControlType.COMMIT)
log.roll()
assert run(log).passes == 2
fill(log)
run(log)
log.pass_retention()
log.clean_expired()
check("transactions, two passes")

log = CompactedLog()
for number in range(30):
    log.put(*((f"key-{number}-{place}", "v") for place in range(20)), codec=number % 5)
log.roll()
run(log, keys=64)
check("a map that is full")

log = CompactedLog()
for _ in range(3):
    fill(log)
    fill(log, 4)
    log.publish(replace(log.job(singly=True), slack=0.1, spill_bytes_max=1 << 30))
    report = log.publish(replace(log.job(singly=True), by_index=True, spill_bytes_max=1 << 30))
    assert report.next_dirty_offset == log.log.log_end_offset
check("by key index, selective and whole")

log = CompactedLog()
for number in range(30):
    log.put(*((f"key-{number}-{place}", "v") for place in range(20)), codec=number % 5)
    log.roll()
log.publish(replace(log.job(keys=64), spill_bytes_max=1 << 30))
check("keys that are spilled")

for header in (None, b"version"):
    log = CompactedLog()
    for _ in range(2):
        fill(log)
        view = ViewRules(order=ViewOrder(header, None))
        run_clean(log.env, replace(log.job(), view=view), Recorder())
    check(f"a view by {header or 'timestamp'}")
"""


def test_the_first_clean_of_every_shape_compiles_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shapes = done.stdout.splitlines()
    assert len(shapes) == 11
    assert [shape for shape in shapes if not shape.endswith(" []")] == []
