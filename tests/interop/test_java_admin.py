"""Kafka's own Admin client asks what administrators' tools ask of a cluster."""

import subprocess
from pathlib import Path

from tests.support.peers.java_programs import java_command
from tests.support.peers.kafka import LIB
from tests.support.varve import running_varve


def test_the_java_admin_client_is_answered_about_the_whole_cluster(
    real_kafka: None, tmp_path: Path
) -> None:
    with running_varve(tmp_path) as broker:
        done = subprocess.run(
            java_command(LIB, "AskAdmin", broker.bootstrap, "orders"),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.stdout.splitlines() == [
        "described by id: orders 2",
        "resources: {orders=true}",
        "leader of the quorum: 1",
        "producers: 0",
        "reassignments: {}",
        "elections: {}",
        "election: ElectionNotNeededException",
        "reassigned to: 1",
        "max.connections: 77 DYNAMIC_BROKER_CONFIG read only: false",
        "max.connections.per.ip: 66 DYNAMIC_BROKER_CONFIG read only: false",
        "producer.id.expiration.ms: 55000 DYNAMIC_BROKER_CONFIG read only: false",
    ], done.stderr[-2000:]
