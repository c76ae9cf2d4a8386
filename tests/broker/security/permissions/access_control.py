"""Questions about ACLs, quotas, SCRAM credentials and delegation tokens."""

from typing import Final

from broker.security.acls import Operation, PatternType, Permission, ResourceType
from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import Asked, Questions

questions: Final = Questions()


@questions.add(ApiKey.DESCRIBE_ACLS)
def describe_acls(_: Asked) -> Message:
    return m.DescribeAclsRequest(
        resource_type_filter=ResourceType.GROUP,
        resource_name_filter="nothing",
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )


@questions.add(ApiKey.CREATE_ACLS)
def create_acls(_: Asked) -> Message:
    row = m.CreateAclsRequestCreation(
        resource_type=ResourceType.GROUP,
        resource_name="nothing",
        principal="no-colon",
        host="*",
        operation=Operation.READ,
        permission_type=Permission.ALLOW,
    )
    return m.CreateAclsRequest(creations=[row])


@questions.add(ApiKey.DELETE_ACLS)
def delete_acls(_: Asked) -> Message:
    row = m.DeleteAclsRequestFilter(
        resource_type_filter=ResourceType.GROUP,
        resource_name_filter="nothing",
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=Operation.ANY,
        permission_type=Permission.ANY,
    )
    return m.DeleteAclsRequest(filters=[row])


@questions.add(ApiKey.DESCRIBE_CLIENT_QUOTAS)
def describe_client_quotas(_: Asked) -> Message:
    return m.DescribeClientQuotasRequest(components=[], strict=False)


@questions.add(ApiKey.ALTER_CLIENT_QUOTAS)
def alter_client_quotas(_: Asked) -> Message:
    entity = m.AlterClientQuotasRequestEntity(entity_type="user", entity_name="somebody")
    op = m.AlterClientQuotasRequestOp(key="producer_byte_rate", value=1e9)
    entry = m.AlterClientQuotasRequestEntry(entity=[entity], ops=[op])
    return m.AlterClientQuotasRequest(entries=[entry], validate_only=True)


@questions.add(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS)
def describe_scram_credentials(_: Asked) -> Message:
    # Kafka does not answer a denied request for all users.
    user = m.DescribeUserScramCredentialsRequestUser(name="somebody")
    return m.DescribeUserScramCredentialsRequest(users=[user])


@questions.add(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS)
def describe_all_scram_credentials(_: Asked) -> Message:
    return m.DescribeUserScramCredentialsRequest(users=[])


@questions.add(ApiKey.CREATE_DELEGATION_TOKEN)
def create_a_delegation_token(_: Asked) -> Message:
    return m.CreateDelegationTokenRequest(
        owner_principal_type=None, owner_principal_name=None, renewers=[], max_lifetime_ms=-1
    )


@questions.add(ApiKey.RENEW_DELEGATION_TOKEN)
def renew_a_delegation_token(_: Asked) -> Message:
    return m.RenewDelegationTokenRequest(hmac=b"x", renew_period_ms=-1)


@questions.add(ApiKey.EXPIRE_DELEGATION_TOKEN)
def expire_a_delegation_token(_: Asked) -> Message:
    return m.ExpireDelegationTokenRequest(hmac=b"x", expiry_time_period_ms=-1)


@questions.add(ApiKey.DESCRIBE_DELEGATION_TOKEN)
def describe_delegation_tokens(_: Asked) -> Message:
    return m.DescribeDelegationTokenRequest(owners=None)


@questions.add(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)
def delete_scram_credentials(_: Asked) -> Message:
    row = m.AlterUserScramCredentialsRequestDeletion(name="somebody", mechanism=1)
    return m.AlterUserScramCredentialsRequest(deletions=[row])
