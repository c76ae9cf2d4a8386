"""The token of the HTTP API. It has a file of its own, so that the settings hold no secret."""

import re
from typing import Final

from config.security.small_file import read_small_file

TOKEN_BYTES_MAX: Final = 4096
# The characters that a header carries without quoting (RFC 6750, b68token); long enough to be
# unguessable.
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/=-]{16,}")


class TokenFileError(Exception):
    """The token file cannot be used. The text names the file, never its content."""


def read_token(path: str) -> bytes:
    """Return the token in a file without surrounding white space. Raises TokenFileError."""
    try:
        data = read_small_file(path, TOKEN_BYTES_MAX)
    except OSError as error:
        raise TokenFileError(f"{path}: {error.strerror or error}") from None
    token = data.strip()
    if len(data) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise TokenFileError(
            f"{path}: expected one token of 16 to {TOKEN_BYTES_MAX} letters, digits and -._~+/="
        )
    return token
