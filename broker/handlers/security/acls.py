"""DescribeAcls, CreateAcls, DeleteAcls."""

from broker.event_loop.loop_turns import Turns
from broker.handlers.security.acl_changes import AclChanges
from broker.network.request_context import RequestContext
from broker.security.acls import AclFilter, InvalidAclError, Operation, check_filter
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    CreateAclsResponseResult,
    DeleteAclsRequest,
    DeleteAclsRequestFilter,
    DeleteAclsResponse,
    DeleteAclsResponseFilterResult,
    DeleteAclsResponseMatchingAcl,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeAclsResponseAcl,
    DescribeAclsResponseResource,
)
from storage.directory.security_entries import AclEntry
from storage.errors import StorageError

NO_AUTHORIZER = "No Authorizer is configured. Set authorization.enabled in the settings file"
DENIED = "Cluster authorization failed."


async def describe_acls(
    context: RequestContext, _header: RequestHeader, body: DescribeAclsRequest
) -> DescribeAclsResponse:
    """List the entries that a filter selects, by resource pattern."""
    error, message = _refusal(context, Operation.DESCRIBE)
    selection = _filter(body)
    if error is ErrorCode.NONE:
        try:
            check_filter(selection)
        except InvalidAclError as invalid:
            error, message = ErrorCode.INVALID_REQUEST, str(invalid)
    response = DescribeAclsResponse(error_code=error, error_message=message)
    if error is not ErrorCode.NONE:
        return response
    resources: dict[tuple[int, int, str], DescribeAclsResponseResource] = {}
    async for acl in Turns().over(context.services.metadata_writer.metadata.acls):
        if selection.matches(acl):
            pattern = (acl.resource_type, acl.pattern_type, acl.resource_name)
            if pattern not in resources:
                resources[pattern] = DescribeAclsResponseResource(
                    resource_type=acl.resource_type,
                    pattern_type=acl.pattern_type,
                    resource_name=acl.resource_name,
                )
            resources[pattern].acls.append(
                DescribeAclsResponseAcl(
                    principal=acl.principal,
                    host=acl.host,
                    operation=acl.operation,
                    permission_type=acl.permission,
                )
            )
    response.resources = list(resources.values())
    return response


async def create_acls(
    context: RequestContext, _header: RequestHeader, body: CreateAclsRequest
) -> CreateAclsResponse:
    """Add entries; answers when they are durable. An entry that exists already is no error."""
    error, message = _refusal(context, Operation.ALTER)
    response, turns = CreateAclsResponse(), Turns()
    acls = [
        AclEntry(
            resource_type=row.resource_type,
            pattern_type=row.resource_pattern_type,
            resource_name=row.resource_name,
            principal=row.principal,
            host=row.host,
            operation=row.operation,
            permission=row.permission_type,
        )
        async for row in turns.over(body.creations)
    ]
    results: list[InvalidAclError | None] = [None] * len(acls)
    if error is ErrorCode.NONE:
        try:
            results = await _changes(context).add(acls)
        except StorageError as failure:
            error, message = code_of(failure), str(failure)
    async for invalid in turns.over(results):
        result = CreateAclsResponseResult(error_code=error, error_message=message)
        if invalid is not None:
            result.error_code = ErrorCode.INVALID_REQUEST
            result.error_message = str(invalid)
        response.results.append(result)
    return response


async def delete_acls(
    context: RequestContext, _header: RequestHeader, body: DeleteAclsRequest
) -> DeleteAclsResponse:
    """Remove the entries that filters select; answers when the change is durable."""
    error, message = _refusal(context, Operation.ALTER)
    response, turns = DeleteAclsResponse(), Turns()
    valid: list[AclFilter] = []
    rows: list[DeleteAclsResponseFilterResult] = []
    async for request in turns.over(body.filters):
        row = DeleteAclsResponseFilterResult(error_code=error, error_message=message)
        response.filter_results.append(row)
        if error is not ErrorCode.NONE:
            continue
        selection = _filter(request)
        try:
            check_filter(selection)
        except InvalidAclError as invalid:
            row.error_code, row.error_message = ErrorCode.INVALID_REQUEST, str(invalid)
        else:
            valid.append(selection)
            rows.append(row)
    try:
        removed = await _changes(context).remove(valid)
    except StorageError as failure:
        for row in rows:
            row.error_code, row.error_message = code_of(failure), str(failure)
        return response
    for row, acls in zip(rows, removed, strict=True):
        row.matching_acls = [_matching(acl) async for acl in turns.over(acls)]
    return response


def _changes(context: RequestContext) -> AclChanges:
    return AclChanges(context.services.metadata_writer, context.services.authorizer, context.client)


def _refusal(context: RequestContext, operation: Operation) -> tuple[ErrorCode, str | None]:
    if not context.may_cluster(operation):
        return ErrorCode.CLUSTER_AUTHORIZATION_FAILED, DENIED
    if not context.services.authorizer.is_enabled:
        return ErrorCode.SECURITY_DISABLED, NO_AUTHORIZER
    return ErrorCode.NONE, None


def _filter(row: DescribeAclsRequest | DeleteAclsRequestFilter) -> AclFilter:
    return AclFilter(
        resource_type=row.resource_type_filter,
        resource_name=row.resource_name_filter,
        pattern_type=row.pattern_type_filter,
        principal=row.principal_filter,
        host=row.host_filter,
        operation=row.operation,
        permission=row.permission_type,
    )


def _matching(acl: AclEntry) -> DeleteAclsResponseMatchingAcl:
    return DeleteAclsResponseMatchingAcl(
        resource_type=acl.resource_type,
        pattern_type=acl.pattern_type,
        resource_name=acl.resource_name,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )
