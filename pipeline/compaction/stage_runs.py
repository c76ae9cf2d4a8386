"""Runs the tasks of a stage on an engine, from descriptors to results."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from pipeline.engines.engine import Engine
from pipeline.stages.planning import largest_first
from pipeline.stages.tasks import decode, encode

Source: TypeAlias = Mapping[str, str]  # a transport's descriptor
Progress: TypeAlias = Callable[[str, int, int], None]  # stage, tasks done, tasks in all
K = TypeVar("K")
T = TypeVar("T")


class StageRunner:
    """Runs stages on an engine and reports progress."""

    def __init__(self, engine: Engine, progress: Progress | None) -> None:
        self._engine = engine
        self._progress = progress

    def run(
        self, stage: str, tasks: Sequence[object], sizes: Sequence[int], kind: type[T]
    ) -> list[T]:
        """Run tasks, the largest first by `sizes`; return results in the order of the tasks.

        Raises StageFailedError.
        """
        if not tasks:
            return []
        order = largest_first(sizes)
        on_progress = self._progress

        def report(done: int) -> None:
            if on_progress is not None:
                on_progress(stage, done, len(tasks))

        report(0)
        results = self._engine.run(
            stage, [encode(tasks[place]) for place in order], progress=report
        )
        by_place = dict(zip(order, results, strict=True))
        return [decode(kind, by_place[place]) for place in range(len(tasks))]

    def run_grouped(
        self, stage: str, groups: Sequence[Sequence[K]], size: Callable[[K], int], kind: type[T]
    ) -> list[list[T]]:
        """Run the tasks of all groups together; return the results by group.

        Raises StageFailedError.
        """
        tasks = [task for group in groups for task in group]
        results = iter(self.run(stage, tasks, [size(task) for task in tasks], kind))
        return [[next(results) for _ in group] for group in groups]
