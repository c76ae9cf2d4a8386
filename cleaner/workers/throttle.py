"""Limit the bytes per second of all workers together, without locks between processes.

Rule 1. The broker alone owns the token buckets. It tops up *grants*; a worker only spends them.
Rule 2. Every slot of the shared memory has one writer, and is 8 aligned bytes: written whole.
Rule 3. Granted and not yet spent bytes never exceed what is in the bucket, except after the rate
        was lowered or set. The bucket never holds more than one second of the rate. So over any
        window the bytes charged stay within rate x window + burst, whatever the workers do and
        however late the broker tops up.
Rule 4. A dead worker blocks no bytes: unspent grants were never taken from the bucket.

A worker spends its grant and waits for more in short naps, in which it checks its abort flag. If a
rate is lowered or set while a job runs, outstanding grants can put the bucket into debt; nothing is
granted until the debt is paid.

The arithmetic (IoTokenBucket, Budget) knows no clock: time comes in as seconds that only go
forward.
"""

import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from cleaner.host import Foreground
from cleaner.job import CleanAbortedError
from cleaner.workers.spare_capacity import SpareCapacity

BURST_SECONDS: Final = 1.0  # long enough to ride out a late top-up, short enough not to be felt
TOP_UP_SECONDS: Final = 0.05  # well below the burst, so that a worker seldom runs dry
# The share of the burst for one worker: a worker that does not spend must not delay the others.
GRANT_SHARE_MAX: Final = 0.25
FLOOR_BYTES_PER_SECOND: Final = float(64 << 20)  # without a configured rate, under foreground load
# Between two reads of the foreground counters, which visit all topics.
OBSERVE_SECONDS: Final = 0.25
MOVED_SECONDS: Final = 1.0  # averaging period of the workers' speed
NAP_SECONDS: Final = 0.01  # between two checks of the grant and the abort flag
UNLIMITED: Final = (1 << 63) - 1  # a grant that no worker can spend

_PAGE_BYTES: Final = mmap.PAGESIZE


class _Slot(IntEnum):
    """Index of each 8-byte slot. The broker writes the first three, the worker the others."""

    ABORTED_RUN = 0  # the run that must stop
    READ_GRANTED = 1
    WRITE_GRANTED = 2
    READ_SPENT = 8  # on another cache line than what the broker writes
    WRITE_SPENT = 9
    READ_WAITED_US = 10
    WRITE_WAITED_US = 11
    BEATS = 16  # on a line of its own: written by another thread


class Direction(IntEnum):
    """The budget for reads or for writes."""

    READ = 0
    WRITE = 1


Slots: TypeAlias = "memoryview[int]"


def new_memory() -> int:
    """Return a descriptor of one anonymous zeroed page, for SharedMemory and for a worker."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("varve-cleaner", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _PAGE_BYTES)
        # A worker that truncated the file would kill the broker by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd
    fd, path = tempfile.mkstemp(prefix="varve-cleaner-")
    os.unlink(path)
    os.ftruncate(fd, _PAGE_BYTES)
    return fd


def beat(slots: Slots) -> None:
    """Count a heartbeat; a thread of the worker calls this repeatedly."""
    slots[_Slot.BEATS] += 1


def beats_of(slots: Slots) -> int:
    """Return the count of heartbeats."""
    return slots[_Slot.BEATS]


class SharedMemory:
    """One worker's shared page. Without a descriptor, it is private to the process."""

    def __init__(self, fd: int | None = None) -> None:
        self._map = mmap.mmap(-1 if fd is None else fd, _PAGE_BYTES)
        self.slots: Slots = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Unmap the page; may be called twice."""
        self.slots.release()
        self._map.close()


class WorkerSide:
    """The worker's use of the page: spend grants, wait, check the abort flag."""

    def __init__(self, slots: Slots, run: int, nap: Callable[[float], object]) -> None:
        self._slots = slots
        self._run = run
        self._nap = nap

    def aborted(self) -> bool:
        """Return whether this run must stop.

        No other number counts: a worker that was stopped in a later run may help an earlier one.
        """
        return self._slots[_Slot.ABORTED_RUN] == self._run

    def charge(self, direction: Direction, count: int) -> None:
        """Spend `count` bytes, waiting for grants. Raises CleanAbortedError."""
        slots = self._slots
        granted, spent = _Slot.READ_GRANTED + direction, _Slot.READ_SPENT + direction
        while True:
            part = min(count, max(0, slots[granted] - slots[spent]))
            slots[spent] += part
            count -= part
            if count <= 0:
                return
            if self.aborted():
                raise CleanAbortedError
            slots[_Slot.READ_WAITED_US + direction] += int(NAP_SECONDS * 1e6)
            self._nap(NAP_SECONDS)


class BrokerSide:
    """The broker's use of the page."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def abort(self, run: int) -> None:
        """Tell the worker to stop run number `run`."""
        self._slots[_Slot.ABORTED_RUN] = run

    def spent(self, direction: Direction) -> int:
        """Return the bytes charged, over all runs."""
        return self._slots[_Slot.READ_SPENT + direction]

    def granted(self, direction: Direction) -> int:
        """Return the bytes granted, over all runs."""
        return self._slots[_Slot.READ_GRANTED + direction]

    def grant(self, direction: Direction, total: int) -> None:
        """Set the bytes granted, over all runs."""
        self._slots[_Slot.READ_GRANTED + direction] = min(total, UNLIMITED)

    def waited_seconds(self, direction: Direction) -> float:
        """Return the time spent waiting for grants, over all runs."""
        return self._slots[_Slot.READ_WAITED_US + direction] / 1e6

    def progress(self) -> float:
        """Return a number that grows with each byte moved and each wait for the budgets."""
        return sum(
            self.spent(direction) + self.waited_seconds(direction) for direction in Direction
        )


@dataclass(slots=True)
class IoTokenBucket:
    """Bytes that may be moved. Time adds to it, up to the burst; it may be negative."""

    bytes_per_second: float
    level: float
    updated_at: float

    @property
    def burst_bytes(self) -> float:
        """Return the maximum level."""
        return self.bytes_per_second * BURST_SECONDS

    def earn(self, now: float) -> None:
        """Add the bytes of the time since the last call."""
        assert now >= self.updated_at
        earned = (now - self.updated_at) * self.bytes_per_second
        self.level = min(self.burst_bytes, self.level + earned)
        self.updated_at = now

    def spend(self, count: int) -> None:
        """Subtract bytes that were moved."""
        assert count >= 0
        self.level -= count


@dataclass(slots=True, eq=False)
class _Account:
    """The grant and the spent bytes of one job in one direction."""

    side: BrokerSide
    direction: Direction
    settled_bytes: int  # spent, as of the last settlement

    @property
    def unspent(self) -> int:
        # As of the last settlement; later spending is settled at the next top-up.
        return self.side.granted(self.direction) - self.settled_bytes


@dataclass(slots=True)
class Budget:
    """One direction's bucket and the workers that share it. A rate of None means no limit."""

    direction: Direction
    rate: float | None
    now: float
    bucket: IoTokenBucket | None = field(init=False, default=None)
    _speed: float = field(init=False, default=0.0)  # bytes per second, averaged
    _moved: int = field(init=False, default=0)  # since _measured_at
    _measured_at: float = field(init=False, default=0.0)
    _accounts: dict[int, _Account] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._measured_at = self.now
        self.set_rate(self.rate, self.now)

    @property
    def has_workers(self) -> bool:
        """Return whether a job is running."""
        return bool(self._accounts)

    def moved_bytes_per_second(self, now: float) -> float:
        """Return the recent speed of the workers."""
        self._settle(now)
        passed = now - self._measured_at
        if passed > 0:
            share = 1 - math.exp(-passed / MOVED_SECONDS)
            self._speed += share * (self._moved / passed - self._speed)
            self._moved, self._measured_at = 0, now
        return self._speed

    def set_rate(self, rate: float | None, now: float) -> None:
        """Change the rate; takes effect at the next top-up. A new bucket starts full."""
        assert rate is None or rate > 0
        self._settle(now)
        self.rate = rate
        if rate is None:
            self.bucket = None
        elif self.bucket is None:
            self.bucket = IoTokenBucket(rate, rate * BURST_SECONDS, now)
            for account in self._accounts.values():
                account.side.grant(self.direction, account.settled_bytes)
        else:
            self.bucket.bytes_per_second = rate
            self.bucket.earn(now)  # caps the level at the new burst

    def join(self, index: int, side: BrokerSide) -> None:
        """Add a worker that starts a job, without a grant."""
        assert index not in self._accounts
        spent = side.spent(self.direction)
        side.grant(self.direction, spent)
        self._accounts[index] = _Account(side, self.direction, spent)

    def leave(self, index: int, now: float) -> None:
        """Remove a worker; its unspent bytes are free again."""
        self._settle(now)
        account = self._accounts.pop(index)
        account.side.grant(self.direction, account.settled_bytes)

    def top_up(self, now: float) -> None:
        """Grant the bytes in the bucket that are not granted yet."""
        self._settle(now)
        accounts = list(self._accounts.values())
        if self.bucket is None:
            for account in accounts:
                account.side.grant(self.direction, UNLIMITED)
            return
        unspent = [account.unspent for account in accounts]
        remaining = max(0, int(self.bucket.level) - sum(unspent))
        unspent_max = max(1, int(self.bucket.burst_bytes * GRANT_SHARE_MAX))
        grants = split_grants(remaining, unspent, unspent_max)
        for account, more in zip(accounts, grants, strict=True):
            account.side.grant(self.direction, account.side.granted(self.direction) + more)

    def _settle(self, now: float) -> None:
        if self.bucket is not None:
            self.bucket.earn(now)
        for account in self._accounts.values():
            spent = account.side.spent(self.direction)
            moved = max(0, spent - account.settled_bytes)
            self._moved += moved
            if self.bucket is not None:
                self.bucket.spend(moved)
            account.settled_bytes = spent


def split_grants(remaining: int, unspent: Sequence[int], unspent_max: int) -> list[int]:
    """Split `remaining` bytes evenly among workers with `unspent` bytes each.

    No worker gets more than `unspent_max` bytes in all; the others share the difference.
    """
    grants = [0] * len(unspent)
    fullest_first = sorted(range(len(unspent)), key=lambda index: -unspent[index])
    for done, index in enumerate(fullest_first):
        fair = remaining // (len(unspent) - done)
        grants[index] = max(0, min(fair, unspent_max - unspent[index]))
        remaining -= grants[index]
    return grants


class Throttle:
    """Both budgets. The dispatcher calls `tick` every TOP_UP_SECONDS while jobs run.

    A direction without a configured rate has the rate that `spare_capacity` allows.
    """

    def __init__(
        self,
        read_bytes_per_second: float | None,
        write_bytes_per_second: float | None,
        now: float,
        *,
        floor_bytes_per_second: float = FLOOR_BYTES_PER_SECOND,
    ) -> None:
        self._explicit = (read_bytes_per_second, write_bytes_per_second)
        self.budgets = (
            Budget(Direction.READ, read_bytes_per_second, now),
            Budget(Direction.WRITE, write_bytes_per_second, now),
        )
        self.spare_capacity = SpareCapacity(floor_bytes_per_second, now)
        self._due_at: float | None = None  # of the next tick; None if no job runs
        self._observe_at = -math.inf

    @property
    def rates(self) -> tuple[float, float]:
        """Return the present limits for reads and writes in bytes/s; math.inf means no limit."""
        read, write = (budget.rate for budget in self.budgets)
        return (math.inf if read is None else read, math.inf if write is None else write)

    def set_rates(
        self,
        read: float | None,
        write: float | None,
        now: float,
        *,
        floor_bytes_per_second: float | None = None,
    ) -> None:
        """Change both rates, and the floor if given; running jobs continue."""
        if floor_bytes_per_second is not None:
            self.spare_capacity.set_floor(floor_bytes_per_second)
        self._explicit = (read, write)
        self._apply(now)

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        """Add a worker that starts a job."""
        for budget in self.budgets:
            budget.join(index, side)
            budget.top_up(now)

    def leave(self, index: int, now: float) -> None:
        """Remove a worker whose job has ended."""
        for budget in self.budgets:
            budget.leave(index, now)
        if not any(budget.has_workers for budget in self.budgets):
            self._due_at = None

    def tick(self, now: float, foreground: Callable[[], Foreground]) -> None:
        """Observe the broker's load and top up the grants.

        A timer of the event loop calls this TOP_UP_SECONDS after the last call; its lateness shows
        how long the loop was blocked. `foreground` is CleanerHost.foreground.
        """
        late = 0.0 if self._due_at is None else max(0.0, now - self._due_at)
        self._due_at = now + TOP_UP_SECONDS
        if now >= self._observe_at:
            self.spare_capacity.observe(foreground(), now)
            self._observe_at = now + OBSERVE_SECONDS
        moved = max(budget.moved_bytes_per_second(now) for budget in self.budgets)
        self.spare_capacity.tick(now, late, moved)
        self._apply(now)

    def _apply(self, now: float) -> None:
        capacity = self.spare_capacity.allowed
        allowed = None if capacity == math.inf else capacity
        for budget, explicit in zip(self.budgets, self._explicit, strict=True):
            rate = allowed if explicit is None else explicit
            if budget.rate != rate:
                budget.set_rate(rate, now)
            budget.top_up(now)
