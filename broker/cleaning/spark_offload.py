"""Jobs on Spark that the cleaner wants: started, watched, ended, and what comes of them.

Rules
- A job is `python -m pipeline compact`, a process of its own: nothing of Spark is imported here,
  and what it does to a log goes through a lease, as with everybody who works outside of the broker.
- One job at a time: all partitions of one topic that are due, beginning with the most urgent topic.
- The process has a group of its own. To end it is to ask it, which gives its run up, and then to
  kill what is left of the group. It is ended at the stop, by an operator's pause or abort of one of
  its partitions, and when it takes too long.
- What it says on standard error is in the log, some lines of it.
- Every end is told to the pool (SparkOffload) partition by partition; a failure also to the
history.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.history import JobRecord, Outcome
from cleaner.scheduler.offload import OffloadedJob
from config.exit_codes import DONE, NO_SPARK, STALE, USAGE
from config.settings import CleanerSettings
from config.units import about_span
from storage.env import Env
from storage.model import TopicPartition

ROUND_SECONDS: Final = 5.0  # between two looks, if nobody says that something is due
GRACE_SECONDS: Final = 10.0  # for a job that is asked to end: it gives its run up
LEFT_SECONDS: Final = 5.0  # for the rest of its group, which removes its own files
POLL_SECONDS: Final = 0.1  # between two looks whether that is gone
ANSWER_BYTES_MAX: Final = 16 << 20  # a line or so for each partition
LINES_MAX: Final = 20  # of what a job says, in the log
LINE_CHARS_MAX: Final = 500
CHUNK_BYTES: Final = 1 << 16
NEEDS: Final = ("pipeline", "pyspark", "pyarrow", "pandas")
EXTRA_MISSING: Final = "it needs more packages: pip install 'varve[pipeline]'"
COMMAND: Final = (sys.executable, "-P", "-m", "pipeline")

_PACKAGES: Final = str(Path(__file__).resolve().parents[2])

logger = structlog.get_logger("broker.spark")


@dataclass(slots=True)
class ChildExit:
    """How a job's process ended."""

    code: int  # below 0: by this signal
    answer: Mapping[str, Any]  # what it printed; empty where that is no JSON object
    words: str  # its last line on standard error


@dataclass(slots=True)
class _Child:
    """A process that runs, and why it was told to end."""

    process: Process
    interrupted: str = ""
    timed_out: bool = False
    end_tasks: set["asyncio.Task[None]"] = field(default_factory=set)


@dataclass(slots=True)
class _ChildOutput:
    """What a job says on standard error: the first lines are for the log, the last is kept."""

    topic: str
    lines: int = 0
    last: str = ""

    def line(self, raw: bytes) -> None:
        text = raw.decode(errors="replace").strip()[:LINE_CHARS_MAX]
        if not text:
            return
        self.last = text
        self.lines += 1
        if self.lines <= LINES_MAX:
            logger.warning("spark job says", topic=self.topic, reason=text)


class SparkRunner:
    """Starts what is due, and tells the pool how it ended."""

    def __init__(
        self,
        env: Env,
        pool: CleanerPool,
        cleaning: BrokerCleanerHost,
        *,
        settings: Callable[[], CleanerSettings],
        url: Callable[[], str],
        token_file: Callable[[], str | None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`url`: of the broker's own HTTP; `token_file`: that holds its token, if there is one."""
        self._env = env
        self._pool = pool
        self._cleaning = cleaning
        self._settings = settings
        self._url = url
        self._token_file = token_file
        self._command = tuple(command)
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._child: _Child | None = None
        self._stopping = False

    def start(self) -> None:
        """Look for what is due from now on."""
        self._pool.offload.wake = self._wake.set
        self._watcher = asyncio.create_task(self._watch(), name="spark-cleaning")

    async def stop(self) -> None:
        """End the job under way, and start none any more. While the broker's HTTP still answers."""
        self._stopping = True
        self._wake.set()
        self._interrupt("the broker stops")
        if self._watcher is not None:
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self._pool.offload.due and not self._stopping:
                    await self._run_next()
            except Exception:
                logger.exception("spark job was not seen to its end")  # supervised

    # One job ------------------------------------------------------------------------------------

    async def _run_next(self) -> None:
        offload = self._pool.offload
        if any(find_spec(name) is None for name in NEEDS):
            self._cannot_start(EXTRA_MISSING)
            return
        first, *_ = due = offload.due
        partitions = tuple(sorted(partition for partition in due if partition.topic == first.topic))
        settings = self._settings()
        job = OffloadedJob(partitions, settings.spark.master, offload.now_ms())
        began_ms = self._env.wall_ms()
        offload.job_started(job)
        offload.interrupt = self._interrupt
        logger.info("spark job started", topic=first.topic, partitions=len(partitions))
        try:
            ended = await self._carry_out(job, settings)
        except OSError as error:
            self._cannot_start(f"the process does not start: {error}")
            return
        finally:
            child, self._child = self._child, None
            offload.job_ended()
            self._pool.wake()
        assert child is not None
        self._settle(job, ended, child, began_ms)

    def _cannot_start(self, reason: str) -> None:
        if self._pool.offload.cannot_start(reason):
            wait = about_span(self._settings().retry_backoff_max_ms)
            logger.error(
                "no spark job can be started; the workers clean what was meant for it",
                reason=reason,
                tried_again_in=wait,
            )
        self._pool.wake()

    def _arguments(self, job: OffloadedJob, settings: CleanerSettings) -> list[str]:
        spark = settings.spark
        numbers = ",".join(str(partition.partition) for partition in job.partitions)
        results = ["compact", "--partitions", numbers, "--engine", "spark", "--json", "--no-roll"]
        results += ["--master", spark.master, "--memory", f"{spark.memory_bytes >> 20}m"]
        results += ["--task-memory", str(spark.task_memory_bytes), "--transport", spark.transport]
        results += ["--http", spark.broker_url or self._url()]
        token_file = self._token_file()
        if token_file is not None:
            results += ["--token-file", token_file]
        return [*results, "--", job.partitions[0].topic]

    async def _carry_out(self, job: OffloadedJob, settings: CleanerSettings) -> ChildExit:
        """Run the process to its end. Raises OSError where none starts."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *self._arguments(job, settings),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=_environment(),
            start_new_session=True,
        )
        child = self._child = _Child(process)
        with suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PGRP, process.pid, settings.nice)
        if self._stopping:  # it was told before there was a process
            self._interrupt("the broker stops")
        assert process.stdout is not None
        assert process.stderr is not None
        child_output = _ChildOutput(job.partitions[0].topic)
        loop = asyncio.get_running_loop()
        span = about_span(settings.spark.timeout_ms)
        bound = loop.call_later(settings.spark.timeout_ms / 1000, self._too_long, child, span)
        try:
            output, _ = await asyncio.gather(
                _read(process.stdout), _read_output(process.stderr, child_output)
            )
            code = await process.wait()
        finally:
            bound.cancel()
            await _end_group(process.pid)
        if child_output.lines > LINES_MAX:
            logger.warning(
                "spark job said more than is told",
                topic=child_output.topic,
                lines=child_output.lines,
                reason=child_output.last,
            )
        return ChildExit(code, _parsed(output), child_output.last.removeprefix("varve: "))

    def _too_long(self, child: _Child, span: str) -> None:
        child.timed_out = True
        self._interrupt(f"it took longer than {span}")

    def _interrupt(self, reason: str) -> None:
        """Have the process give its run up and end; killed if it does not."""
        child = self._child
        if child is None or child.interrupted:
            return
        child.interrupted = reason
        task = asyncio.create_task(_end(child.process), name="end-spark-job")
        child.end_tasks.add(task)
        task.add_done_callback(child.end_tasks.discard)

    # What came of it ----------------------------------------------------------------------------

    def _settle(self, job: OffloadedJob, ended: ChildExit, child: _Child, began_ms: int) -> None:
        offload = self._pool.offload
        results = _outcomes(ended.answer)
        if ended.code in (USAGE, NO_SPARK) and not child.interrupted:
            self._cannot_start(ended.words or f"the job ended with {ended.code}")
            self._keep(job, began_ms, "failed", ended.words)
            return
        partitions: list[TopicPartition] = []
        for partition in job.partitions:
            outcome, _ = results.get(partition.partition, ("", ""))
            if outcome == "adopted" or (ended.code == DONE and not outcome):
                offload.succeeded(partition)
            else:
                partitions.append(partition)
        if not partitions:
            logger.info(
                "spark job done", topic=job.partitions[0].topic, partitions=len(job.partitions)
            )
            return
        for partition in partitions:
            outcome, why = results.get(partition.partition, ("", ""))
            reason = why or child.interrupted or ended.words or _of_code(ended.code)
            self._settle_one(partition, ended, child, outcome, reason)
            self._keep_one(partition, began_ms, _kept_as(ended, child, outcome), reason)

    def _settle_one(
        self, partition: TopicPartition, ended: ChildExit, child: _Child, outcome: str, reason: str
    ) -> None:
        offload = self._pool.offload
        match _kept_as(ended, child, outcome):
            case "aborted":
                logger.info("spark job given up", partition=str(partition), reason=reason)
            case "stale":
                offload.job_discarded(partition, reason)
                logger.warning("spark job became void", partition=str(partition), reason=reason)
            case _:
                given_up = offload.failed(partition, reason)
                logger.error(
                    "spark job failed; the workers clean the partition now"
                    if given_up
                    else "spark job failed",
                    partition=str(partition),
                    reason=reason,
                )

    def _keep(self, job: OffloadedJob, began_ms: int, outcome: Outcome, reason: str) -> None:
        for partition in job.partitions:
            self._keep_one(partition, began_ms, outcome, reason)

    def _keep_one(
        self, partition: TopicPartition, began_ms: int, outcome: Outcome, reason: str
    ) -> None:
        facts = self._cleaning.facts_of(partition)
        if facts is None:
            return  # it was deleted meanwhile
        record = JobRecord(
            partition=partition,
            run_id="",
            started_ms=began_ms,
            finished_ms=self._env.wall_ms(),
            outcome=outcome,
            reason=reason,
            engine="spark",
        )
        self._pool.remote_clean_failed(facts, record)


def _kept_as(ended: ChildExit, child: _Child, outcome: str) -> Outcome:
    """What the history calls an end that was none."""
    if child.interrupted and not child.timed_out:
        return "aborted"
    if outcome in ("stale", "expired") or (not outcome and ended.code == STALE):
        return "stale"
    return "failed"


def _outcomes(answer: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """Outcome and reason by number of the partition."""
    result = {}
    rows = answer.get("partitions")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("partition"), int):
            result[row["partition"]] = (str(row.get("outcome", "")), str(row.get("reason", "")))
    return result


def _of_code(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _environment() -> dict[str, str]:
    """Ours, with the folder of these packages in front: the job is of the broker's own code."""
    paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All of it, as far as that is an answer; the rest is read, and let go."""
    result = bytearray()
    while data := await stream.read(CHUNK_BYTES):
        if len(result) <= ANSWER_BYTES_MAX:
            result += data
    return bytes(result)


def _parsed(output: bytes) -> Mapping[str, Any]:
    if len(output) > ANSWER_BYTES_MAX:
        return {}
    with suppress(ValueError, RecursionError):
        document = json.loads(output)
        if isinstance(document, dict):
            return document
    return {}


async def _read_output(stream: asyncio.StreamReader, child_output: _ChildOutput) -> None:
    """Line by line, whatever their length."""
    rest = b""
    while data := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:CHUNK_BYTES]
        for line in lines:
            child_output.line(line)
    child_output.line(rest)


async def _end(process: Process) -> None:
    """Ask the process to end, and wait; then kill its group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS + LEFT_SECONDS):
            await process.wait()
            await _end_group(process.pid)
            return
    _kill_group(process.pid)


def _kill_group(group: int) -> bool:
    """kill -9; False where nobody is left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


async def _end_group(group: int) -> None:
    """Its leader has ended, or nobody waits for it: see that the rest does."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEFT_SECONDS
    while loop.time() < until:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        await asyncio.sleep(POLL_SECONDS)
    _kill_group(group)
