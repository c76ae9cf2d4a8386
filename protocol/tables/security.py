"""Message tables: authentication, access control lists, quotas, delegation tokens.

Source: the Kafka protocol guide (messages of Apache Kafka 4.3).
"""

from typing import Final

from protocol.schema import Api, F, api

SASL_HANDSHAKE = api(
    17, "SaslHandshake", "0-1", "",
    request=(
        F("mechanism", "string"),
    ),
    response=(
        F("error_code", "int16"),
        F("mechanisms", "[]string"),
    ),
)  # fmt: skip

SASL_AUTHENTICATE = api(
    36, "SaslAuthenticate", "0-2", "2+",
    request=(
        F("auth_bytes", "bytes"),
    ),
    response=(
        F("error_code", "int16"),
        F("error_message", "string", null="0+"),
        F("auth_bytes", "bytes"),
        F("session_lifetime_ms", "int64", "1+"),
    ),
)  # fmt: skip

DESCRIBE_ACLS = api(
    29, "DescribeAcls", "1-3", "2+",
    request=(
        F("resource_type_filter", "int8"),
        F("resource_name_filter", "string", null="0+"),
        F("pattern_type_filter", "int8", "1+", default=3),
        F("principal_filter", "string", null="0+"),
        F("host_filter", "string", null="0+"),
        F("operation", "int8"),
        F("permission_type", "int8"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+"),
        F("resources", "[]Resource", "0+",
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("pattern_type", "int8", "1+", default=3),
          F("acls", "[]Acl", "0+",
            F("principal", "string"),
            F("host", "string"),
            F("operation", "int8"),
            F("permission_type", "int8"))),
    ),
)  # fmt: skip

CREATE_ACLS = api(
    30, "CreateAcls", "1-3", "2+",
    request=(
        F("creations", "[]Creation", "0+",
          F("resource_type", "int8"),
          F("resource_name", "string"),
          F("resource_pattern_type", "int8", "1+", default=3),
          F("principal", "string"),
          F("host", "string"),
          F("operation", "int8"),
          F("permission_type", "int8")),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Result", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+")),
    ),
)  # fmt: skip

DELETE_ACLS = api(
    31, "DeleteAcls", "1-3", "2+",
    request=(
        F("filters", "[]Filter", "0+",
          F("resource_type_filter", "int8"),
          F("resource_name_filter", "string", null="0+"),
          F("pattern_type_filter", "int8", "1+", default=3),
          F("principal_filter", "string", null="0+"),
          F("host_filter", "string", null="0+"),
          F("operation", "int8"),
          F("permission_type", "int8")),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("filter_results", "[]FilterResult", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+"),
          F("matching_acls", "[]MatchingAcl", "0+",
            F("error_code", "int16"),
            F("error_message", "string", null="0+"),
            F("resource_type", "int8"),
            F("resource_name", "string"),
            F("pattern_type", "int8", "1+", default=3),
            F("principal", "string"),
            F("host", "string"),
            F("operation", "int8"),
            F("permission_type", "int8"))),
    ),
)  # fmt: skip

CREATE_DELEGATION_TOKEN = api(
    38, "CreateDelegationToken", "1-3", "2+",
    request=(
        F("owner_principal_type", "string", "3+", null="3+"),
        F("owner_principal_name", "string", "3+", null="3+"),
        F("renewers", "[]Renewer", "0+",
          F("principal_type", "string"),
          F("principal_name", "string")),
        F("max_lifetime_ms", "int64"),
    ),
    response=(
        F("error_code", "int16"),
        F("principal_type", "string"),
        F("principal_name", "string"),
        F("token_requester_principal_type", "string", "3+"),
        F("token_requester_principal_name", "string", "3+"),
        F("issue_timestamp_ms", "int64"),
        F("expiry_timestamp_ms", "int64"),
        F("max_timestamp_ms", "int64"),
        F("token_id", "string"),
        F("hmac", "bytes"),
        F("throttle_time_ms", "int32"),
    ),
)  # fmt: skip

RENEW_DELEGATION_TOKEN = api(
    39, "RenewDelegationToken", "1-2", "2+",
    request=(
        F("hmac", "bytes"),
        F("renew_period_ms", "int64"),
    ),
    response=(
        F("error_code", "int16"),
        F("expiry_timestamp_ms", "int64"),
        F("throttle_time_ms", "int32"),
    ),
)  # fmt: skip

EXPIRE_DELEGATION_TOKEN = api(
    40, "ExpireDelegationToken", "1-2", "2+",
    request=(
        F("hmac", "bytes"),
        F("expiry_time_period_ms", "int64"),
    ),
    response=(
        F("error_code", "int16"),
        F("expiry_timestamp_ms", "int64"),
        F("throttle_time_ms", "int32"),
    ),
)  # fmt: skip

DESCRIBE_DELEGATION_TOKEN = api(
    41, "DescribeDelegationToken", "1-3", "2+",
    request=(
        F("owners", "[]Owner", "0+",
          F("principal_type", "string"),
          F("principal_name", "string"), null="0+"),
    ),
    response=(
        F("error_code", "int16"),
        F("tokens", "[]Token", "0+",
          F("principal_type", "string"),
          F("principal_name", "string"),
          F("token_requester_principal_type", "string", "3+"),
          F("token_requester_principal_name", "string", "3+"),
          F("issue_timestamp", "int64"),
          F("expiry_timestamp", "int64"),
          F("max_timestamp", "int64"),
          F("token_id", "string"),
          F("hmac", "bytes"),
          F("renewers", "[]Renewer", "0+",
            F("principal_type", "string"),
            F("principal_name", "string"))),
        F("throttle_time_ms", "int32"),
    ),
)  # fmt: skip

DESCRIBE_CLIENT_QUOTAS = api(
    48, "DescribeClientQuotas", "0-1", "1+",
    request=(
        F("components", "[]Component", "0+",
          F("entity_type", "string"),
          F("match_type", "int8"),
          F("match", "string", null="0+")),
        F("strict", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+"),
        F("entries", "[]Entry", "0+",
          F("entity", "[]Entity", "0+",
            F("entity_type", "string"),
            F("entity_name", "string", null="0+")),
          F("values", "[]Value", "0+",
            F("key", "string"),
            F("value", "float64")), null="0+"),
    ),
)  # fmt: skip

ALTER_CLIENT_QUOTAS = api(
    49, "AlterClientQuotas", "0-1", "1+",
    request=(
        F("entries", "[]Entry", "0+",
          F("entity", "[]Entity", "0+",
            F("entity_type", "string"),
            F("entity_name", "string", null="0+")),
          F("ops", "[]Op", "0+",
            F("key", "string"),
            F("value", "float64"),
            F("remove", "bool"))),
        F("validate_only", "bool"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("entries", "[]Entry", "0+",
          F("error_code", "int16"),
          F("error_message", "string", null="0+"),
          F("entity", "[]Entity", "0+",
            F("entity_type", "string"),
            F("entity_name", "string", null="0+"))),
    ),
)  # fmt: skip

DESCRIBE_USER_SCRAM_CREDENTIALS = api(
    50, "DescribeUserScramCredentials", "0", "0+",
    request=(
        F("users", "[]User", "0+",
          F("name", "string"), null="0+"),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("error_code", "int16"),
        F("error_message", "string", null="0+"),
        F("results", "[]Result", "0+",
          F("user", "string"),
          F("error_code", "int16"),
          F("error_message", "string", null="0+"),
          F("credential_infos", "[]CredentialInfo", "0+",
            F("mechanism", "int8"),
            F("iterations", "int32"))),
    ),
)  # fmt: skip

ALTER_USER_SCRAM_CREDENTIALS = api(
    51, "AlterUserScramCredentials", "0", "0+",
    request=(
        F("deletions", "[]Deletion", "0+",
          F("name", "string"),
          F("mechanism", "int8")),
        F("upsertions", "[]Upsertion", "0+",
          F("name", "string"),
          F("mechanism", "int8"),
          F("iterations", "int32"),
          F("salt", "bytes"),
          F("salted_password", "bytes")),
    ),
    response=(
        F("throttle_time_ms", "int32"),
        F("results", "[]Result", "0+",
          F("user", "string"),
          F("error_code", "int16"),
          F("error_message", "string", null="0+")),
    ),
)  # fmt: skip

SECURITY_APIS: Final[tuple[Api, ...]] = (
    SASL_HANDSHAKE,
    SASL_AUTHENTICATE,
    DESCRIBE_ACLS,
    CREATE_ACLS,
    DELETE_ACLS,
    CREATE_DELEGATION_TOKEN,
    RENEW_DELEGATION_TOKEN,
    EXPIRE_DELEGATION_TOKEN,
    DESCRIBE_DELEGATION_TOKEN,
    DESCRIBE_CLIENT_QUOTAS,
    ALTER_CLIENT_QUOTAS,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
    ALTER_USER_SCRAM_CREDENTIALS,
)
