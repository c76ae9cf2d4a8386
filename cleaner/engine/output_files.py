"""What an output is written to: an Env, or something else that takes bytes for files."""

from typing import Protocol

from storage.env import ReadBuffer


class OutputFile(Protocol):
    """A file that only grows. See storage.env.File."""

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Write all of `data` behind what was written before."""

    def sync(self) -> None:
        """It is complete: return once its content is on the device."""

    def close(self) -> None:
        """Give it back."""


class OutputFiles(Protocol):
    """Makes and unmakes them. See storage.env.Env."""

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> OutputFile:
        """Begin a file."""
        ...

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """Set the last modification of one that is complete."""

    def unlink(self, path: str) -> None:
        """It is not wanted after all."""

    def sync_dir(self, path: str) -> None:
        """Return once the names in a folder are on the device."""
