"""The run's folders are elsewhere: files come from the broker by HTTP, and go back to it.

Rules
- Inputs are fetched in ranges. Of each the broker tells the checksum; a range that is cut short or
  damaged on the way is fetched again, and so is one that nobody answered: ATTEMPTS times in all.
- What the broker refuses is not tried again: the run has ended, or the request is wrong.
- Outputs are put with their checksum; the broker answers when they are durable.
- No file is held in memory as a whole.
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
from pipeline.transport import SCRATCH_VARIABLE, InputsGoneError, TransportError
from storage.env import Env
from storage.format import filenames
from storage.segments.swap import crc_of_file

RANGE_BYTES: Final = 4 << 20  # no more than the broker gives at a time
ATTEMPTS: Final = 6
PAUSE_SECONDS: Final = 0.2  # before the second attempt; doubled before each further one
SPARK_DIRS_VARIABLE: Final = "SPARK_LOCAL_DIRS"  # set in an executor's workers; it empties them
GONE: Final = (401, 403, 404, 409, 410)  # statuses that say: not any more

T = TypeVar("T")


class _DamagedOnTheWayError(Exception):
    """What came is not what was sent."""


class HttpTransport:
    """Files of one run, fetched to a scratch folder of this host."""

    def __init__(
        self,
        env: Env,
        url: str,
        run: str,
        token: str,
        *,
        nap: Callable[[float], object] = time.sleep,
    ) -> None:
        """Raises ValueError for a `url` that is none."""
        self._env = env
        self._run = run
        self._nap = nap
        self._client = ApiClient(url, token).below(f"{COMPACTIONS_PATH}/{run}")
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
                raise TransportError(f"{name} cannot be fetched: {error}") from error
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
                raise TransportError(f"{folder}/{name} cannot be fetched: {error}") from error
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
        """Fetch a file of `size_bytes`; None: as long as the broker says. Raises ApiRefusedError,
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
        """Bytes from `first` on, and the size of the file."""

        def attempt() -> tuple[bytes, int]:
            data, headers = self._client.download(remote, first, count)
            header = headers.get(CRC_HEADER, "")
            if f"{crc32c(data):08x}" != header:
                raise _DamagedOnTheWayError(f"bytes from {first} on have another checksum")
            total = _total(headers.get("Content-Range", ""), len(data))
            if len(data) < min(count, total - first):
                raise _DamagedOnTheWayError(f"bytes from {first} on were cut short")
            return data, total

        return self._tried(remote, attempt)

    def _upload(self, remote: str, path: str) -> None:
        size_bytes = self._env.size(path)
        reported = {CRC_HEADER: f"{crc_of_file(self._env, path):08x}"}

        def attempt() -> object:
            with open(path, "rb") as content:
                return self._client.upload(remote, content, size_bytes, reported)

        try:
            self._tried(remote, attempt)
        except ApiRefusedError as error:
            raise TransportError(f"{remote} was refused: {error}") from error

    def _tried(self, subject: str, attempt: Callable[[], T]) -> T:
        """Raises ApiRefusedError, TransportError."""
        for number in range(ATTEMPTS):
            try:
                return attempt()
            except (UnreachableError, _DamagedOnTheWayError) as error:
                if number == ATTEMPTS - 1:
                    raise TransportError(f"{subject}: {error}, {ATTEMPTS} times") from error
            except ApiRefusedError as error:
                if error.status not in _WORTH_ANOTHER or number == ATTEMPTS - 1:
                    raise
            self._nap(PAUSE_SECONDS * 2**number)
        raise AssertionError


# 408: it came too slowly; 422: it was damaged on the way; 503: the broker starts.
_WORTH_ANOTHER: Final = (408, 422, 503)


def _scratch_parent() -> str | None:
    """Where what is left of a process that was killed is removed by its parent; None: TMPDIR."""
    of_spark = os.environ.get(SPARK_DIRS_VARIABLE, "").split(",")[0]
    return os.environ.get(SCRATCH_VARIABLE) or of_spark or None


def _partition(job: CleanJob) -> str:
    return f"/partitions/{job.partition.partition}"


def _total(content_range: str, count: int) -> int:
    """The size that a Content-Range tells; without one what came is all."""
    _, slash, total = content_range.rpartition("/")
    return int(total) if slash and total.isascii() and total.isdigit() else count
