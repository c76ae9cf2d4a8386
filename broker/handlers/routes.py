"""Which handler answers which API: the table of what this broker can do."""

from broker.handlers import (
    cluster,
    configs,
    features,
    list_offsets,
    quotas,
    replication,
    topics,
)
from broker.handlers.dispatch import Dispatcher, FastPath, Handler
from broker.handlers.fetch import fetch
from broker.handlers.groups import (
    administration,
    classic_protocol,
    committed_offsets,
    consumer_protocol,
    find_coordinator,
)
from broker.handlers.produce import produce
from broker.handlers.security import acls, delegation_tokens, sasl, scram_users
from broker.handlers.security.audited import audited
from broker.handlers.transactions import administration as transaction_administration
from broker.handlers.transactions import offsets, producers
from broker.network.request_context import Services
from protocol.api import ApiKey, advertised


def make_dispatcher(services: Services) -> Dispatcher:
    """Return a dispatcher with the handler of every API; ApiVersions lists exactly these APIs."""
    fast: dict[int, FastPath] = {ApiKey.PRODUCE: produce, ApiKey.FETCH: fetch}
    handlers: dict[int, Handler] = {
        ApiKey.LIST_OFFSETS: list_offsets.ListOffsetsHandler().list_offsets,
        ApiKey.OFFSET_FOR_LEADER_EPOCH: list_offsets.offset_for_leader_epoch,
        ApiKey.DESCRIBE_PRODUCERS: transaction_administration.describe_producers,
        ApiKey.INIT_PRODUCER_ID: producers.init_producer_id,
        ApiKey.ADD_PARTITIONS_TO_TXN: producers.add_partitions_to_txn,
        ApiKey.ADD_OFFSETS_TO_TXN: offsets.add_offsets_to_txn,
        ApiKey.END_TXN: producers.end_txn,
        ApiKey.TXN_OFFSET_COMMIT: offsets.txn_offset_commit,
        ApiKey.WRITE_TXN_MARKERS: transaction_administration.write_txn_markers,
        ApiKey.DESCRIBE_TRANSACTIONS: transaction_administration.describe_transactions,
        ApiKey.LIST_TRANSACTIONS: transaction_administration.list_transactions,
        ApiKey.METADATA: cluster.metadata,
        ApiKey.DESCRIBE_CLUSTER: cluster.describe_cluster,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS: cluster.describe_topic_partitions,
        ApiKey.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
        ApiKey.LIST_PARTITION_REASSIGNMENTS: replication.list_partition_reassignments,
        ApiKey.ELECT_LEADERS: replication.elect_leaders,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: replication.alter_partition_reassignments,
        ApiKey.ALTER_REPLICA_LOG_DIRS: replication.alter_replica_log_dirs,
        ApiKey.DESCRIBE_QUORUM: replication.describe_quorum,
        ApiKey.DESCRIBE_ACLS: acls.describe_acls,
        ApiKey.CREATE_ACLS: acls.create_acls,
        ApiKey.DELETE_ACLS: acls.delete_acls,
        ApiKey.CREATE_TOPICS: topics.create_topics,
        ApiKey.DELETE_TOPICS: topics.delete_topics,
        ApiKey.CREATE_PARTITIONS: topics.create_partitions,
        ApiKey.DELETE_RECORDS: topics.delete_records,
        ApiKey.DESCRIBE_CONFIGS: configs.describe_configs,
        ApiKey.ALTER_CONFIGS: configs.alter_configs,
        ApiKey.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
        ApiKey.LIST_CONFIG_RESOURCES: configs.list_config_resources,
        ApiKey.DESCRIBE_CLIENT_QUOTAS: quotas.describe_client_quotas,
        ApiKey.ALTER_CLIENT_QUOTAS: quotas.alter_client_quotas,
        ApiKey.UPDATE_FEATURES: features.update_features,
        ApiKey.CREATE_DELEGATION_TOKEN: delegation_tokens.create_delegation_token,
        ApiKey.RENEW_DELEGATION_TOKEN: delegation_tokens.renew_delegation_token,
        ApiKey.EXPIRE_DELEGATION_TOKEN: delegation_tokens.expire_delegation_token,
        ApiKey.DESCRIBE_DELEGATION_TOKEN: delegation_tokens.describe_delegation_token,
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: scram_users.describe_user_scram_credentials,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: scram_users.alter_user_scram_credentials,
        ApiKey.SASL_HANDSHAKE: sasl.sasl_handshake,
        ApiKey.SASL_AUTHENTICATE: sasl.sasl_authenticate,
        ApiKey.FIND_COORDINATOR: find_coordinator.find_coordinator,
        ApiKey.JOIN_GROUP: classic_protocol.join_group,
        ApiKey.SYNC_GROUP: classic_protocol.sync_group,
        ApiKey.HEARTBEAT: classic_protocol.heartbeat,
        ApiKey.LEAVE_GROUP: classic_protocol.leave_group,
        ApiKey.OFFSET_COMMIT: committed_offsets.offset_commit,
        ApiKey.OFFSET_FETCH: committed_offsets.offset_fetch,
        ApiKey.OFFSET_DELETE: committed_offsets.offset_delete,
        ApiKey.LIST_GROUPS: administration.list_groups,
        ApiKey.DESCRIBE_GROUPS: administration.describe_groups,
        ApiKey.DELETE_GROUPS: administration.delete_groups,
        ApiKey.CONSUMER_GROUP_HEARTBEAT: consumer_protocol.consumer_group_heartbeat,
        ApiKey.CONSUMER_GROUP_DESCRIBE: consumer_protocol.consumer_group_describe,
    }
    handlers = {key: audited(ApiKey(key), handler) for key, handler in handlers.items()}
    keys = {*fast, *handlers, ApiKey.API_VERSIONS}
    handlers[ApiKey.API_VERSIONS] = cluster.ClusterHandlers(advertised(keys)).api_versions
    return Dispatcher(services, fast, handlers)
