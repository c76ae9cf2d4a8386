"""Stage `whole`: clean a partition in one task, with the broker's own code."""

from dataclasses import replace

from cleaner.engine.clean import run_clean
from cleaner.engine.outcome import MapFullError
from cleaner.job import UnlimitedControl
from pipeline.stages.planning import source_segments
from pipeline.stages.task_files import delivered_names, open_task_files
from pipeline.stages.tasks import WholeResult, WholeTask, decode, encode
from storage.env import Env, RealEnv


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `clean_whole` raises."""
    return encode(clean_whole(RealEnv(), decode(WholeTask, task)))


def clean_whole(env: Env, task: WholeTask) -> WholeResult:
    """Clean the partition into a new folder. Raises StorageError, OSError."""
    with open_task_files(env, task.source, task.job) as place:
        bases = [source.base_offset for source in source_segments(task.job)]
        job = place.job_over(bases)
        name, path = place.folder("whole")
        control = UnlimitedControl()
        try:
            report = run_clean(env, replace(job, output_directory=path), control, every_key=True)
        except MapFullError:
            place.discard()
            return WholeResult()
        place.check_inputs(job, bases)
        place.deliver(name, delivered_names(control.groups))
        return WholeResult(name, tuple(control.groups), place.renamed(report))
