"""The OpenAPI document of the routes that handlers of the Kafka protocol answer."""

from typing import Any, Final

from broker.http.api.kafka import acls, broker_settings, users
from broker.http.api.kafka.group_changes import GROUP, OFFSETS
from broker.http.api.kafka.records import LIMIT_MAX, RECORDS
from broker.http.api.kafka.topic_changes import SETTINGS
from broker.http.api.kafka.topic_changes import TOPIC as ONE_TOPIC
from broker.http.api.openapi.parts import PARTITION, TOPIC, UNKNOWN, change, get, query

_GROUP: Final = {
    "name": "group", "in": "path", "required": True, "schema": {"type": "string"},
}  # fmt: skip
_IF_MATCH: Final = {
    "name": "If-Match", "in": "header", "description": "The ETag of what was read.",
    "schema": {"type": "string"},
}  # fmt: skip
_SETTINGS: Final = {
    "type": "object",
    "description": "Values by the names of topic settings.",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
_VALIDATE_ONLY: Final = {"type": "boolean", "description": "Validate; change nothing."}
_FIELDS: Final = ("name", "value", "value_base64")  # of a header
_NO_TOPIC: Final = (404, "There is no such topic.")
_NO_GROUP: Final = (404, "There is no such group.")
_INVALID: Final = (422, "The name, a setting or the number of partitions is invalid.")
_QUOTA: Final = (429, "The quota of topic changes is exceeded; see Retry-After.")
_RETRY: Final = (503, "Groups are being loaded, or the data directory failed: try again.")
_MEMBERS: Final = (409, "The group has members.")


def create_topic() -> dict[str, Any]:
    """Return the operation that creates a topic."""
    operation = change(
        "post",
        "Create a topic. Needs CREATE on the topic or the cluster.",
        [],
        (201, "Created."),
        (409, "There is a topic of this name."),
        _INVALID,
        _QUOTA,
        _RETRY,
        body={
            "name": {"type": "string"},
            "partitions": {"type": "integer", "description": "Default: that of the settings."},
            "settings": _SETTINGS,
            "validate_only": _VALIDATE_ONLY,
        },
    )
    answers = operation["post"]["responses"]
    answers["201"] = {**answers["200"], "description": "Created."}
    answers["200"] = {**answers["200"], "description": "Valid; nothing was created."}
    return operation


def _records() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    header = {"type": "object", "properties": dict.fromkeys(_FIELDS, text)}
    return get(
        "Show a page of committed records of a topic or view, cut to 4 KiB. Needs READ on it.",
        [
            TOPIC,
            PARTITION,
            query("from", "string", "earliest, latest, an offset, or a time (ISO 8601)."),
            query("limit", "integer", "Records; default: 50.", minimum=1, maximum=LIMIT_MAX),
            query("key", "string", "Only records with this key."),
            query("key_base64", "string", "The same for a key that is not UTF-8."),
        ],
        UNKNOWN,
        (409, "The partition is offline."),
        _RETRY,
    ) | change(
        "post",
        "Produce one record. Needs WRITE on the topic.",
        [TOPIC, PARTITION],
        (201, "Produced."),
        UNKNOWN,
        (413, "The record is larger than the topic allows."),
        (422, "The topic does not accept the record."),
        _RETRY,
        body={
            "key": text,
            "key_base64": text,
            "value": text,
            "value_base64": text,
            "headers": {"type": "array", "items": header},
            "timestamp_ms": {"type": "integer"},
        },
    )


def _user_paths() -> dict[str, Any]:
    mechanism = {"enum": list(users.MECHANISMS)}
    user = {"name": "user", "in": "path", "required": True, "schema": {"type": "string"}}
    unknown = (404, "There is no such user.")
    return {
        users.ROOT: get(
            "List the users of SASL/SCRAM that the broker stores. Needs DESCRIBE on the cluster.",
            [
                query("contains", "string", "Part of the names."),
                query("after", "string", "`next` of the previous page."),
                query("limit", "integer", "Rows per page; default: 500.", minimum=1, maximum=2000),
            ],
        ),
        users.USER: change(
            "put",
            "Create a user, or set another password. Needs ALTER on the cluster.",
            [user],
            (422, "The name or the password is invalid, or the settings file has this user."),
            body={
                "password": {"type": "string"},
                "mechanism": {**mechanism, "default": users.DEFAULT_MECHANISM},
            },
        )
        | change(
            "delete",
            "Delete a user, or its password for one mechanism. Needs ALTER on the cluster.",
            [user, {**query("mechanism", "string", "Default: all."), "schema": mechanism}],
            unknown,
        ),
    }


def _acl_paths() -> dict[str, Any]:
    schemas: dict[str, Any] = {
        name: {"enum": list(acls.choices(name))} if acls.choices(name) else {"type": "string"}
        for name in acls.FIELDS
    }
    fields = [
        {**query(name, "string", "Of the entry."), "required": True, "schema": schema}
        for name, schema in schemas.items()
    ]
    off = (409, "The broker has no access control (authorization.enabled).")
    added = change(
        "post",
        "Add an entry. Needs ALTER on the cluster.",
        [],
        off,
        (422, "Kafka does not allow the entry."),
        body=schemas,
    )
    answers = added["post"]["responses"]
    answers["201"] = {**answers.pop("200"), "description": "The entry is in effect."}
    return {
        acls.ROOT: get(
            "List the entries of the access control lists. Needs DESCRIBE on the cluster.",
            [
                query("contains", "string", "Part of the principal or of the resource's name."),
                query("after", "string", "`next` of the previous page."),
                query("limit", "integer", "Rows per page; default: 500.", minimum=1, maximum=5000),
            ],
            off,
        )
        | added
        | change(
            "delete",
            "Remove one entry, which all its fields name. Needs ALTER on the cluster.",
            fields,
            (404, "There is no such entry."),
            off,
        )
    }


def paths() -> dict[str, Any]:
    """Return the other paths."""
    topic_id = query("topic_id", "string", "Delete this topic only, not one created since.")
    return {
        broker_settings.PATH: get(
            "Show the settings in effect, their sources and help, and the last reload. Needs"
            " DESCRIBE_CONFIGS on the cluster.",
            [],
        )
        | change(
            "patch",
            "Change settings that need no restart. Needs ALTER_CONFIGS on the cluster.",
            [],
            (422, "A setting is invalid, or cannot be changed while the broker runs."),
            body={
                "set": _SETTINGS,
                "unset": {"type": "array", "items": {"type": "string"}},
                "validate_only": _VALIDATE_ONLY,
            },
        ),
        **_user_paths(),
        **_acl_paths(),
        SETTINGS: get("List the settings that topics can have, with defaults and help.", []),
        ONE_TOPIC: get(
            "Show a topic with its settings and an ETag. Needs DESCRIBE_CONFIGS on the topic.",
            [TOPIC],
            _NO_TOPIC,
        )
        | change(
            "patch",
            "Change settings and add partitions. Needs ALTER_CONFIGS for settings, ALTER for"
            " partitions and DESCRIBE_CONFIGS for the answer.",
            [TOPIC, _IF_MATCH],
            _NO_TOPIC,
            (412, "The topic has changed since it was read; the detail names what."),
            _INVALID,
            _QUOTA,
            _RETRY,
            body={
                "set": _SETTINGS,
                "unset": {"type": "array", "items": {"type": "string"}},
                "partitions": {"type": "integer", "description": "The new number, not fewer."},
                "validate_only": _VALIDATE_ONLY,
            },
        )
        | change(
            "delete",
            "Delete a topic with its records. Needs DELETE on the topic.",
            [TOPIC, topic_id],
            _NO_TOPIC,
            (409, "The topic was created again, or topics cannot be deleted (delete_topics)."),
            _QUOTA,
            _RETRY,
        ),
        RECORDS: _records(),
        GROUP: get(
            "Show a group with its members, committed offsets and lag. Needs DESCRIBE on it.",
            [_GROUP],
            _NO_GROUP,
            _RETRY,
        )
        | change(
            "delete",
            "Delete a group with its offsets. Needs DELETE on the group.",
            [_GROUP],
            _NO_GROUP,
            _MEMBERS,
            _RETRY,
        ),
        OFFSETS: change(
            "post",
            "Commit other offsets of a topic. Needs READ on the group and the topic.",
            [_GROUP],
            (404, "There is no such topic or partition."),
            _MEMBERS,
            _RETRY,
            body={
                "topic": {"type": "string"},
                "partition": {"type": "integer", "description": "Default: all partitions."},
                "to": {
                    "type": ["string", "integer"],
                    "description": "earliest, latest, an offset, or a time (ISO 8601).",
                },
                "dry_run": {"type": "boolean", "description": "Show the offsets only."},
            },
        ),
    }
