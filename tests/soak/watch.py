"""What a run takes of the machine, second by second."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LEFTOVERS = (".cleaned", ".deleted", ".swap", ".journal")


def disk_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk; those that go meanwhile take nothing."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def files_like(folder: Path, *endings: str) -> list[str]:
    """Names that end so."""
    return sorted(
        name for _, _, names in os.walk(folder) for name in names if name.endswith(endings)
    )


def workers_of(pid: int) -> list[psutil.Process]:
    """The cleaner's workers of a broker, which has no other children."""
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


@dataclass
class Sample:
    """One look."""

    seconds: float
    disk_bytes: int
    broker_fds: int
    broker_bytes: int  # resident
    worker_bytes: int  # resident, of the largest worker
    workers: int


@dataclass
class Watch:
    """All looks, and the bound that the disk has to keep to."""

    folder: Path
    samples: list[Sample] = field(default_factory=list)
    over: list[str] = field(default_factory=list)

    def look(self, seconds: float, pid: int, bound_bytes: int) -> None:
        """Take a sample of a broker that runs."""
        used = disk_bytes(self.folder)
        try:
            broker = psutil.Process(pid)
            fds, resident = broker.num_fds(), broker.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            fds = resident = 0
        sizes = []
        for worker in workers_of(pid):
            try:
                sizes.append(worker.memory_info().rss)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        largest = max(sizes, default=0)
        self.samples.append(Sample(seconds, used, fds, resident, largest, len(sizes)))
        if used > bound_bytes:
            self.over.append(f"{used} bytes after {seconds:.0f} s, the bound is {bound_bytes}")

    def largest(self, name: str) -> int:
        """The largest value of one field of the samples."""
        return max((int(getattr(sample, name)) for sample in self.samples), default=0)
