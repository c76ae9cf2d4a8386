"""The stages of bulk work, by name. A task is a JSON descriptor as bytes, and so is its result.

Importing this package is cheap: a stage's module, and Numba with it, is loaded when one runs.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, TypeAlias

Stage: TypeAlias = Callable[[bytes], bytes]


def _stage_of(module: str) -> Stage:
    def run(task: bytes) -> bytes:
        stage: Stage = import_module(f"{__name__}.{module}").run_task
        return stage(task)

    return run


STAGES: Final[Mapping[str, Stage]] = {
    "whole": _stage_of("whole"),  # clean a partition in one task
    "combine": _stage_of("combine"),  # some segments' fingerprints, by shard
    "merge": _stage_of("merge"),  # the survivors of one shard of the keys
    "rewrite": _stage_of("rewrite"),  # some groups of a partition, by their survivors
    "histories": _stage_of("histories"),  # how often keys recur, and how long records stay live
    "survey": _stage_of("survey"),  # index a partition in one task: survivors and counts
}


def run_stage(name: str, task: bytes) -> bytes:
    """Run one task here -> its result. Raises KeyError for an unknown stage, else what it does."""
    return STAGES[name](task)
