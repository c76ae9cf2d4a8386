"""The APIs of delegation tokens (KIP-48), which this broker does not issue.

They answer as Kafka without a secret key for tokens does. On a connection whose client is not
authenticated, Kafka refuses them before it looks for the key.
"""

from broker.network.request_context import RequestContext
from broker.security.principal import ANONYMOUS
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from protocol.messages import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)

NO_TIME = -1


def create_delegation_token(
    context: RequestContext, _header: RequestHeader, body: CreateDelegationTokenRequest
) -> CreateDelegationTokenResponse:
    """Refuse to create a token; name its owner and who requested it."""
    requester = context.principal
    return CreateDelegationTokenResponse(
        error_code=_refusal(context),
        principal_type=body.owner_principal_type or requester.kind,
        principal_name=body.owner_principal_name or requester.name,
        token_requester_principal_type=requester.kind,
        token_requester_principal_name=requester.name,
        issue_timestamp_ms=NO_TIME,
        expiry_timestamp_ms=NO_TIME,
        max_timestamp_ms=NO_TIME,
    )


def renew_delegation_token(
    context: RequestContext, _header: RequestHeader, _body: RenewDelegationTokenRequest
) -> RenewDelegationTokenResponse:
    """Refuse to renew a token."""
    return RenewDelegationTokenResponse(error_code=_refusal(context), expiry_timestamp_ms=NO_TIME)


def expire_delegation_token(
    context: RequestContext, _header: RequestHeader, _body: ExpireDelegationTokenRequest
) -> ExpireDelegationTokenResponse:
    """Refuse to expire a token."""
    return ExpireDelegationTokenResponse(error_code=_refusal(context), expiry_timestamp_ms=NO_TIME)


def describe_delegation_token(
    context: RequestContext, _header: RequestHeader, _body: DescribeDelegationTokenRequest
) -> DescribeDelegationTokenResponse:
    """Refuse to list tokens."""
    return DescribeDelegationTokenResponse(error_code=_refusal(context))


def _refusal(context: RequestContext) -> ErrorCode:
    if context.principal == ANONYMOUS or context.listener.protocol == "PLAINTEXT":
        return ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    return ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED
