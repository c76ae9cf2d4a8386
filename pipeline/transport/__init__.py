"""Transfer of a remote compaction's files to the host of a task, and back.

Rules
- A task gets a descriptor: {"kind": "disk"} if its host can open the lease's directories;
  {"kind": "http", "url", "tls", "compaction_id", "token"} if files are downloaded from the broker
  and uploaded. All values are text; "tls" has the fields of ClientTls as JSON, or is empty.
- Delivered files are durable, in the lease's directory, under names that a manifest may use.
- A transport belongs to one attempt of one task. `close` deletes its files on this host.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from cleaner.job import CleanJob
from cleaner.remote_compaction import SCRATCH_PREFIX
from config.security.clients import ClientTls
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
# The directory of the files that a transport keeps on this host.
SCRATCH_VARIABLE: Final = "VARVE_SCRATCH"


class InputsGoneError(Exception):
    """A pinned segment is missing, because the lease has ended."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: the segment is gone, because the lease that pinned it has ended")


class TransportError(Exception):
    """A file could not be downloaded or uploaded."""


class Transport(Protocol):
    """Transfers files to this host and back."""

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        """Return `job` with a directory of this host that has these segments.

        Raises InputsGoneError, TransportError, OSError.
        """

    def outputs(self, job: CleanJob, folder: str) -> str:
        """Return a directory of this host for the files of `folder` of the lease."""

    def deliver(self, job: CleanJob, folder: str, names: Sequence[str]) -> None:
        """Deliver these files of an output folder; they are durable afterwards.

        Raises TransportError, OSError.
        """

    def fetch(self, job: CleanJob, folder: str, names: Sequence[str]) -> str:
        """Return a directory of this host with these files, which an earlier task delivered.

        Raises TransportError, OSError.
        """

    def close(self) -> None:
        """Delete the files that only this host needs."""


def open_transport(env: Env, descriptor: Mapping[str, Any]) -> Transport:
    """Open the transport of a descriptor. Raises ValueError for an unknown kind."""
    if descriptor.get("kind") == "disk":
        from pipeline.transport.disk import DiskTransport

        return DiskTransport(env)
    if descriptor.get("kind") == "http":
        from pipeline.transport.http import HttpTransport

        tls = descriptor["tls"]
        return HttpTransport(
            env,
            descriptor["url"],
            descriptor["compaction_id"],
            descriptor["token"],
            tls=ClientTls(**json.loads(tls)) if tls else None,
        )
    raise ValueError(f"unknown transport kind {descriptor.get('kind')!r}")
