"""Requests that follow the OpenAPI document, and requests that break it: none gets a 500."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.http.api.openapi.openapi import document
from tests.support.draws import cases
from tests.support.varve import VarveBroker, running_varve

EXAMPLES = cases(few=2, many=40)  # of each operation
TIMEOUT_SECONDS = 30
SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"},
    "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
}
# Values that exist, in place of what was drawn: most drawn names exist nowhere.
KNOWN = {"topic": "orders", "partition": 0, "group": "readers", "user": "ada"}
STREAMS = "/events"  # they do not end; test_events.py


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("schemathesis"), SETTINGS) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        config = {"cleanup.policy": "compact", "varve.view": "compacted"}
        for future in admin.create_topics([NewTopic("orders", 2, 1, config=config)]).values():
            future.result(30)
        producer = Producer({"bootstrap.servers": running.bootstrap})
        for number in range(100):
            producer.produce("orders", b"%d" % number, b"%d" % (number % 7), partition=0)
        assert producer.flush(30) == 0
        yield running


def labels() -> list[str]:
    """The names that schemathesis gives the operations: only the test itself imports it."""
    methods = [(path, method) for path, item in document("0")["paths"].items() for method in item]
    return sorted(f"{method.upper()} {path}" for path, method in methods if STREAMS not in path)


@cache
def operations() -> dict[str, Any]:
    import schemathesis

    schema = schemathesis.openapi.from_dict(document("0"))
    found = [result.ok() for result in schema.get_all_operations()]
    return {item.label: item for item in found if STREAMS not in item.path}


@pytest.mark.parametrize("label", labels())
def test_no_request_gets_an_internal_error(broker: VarveBroker, label: str) -> None:
    from schemathesis import GenerationMode

    operation = operations()[label]
    documented = operation.definition.raw["responses"]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        case=st.one_of(
            operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        ),
        is_known=st.booleans(),
    )
    def send(case: Any, *, is_known: bool) -> None:
        for name in KNOWN if is_known else ():
            if name in (case.path_parameters or {}):
                case.path_parameters[name] = KNOWN[name]
        response = case.call(base_url=broker.url, timeout=TIMEOUT_SECONDS)
        status = response.status_code
        assert status < 500 or str(status) in documented, response.text
        if status >= 400:
            assert response.json()["status"] == status  # a problem document

    send()


def test_the_log_of_the_broker_has_no_failed_request(broker: VarveBroker) -> None:
    lines = [line for line in broker.log_text.splitlines() if "request failed" in line]
    assert lines == []
    assert json.loads(broker.get("/api/v1/overview"))["version"]
