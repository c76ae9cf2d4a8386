"""Replication APIs on a single node: ElectLeaders, reassignments, DescribeQuorum.

This broker is the only replica and the leader of every partition. Administrators' tools (Cruise
Control, kafka-leader-election, kafka-reassign-partitions, kafka-metadata-quorum) ask nevertheless.
The answers are those of a Kafka cluster of one node in which nothing is wrong.
"""

from collections.abc import Sequence
from typing import Final

from broker.event_loop.loop_turns import Turns
from broker.network.request_context import RequestContext
from broker.security.acls import Operation
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    AlterPartitionReassignmentsResponsePartition,
    AlterPartitionReassignmentsResponseTopic,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirsResponsePartition,
    AlterReplicaLogDirsResponseResult,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeQuorumResponseListener,
    DescribeQuorumResponseNode,
    DescribeQuorumResponsePartition,
    DescribeQuorumResponseTopic,
    DescribeQuorumResponseVoter,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ElectLeadersResponsePartitionResult,
    ElectLeadersResponseReplicaElectionResult,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

METADATA_TOPIC: Final = "__cluster_metadata"
PREFERRED: Final = 0
UNCLEAN: Final = 1
_ELECTION_NOT_NEEDED: Final = "Leader election not needed for topic partition."
_UNKNOWN_PARTITION: Final = "This server does not host this topic-partition."


async def elect_leaders(
    context: RequestContext, _header: RequestHeader, body: ElectLeadersRequest
) -> ElectLeadersResponse:
    """Answer that no election is needed: the only replica leads every partition it serves.

    As in Kafka, an election for all partitions (null) lists only those that need one: none.
    """
    is_denied = not context.may_cluster(Operation.ALTER)
    if body.election_type not in (PREFERRED, UNCLEAN):
        return ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST)
    response, turns = ElectLeadersResponse(), Turns()
    if is_denied:
        response.error_code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    async for topic in turns.over(body.topic_partitions or ()):
        results = []
        for index in topic.partitions:
            await turns.take()
            if is_denied:
                denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
                results.append(
                    ElectLeadersResponsePartitionResult(partition_id=index, error_code=denied)
                )
            else:
                results.append(_election(context, topic.topic, index))
        response.replica_election_results.append(
            ElectLeadersResponseReplicaElectionResult(topic=topic.topic, partition_result=results)
        )
    return response


def _election(
    context: RequestContext, topic: str, index: int
) -> ElectLeadersResponsePartitionResult:
    result = ElectLeadersResponsePartitionResult(partition_id=index)
    described = context.services.topic(topic)
    if described is None or not 0 <= index < described.partition_count:
        result.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        result.error_message = _UNKNOWN_PARTITION
    elif index in described.offline:
        result.error_code = ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
        result.error_message = described.offline[index]
    else:
        result.error_code = ErrorCode.ELECTION_NOT_NEEDED
        result.error_message = _ELECTION_NOT_NEEDED
    return result


async def alter_partition_reassignments(
    context: RequestContext, _header: RequestHeader, body: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    """Accept an assignment to this broker, which changes nothing; refuse every other one."""
    response, turns = AlterPartitionReassignmentsResponse(), Turns()
    response.allow_replication_factor_change = body.allow_replication_factor_change
    is_denied = not context.may_cluster(Operation.ALTER)
    if is_denied:
        response.error_code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    async for topic in turns.over(body.topics):
        rows = []
        for partition in topic.partitions:
            await turns.take()
            code, message = ErrorCode.CLUSTER_AUTHORIZATION_FAILED, None
            if not is_denied:
                code, message = _reassignment(
                    context, topic.name, partition.partition_index, partition.replicas
                )
            rows.append(
                AlterPartitionReassignmentsResponsePartition(
                    partition_index=partition.partition_index,
                    error_code=code,
                    error_message=message,
                )
            )
        response.responses.append(
            AlterPartitionReassignmentsResponseTopic(name=topic.name, partitions=rows)
        )
    return response


def _reassignment(
    context: RequestContext, topic: str, index: int, replicas: Sequence[int] | None
) -> tuple[ErrorCode, str | None]:
    described = context.services.topic(topic)
    if described is None or not 0 <= index < described.partition_count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, _UNKNOWN_PARTITION
    if replicas is None:
        return ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No partition reassignment is in progress."
    if list(replicas) != [context.services.node_id]:
        return (
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"The only broker of this cluster is {context.services.node_id}.",
        )
    return ErrorCode.NONE, None


def list_partition_reassignments(
    context: RequestContext, _header: RequestHeader, _body: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    """Answer that no reassignment is in progress: there is one node."""
    if not context.may_cluster(Operation.DESCRIBE):
        return ListPartitionReassignmentsResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    return ListPartitionReassignmentsResponse()


async def alter_replica_log_dirs(
    context: RequestContext, _header: RequestHeader, body: AlterReplicaLogDirsRequest
) -> AlterReplicaLogDirsResponse:
    """Begin to move replicas to other data directories; the response does not wait for the moves.

    If a replica is named twice, the last row counts.
    """
    turns = Turns()
    may_alter = context.may_cluster(Operation.ALTER)
    results: dict[str, AlterReplicaLogDirsResponseResult] = {}
    async for directory in turns.over(body.dirs):
        async for topic in turns.over(directory.topics):
            result = results.setdefault(
                topic.name, AlterReplicaLogDirsResponseResult(topic_name=topic.name)
            )
            async for index in turns.over(topic.partitions):
                code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
                if may_alter:
                    code = _begin_move(context, directory.path, topic.name, index)
                result.partitions.append(
                    AlterReplicaLogDirsResponsePartition(partition_index=index, error_code=code)
                )
    return AlterReplicaLogDirsResponse(results=list(results.values()))


def _begin_move(context: RequestContext, path: str, topic: str, index: int) -> ErrorCode:
    services = context.services
    target = next(
        (directory for directory in services.manager.table.directories if directory.path == path),
        None,
    )
    if target is None:
        return ErrorCode.LOG_DIR_NOT_FOUND
    if not target.is_online:
        return ErrorCode.KAFKA_STORAGE_ERROR
    partition = services.topics.find(topic, index)
    if isinstance(partition, ErrorCode):
        return partition
    is_requested = services.moves.request(partition, target)
    return ErrorCode.NONE if is_requested else ErrorCode.POLICY_VIOLATION


async def describe_quorum(
    context: RequestContext, _header: RequestHeader, body: DescribeQuorumRequest
) -> DescribeQuorumResponse:
    """Describe this node as the only voter of `__cluster_metadata`.

    There is no metadata log. Its end offset is the epoch of `varve.metadata`, which rises with
    every change of the metadata.
    """
    if not context.may_cluster(Operation.DESCRIBE):
        return DescribeQuorumResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    response, turns = DescribeQuorumResponse(), Turns()
    async for topic in turns.over(body.topics):
        rows = []
        for partition in topic.partitions:
            await turns.take()
            rows.append(_quorum(context, topic.topic_name, partition.partition_index))
        response.topics.append(
            DescribeQuorumResponseTopic(topic_name=topic.topic_name, partitions=rows)
        )
    listener = DescribeQuorumResponseListener(
        name=context.listener.name, host=context.address.host, port=context.address.port
    )
    response.nodes = [
        DescribeQuorumResponseNode(node_id=context.services.node_id, listeners=[listener])
    ]
    return response


def _quorum(context: RequestContext, topic: str, index: int) -> DescribeQuorumResponsePartition:
    if topic != METADATA_TOPIC or index != 0:
        return DescribeQuorumResponsePartition(
            partition_index=index,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=_UNKNOWN_PARTITION,
        )
    services = context.services
    epoch = services.manager.metadata.epoch
    voter = DescribeQuorumResponseVoter(
        replica_id=services.node_id,
        log_end_offset=epoch,
        last_caught_up_timestamp=context.wall_ms(),
    )
    return DescribeQuorumResponsePartition(
        partition_index=0,
        leader_id=services.node_id,
        leader_epoch=1,
        high_watermark=epoch,
        current_voters=[voter],
    )
