"""Runs the tasks of one stage after the other on an engine, from descriptors to results."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from pipeline.engines.engine import Engine
from pipeline.stages.planning import largest_first
from pipeline.stages.tasks import decode, encode

Source: TypeAlias = Mapping[str, str]  # a transport's descriptor
Progress: TypeAlias = Callable[[str, int, int], None]  # stage, tasks done, tasks in all
T = TypeVar("T")


class StageRunner:
    """An engine, and whom to tell how far it is."""

    def __init__(self, engine: Engine, progress: Progress | None) -> None:
        self._engine = engine
        self._progress = progress

    def run(
        self, stage: str, tasks: Sequence[object], sizes: Sequence[int], kind: type[T]
    ) -> list[T]:
        """Run tasks, the largest of `sizes` first -> their results, in the order of the tasks.

        Raises StageFailedError.
        """
        if not tasks:
            return []
        order = largest_first(sizes)
        on_progress = self._progress

        def tell(done: int) -> None:
            if on_progress is not None:
                on_progress(stage, done, len(tasks))

        tell(0)
        results = self._engine.run(stage, [encode(tasks[place]) for place in order], progress=tell)
        by_place = dict(zip(order, results, strict=True))
        return [decode(kind, by_place[place]) for place in range(len(tasks))]
