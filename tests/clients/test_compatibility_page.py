"""The table of clients and features on the page about compatibility follows from this one.

Each entry names the test that shows it. To change the page, change CLIENTS and paste `table()`:

    python -c "from tests.clients.test_compatibility_page import table; print(table())"
"""

import importlib
from pathlib import Path
from typing import Final

import pytest

PAGE = Path(__file__).parents[2] / "docs/reference/kafka-compatibility.md"
FEATURES: Final = (
    "compacted topics",
    "all codecs",
    "groups, classic",
    "groups, KIP-848",
    "transactions",
    "TLS and SCRAM",
    "OAUTHBEARER",
    "compacted views",
)
MATRIX: Final = "clients.test_matrix"


def matrix(test: str, *others: str) -> dict[str, str]:
    """Features that one test of the matrix shows: topics, security and `others`."""
    shown = ("compacted topics", "TLS and SCRAM", *others)
    return dict.fromkeys(shown, f"{MATRIX}.{test}")


VIEW: Final = {
    "compacted views": "clients.test_views.test_every_family_reads_the_value_of_the_largest_rank"
}
KILLED_LOOP: Final = (
    "crash.test_kill_transactions."
    "test_a_loop_that_is_killed_with_its_broker_writes_each_record_once"
)
CLIENTS: Final[dict[str, dict[str, str]]] = {
    "confluent-kafka (librdkafka) 2.x": {
        **matrix("test_confluent_kafka", "all codecs", "groups, classic"),
        "groups, KIP-848": "interop.test_consumer_protocol."
        "test_librdkafka_shares_a_topic_among_members_and_continues_after_a_restart",
        "transactions": KILLED_LOOP,
        "OAUTHBEARER": "clients.test_sasl.test_confluent_kafka_writes_with_a_token",
        **VIEW,
    },
    "kcat 1.7.1 (librdkafka 2.0.2)": matrix(
        "test_kcat_with_an_old_librdkafka", "all codecs", "groups, classic"
    ),
    "kafka-python 3.x": {
        **matrix("test_kafka_python", "all codecs", "groups, classic"),
        **VIEW,
    },
    "aiokafka 0.14": {
        **matrix("test_aiokafka", "all codecs", "groups, classic"),
        "OAUTHBEARER": "clients.test_sasl.test_aiokafka_writes_with_a_token",
        **VIEW,
    },
    "kafkajs 2.2.4": matrix("test_clients_in_javascript_and_go", "groups, classic", "transactions"),
    "franz-go 1.19": matrix("test_clients_in_javascript_and_go", "groups, classic", "transactions"),
    "rskafka 0.6": matrix("test_a_client_in_rust", "all codecs"),
    "Java 2.8.2": matrix("test_java_clients", "all codecs", "groups, classic", "transactions"),
    "Java 3.9.1": matrix("test_java_clients", "all codecs", "groups, classic", "transactions"),
    "Java 4.3.0": {
        **matrix("test_java_clients", "all codecs", "groups, classic", "transactions"),
        "groups, KIP-848": "interop.test_consumer_protocol."
        "test_javas_consumer_and_tools_speak_the_consumer_protocol",
        "compacted views": "clients.test_views."
        "test_a_view_is_read_to_the_end_while_it_is_published_and_originals_expire",
    },
}


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        f"| client | {' | '.join(FEATURES)} |",
        f"|---|{':-:|' * len(FEATURES)}",
    ]
    for client, shown in CLIENTS.items():
        cells = ("yes" if feature in shown else "" for feature in FEATURES)
        lines.append(f"| {client} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_clients_and_features() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("client", CLIENTS)
def test_each_feature_of_a_client_has_its_test(client: str) -> None:
    assert CLIENTS[client].keys() <= set(FEATURES)
    for test in CLIENTS[client].values():
        module, _, name = test.rpartition(".")
        assert callable(getattr(importlib.import_module(f"tests.{module}"), name)), test
