"""The engine that runs tasks in Python workers on Spark's executors.

Spark transfers descriptors and small results; records never pass through the JVM. A Spark task
takes a tenth of a second to start on a busy machine, so several of our tasks are bundled into one.
An RDD distributes the bundles in one Spark job; a DataFrame would need three. Spark Connect
supports only DataFrames, so there `mapInArrow` runs over a frame that is partitioned by range.

The executors' Python must have the same version of Varve installed, with the extra `pipeline`.
Numba compiles kernels from its files and caches them beside them, so an archive cannot carry it.

Spark retries a task according to `spark.task.maxFailures`, possibly on another executor. The engine
reports the reason of the last attempt, which it parses from Spark's error.
"""

import gc
import importlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow

from config.extras import install_command
from pipeline.engines.engine import StageFailedError
from pipeline.engines.spark_session import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The JVM of a session that runs only stages handles descriptors. The optimizing compiler would take
# more of the tasks' processor time than it saves.
STAGE_SETTINGS: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
RESULT_BYTES_MAX: Final = 16 << 20  # of one task: counts and names of files, no records
TOGETHER_MAX: Final = 8  # our tasks per Spark task, which is retried as a whole
WAVES: Final = 2  # at least this many Spark tasks per core, so that a slow one delays little
POLL_SECONDS: Final = 0.25  # between two progress queries
REASON_CHARS_MAX: Final = 2000
UNKNOWN: Final = "unknown"  # version of a checkout

# The stages that this worker has run. pyspark's daemon collects garbage after each Spark task,
# which takes 70 ms with the kernels loaded. What a stage has loaded stays, so it is frozen once.
_stages_run: Final[set[str]] = set()

_Task: TypeAlias = tuple[int, bytes]  # the index of a task, and its payload or result
_TASK: Final = pyarrow.struct([("task", pyarrow.int64()), ("payload", pyarrow.binary())])
_BUNDLES: Final = pyarrow.schema([("bundle", pyarrow.int64()), ("tasks", pyarrow.list_(_TASK))])
_RESULTS: Final = pyarrow.schema([("task", pyarrow.int64()), ("result", pyarrow.binary())])
_REASON: Final = re.compile(r'\[\[varve (?P<text>"(?:[^"\\]|\\.)*")\]\]')
_NOT_THERE: Final = re.compile(r"ModuleNotFoundError: No module named '(?:pipeline|numba|storage)'")
_LOST: Final = re.compile(r"most recent failure: (?:Lost task [^:]*: )?(?P<text>[^\n]+)")


class TaskReasonError(Exception):
    """Raised in a worker: carries the reason of a failure through the JVM."""

    def __init__(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        super().__init__(f"[[varve {json.dumps(reason)}]]")


class VersionError(Exception):
    """Executors and driver have different versions of the code."""


class SparkEngine:
    """Runs stages on a session that the caller starts and stops."""

    name = "spark"

    def __init__(
        self,
        spark: "SparkSession",
        *,
        parallelism: int | None = None,
        registry: str = "pipeline.stages",
    ) -> None:
        """`parallelism` None: Spark's default. `registry` is the module with `run_stage`."""
        self._spark = spark
        self._registry = registry
        self._context = None if _is_connect(spark) else spark.sparkContext
        self.parallelism = max(1, parallelism or self._cores())

    def run(
        self,
        stage: str,
        tasks: Sequence[bytes],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        """See Engine. Raises StageFailedError."""
        if not tasks:
            return []
        dealt = deal(len(tasks), self.parallelism)
        sizes = sorted((len(places) for places in dealt), reverse=True)
        sent = None if progress is None else _TaskProgress(sizes, progress)
        carry = self._by_frame if self._context is None else self._by_rdd
        try:
            with self._watched(sent):
                results = carry(stage, [[(at, tasks[at]) for at in places] for places in dealt])
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            raise StageFailedError(stage, reason) from None
        if progress is not None:
            progress(len(tasks))
        return [results[index] for index in range(len(tasks))]

    def _watched(self, sent: "_TaskProgress | None") -> "_JobWatch | _ConnectWatch":
        if self._context is None:
            return _ConnectWatch(self._spark, sent)
        return _JobWatch(self._context, sent)

    def _by_rdd(self, stage: str, dealt: "list[list[_Task]]") -> dict[int, bytes]:
        work = _work(stage, self._registry, code_version())
        assert self._context is not None
        spread = self._context.parallelize(dealt, len(dealt))
        return dict(spread.flatMap(work).collect())

    def _by_frame(self, stage: str, dealt: "list[list[_Task]]") -> dict[int, bytes]:
        work = _work(stage, self._registry, code_version())

        def over(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
            for batch in batches:
                for bundle in batch.column("tasks").to_pylist():
                    for task, result in work([(item["task"], item["payload"]) for item in bundle]):
                        yield pyarrow.record_batch([[task], [result]], schema=_RESULTS)

        bundles = [[{"task": at, "payload": item} for at, item in bundle] for bundle in dealt]
        table = pyarrow.table([range(len(bundles)), bundles], schema=_BUNDLES)
        frame = self._spark.createDataFrame(table).repartitionByRange(len(bundles), "bundle")
        result = frame.mapInArrow(over, "task long, result binary").toArrow()
        return dict(zip(*(result.column(index).to_pylist() for index in (0, 1)), strict=True))

    def close(self) -> None:
        """See Engine. The caller stops the session."""

    def _cores(self) -> int:
        if self._context is not None:
            return int(self._context.defaultParallelism)
        # Spark Connect does not report its parallelism, but splits a range into one part per core.
        from pyspark.sql.functions import spark_partition_id

        return int(self._spark.range(10_000).select(spark_partition_id()).distinct().count())


class _TaskProgress:
    """Converts the number of finished Spark tasks to finished tasks of ours."""

    def __init__(self, sizes: Sequence[int], progress: Callable[[int], None]) -> None:
        """`sizes`: our tasks in each Spark task, largest first."""
        self.bundles = len(sizes)
        self._sizes = sizes
        self._progress = progress
        self._done = 0

    def __call__(self, bundles: int) -> None:
        # Which ones are finished is unknown; count the smallest.
        done = sum(self._sizes[len(self._sizes) - bundles :])
        if done > self._done:
            self._done = done
            self._progress(done)


class _JobWatch:
    """Reports progress during a block and cancels the Spark jobs if the block fails."""

    def __init__(self, context: Any, sent: _TaskProgress | None) -> None:
        self._context = context
        self._on_done = sent
        self._group = f"varve-{uuid.uuid4()}"
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._context.setJobGroup(self._group, "varve", interruptOnCancel=True)
        if self._on_done is not None:
            self._thread = threading.Thread(
                target=self._poll, args=(self._on_done,), name="spark-progress", daemon=True
            )
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if kind is not None:
            self._context.cancelJobGroup(self._group)
        self._context.setLocalProperty("spark.jobGroup.id", None)

    def _poll(self, sent: _TaskProgress) -> None:
        tracker = self._context.statusTracker()
        while not self._over.wait(POLL_SECONDS):
            for job in tracker.getJobIdsForGroup(self._group):
                info = tracker.getJobInfo(job)
                for stage in [] if info is None else info.stageIds:
                    stage_info = tracker.getStageInfo(stage)
                    if stage_info is not None and stage_info.numTasks == sent.bundles:
                        sent(stage_info.numCompletedTasks)


class _ConnectWatch:
    """The same for Spark Connect, which reports progress to a handler."""

    def __init__(self, spark: "SparkSession", sent: _TaskProgress | None) -> None:
        self._spark = spark
        self._on_done = sent
        self._tag = f"varve-{uuid.uuid4()}"

    def __enter__(self) -> None:
        self._spark.addTag(self._tag)
        if self._on_done is not None:
            self._spark.registerProgressHandler(self._handle)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._spark.removeTag(self._tag)
        if self._on_done is not None:
            self._spark.removeProgressHandler(self._handle)
        if kind is not None:
            self._spark.interruptTag(self._tag)

    def _handle(self, stages: Any, **_: object) -> None:
        assert self._on_done is not None
        for stage in stages or ():
            if stage.num_tasks == self._on_done.bundles:
                self._on_done(stage.num_completed_tasks)


def _is_connect(spark: "SparkSession") -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def code_version() -> str:
    """Return the version of this code; UNKNOWN if it is not installed."""
    try:
        return metadata.version("varve")
    except metadata.PackageNotFoundError:
        return UNKNOWN


def deal(count: int, parallelism: int) -> list[list[int]]:
    """Distribute task indexes, largest task first, over bundles of about equal work.

    Alternate rounds run in opposite directions.
    """
    bundles = min(count, max(WAVES * parallelism, -(-count // TOGETHER_MAX)))
    dealt: list[list[int]] = [[] for _ in range(bundles)]
    for place in range(count):
        turn, at = divmod(place, bundles)
        dealt[bundles - 1 - at if turn % 2 else at].append(place)
    return dealt


def _work(stage: str, registry: str, version: str) -> Callable[[Sequence[_Task]], Iterator[_Task]]:
    """Return the function that workers call; they import this module and look up the stage."""

    def run(tasks: Sequence[_Task]) -> Iterator[_Task]:
        return run_tasks(stage, registry, version, tasks)

    return run


def run_tasks(stage: str, registry: str, version: str, tasks: Sequence[_Task]) -> Iterator[_Task]:
    """Run some tasks in a worker. `version` is the driver's code version.

    Raises TaskReasonError, also for a result that is too large for the driver.
    """
    try:
        here = code_version()
        if version != here and UNKNOWN not in (version, here):
            raise VersionError(f"the executor has varve {here}, the driver {version}")
        run_stage = importlib.import_module(registry).run_stage
    except (VersionError, ImportError) as error:
        raise TaskReasonError(error) from error
    for task, payload in tasks:
        try:
            result = run_stage(stage, payload)
            if len(result) > RESULT_BYTES_MAX:
                raise ValueError(f"a result of {len(result)} bytes is over {RESULT_BYTES_MAX}")
        except Exception as error:
            raise TaskReasonError(error) from error
        yield task, result
    if stage not in _stages_run:
        _stages_run.add(stage)
        gc.collect()  # frozen garbage would stay
        gc.freeze()


def _reason(error: Exception) -> str | None:
    """Return the reason of a failed Spark job; None if the error is not Spark's."""
    text = str(error)
    if (match := _REASON.search(text)) is not None:
        return str(json.loads(match["text"]))
    if _NOT_THERE.search(text) is not None:
        return f"the executors cannot import Varve: run there {install_command('pipeline')}"
    module = type(error).__module__
    if not module.startswith(("pyspark.", "py4j.")):
        return None
    if (match := _LOST.search(text)) is not None:
        return match["text"][:REASON_CHARS_MAX]
    return first_line(error)
