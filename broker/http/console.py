"""The console: the static files of the daemon's web page, at `/` and below `/console/`.

Rules
- The files come with the package. The console needs no build step and loads nothing from other
  hosts; the Content-Security-Policy (CSP Level 3) allows scripts and styles of this server only,
  and no inline ones.
- The files contain nothing of the broker, so they need no credentials. The page asks the API with
  those of its user.
- A file is read once, at its first request. Browsers ask again each time and get 304 while it is
  unchanged, so a new version of the broker never meets old files.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import aiofiles
from aiohttp import web

FOLDER: Final = Path(__file__).with_name("static")
INDEX: Final = "index.html"
FILE_PATH: Final = "/console/{file}"
OPEN_ROUTES: Final = ("/", FILE_PATH)
CONTENT_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    body: bytes
    content_type: str
    etag: str

    def response(self, request: web.Request) -> web.Response:
        """Return the file, or 304 if the browser has it."""
        etags = {tag.value for tag in request.if_none_match or ()}
        if self.etag in etags:
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(
                body=self.body, content_type=self.content_type, charset="utf-8", headers=HEADERS
            )
        response.etag = self.etag
        return response


@cache
def _paths_below(folder: Path) -> Mapping[str, Path]:
    """Return the files of a folder that the console serves, by their paths in it."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix in CONTENT_TYPES
    }


class Console:
    """Serves the files of a folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._paths = _paths_below(folder)
        self._files: dict[str, StaticFile] = {}

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get("/", self._index)
        yield web.get("/console/{file:.+}", self._file)

    async def _index(self, request: web.Request) -> web.Response:
        return (await self._read(INDEX)).response(request)

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._paths:
            return web.Response(status=404, text="there is no such file\n")
        return (await self._read(name)).response(request)

    async def _read(self, name: str) -> StaticFile:
        file = self._files.get(name)
        if file is None:
            path = self._paths[name]
            async with aiofiles.open(path, "rb") as opened:
                body = await opened.read()
            etag = hashlib.sha256(body).hexdigest()[:32]
            file = self._files[name] = StaticFile(body, CONTENT_TYPES[path.suffix], etag)
        return file
