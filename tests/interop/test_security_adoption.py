"""Users, access control lists and quotas of a killed Apache Kafka hold here as they did there."""

import hashlib
import re
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient

from broker.security.acls import Operation, PatternType, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.peers.kafka import start_kafka
from tests.support.ports import free_port
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

PASSWORD = "correct-horse"
ITERATIONS = 4096
SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}


def acl(name: str, permission: Permission, host: str = "*") -> m.CreateAclsRequestCreation:
    return m.CreateAclsRequestCreation(
        resource_type=ResourceType.TOPIC,
        resource_name=name,
        resource_pattern_type=PatternType.PREFIXED,
        principal="User:ann",
        host=host,
        operation=Operation.DESCRIBE,
        permission_type=permission,
    )


def upsertion(name: str, mechanism: int) -> m.AlterUserScramCredentialsRequestUpsertion:
    digest = {1: "sha256", 2: "sha512"}[mechanism]
    salted = hashlib.pbkdf2_hmac(digest, PASSWORD.encode(), b"some salt", ITERATIONS)
    return m.AlterUserScramCredentialsRequestUpsertion(
        name=name,
        mechanism=mechanism,
        iterations=ITERATIONS,
        salt=b"some salt",
        salted_password=salted,
    )


def quota(key: str, value: float, *, remove: bool = False) -> m.AlterClientQuotasRequestEntry:
    entity = [
        m.AlterClientQuotasRequestEntity(entity_type="user", entity_name="ann"),
        m.AlterClientQuotasRequestEntity(entity_type="client-id", entity_name=None),
    ]
    op = m.AlterClientQuotasRequestOp(key=key, value=value, remove=remove)
    return m.AlterClientQuotasRequestEntry(entity=entity, ops=[op])


def configure(client: RawClient) -> None:
    """Create what is taken over later, and some of it for a while only."""
    rows = [
        m.CreateTopicsRequestTopic(name=name, num_partitions=1, replication_factor=1)
        for name in ("orders", "orders-secret", "others")
    ]
    topics = m.CreateTopicsRequest(topics=rows, timeout_ms=30_000)
    acls = [
        acl("ord", Permission.ALLOW),
        acl("orders-s", Permission.DENY),
        acl("oth", Permission.ALLOW, "10.9.9.9"),
        acl("gone", Permission.ALLOW),
    ]
    removed = m.DeleteAclsRequestFilter(
        resource_type_filter=ResourceType.TOPIC,
        resource_name_filter="gone",
        pattern_type_filter=PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )
    users = [upsertion("ann", 1), upsertion("ann", 2), upsertion("bob", 1)]
    bob = m.AlterUserScramCredentialsRequestDeletion(name="bob", mechanism=1)
    for key, version, body in (
        (ApiKey.CREATE_TOPICS, 7, topics),
        (ApiKey.CREATE_ACLS, 3, m.CreateAclsRequest(creations=acls)),
        (ApiKey.DELETE_ACLS, 3, m.DeleteAclsRequest(filters=[removed])),
        *(
            (
                ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
                0,
                m.AlterUserScramCredentialsRequest(upsertions=[row]),
            )
            for row in users
        ),
        (
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
            0,
            m.AlterUserScramCredentialsRequest(deletions=[bob]),
        ),
        *(
            (ApiKey.ALTER_CLIENT_QUOTAS, 1, m.AlterClientQuotasRequest(entries=[entry]))
            for entry in (
                quota("producer_byte_rate", 1e6),
                quota("consumer_byte_rate", 2e6),
                quota("consumer_byte_rate", 0, remove=True),
            )
        ),
    ):
        answer = repr(client.request(key, version, body))
        assert re.search(r"\berror_code=[^0]", answer) is None, answer


def described(client: RawClient) -> list[Any]:
    """The entries, users and quotas that a broker lists."""
    acls = client.request(
        ApiKey.DESCRIBE_ACLS,
        3,
        m.DescribeAclsRequest(
            resource_type_filter=ResourceType.ANY,
            resource_name_filter=None,
            pattern_type_filter=PatternType.ANY,
            principal_filter=None,
            host_filter=None,
            operation=Operation.ANY,
            permission_type=Permission.ANY,
        ),
    )
    users = client.request(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        m.DescribeUserScramCredentialsRequest(users=None),
    )
    quotas = client.request(
        ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, m.DescribeClientQuotasRequest(components=[])
    )
    assert isinstance(acls, m.DescribeAclsResponse)
    assert isinstance(users, m.DescribeUserScramCredentialsResponse)
    assert isinstance(quotas, m.DescribeClientQuotasResponse)
    return [
        sorted(
            (row.resource_type, row.pattern_type, row.resource_name, repr(row.acls))
            for row in acls.resources
        ),
        sorted(
            (row.user, *sorted((c.mechanism, c.iterations) for c in row.credential_infos))
            for row in users.results
        ),
        sorted(
            (
                sorted((part.entity_type, part.entity_name or "") for part in entry.entity),
                sorted((value.key, value.value) for value in entry.values),
            )
            for entry in quotas.entries or ()
        ),
    ]


def topics_of(port: int, mechanism: str) -> set[str]:
    config = {
        "bootstrap.servers": f"localhost:{port}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": "ann",
        "sasl.password": PASSWORD,
    }
    return set(AdminClient(config).list_topics(timeout=30).topics)


def test_users_entries_and_quotas_of_kafka_are_taken_over(real_kafka: None, tmp_path: Path) -> None:
    kafka = start_kafka(tmp_path, SETTINGS)
    try:
        with RawClient(kafka.port) as client:
            configure(client)
            # Kafka answers from its metadata, which follow a change a little later.
            wait_until(lambda: len(described(client)[2][0][1]) == 1, "the last change is in effect")
            expected = described(client)
    finally:
        kafka.kill()
    assert [len(rows) for rows in expected] == [3, 1, 1]
    plain, secured = free_port(), free_port()
    settings = {
        "listeners": [f"PLAINTEXT://127.0.0.1:{plain}", f"SASL_PLAINTEXT://127.0.0.1:{secured}"],
        "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    }
    with running_varve(tmp_path, settings, port=plain) as broker:
        assert "security settings taken from kafka" in broker.log_text
        assert PASSWORD not in broker.log_text
        with RawClient(plain) as client:
            assert described(client) == expected
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            assert topics_of(secured, mechanism) == {"orders"}
