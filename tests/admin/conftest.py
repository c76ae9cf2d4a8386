"""A broker that the tests of several commands share: every test has topics of its own."""

from collections.abc import Iterator

import pytest

from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    port, sasl_port = free_port(), free_port()
    settings = {
        "listeners": [f"127.0.0.1:{port}", f"SASL_PLAINTEXT://127.0.0.1:{sasl_port}"],
        "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    }
    with running_varve(tmp_path_factory.mktemp("admin"), settings, port=port) as running:
        running.sasl_port = sasl_port  # type: ignore[attr-defined]
        yield running
