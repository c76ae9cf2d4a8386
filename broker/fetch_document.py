"""Fetch a document from a server that the settings name, and from no other."""

import http.client
import urllib.request
from collections.abc import Mapping


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Follow nothing: a redirection becomes an HTTPError."""
        return


def fetch_document(
    url: str, *, timeout_seconds: float, bytes_max: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return the body of the answer to a GET. It takes as long as the server sends something.

    Raises urllib.error.HTTPError, an OSError, for a status of failure or a redirection; OSError if
    the server does not answer as HTTP requires, or with more than `bytes_max`; ValueError for a
    malformed URL.
    """
    opener = urllib.request.build_opener(_NoRedirection)
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            data: bytes = answer.read(bytes_max + 1)
    except http.client.HTTPException as error:
        raise OSError(f"not an answer of HTTP: {error!r}") from None
    if len(data) > bytes_max:
        raise OSError(f"the answer is larger than {bytes_max} bytes")
    return data
