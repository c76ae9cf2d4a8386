"""One real daemon for all client tests; every test uses topics of its own."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.varve import VarveBroker, running_varve

SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200},
    "retention_check_interval_ms": 500,
}


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    """The daemon under test."""
    directory: Path = tmp_path_factory.mktemp("varve")
    with running_varve(directory, SETTINGS) as running:
        yield running


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
