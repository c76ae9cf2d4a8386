"""The stages of remote compactions and tables, by name. Tasks and results are JSON as bytes.

Importing this package is cheap: the module of a stage, and Numba, are imported when it runs.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, TypeAlias

Stage: TypeAlias = Callable[[bytes], bytes]


def _lazy_stage(module: str) -> Stage:
    def run(task: bytes) -> bytes:
        stage: Stage = import_module(f"{__name__}.{module}").run_task
        return stage(task)

    return run


STAGES: Final[Mapping[str, Stage]] = {
    "whole": _lazy_stage("whole"),  # clean a partition in one task
    "combine": _lazy_stage("combine"),  # fingerprint the keys of some segments, by shard
    "merge": _lazy_stage("merge"),  # find the survivors of one shard
    "rewrite": _lazy_stage("rewrite"),  # rewrite some groups by their survivors
    "histories": _lazy_stage("histories"),  # count records per key and their lifetimes
    "index": _lazy_stage("index"),  # index a partition in one task: survivors and counts
}


def run_stage(name: str, task: bytes) -> bytes:
    """Run one task; return its result. Raises KeyError for an unknown stage."""
    return STAGES[name](task)
