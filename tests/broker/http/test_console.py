"""The console's files: who gets them, and what browsers are told about them."""

import hashlib
import re
from collections.abc import AsyncIterator

import pytest

from broker.app import Broker
from broker.http.console import CONTENT_TYPES, FOLDER, INDEX
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import ask
from tests.support.storage.memory_env import MemoryEnv

OUR_FILES = [
    path for path in FOLDER.rglob("*") if path.is_file() and path.parent != FOLDER / "vendor"
]
OUR_MODULES = [path for path in OUR_FILES if path.suffix == ".js"]


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=4)) as broker:
        yield broker


async def test_every_file_is_served_with_its_type_and_a_strict_policy(broker: Broker) -> None:
    names = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()]
    assert len(names) > 10
    for name in names:
        status, headers, body = await ask(broker, "GET", f"/console/{name}")
        assert (status, body) == (200, (FOLDER / name).read_bytes()), name
        assert headers.get_content_type() == CONTENT_TYPES[f".{name.rpartition('.')[2]}"]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


async def test_a_browser_that_has_a_file_gets_no_body(broker: Broker) -> None:
    _, headers, _ = await ask(broker, "GET", "/console/app.js")
    status, _, body = await ask(
        broker, "GET", "/console/app.js", **{"If-None-Match": headers["ETag"]}
    )
    assert (status, body) == (304, b"")
    status, _, body = await ask(broker, "GET", "/console/app.js", **{"If-None-Match": '"older"'})
    assert status == 200
    assert body


@pytest.mark.parametrize(
    "path",
    ["/console/../console.py", "/console/%2e%2e/console.py", "/console/", "/console/none.js"],
)
async def test_nothing_but_the_consoles_files_is_served(broker: Broker, path: str) -> None:
    status, _, _ = await ask(broker, "GET", path)
    assert status == 404


async def test_the_page_names_only_files_that_exist(broker: Broker) -> None:
    _, _, page = await ask(broker, "GET", "/")
    paths = re.findall(r'(?:src|href)="(/console/[^"]+)"', page.decode())
    assert len(paths) >= 4
    for script in OUR_MODULES:
        for name in re.findall(r'from "(\.[^"]+)"', script.read_text()):
            module = (script.parent / name).resolve()
            paths.append(f"/console/{module.relative_to(FOLDER.resolve()).as_posix()}")
    for path in set(paths):
        assert (await ask(broker, "GET", path))[0] == 200, path


def test_the_page_loads_every_module_at_once() -> None:
    """A module that is found only by reading another one costs a round trip more."""
    page = (FOLDER / INDEX).read_text()
    preloaded = set(re.findall(r'"modulepreload" href="/console/([^"]+)"', page))
    modules = {path.relative_to(FOLDER).as_posix() for path in OUR_MODULES}
    assert preloaded == {"vendor/preact-htm.js", *modules} - {"app.js"}


def test_the_console_loads_nothing_from_other_hosts() -> None:
    for path in OUR_FILES:
        if path.suffix in (".html", ".js", ".css"):
            assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", path.read_text()) == [], path


def test_vendored_libraries_are_the_released_files() -> None:
    vendor = FOLDER / "vendor"
    listed = re.findall(
        r"^(\S+\.(?:js|css))\n.*\n\s+([0-9a-f]{64})$", (vendor / "VERSIONS.txt").read_text(), re.M
    )
    files = {path.name for path in vendor.iterdir() if path.suffix in (".js", ".css")}
    assert {name for name, _ in listed} == files
    for name, digest in listed:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name


async def test_an_api_request_of_the_console_raises_no_password_dialog() -> None:
    """A browser shows its own dialog for a Basic challenge, whoever sent the request."""
    async with broker_in_memory(
        MemoryEnv(seed=4), http_users=True, token=b"0123456789abcdef"
    ) as broker:
        status, headers, _ = await ask(broker, "GET", "/api/v1/overview")
        assert status == 401
        assert any(text.startswith("Basic") for text in headers.get_all("WWW-Authenticate"))
        status, headers, _ = await ask(
            broker, "GET", "/api/v1/overview", **{"X-Requested-With": "console"}
        )
        assert status == 401
        assert headers.get_all("WWW-Authenticate") == ['Bearer realm="varve"']
