"""Shared parts of jobs on a lease: deferred interrupts, the transport, errors of a lost lease."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cleaner.remote_compaction import PartitionPlan
from pipeline.client.lease import Lease
from pipeline.engines.engine import StageFailedError
from pipeline.engines.spark_session import LOCAL_MASTER
from storage.format.filenames import LOG, file_name


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay an interrupt to the end of a block, such as between leasing and using the lease.

    The second interrupt takes effect at once.
    """
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if waiting:
            signal.default_int_handler(number, frame)
        waiting.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if waiting:
        raise KeyboardInterrupt


@contextmanager
def lost_lease_reported(lease: Lease) -> Iterator[None]:
    """Report a lost lease instead of the failed task: a lost lease takes the task's files away."""
    try:
        yield
    except StageFailedError:
        lease.confirm()  # raises if the lease is lost or the broker does not answer
        raise


def choose_transport(requested: str, engine_name: str, master: str, lease: Lease) -> str:
    """Return "disk" if the workers run here and can open the lease's files, else "http"."""
    if requested != "auto":
        return requested
    if engine_name == "spark" and LOCAL_MASTER.fullmatch(master) is None:
        return "http"
    return "disk" if all(_is_here(planned) for planned in lease.plan.partitions) else "http"


def _is_here(planned: PartitionPlan) -> bool:
    """Return whether this user can read the files of this plan and write beside them.

    A folder of the same name on another machine holds other files.
    """
    job = planned.job
    if not job.groups:
        return True
    path = os.path.join(job.directory, file_name(job.groups[0][0].base_offset, LOG))
    return os.access(path, os.R_OK) and os.access(os.path.dirname(job.directory), os.W_OK)
