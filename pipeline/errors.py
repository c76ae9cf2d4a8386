"""The error that ends a job, with the exit code that the command returns."""

from config import exit_codes


class JobError(Exception):
    """A job cannot continue; `code` is one of config/exit_codes.py."""

    def __init__(self, message: str, code: int = exit_codes.FAILED) -> None:
        super().__init__(message)
        self.code = code


def as_disk_error(error: OSError) -> JobError:
    """Return the error of a job whose files or output cannot be read or written."""
    path = error.filename2 or error.filename  # a rename names its target second
    where = "" if path is None else f"{path}: "
    reason = error.strerror or next(iter(str(error).splitlines()), type(error).__name__)
    return JobError(f"{where}{reason}")
