"""Worker processes: what they inherit, what they send, and how they end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cleaner.job import CleanAbortedError, CleanJob, CleanReport, JobControl
from cleaner.verification import LogCheckRequest
from cleaner.workers.channel import (
    ROWS_PER_PART,
    CheckLog,
    FromWorker,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    Message,
    Progressed,
    RunJob,
    SplitOrder,
    VerifyJob,
    WorkerReady,
)
from cleaner.workers.process import ProcessLink, spawn_command
from cleaner.workers.throttle import UNLIMITED, BrokerSide, Direction, SharedMemory
from cleaner.workers.worker import PROGRESS_SECONDS, REASON_CHARS_MAX, execute
from storage.env import Env
from storage.errors import StorageError, TransactionIndexError
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaner_jobs import GROUP, group_of, job, report_of
from tests.support.storage.memory_env import MemoryEnv
from tests.support.waiting import wait_until

ODD = [sys.executable, "-P", "-m", "tests.support.cleaner.scheduler.odd_worker"]


def run_here(runner, slots=None) -> list[FromWorker]:
    messages: list[FromWorker] = []
    memory = SharedMemory()
    side = BrokerSide(memory.slots if slots is None else slots)
    side.grant(Direction.READ, UNLIMITED)
    side.grant(Direction.WRITE, UNLIMITED)
    env = MemoryEnv(1)
    execute(
        RunJob(3, job()),
        runner,
        env,
        memory.slots if slots is None else slots,
        send=messages.append,
        nap=env.advance_ms,
    )
    return messages


def test_a_job_ends_with_its_report_after_its_groups() -> None:
    def runner(env: Env, order: CleanJob, control: JobControl) -> CleanReport:
        control.groups_cleaned((GROUP,))
        return report_of(order)

    assert run_here(runner) == [GroupsCleaned(3, (GROUP,)), JobDone(3, report_of(job()))]


def test_an_aborted_job_says_so_and_nothing_else() -> None:
    memory = SharedMemory()
    BrokerSide(memory.slots).abort(3)

    def runner(env: Env, order: CleanJob, control: JobControl) -> CleanReport:
        assert control.aborted()
        raise CleanAbortedError

    assert run_here(runner, memory.slots) == [JobStopped(3)]


@pytest.mark.parametrize(
    ("error", "reason", "missing", "index_wrong"),
    [
        (FileNotFoundError(2, "gone", "0.log"), "FileNotFoundError: ", True, False),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space", False, False),
        (MemoryError(), "MemoryError in runner: raise error", False, False),
        (AssertionError("x" * 9999), "AssertionError: xxx", False, False),
        (TransactionIndexError(7, 12), "TransactionIndexError: ", False, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_job_raises_is_told_by_name(
    error: Exception, reason: str, missing: bool, index_wrong: bool
) -> None:
    def runner(env: Env, order: CleanJob, control: JobControl) -> CleanReport:
        raise error

    (failed,) = run_here(runner)
    assert isinstance(failed, JobFailed)
    assert failed.reason.startswith(reason)
    assert len(failed.reason) <= REASON_CHARS_MAX
    # A traceback is for a mistake of ours, not for a full disk.
    assert ("runner" in failed.traceback) is not isinstance(error, OSError | StorageError)
    assert failed.file_missing == missing
    assert failed.index_wrong == index_wrong


def test_progress_is_told_now_and_then_however_often_it_is_reported() -> None:
    def runner(env: MemoryEnv, order: CleanJob, control: JobControl) -> CleanReport:
        for number in range(100):
            control.progress("map", number, 100)
            env.advance_ms(PROGRESS_SECONDS * 1000 / 10)
        return report_of(order)

    messages = run_here(runner)
    progresseds = [message for message in messages if isinstance(message, Progressed)]
    assert 10 <= len(progresseds) <= 11


# --- as a process


async def receive(link: ProcessLink) -> Message | None:
    return await asyncio.wait_for(link.receive(), 60)


@contextmanager
def closing(link: ProcessLink) -> Iterator[ProcessLink]:
    try:
        yield link
    finally:
        link.kill()
        link._process.wait(30)
        link.close()


async def started() -> ProcessLink:
    link = await spawn_command([*ODD, "--nice", "7"])
    assert isinstance(await receive(link), WorkerReady)
    return link


def grant_all(link: ProcessLink) -> BrokerSide:
    side = BrokerSide(link.slots)
    side.grant(Direction.READ, UNLIMITED)
    side.grant(Direction.WRITE, UNLIMITED)
    return side


async def test_a_worker_runs_job_after_job_and_ends_when_the_socket_closes() -> None:
    with closing(await started()) as link:
        side = grant_all(link)
        for run in (1, 2):
            link.send(RunJob(run, job()))
            assert await receive(link) == GroupsCleaned(run, (group_of(job()),))
            assert await receive(link) == JobDone(run, report_of(job()))
        assert (side.spent(Direction.READ), side.spent(Direction.WRITE)) == (200, 100)
        link.shutdown()
        assert await receive(link) is None
        assert await link.reap() == "exit status 0"
        assert link.is_gone()


async def test_a_job_with_many_aborted_transactions_is_sent_in_turns() -> None:
    """One frame in a turn of the loop; the worker puts them together."""
    rows = 20 * ROWS_PER_PART
    aborted = tuple(TxnIndexEntry(1, 2 * n, 2 * n + 1, 2 * n + 2) for n in range(rows))
    with closing(await started()) as link:
        grant_all(link)
        written: list[int] = []
        write = link._writer.write
        link._writer.write = lambda data: (written.append(len(data)), write(data))  # type: ignore[assignment,func-returns-value]
        link.send(RunJob(1, replace(job(), aborted=aborted)))
        for frames in range(1, 22):
            assert len(written) == frames
            await asyncio.sleep(0)
        assert await receive(link) == GroupsCleaned(1, (group_of(job()),))
        assert isinstance(await receive(link), JobDone)
        assert len(written) == 21


MANY_ABORTED = replace(
    job(), aborted=tuple(TxnIndexEntry(1, n, n, n) for n in range(ROWS_PER_PART + 1))
)


@pytest.mark.parametrize(
    "order",
    [
        RunJob(1, MANY_ABORTED),
        VerifyJob(1, MANY_ABORTED, (), ()),
        CheckLog(1, MANY_ABORTED, LogCheckRequest(0)),
    ],
    ids=lambda order: type(order).__name__,
)
async def test_an_order_of_several_frames_arrives_as_a_whole(order: SplitOrder) -> None:
    with closing(await started()) as link:
        grant_all(link)
        link.send(order)
        reply = await receive(link)  # this worker can only run jobs
        assert isinstance(reply, GroupsCleaned if isinstance(order, RunJob) else JobFailed)


async def test_a_job_that_raises_costs_nothing_but_itself() -> None:
    with closing(await started()) as link:
        grant_all(link)
        link.send(RunJob(1, job(job_id="raise")))
        failed = await receive(link)
        assert isinstance(failed, JobFailed)
        assert "No space left on device" in failed.reason
        link.send(RunJob(2, job()))
        assert isinstance(await receive(link), GroupsCleaned)


async def test_a_worker_waits_for_grants_and_heeds_the_abort_flag_while_it_waits() -> None:
    with closing(await started()) as link:
        side = BrokerSide(link.slots)
        side.grant(Direction.READ, 10_000)
        link.send(RunJob(1, job(job_id="work")))
        await until_true(lambda: side.waited_seconds(Direction.READ) > 0)
        assert side.spent(Direction.READ) == 10_000
        side.abort(1)
        while not isinstance(message := await receive(link), JobStopped):
            assert isinstance(message, Progressed)


async def until_true(holds) -> None:
    await asyncio.to_thread(wait_until, holds, "in the other process")


async def test_a_crash_is_seen_and_named() -> None:
    with closing(await started()) as link:
        link.send(RunJob(1, job(job_id="crash")))
        assert await receive(link) is None
        assert await link.reap() == f"killed by signal {signal.SIGSEGV}"


async def test_a_hanging_worker_can_be_killed() -> None:
    with closing(await started()) as link:
        link.send(RunJob(1, job(job_id="hang")))
        link.kill()
        assert await receive(link) is None
        assert await link.reap() == "killed by signal 9"


async def test_a_stop_signal_does_not_end_a_worker_that_is_still_starting() -> None:
    program = "import os, signal\nfor number in (2, 15): os.kill(os.getpid(), number)"
    link = await spawn_command([sys.executable, "-c", program])
    with closing(link):
        assert await link.reap() == "exit status 0"


async def test_interrupts_are_left_to_the_broker() -> None:
    with closing(await started()) as link:
        os.kill(link.pid, signal.SIGINT)
        os.kill(link.pid, signal.SIGTERM)
        grant_all(link)
        link.send(RunJob(1, job()))
        assert isinstance(await receive(link), GroupsCleaned)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_worker_inherits_its_socket_and_its_page_and_no_other_descriptor() -> None:
    with socket.socket() as mine, closing(await started()) as link:
        mine.set_inheritable(True)
        with closing(await started()) as second:
            for worker in (link, second):
                folder = f"/proc/{worker.pid}/fd"
                opened = {int(fd): os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
                assert opened[0] == opened[1] == "/dev/null"
                rest = [target for fd, target in opened.items() if fd > 2]
                assert sorted(target.partition(":")[0] for target in rest) == ["/memfd", "socket"]
        assert os.getpriority(os.PRIO_PROCESS, link.pid) == min(19, os.nice(0) + 7)


STARTING_WORKER = """
import os, socket, sys
from cleaner.workers.worker import finish_start, prepare
ours, theirs = socket.socketpair()
memory_fd = os.memfd_create("m")
before = os.nice(0)
preparation = prepare(
    [f"--fd={theirs.detach()}", f"--memory-fd={memory_fd}", f"--parent={os.getppid()}", "--nice=7"]
)
loading = os.nice(0)
finish_start(preparation)
print(loading - before, os.nice(0) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")
def test_a_worker_loads_its_kernels_at_half_of_its_nice_value() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTING_WORKER], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.returncode) == (["3", "7"], 0), done.stderr


BROKER = """
import asyncio, sys
from cleaner.workers.channel import RunJob
from cleaner.workers.process import spawn_command
from tests.support.cleaner.cleaner_jobs import job
async def main():
    module = "tests.support.cleaner.scheduler.odd_worker"
    link = await spawn_command([sys.executable, "-P", "-m", module])
    await link.receive()
    link.send(RunJob(1, job(job_id="hang")))
    print(link.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills the orphan")
def test_a_busy_worker_dies_with_its_broker() -> None:
    broker = subprocess.Popen([sys.executable, "-c", BROKER], stdout=subprocess.PIPE)
    assert broker.stdout is not None
    worker_pid = int(broker.stdout.readline())
    os.kill(worker_pid, 0)
    broker.kill()
    broker.wait(30)
    broker.stdout.close()
    wait_until(lambda: not is_running(worker_pid), "the orphan dies")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_worker_that_cannot_be_started_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await spawn_command(["/nonexistent/python"])
    assert len(os.listdir("/proc/self/fd")) == before
