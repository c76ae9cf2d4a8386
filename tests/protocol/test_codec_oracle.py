"""Every layout against kio, whose classes are generated from Apache Kafka's own schemas."""

import random

import pytest

from protocol import codec
from protocol.api import APIS, ApiKey
from protocol.schema import Direction
from tests.support.draws import cases
from tests.support.protocol.kio_messages import difference, encoded, kio_class, random_message
from tests.support.protocol.messages import api_name, versions_of
from tests.support.protocol.requests import decode_request

MESSAGES = cases(few=1, many=8)  # of each version


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_every_message_is_read_and_written_as_kio_does(api_key: int, direction: Direction) -> None:
    for _, version in versions_of(api_key):
        rng = random.Random(api_key * 100 + version)
        kind = kio_class(api_key, version, direction)
        for _ in range(MESSAGES):
            remote = random_message(rng, kind)
            body = encoded(remote)
            flexible = APIS[api_key].is_flexible(version)
            if direction == "request":
                head = api_key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\7"
                head += b"\0\2me" + b"\0" * flexible
                header, message = decode_request(api_key, version, head + body)
                assert header == (api_key, version, 7, "me", len(head))
                again = codec.encode_request(api_key, version, 7, "me", message)
            else:
                has_tags = flexible and api_key != ApiKey.API_VERSIONS
                head = b"\0\0\0\7" + b"\0" * has_tags
                correlation_id, message = codec.decode_response(api_key, version, head + body)
                assert correlation_id == 7
                again = codec.encode_response(api_key, version, 7, message)
            assert difference(message, remote) is None, version
            assert again == len(head + body).to_bytes(4, "big") + head + body, version


def test_the_tables_hold_every_version_that_is_to_be_spoken() -> None:
    ranges = {APIS[key].name: tuple(APIS[key].versions) for key in APIS}
    assert ranges == {
        "Produce": (3, 13), "Fetch": (4, 18), "ListOffsets": (1, 11), "Metadata": (0, 13),
        "OffsetCommit": (2, 10), "OffsetFetch": (1, 10), "FindCoordinator": (0, 6),
        "JoinGroup": (0, 9), "Heartbeat": (0, 4), "LeaveGroup": (0, 5), "SyncGroup": (0, 5),
        "DescribeGroups": (0, 6), "ListGroups": (0, 5), "ApiVersions": (0, 4),
        "CreateTopics": (2, 7), "DeleteTopics": (1, 6), "DeleteRecords": (0, 2),
        "InitProducerId": (0, 5), "OffsetForLeaderEpoch": (2, 4), "DescribeConfigs": (1, 4),
        "AlterConfigs": (0, 2), "DescribeLogDirs": (1, 5), "CreatePartitions": (0, 3),
        "DeleteGroups": (0, 2), "IncrementalAlterConfigs": (0, 1),
        "ListPartitionReassignments": (0, 0), "OffsetDelete": (0, 0),
        "ElectLeaders": (0, 2), "AlterPartitionReassignments": (0, 1), "DescribeQuorum": (0, 2),
        "DescribeProducers": (0, 0), "ListConfigResources": (0, 1),
        "AddPartitionsToTxn": (0, 5), "AddOffsetsToTxn": (0, 4), "EndTxn": (0, 5),
        "WriteTxnMarkers": (1, 2), "TxnOffsetCommit": (0, 5), "DescribeTransactions": (0, 0),
        "ListTransactions": (0, 2),
        "DescribeCluster": (0, 2), "DescribeTopicPartitions": (0, 0),
        "ConsumerGroupHeartbeat": (0, 1), "ConsumerGroupDescribe": (0, 1),
        "SaslHandshake": (0, 1), "SaslAuthenticate": (0, 2), "DescribeAcls": (1, 3),
        "CreateAcls": (1, 3), "DeleteAcls": (1, 3), "AlterReplicaLogDirs": (1, 2),
        "CreateDelegationToken": (1, 3), "RenewDelegationToken": (1, 2),
        "ExpireDelegationToken": (1, 2), "DescribeDelegationToken": (1, 3),
        "DescribeClientQuotas": (0, 1), "AlterClientQuotas": (0, 1),
        "DescribeUserScramCredentials": (0, 0), "AlterUserScramCredentials": (0, 0),
        "UpdateFeatures": (0, 2),
    }  # fmt: skip
