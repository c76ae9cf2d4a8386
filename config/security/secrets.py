"""References to secrets, so that the settings file and its dumps contain none."""

import os
from dataclasses import dataclass
from typing import Final

from config.security.small_file import read_small_file

SECRET_BYTES_MAX: Final = 4096
_variables: Final[set[str]] = set()  # of the environment, that the settings name as secrets


class SecretError(Exception):
    """A secret cannot be read. The text names its place, never its content."""


@dataclass(frozen=True, slots=True)
class SecretReference:
    """The file or the environment variable that contains a secret."""

    kind: str  # "file" or "env"
    name: str

    def read(self) -> str:
        """Return the secret without a final line break. Raises SecretError."""
        if self.kind == "env":
            value = os.environ.get(self.name)
            if not value:
                raise SecretError(f"the environment variable {self.name} is not set")
            return value
        try:
            data = read_small_file(self.name, SECRET_BYTES_MAX)
        except OSError as error:
            raise SecretError(f"{self.name}: {error.strerror or error}") from None
        try:
            text = data.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise SecretError(f"{self.name} is not UTF-8 text") from None
        if not text or len(data) > SECRET_BYTES_MAX:
            raise SecretError(f"{self.name}: expected 1 to {SECRET_BYTES_MAX} bytes")
        return text


def parse_secret(value: object) -> object:
    """Read `{file: PATH}` or `{env: NAME}`. Raises ValueError without repeating the value."""
    if value is None or isinstance(value, SecretReference):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind in ("file", "env") and isinstance(name, str) and name:
            if kind == "env":
                _variables.add(name)
            return SecretReference(kind, name)
    raise ValueError("expected {file: PATH} or {env: NAME}; secrets do not belong in this file")


def environment_without_secrets() -> dict[str, str]:
    """Return the environment for processes that the broker starts; they need no secret."""
    return {name: value for name, value in os.environ.items() if name not in _variables}
