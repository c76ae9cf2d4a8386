"""How the files of a run get to where a task runs, and back.

Rules
- A task is told by a descriptor: {"kind": "disk"} where the run's folders can be reached by their
  paths; {"kind": "http", "url", "compaction_id", "token"} where files are fetched from the broker
  and put back.
- What was delivered is durable, in the folder of the run, under names that the manifest may name.
- A transport belongs to one attempt of one task. What it keeps on this host goes with `close`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from cleaner.job import CleanJob
from cleaner.remote_compaction import SCRATCH_PREFIX
from storage.env import Env

__all__ = [
    "OUT",
    "SCRATCH",
    "SCRATCH_VARIABLE",
    "InputsGoneError",
    "Transport",
    "TransportError",
    "open_transport",
]

SCRATCH: Final = SCRATCH_PREFIX
OUT: Final = "out"
SCRATCH_VARIABLE: Final = "VARVE_SCRATCH"  # the folder for what a transport keeps on this host


class InputsGoneError(Exception):
    """A pinned segment is not there any more: the run has ended."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: the segment is gone; the run it was kept for has ended")


class TransportError(Exception):
    """A file could not be had or handed over; `reason` is for people."""


class Transport(Protocol):
    """How files get to this host and back."""

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        """`job` with a folder of this host that holds these segments.

        Raises InputsGoneError, TransportError, OSError.
        """

    def outputs(self, job: CleanJob, folder: str) -> str:
        """A folder of this host whose files will be delivered to `folder` of the run."""

    def deliver(self, job: CleanJob, folder: str, names: Sequence[str]) -> None:
        """Hand over these files of an output folder; durable when it returns.

        Raises TransportError, OSError.
        """

    def fetch(self, job: CleanJob, folder: str, names: Sequence[str]) -> str:
        """A folder of this host that holds these files, which a task before has delivered.

        Raises TransportError, OSError.
        """

    def close(self) -> None:
        """Give back what is only this host's."""


def open_transport(env: Env, descriptor: Mapping[str, Any]) -> Transport:
    """The transport that a task's descriptor names. Raises ValueError for one that is none."""
    if descriptor.get("kind") == "disk":
        from pipeline.transport.disk import DiskTransport

        return DiskTransport(env)
    if descriptor.get("kind") == "http":
        from pipeline.transport.http import HttpTransport

        return HttpTransport(
            env, descriptor["url"], descriptor["compaction_id"], descriptor["token"]
        )
    raise ValueError(f"no transport of kind {descriptor.get('kind')!r}")
