"""The HTTP transport: files are downloaded from the broker and uploaded to it.

Rules
- Inputs are downloaded in ranges with checksums. A range that is truncated, damaged or unanswered
  is requested again, ATTEMPTS times in all.
- A refusal is not retried: the lease has ended, or the request is wrong.
- Outputs are uploaded with their checksum; the broker answers when they are durable.
- No file is ever wholly in memory.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from crc32c import crc32c

from admin.client import ApiClient, ApiRefusedError, UnreachableError
from cleaner.job import CleanJob
from cleaner.remote_compaction import COMPACTIONS_PATH, CRC_HEADER
from config.security.clients import ClientSecurity, ClientTls
from pipeline.transport import SCRATCH_VARIABLE, InputsGoneError, TransportError
from storage.env import Env
from storage.format import filenames
from storage.swap.swap_journal import crc_of_file

RANGE_BYTES: Final = 4 << 20  # the most that the broker sends at a time
ATTEMPTS: Final = 6
PAUSE_SECONDS: Final = 0.2  # before the second attempt; doubled before each further one
# Set in the workers of executors, which delete its content.
SPARK_DIRS_VARIABLE: Final = "SPARK_LOCAL_DIRS"
GONE: Final = (401, 403, 404, 409, 410)  # statuses of a lease that has ended

T = TypeVar("T")


class _DamagedInTransitError(Exception):
    """A response was truncated or damaged in transit."""


class HttpTransport:
    """Files of one lease, downloaded to a scratch directory of this host."""

    def __init__(
        self,
        env: Env,
        url: str,
        compaction_id: str,
        token: str,
        *,
        tls: ClientTls | None = None,
        nap: Callable[[float], object] = time.sleep,
    ) -> None:
        """Raises ValueError for an invalid `url`."""
        self._env = env
        self._compaction_id = compaction_id
        self._nap = nap
        security = ClientSecurity(tls=tls or ClientTls())
        self._client = ApiClient(url, token, security).below(f"{COMPACTIONS_PATH}/{compaction_id}")
        self._scratch: str | None = None

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        """See Transport."""
        folder = self._folder("in")
        sizes = {source.base_offset: source.size_bytes for group in job.groups for source in group}
        for base in bases:
            name = filenames.file_name(base, filenames.LOG)
            path = f"{folder}/{name}"
            if self._env.exists(path):
                continue
            try:
                self._download(f"{_partition(job)}/inputs/{name}", path, sizes[base])
            except ApiRefusedError as error:
                if error.status in GONE:
                    raise InputsGoneError(f"{job.directory}/{name}") from error
                raise TransportError(f"cannot download {name}: {error}") from error
        return replace(job, directory=folder)

    def outputs(self, job: CleanJob, folder: str) -> str:
        """See Transport."""
        return self._folder(f"out/{folder}")

    def deliver(self, job: CleanJob, folder: str, names: Sequence[str]) -> None:
        """See Transport."""
        for name in names:
            local = f"{self._folder(f'out/{folder}')}/{name}"
            self._upload(f"{_partition(job)}/outputs/{folder}/{name}", local)

    def fetch(self, job: CleanJob, folder: str, names: Sequence[str]) -> str:
        """See Transport."""
        local = self._folder(f"fetched/{folder}")
        for name in names:
            path = f"{local}/{name}"
            if self._env.exists(path):
                continue
            try:
                self._download(f"{_partition(job)}/outputs/{folder}/{name}", path, None)
            except ApiRefusedError as error:
                raise TransportError(f"cannot download {folder}/{name}: {error}") from error
        return local

    def close(self) -> None:
        """See Transport."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _folder(self, name: str) -> str:
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="varve-", dir=_scratch_parent())
        path = f"{self._scratch}/{name}"
        self._env.mkdir(path)
        return path

    def _download(self, remote: str, path: str, size_bytes: int | None) -> None:
        """Download a file of `size_bytes`; None: the broker's size. Raises ApiRefusedError,
        TransportError, OSError.
        """
        temporary = f"{path}.part"
        file = self._env.open(temporary, create=True, write=True, truncate=True)
        try:
            position = 0
            while size_bytes is None or position < size_bytes:
                requested = RANGE_BYTES if size_bytes is None else size_bytes - position
                data, total = self._range(remote, position, min(requested, RANGE_BYTES))
                if size_bytes is None:
                    size_bytes = total
                if total < size_bytes:
                    raise TransportError(f"{remote} has {total} bytes instead of {size_bytes}")
                file.pwrite(data, position)
                position += len(data)
        finally:
            file.close()
        self._env.rename(temporary, path)

    def _range(self, remote: str, first: int, count: int) -> tuple[bytes, int]:
        """Return bytes from `first` on, and the size of the file."""

        def attempt() -> tuple[bytes, int]:
            data, headers = self._client.download(remote, first, count)
            header = headers.get(CRC_HEADER, "")
            if f"{crc32c(data):08x}" != header:
                raise _DamagedInTransitError(f"bytes from {first} on have a wrong checksum")
            total = _total(headers.get("Content-Range", ""), len(data))
            if len(data) < min(count, total - first):
                raise _DamagedInTransitError(f"bytes from {first} on are truncated")
            return data, total

        return self._with_retries(remote, attempt)

    def _upload(self, remote: str, path: str) -> None:
        size_bytes = self._env.size(path)
        reported = {CRC_HEADER: f"{crc_of_file(self._env, path):08x}"}

        def attempt() -> object:
            with open(path, "rb") as content:
                return self._client.upload(remote, content, size_bytes, reported)

        try:
            self._with_retries(remote, attempt)
        except ApiRefusedError as error:
            raise TransportError(f"the broker refused {remote}: {error}") from error

    def _with_retries(self, subject: str, attempt: Callable[[], T]) -> T:
        """Raises ApiRefusedError, TransportError."""
        for number in range(ATTEMPTS):
            try:
                return attempt()
            except (UnreachableError, _DamagedInTransitError) as error:
                if number == ATTEMPTS - 1:
                    raise TransportError(f"{subject}: {error}, {ATTEMPTS} times") from error
            except ApiRefusedError as error:
                if error.status not in _RETRIABLE or number == ATTEMPTS - 1:
                    raise
            self._nap(PAUSE_SECONDS * 2**number)
        raise AssertionError


# 408: too slow; 422: damaged in transit; 503: the broker is starting.
_RETRIABLE: Final = (408, 422, 503)


def _scratch_parent() -> str | None:
    """Return a directory that the parent process cleans up after a kill; None: TMPDIR."""
    spark_directory = os.environ.get(SPARK_DIRS_VARIABLE, "").split(",")[0]
    return os.environ.get(SCRATCH_VARIABLE) or spark_directory or None


def _partition(job: CleanJob) -> str:
    return f"/partitions/{job.partition.partition}"


def _total(content_range: str, count: int) -> int:
    """Return the size in a Content-Range; without one, the response is the whole file."""
    _, slash, total = content_range.rpartition("/")
    return int(total) if slash and total.isascii() and total.isdigit() else count
