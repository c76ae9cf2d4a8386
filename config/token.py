"""The secret of the HTTP API, in a file of its own so that settings can be shown to anybody."""

import re
from pathlib import Path
from typing import Final

TOKEN_BYTES_MAX: Final = 4096
# What a header can carry without quoting (RFC 6750, b68token), and too much to be guessed.
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/=-]{16,}")


class TokenFileError(Exception):
    """A token file that cannot be used; the text names the file and never its content."""


def read_token(path: str) -> bytes:
    """The token in a file; white space around it does not count. Raises TokenFileError."""
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise TokenFileError(f"{path}: {error.strerror or error}") from None
    token = data.strip()
    if len(data) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise TokenFileError(
            f"{path}: expected one token of 16 to {TOKEN_BYTES_MAX} letters, digits and -._~+/="
        )
    return token
