"""The destination of outputs: an Env, or a replacement for it."""

from typing import Protocol

from storage.env import ReadBuffer


class OutputFile(Protocol):
    """A file that only grows. See storage.env.File."""

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Append `data`."""

    def sync(self) -> None:
        """Return once the content of the complete file is on the device."""

    def close(self) -> None:
        """Close the file."""


class OutputFiles(Protocol):
    """Creates and removes output files. See storage.env.Env."""

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> OutputFile:
        """Create a file."""
        ...

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """Set the modification time of a complete file."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def sync_dir(self, path: str) -> None:
        """Return once the names in the folder are on the device."""
