"""Random ACLs have the answers and effects of Kafka.

A history is a list of requests from a seed: an administrator creates, describes and deletes ACLs,
rightly and wrongly, and after each of these requests users ask questions whose answers depend on
permissions. It runs against Kafka 4.3.0 with StandardAuthorizer and against this broker, and both
list all entries alike. tests/broker/security/permissions has the answers to each permission alone.
Sources: KIP-11, KIP-290, KIP-430, KIP-679.
"""

import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from broker.security.acls import (
    CLUSTER_NAME,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from tests.broker.security.permissions.asking import digest, questions
from tests.broker.security.permissions.groups import commit_of
from tests.broker.security.permissions.question import (
    GROUP,
    TOPIC,
    Asked,
    Question,
    Questions,
    victims,
)
from tests.broker.security.permissions.users import PERMISSIONS
from tests.interop.both_brokers import GROUP as GROUP_TYPE
from tests.interop.both_brokers import TRANSACTION, create_topics, find_coordinator
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import running_kafka
from tests.support.ports import free_port
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.logs import batch_of
from tests.support.varve import running_varve
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_ACL_SEEDS", few=2, many=12)
STEPS: Final = 25
FIRST_ENTRIES: Final = 15
QUESTIONS: Final = 6  # after each change
USERS: Final = ["alice", "bob"]
PASSWORD: Final = "secret"
TOPICS: Final = [TOPIC, *(name for user in USERS for name in victims(user))]
pytestmark = pytest.mark.xdist_group("kafka with acls")

# Those that change what other questions are about.
NOT_ASKED: Final = {"metadata that creates", "delete topics", "delete topics by id"}
NAMES: Final = {
    ResourceType.TOPIC: [TOPIC, "ord", "missing", "victim-", "victim-alice", "brand-new", "o"],
    ResourceType.GROUP: [GROUP, GROUP, "bill", "of-alice", "missing", "modern"],
    ResourceType.CLUSTER: [CLUSTER_NAME] * 6 + ["kafka", "*"],
    ResourceType.TRANSACTIONAL_ID: ["tx", "tx-", "tx-alice", "tx-missing", "t"],
    ResourceType.DELEGATION_TOKEN: ["token"],
    ResourceType.USER: ["User:alice", "alice"],
}
PREFIXES: Final = {"ord", "victim-", "o", "bill", "tx-", "t"}
PRINCIPALS: Final = ["User:alice", "User:bob", "User:*"]
OTHER_PRINCIPALS: Final = ["Group:alice", "alice", "", "*", "user:alice"]
HOSTS: Final = ["*"] * 4 + ["127.0.0.1"] * 3 + ["10.1.1.1"]
OTHER_HOSTS: Final = ["", "localhost", "::1", "127.0.0.0/8"]
UNKNOWN: Final = 0
OF_TRANSACTION: Final = -77  # stands for the producer of the transaction, which each broker chose
INVALID: Final = "invalid"
IS_INVALID: Final = ErrorCode.INVALID_REQUEST
UNKNOWN_ERROR: Final = ErrorCode.UNKNOWN_SERVER_ERROR

ERROR_CODE: Final = re.compile(r"'error_code': (-?\d+)")

Row = dict[str, Any]
more_questions: Final = Questions()


@more_questions.add(ApiKey.METADATA)
def metadata_of_all_topics(_: Asked) -> m.Message:
    return m.MetadataRequest(topics=None, include_topic_authorized_operations=True)


@more_questions.add(ApiKey.DESCRIBE_ACLS)
def describe_all_acls(_: Asked) -> m.Message:
    return describe_of({})


@more_questions.add(ApiKey.OFFSET_FETCH, 9)
def offset_fetch_of_groups(_: Asked) -> m.Message:
    rows = [m.OffsetFetchRequestGroup(group_id=name, topics=None) for name in (GROUP, "missing")]
    return m.OffsetFetchRequest(groups=rows)


@more_questions.add(ApiKey.DESCRIBE_GROUPS)
def describe_more_groups(_: Asked) -> m.Message:
    names = [GROUP, "missing", "of-alice", "modern"]
    return m.DescribeGroupsRequest(groups=names, include_authorized_operations=True)


@more_questions.add(ApiKey.DELETE_TOPICS, 5)
def delete_missing_topics(_: Asked) -> m.Message:
    return m.DeleteTopicsRequest(topic_names=["missing", "brand-new"], timeout_ms=5_000)


@more_questions.add(ApiKey.LIST_TRANSACTIONS)
def list_all_transactions(_: Asked) -> m.Message:
    return m.ListTransactionsRequest()


@more_questions.add(ApiKey.DESCRIBE_TRANSACTIONS)
def describe_more_transactions(_: Asked) -> m.Message:
    return m.DescribeTransactionsRequest(transactional_ids=["tx", "tx-missing", "t"])


def random_question(rng: random.Random) -> Question:
    """Return a question about several topics and groups."""
    names = rng.sample([*TOPICS, "missing", "brand-new"], rng.randint(1, 3))
    groups = rng.sample([GROUP, "missing", "of-alice"], rng.randint(1, 2))
    producer: Row = {
        "transactional_id": rng.choice(["tx", "tx", "tx-alice", "tx-missing"]),
        "producer_id": OF_TRANSACTION,
        "producer_epoch": OF_TRANSACTION,
    }
    index = rng.choices([0, 9], [5, 1])[0]
    key, version, make = rng.choice(
        [
            (ApiKey.PRODUCE, 12, lambda _: produce_to(names, index)),
            (ApiKey.FETCH, 12, lambda _: fetch_from(names, index)),
            (ApiKey.METADATA, rng.choice([4, 12]), lambda _: metadata_of(names)),
            (ApiKey.LIST_OFFSETS, 9, lambda _: offsets_of(names, index)),
            (ApiKey.OFFSET_COMMIT, 9, lambda _: commit_to(groups[0], names, index)),
            (ApiKey.OFFSET_FETCH, 9, lambda _: committed_offsets(groups, names)),
            (ApiKey.CREATE_TOPICS, 7, lambda _: creation_of(names)),
            (ApiKey.ADD_PARTITIONS_TO_TXN, 3, lambda _: addition_of(producer, names, index)),
            (
                ApiKey.ADD_OFFSETS_TO_TXN,
                3,
                lambda _: m.AddOffsetsToTxnRequest(group_id=groups[0], **producer),
            ),
            (ApiKey.TXN_OFFSET_COMMIT, 3, lambda _: txn_commit(producer, names)),
            (ApiKey.END_TXN, 4, lambda _: m.EndTxnRequest(committed=True, **producer)),
            (ApiKey.DESCRIBE_CONFIGS, 4, lambda _: configs_of(names)),
        ]
    )
    text = f"{key.name} {version} {names} {groups} {producer['transactional_id']} {index}"
    return Question(text, key, version, make)


def produce_to(names: list[str], index: int) -> m.Message:
    rows = [
        m.ProduceRequestTopic(
            name=name,
            partition_data=[m.ProduceRequestPartition(index=index, records=bytes(batch_of(b"v")))],
        )
        for name in names
    ]
    return m.ProduceRequest(acks=-1, timeout_ms=5_000, topic_data=rows, transactional_id=None)


def fetch_from(names: list[str], index: int) -> m.Message:
    partition = m.FetchRequestPartition(partition=index, partition_max_bytes=1)
    rows = [m.FetchRequestTopic(topic=name, partitions=[partition]) for name in names]
    return m.FetchRequest(max_wait_ms=0, max_bytes=1, session_epoch=-1, topics=rows)


def metadata_of(names: list[str]) -> m.Message:
    return m.MetadataRequest(
        topics=[m.MetadataRequestTopic(name=name) for name in names],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )


def offsets_of(names: list[str], index: int) -> m.Message:
    partition = m.ListOffsetsRequestPartition(partition_index=index, timestamp=-2)
    rows = [m.ListOffsetsRequestTopic(name=name, partitions=[partition]) for name in names]
    return m.ListOffsetsRequest(replica_id=-1, topics=rows)


def commit_to(group: str, names: list[str], index: int) -> m.Message:
    rows = [commit_of(name, index) for name in names]
    return m.OffsetCommitRequest(group_id=group, topics=rows)


def committed_offsets(groups: list[str], names: list[str]) -> m.Message:
    topics = [m.OffsetFetchRequestGroupTopic(name=name, partition_indexes=[0]) for name in names]
    rows = [m.OffsetFetchRequestGroup(group_id=group, topics=topics) for group in groups]
    return m.OffsetFetchRequest(groups=rows)


def creation_of(names: list[str]) -> m.Message:
    rows = [
        m.CreateTopicsRequestTopic(name=name, num_partitions=1, replication_factor=1)
        for name in names
    ]
    return m.CreateTopicsRequest(topics=rows, timeout_ms=5_000, validate_only=True)


def addition_of(producer: Row, names: list[str], index: int) -> m.Message:
    rows = [m.AddPartitionsToTxnRequestTopicV3(name=name, partitions=[index]) for name in names]
    named = {f"v3_and_below_{field}": value for field, value in producer.items()}
    return m.AddPartitionsToTxnRequest(v3_and_below_topics=rows, **named)


def txn_commit(producer: Row, names: list[str]) -> m.Message:
    partition = m.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    rows = [m.TxnOffsetCommitRequestTopic(name=name, partitions=[partition]) for name in names]
    return m.TxnOffsetCommitRequest(group_id=GROUP, topics=rows, **producer)


def configs_of(names: list[str]) -> m.Message:
    rows = [
        m.DescribeConfigsRequestResource(
            resource_type=ResourceType.TOPIC, resource_name=name, configuration_keys=None
        )
        for name in names
    ]
    return m.DescribeConfigsRequest(resources=rows)


ALL_QUESTIONS: Final = [
    question
    for question in (*questions(), *more_questions)
    if question.name.partition(" (")[0] not in NOT_ASKED
]


class Side:
    """One broker: an administrator without SASL, and a connection of each user."""

    def __init__(self, port: int, sasl_port: int, stack: ExitStack) -> None:
        self._port, self._sasl_port, self._stack = port, sasl_port, stack
        self._clients: dict[str, RawClient] = {}
        self.topic_ids: dict[str, bytes] = {}
        self._producer = -1, -1  # of transaction "tx"

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    def ask(self, user: str, key: ApiKey, version: int, body: m.Message) -> Any:
        """Return the answer, or None if the broker has closed the connection."""
        client = self._clients.get(user)
        if client is None:
            client = self._stack.enter_context(RawClient(self._sasl_port if user else self._port))
            if user:
                log_in(client, user)
            self._clients[user] = client
        try:
            return client.request(key, version, body)
        except ConnectionError:
            del self._clients[user]
            return None

    def answer(self, user: str, question: Question) -> Any:
        body = question.make(Asked(user, self.topic_ids))
        for name, value in zip(("producer_id", "producer_epoch"), self._producer, strict=True):
            for field in (name, f"v3_and_below_{name}"):
                if getattr(body, field, None) == OF_TRANSACTION:
                    setattr(body, field, value)
        answer = self.ask(user, question.key, question.version, body)
        if answer is None:
            return None
        if question.key is ApiKey.METADATA:
            answer.topics = [row for row in answer.topics if not str(row.name).startswith("__")]
        if question.key is ApiKey.DESCRIBE_ACLS:
            return answer.error_code, entries_of(answer)
        return digest(answer)

    def entries(self) -> Any:
        return entries_of(self.ask("", ApiKey.DESCRIBE_ACLS, 3, describe_of({})))

    def set_up(self) -> None:
        for kind, name in ((GROUP_TYPE, GROUP), (TRANSACTION, "tx")):
            with RawClient(self._port) as client:
                find_coordinator(client, kind, name)
        init = m.InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=900_000)
        # No question deletes this one: without offsets, the group would end here, in Kafka later.
        commit = m.OffsetCommitRequest(group_id=GROUP, topics=[commit_of(TOPIC, 1)])

        def is_done() -> bool:
            begun = self.ask("", ApiKey.INIT_PRODUCER_ID, 4, init)
            committed = self.ask("", ApiKey.OFFSET_COMMIT, 9, commit)
            self._producer = begun.producer_id, begun.producer_epoch
            codes = begun.error_code, committed.topics[0].partitions[0].error_code
            return codes == (0, 0)

        wait_until(is_done, "a transaction and an offset")
        metadata = self.ask("", ApiKey.METADATA, 12, m.MetadataRequest(topics=None))
        self.topic_ids = {row.name: row.topic_id for row in metadata.topics}

    def clear(self) -> None:
        everything = m.DeleteAclsRequest(filters=[filter_of({})])
        self.ask("", ApiKey.DELETE_ACLS, 3, everything)
        wait_until(lambda: not self.entries(), "no entries")


def log_in(client: RawClient, user: str) -> None:
    client.request(ApiKey.SASL_HANDSHAKE, 1, m.SaslHandshakeRequest(mechanism="PLAIN"))
    token = m.SaslAuthenticateRequest(auth_bytes=f"\0{user}\0{PASSWORD}".encode())
    answer: Any = client.request(ApiKey.SASL_AUTHENTICATE, 2, token)
    assert answer.error_code == ErrorCode.NONE


def entries_of(answer: Any) -> list[Any]:
    return sorted(
        (
            resource.resource_type, resource.pattern_type, resource.resource_name,
            acl.principal, acl.host, acl.operation, acl.permission_type,
        )
        for resource in answer.resources
        for acl in resource.acls
    )  # fmt: skip


def describe_of(row: Row) -> m.DescribeAclsRequest:
    return m.DescribeAclsRequest(**_selection(row))


def filter_of(row: Row) -> m.DeleteAclsRequestFilter:
    return m.DeleteAclsRequestFilter(**_selection(row))


def _selection(row: Row) -> Row:
    everything: Row = {
        "resource_type_filter": ResourceType.ANY,
        "resource_name_filter": None,
        "pattern_type_filter": PatternType.ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": Operation.ANY,
        "permission_type": Permission.ANY,
    }
    return {**everything, **row}


class Requests:
    """The requests of one history."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self, entries: list[Any]) -> tuple[ApiKey, int, m.Message]:
        rng = self._rng
        key = rng.choices(
            [ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS, ApiKey.DESCRIBE_ACLS], [5, 2, 1]
        )[0]
        version = rng.randint(1, 3)
        if key is ApiKey.CREATE_ACLS:
            rows = [self._entry() for _ in range(rng.randint(1, 6) if entries else FIRST_ENTRIES)]
            if rng.random() < 0.2:  # alone: Kafka does not look at the others
                rows = [self._unusual_entry()]
            return key, version, m.CreateAclsRequest(creations=rows)
        if key is ApiKey.DELETE_ACLS:
            filters = [filter_of(self._filter(entries)) for _ in range(rng.choice([1, 1, 2]))]
            if rng.random() < 0.15:
                filters = [filter_of(self._unusual_filter(entries))]
            return key, version, m.DeleteAclsRequest(filters=filters)
        make = self._unusual_filter if rng.random() < 0.15 else self._filter
        return key, version, describe_of(make(entries))

    def _resource(self) -> tuple[int, str]:
        rng = self._rng
        kind = rng.choices(list(NAMES), [6, 4, 4, 3, 0.3, 0.3])[0]
        name = rng.choice(NAMES[kind])
        return kind, "*" if kind is not ResourceType.CLUSTER and rng.random() < 0.15 else name

    def _entry(self) -> m.CreateAclsRequestCreation:
        rng = self._rng
        kind, name = self._resource()
        prefixed = 0.85 if name in PREFIXES else 0.1
        fitting = PERMISSIONS.get(ResourceType(kind), ()) if rng.random() < 0.9 else ()
        operations = fitting or list(Operation)[1:]
        return m.CreateAclsRequestCreation(
            resource_type=kind,
            resource_name=name,
            resource_pattern_type=PatternType.PREFIXED
            if rng.random() < prefixed
            else PatternType.LITERAL,
            principal=rng.choice(PRINCIPALS),
            host=rng.choice(HOSTS),
            operation=rng.choice(operations),
            permission_type=rng.choices([Permission.ALLOW, Permission.DENY], [4, 1])[0],
        )

    def _unusual_entry(self) -> m.CreateAclsRequestCreation:
        rng, row = self._rng, self._entry()
        field, values = rng.choice(
            [
                ("resource_type", [UNKNOWN, ResourceType.ANY, 8, -1]),
                ("resource_name", ["", "ä", " ", "x" * 300]),
                ("resource_pattern_type", [UNKNOWN, PatternType.ANY, PatternType.MATCH, 5]),
                ("principal", OTHER_PRINCIPALS),
                ("principal", OTHER_PRINCIPALS),
                ("host", OTHER_HOSTS),
                ("operation", [UNKNOWN, Operation.ANY, 16]),
                ("permission_type", [UNKNOWN, Permission.ANY, 4]),
            ]
        )
        setattr(row, field, rng.choice(values))
        return row

    def _filter(self, entries: list[Any]) -> Row:
        rng = self._rng
        kind, name = self._resource()
        principal, host, operation = rng.choice(PRINCIPALS), rng.choice(HOSTS), Operation.READ
        permission = rng.choice([Permission.ALLOW, Permission.DENY])
        pattern: int = PatternType.LITERAL
        if entries and rng.random() < 0.7:
            kind, pattern, name, principal, host, operation, permission = rng.choice(entries)
        values: Row = {
            "resource_type_filter": kind,
            "resource_name_filter": name + rng.choice(["", "", "-more"]),
            "pattern_type_filter": rng.choice([pattern, PatternType.MATCH, PatternType.ANY]),
            "principal_filter": principal,
            "host_filter": host,
            "operation": operation,
            "permission_type": permission,
        }
        kept = rng.choice([0.4, 0.7, 0.9, 0.9])
        return {field: value for field, value in values.items() if rng.random() < kept}

    def _unusual_filter(self, entries: list[Any]) -> Row:
        rng, row = self._rng, self._filter(entries)
        if rng.random() < 0.6:
            field = rng.choice(
                ["resource_type_filter", "pattern_type_filter", "operation", "permission_type"]
            )
            row[field] = rng.choice([UNKNOWN, 77, -1])
        else:
            field = rng.choice(["resource_name_filter", "principal_filter", "host_filter"])
            row[field] = rng.choice(["", "*", "alice"])
        return row


def plain(answer: Any) -> Any:
    """Return the answer to an administrator without texts and order.

    To a code that does not exist, or that only filters may have, Kafka answers
    UNKNOWN_SERVER_ERROR, or it closes the connection.
    """
    if answer is None:
        return INVALID
    if isinstance(answer, m.DescribeAclsResponse):
        return INVALID if answer.error_code == IS_INVALID else (0, entries_of(answer))
    if isinstance(answer, m.CreateAclsResponse):
        codes = [row.error_code for row in answer.results]
        return INVALID if codes in ([IS_INVALID], [UNKNOWN_ERROR]) else codes
    if [row.error_code for row in answer.filter_results] == [IS_INVALID]:
        return INVALID
    removed = set[Any]()
    results = []
    for row in answer.filter_results:
        acls = {
            tuple(getattr(acl, name) for name in acl.__slots__ if name != "error_message")
            for acl in row.matching_acls
        }
        results.append((row.error_code, sorted(acls - removed)))  # with the first of the filters
        removed |= acls
    return results


def run_history(seed: int, sides: tuple[Side, Side]) -> set[str]:
    """Return the names of the errors that users got."""
    rng = random.Random(seed)
    requests, trace, errors = Requests(rng), [f"seed {seed}"], set[str]()
    for side in sides:
        side.clear()
    entries: list[Any] = []
    for _ in range(STEPS):
        key, version, body = requests.next(entries)
        kafka, ours = (plain(side.ask("", key, version, body)) for side in sides)
        trace.append(f"{key.name} {version} {body}:\n    {kafka}")
        text = "\n".join([*trace, f"but we: {ours}"])
        # To Kafka, a filter with a code that does not exist is one that matches nothing.
        assert ours == kafka or (ours == INVALID and kafka in ((0, []), [(0, [])])), text
        both = [side.entries() for side in sides]

        def are_alike() -> bool:
            both[:] = [side.entries() for side in sides]  # noqa: B023
            return both[0] == both[1]  # noqa: B023

        try:
            wait_until(are_alike, "Kafka follows its metadata a little later", 3)
        except AssertionError:
            raise AssertionError("\n".join([*trace, f"{both[0]}", f"but we: {both[1]}"])) from None
        entries = both[0]
        for _ in range(QUESTIONS):
            user, question = rng.choice(USERS), rng.choice(ALL_QUESTIONS)
            if rng.random() < 0.5:
                question = random_question(rng)
            answer = ask_both(user, question, sides, trace)
            codes = ERROR_CODE.findall(repr(answer))
            errors.update(ErrorCode(int(code)).name for code in codes)
    return errors


def ask_both(user: str, question: Question, sides: tuple[Side, Side], trace: list[str]) -> Any:
    """Ask until the answers are alike: Kafka's controller follows a change a little later."""
    answers: list[Any] = []

    def are_alike() -> bool:
        answers[:] = [side.answer(user, question) for side in sides]
        return bool(answers[0] == answers[1])

    try:
        wait_until(are_alike, "the same answers", 3)
    except AssertionError:
        entries = "\n".join(map(repr, sides[0].entries()))
        asked = f"{user} asks {question.name}: {answers[0]}\nbut we: {answers[1]}"
        raise AssertionError("\n".join([*trace, entries, asked])) from None
    return answers[0]


def kafka_settings() -> dict[str, str]:
    accounts = " ".join(f'user_{name}="{PASSWORD}"' for name in USERS)
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module} required {accounts};",
    }


def varve_settings(folder: Path, port: int, sasl_port: int) -> dict[str, Any]:
    (folder / "password").write_text(PASSWORD)
    return {
        "listeners": [f"127.0.0.1:{port}", f"SASL_PLAINTEXT://127.0.0.1:{sasl_port}"],
        "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
        "sasl": {
            "mechanisms": ["PLAIN"],
            "users": {name: {"file": str(folder / "password")} for name in USERS},
        },
        "groups": {"offsets_partitions": 4},
        "transactions": {"state_partitions": 4},
    }


@pytest.fixture(scope="module")
def sides(
    real_kafka: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Side, Side]]:
    folder = tmp_path_factory.mktemp("acls")
    kafka_sasl, port, sasl = free_port(), free_port(), free_port()
    ours = varve_settings(folder, port, sasl)
    with (
        ExitStack() as stack,
        running_kafka(
            folder / "kafka", kafka_settings(), listeners={"SASL_PLAINTEXT": kafka_sasl}
        ) as kafka,
        running_varve(folder / "varve", ours, port=port) as varve,
    ):
        create_topics((kafka, varve), dict.fromkeys(TOPICS, 2))
        both = Side(kafka.port, kafka_sasl, stack), Side(port, sasl, stack)
        for side in both:
            side.set_up()
        yield both


@pytest.mark.timeout(600)  # many histories in CI
def test_acls_in_any_order_have_the_answers_and_effects_of_kafka(
    sides: tuple[Side, Side],
) -> None:
    print(f"VARVE_ACL_SEEDS={SEEDS.start}:{SEEDS.stop}")
    errors = set[str]()
    for seed in SEEDS:
        errors |= run_history(seed, sides)
    kinds = ["TOPIC", "GROUP", "CLUSTER", "TRANSACTIONAL_ID"]
    assert {"NONE", *(f"{kind}_AUTHORIZATION_FAILED" for kind in kinds)} <= errors
