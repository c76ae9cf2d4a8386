"""The error that ends a job, with the exit code that the command returns."""

from config import exit_codes


class JobError(Exception):
    """A job cannot continue; `code` is one of config/exit_codes.py."""

    def __init__(self, message: str, code: int = exit_codes.FAILED) -> None:
        super().__init__(message)
        self.code = code
