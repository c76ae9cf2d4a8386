"""Where a task reads and writes, on whatever host it runs.

Rules
- Every attempt of a task writes to folders of its own, whose names no other attempt has. Its result
  names them; what nobody names is swept with the run.
- Outputs (folders in `out/`) are durable before they are delivered. Scratch, which one stage leaves
  for the next, is not: after a crash the run begins anew.
- Paths in what a task reports are those of the job, not of this host.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage
from pipeline.stages.tasks import DamageFound
from pipeline.transport import SCRATCH, InputsGoneError, Transport, open_transport
from storage.env import Env
from storage.format import filenames

_NAME_BYTES: Final = 6  # random; a run has some thousands of attempts at most


class TaskFiles:
    """One attempt's files."""

    def __init__(self, env: Env, transport: Transport, job: CleanJob) -> None:
        self.env = env
        self._transport = transport
        self._job = job
        self._folders: list[str] = []
        self._directory = job.directory

    def job_over(self, bases: Iterable[int]) -> CleanJob:
        """The job, where these segments lie on this host."""
        local = self._transport.inputs(self._job, tuple(bases))
        self._directory = local.directory
        return local

    def check_inputs(self, local: CleanJob, bases: Iterable[int]) -> None:
        """See after the work that nobody took its inputs away meanwhile. Raises InputsGoneError.

        To the cleaner a segment that is gone is one that retention took, and has nothing left.
        """
        for base in bases:
            path = f"{local.directory}/{filenames.file_name(base, filenames.LOG)}"
            if not self.env.exists(path):
                raise InputsGoneError(path)

    def folder(self, stage: str, *, scratch: bool = False) -> tuple[str, str]:
        """A new folder: its name in the run, and its path here."""
        name = f"{SCRATCH if scratch else ''}{stage}-{self.env.random_bytes(_NAME_BYTES).hex()}"
        path = self._transport.outputs(self._job, name)
        self._folders.append(path)
        return name, path

    def deliver(self, folder: str, names: Iterable[str]) -> None:
        """Hand over files of a folder."""
        self._transport.deliver(self._job, folder, tuple(names))

    def fetch(self, folder: str, names: Iterable[str]) -> str:
        """Where files of a task before stand on this host."""
        return self._transport.fetch(self._job, folder, tuple(names))

    def discard(self) -> None:
        """Remove what this attempt has written."""
        for path in self._folders:
            if self.env.is_dir(path):
                self.env.remove_tree(path)

    def named(self, path: str) -> str:
        """A path of this host, as the job would name it."""
        head, name = os.path.split(path)
        return f"{self._job.directory}/{name}" if head == self._directory else path

    def damage_reports(
        self, damaged: Mapping[int, Damage], indexing: Collection[int] = ()
    ) -> tuple[DamageFound, ...]:
        """Damage by base offset, as a result tells it; `indexing` are those met so."""
        return tuple(
            DamageFound(
                base,
                self.named(damage.path),
                damage.position,
                damage.reason,
                indexing=base in indexing,
            )
            for base, damage in sorted(damaged.items())
        )

    def renamed(self, report: CleanReport) -> CleanReport:
        """A report whose paths are the job's."""
        damaged = tuple(damage._replace(path=self.named(damage.path)) for damage in report.damaged)
        return replace(report, damaged=damaged)


@contextmanager
def open_task_files(env: Env, source: Mapping[str, Any], job: CleanJob) -> Iterator[TaskFiles]:
    """Where to run one task. What it has written goes if it fails."""
    transport = open_transport(env, source)
    try:
        place = TaskFiles(env, transport, job)
        try:
            yield place
        except BaseException:
            place.discard()
            raise
    finally:
        transport.close()


def delivered_names(groups: Iterable[CleanedGroup]) -> list[str]:
    """The files that groups consist of."""
    return [file.name for group in groups if group.output for file in group.output.files]


class GroupCollector:
    """The JobControl of a task: groups are kept, and nothing is limited."""

    def __init__(self) -> None:
        self.groups: list[CleanedGroup] = []

    def read_bytes(self, count: int) -> None:
        """See JobControl: there is no budget here."""

    def write_bytes(self, count: int) -> None:
        """See JobControl: there is no budget here."""

    def aborted(self) -> bool:
        """See JobControl: a task is ended with its process."""
        return False

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """See JobControl."""
        self.groups.extend(groups)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """See JobControl: what is told of a task is its end."""
