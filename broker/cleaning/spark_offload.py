"""Run the cleaner's offloaded jobs on Spark: start them, watch them, report how they ended.

Rules
- A job is a process, `python -m pipeline compact`: this module imports nothing of Spark. The job
  changes a log through a lease, as every remote compaction does.
- One job runs at a time. It takes all due partitions of one topic, the most urgent topic first.
- The process leads a process group. Ending it means SIGTERM, upon which it gives up its lease, and
  then SIGKILL for the rest of the group. That happens when the broker stops, when an operator
  pauses or aborts one of its partitions, and when the job takes too long.
- The first lines that it writes to standard error go to the broker's log.
- Each partition's result is reported to cleaner/scheduler/offload.py; failures also go to the
  job history.
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
from tempfile import TemporaryDirectory
from typing import Any, Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.history import JobRecord, Outcome
from cleaner.scheduler.offload import OffloadedJob
from config.exit_codes import DONE, NO_SPARK, STALE, USAGE
from config.extras import install_command
from config.settings import CleanerSettings
from config.units import about_span
from storage.env import Env
from storage.model import TopicPartition

ROUND_SECONDS: Final = 5.0  # between two checks for due partitions, unless woken
GRACE_SECONDS: Final = 10.0  # from SIGTERM on: the job gives up its lease
LEFT_SECONDS: Final = 5.0  # for the rest of its group to remove temporary files
POLL_SECONDS: Final = 0.1  # between two checks whether the group has exited
ANSWER_BYTES_MAX: Final = 16 << 20  # about a line for each partition
LINES_MAX: Final = 20  # of a job's standard error that are logged
LINE_CHARS_MAX: Final = 500
CHUNK_BYTES: Final = 1 << 16
NEEDS: Final = ("pipeline", "pyspark", "pyarrow", "pandas")
EXTRA_MISSING: Final = f"packages are missing: run {install_command('pipeline')}"
COMMAND: Final = (sys.executable, "-P", "-m", "pipeline")

_PACKAGES: Final = str(Path(__file__).resolve().parents[2])

logger = structlog.get_logger("broker.spark")


@dataclass(slots=True)
class ChildExit:
    """How a job's process ended."""

    code: int  # below 0: by this signal
    answer: Mapping[str, Any]  # the JSON object that it printed; empty if it printed none
    last_line: str  # of standard error


@dataclass(slots=True)
class _Child:
    """A running process; `interrupted` is the reason for its end."""

    process: Process
    interrupted: str = ""
    timed_out: bool = False
    end_tasks: set["asyncio.Task[None]"] = field(default_factory=set)


@dataclass(slots=True)
class _ChildOutput:
    """A job's standard error: logs the first lines and keeps the last one."""

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
            logger.warning("spark job output", topic=self.topic, reason=text)


@dataclass(frozen=True, slots=True)
class OwnApi:
    """How a job reaches the HTTP API of this broker."""

    url: str
    token: bytes | None = field(default=None, repr=False)  # if it needs one
    certificates: str | None = None  # of https, as PEM


class SparkRunner:
    """Starts jobs for due partitions and reports their results to the pool."""

    def __init__(
        self,
        env: Env,
        pool: CleanerPool,
        cleaning: BrokerCleanerHost,
        *,
        settings: Callable[[], CleanerSettings],
        api: Callable[[], OwnApi],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._env = env
        self._pool = pool
        self._cleaning = cleaning
        self._settings = settings
        self._api = api
        self._command = tuple(command)
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._child: _Child | None = None
        self._early_interrupt = ""
        self._stopping = False

    def start(self) -> None:
        """Start to watch for due partitions."""
        self._pool.offload.wake = self._wake.set
        self._watcher = asyncio.create_task(self._watch(), name="spark-cleaning")

    async def stop(self) -> None:
        """End the running job and start no more. Call it while the HTTP server still answers."""
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
                logger.exception("spark job supervision failed")

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
        self._early_interrupt = ""
        offload.job_started(job)
        offload.interrupt = self._interrupt
        logger.info("spark job started", topic=first.topic, partitions=len(partitions))
        try:
            ended = await self._carry_out(job, settings)
        except OSError as error:
            self._cannot_start(f"the process cannot be started: {error}")
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
                "spark unavailable",
                reason=reason,
                retry_in=wait,
            )
        self._pool.wake()

    def _arguments(self, job: OffloadedJob, settings: CleanerSettings, folder: str) -> list[str]:
        """Return the arguments of a job; files that only it needs go to `folder`."""
        spark, api = settings.spark, self._api()
        numbers = ",".join(str(partition.partition) for partition in job.partitions)
        results = ["compact", "--partitions", numbers, "--engine", "spark", "--json", "--no-roll"]
        results += ["--master", spark.master, "--memory", f"{spark.memory_bytes >> 20}m"]
        results += ["--task-memory", str(spark.task_memory_bytes), "--transport", spark.transport]
        results += ["--http", spark.broker_url or api.url]
        if api.token is not None:
            path = Path(folder, "token")  # nobody else can read the folder
            path.write_bytes(api.token)
            results += ["--token-file", str(path)]
        if api.certificates is not None:
            # The job trusts this certificate alone, so the certificate need not name the address.
            path = Path(folder, "client.properties")
            text = api.certificates.replace("\n", "\\n")
            path.write_text(
                f"ssl.truststore.certificates={text}\nssl.endpoint.identification.algorithm=\n"
            )
            results += ["--command-config", str(path)]
        return [*results, "--", job.partitions[0].topic]

    async def _carry_out(self, job: OffloadedJob, settings: CleanerSettings) -> ChildExit:
        """Run the process to its end. Raises OSError where none starts."""
        with TemporaryDirectory(prefix="varve-spark-") as folder:
            return await self._run_process(job, settings, self._arguments(job, settings, folder))

    async def _run_process(
        self, job: OffloadedJob, settings: CleanerSettings, arguments: Sequence[str]
    ) -> ChildExit:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=_environment(),
            start_new_session=True,
        )
        child = self._child = _Child(process)
        with suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PGRP, process.pid, settings.nice)
        if self._early_interrupt:  # it came before the process existed
            self._interrupt(self._early_interrupt)
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
                "spark job output cut",
                topic=child_output.topic,
                lines=child_output.lines,
                reason=child_output.last,
            )
        return ChildExit(code, _parsed(output), child_output.last.removeprefix("varve: "))

    def _too_long(self, child: _Child, span: str) -> None:
        child.timed_out = True
        self._interrupt(f"it took longer than {span}")

    def _interrupt(self, reason: str) -> None:
        """Ask the process to give up its lease and exit; kill it if it does not."""
        child = self._child
        if child is None:
            self._early_interrupt = reason
            return
        if child.interrupted:
            return
        child.interrupted = reason
        task = asyncio.create_task(_end(child.process), name="end-spark-job")
        child.end_tasks.add(task)
        task.add_done_callback(child.end_tasks.discard)

    # Results ------------------------------------------------------------------------------------

    def _settle(self, job: OffloadedJob, ended: ChildExit, child: _Child, began_ms: int) -> None:
        offload = self._pool.offload
        results = _outcomes(ended.answer)
        is_refused = ended.code == NO_SPARK or (ended.code == USAGE and self._are_compacted(job))
        if is_refused and not child.interrupted:
            self._cannot_start(ended.last_line or f"the job ended with {ended.code}")
            self._record_all(job, began_ms, "failed", ended.last_line)
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
                "spark job finished", topic=job.partitions[0].topic, partitions=len(job.partitions)
            )
            return
        for partition in partitions:
            outcome, why = results.get(partition.partition, ("", ""))
            reason = why or child.interrupted or ended.last_line or _describe_exit(ended.code)
            self._settle_one(partition, ended, child, outcome, reason)
            self._record(partition, began_ms, _classify(ended, child, outcome), reason)

    def _are_compacted(self, job: OffloadedJob) -> bool:
        """Return whether the topic is still compacted; if not, that is why the job was refused."""
        facts = map(self._cleaning.facts_of, job.partitions)
        return all(each is not None and each.config.compacts for each in facts)

    def _settle_one(
        self, partition: TopicPartition, ended: ChildExit, child: _Child, outcome: str, reason: str
    ) -> None:
        offload = self._pool.offload
        match _classify(ended, child, outcome):
            case "aborted":
                logger.info("spark job aborted", partition=str(partition), reason=reason)
            case "stale":
                offload.job_discarded(partition, reason)
                logger.warning("spark job outdated", partition=str(partition), reason=reason)
            case _:
                given_up = offload.failed(partition, reason)
                logger.error(
                    "spark job failed",
                    partition=str(partition),
                    reason=reason,
                    cleaned_by="workers" if given_up else "spark",
                )

    def _record_all(self, job: OffloadedJob, began_ms: int, outcome: Outcome, reason: str) -> None:
        for partition in job.partitions:
            self._record(partition, began_ms, outcome, reason)

    def _record(
        self, partition: TopicPartition, began_ms: int, outcome: Outcome, reason: str
    ) -> None:
        facts = self._cleaning.facts_of(partition)
        if facts is None:
            return  # it was deleted meanwhile
        record = JobRecord(
            partition=partition,
            job_id="",
            started_ms=began_ms,
            finished_ms=self._env.wall_ms(),
            outcome=outcome,
            reason=reason,
            engine="spark",
        )
        self._pool.remote.failed(facts, record)


def _classify(ended: ChildExit, child: _Child, outcome: str) -> Outcome:
    """Return the history's name for a job that did not clean its partition."""
    if child.interrupted and not child.timed_out:
        return "aborted"
    if outcome in ("stale", "expired") or (not outcome and ended.code == STALE):
        return "stale"
    return "failed"


def _outcomes(answer: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """Return the outcome and the reason by partition number."""
    result = {}
    rows = answer.get("partitions")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("partition"), int):
            result[row["partition"]] = (str(row.get("outcome", "")), str(row.get("reason", "")))
    return result


def _describe_exit(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with status {code}"


def _environment() -> dict[str, str]:
    """Return our environment with these packages first: the job runs the broker's own code."""
    paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read the stream to its end; keep a little more than ANSWER_BYTES_MAX."""
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
    """Pass the stream on line by line; lines may have any length."""
    rest = b""
    while data := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:CHUNK_BYTES]
        for line in lines:
            child_output.line(line)
    child_output.line(rest)


async def _end(process: Process) -> None:
    """Send SIGTERM and wait for the process; then kill its group."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS + LEFT_SECONDS):
            await process.wait()
            await _end_group(process.pid)
            return
    _kill_group(process.pid)


def _kill_group(group: int) -> bool:
    """Send SIGKILL; return False if the group has exited."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


async def _end_group(group: int) -> None:
    """Wait until the rest of the group has exited; kill it after LEFT_SECONDS."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEFT_SECONDS
    while loop.time() < until:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        await asyncio.sleep(POLL_SECONDS)
    _kill_group(group)
