"""Users, access control lists and quotas in Apache Kafka's metadata log.

The records are UserScramCredentialRecord (11), ClientQuotaRecord (14), AccessControlEntryRecord
(18), RemoveAccessControlEntryRecord (19) and RemoveUserScramCredentialRecord (22), all in version
0. Kafka has checked what is in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.directory.kafka_records import ValueReader
from storage.directory.security_entries import AclEntry, QuotaEntity, ScramEntry

USER: Final = 11
QUOTA: Final = 14
ACL: Final = 18
REMOVE_ACL: Final = 19
REMOVE_USER: Final = 22
SECURITY_RECORDS: Final = frozenset((USER, QUOTA, ACL, REMOVE_ACL, REMOVE_USER))
ACL_ID_BYTES: Final = 16
MECHANISMS: Final[Mapping[int, str]] = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}


@dataclass(slots=True)
class SecurityImage:
    """The users, access control lists and quotas after the records so far."""

    acls: dict[bytes, AclEntry] = field(default_factory=dict)  # by id
    scram_users: dict[str, dict[str, ScramEntry]] = field(default_factory=dict)
    client_quotas: dict[QuotaEntity, dict[str, float]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing."""
        return not (self.acls or self.scram_users or self.client_quotas)

    def change(self, kind: int, reader: ValueReader) -> None:
        """Apply one record. Raises MetadataLogError if it is invalid."""
        if kind == ACL:
            self._add_acl(reader)
        elif kind == REMOVE_ACL:
            self.acls.pop(reader.take(ACL_ID_BYTES), None)
        elif kind == USER:
            self._set_user(reader)
        elif kind == REMOVE_USER:
            self._remove_user(reader.text(), reader.int8())
        elif kind == QUOTA:
            self._set_quota(reader)

    def _add_acl(self, reader: ValueReader) -> None:
        acl_id, resource_type, name = reader.take(ACL_ID_BYTES), reader.int8(), reader.text()
        pattern_type, principal, host = reader.int8(), reader.text(), reader.text()
        self.acls[acl_id] = AclEntry(
            resource_type=resource_type,
            pattern_type=pattern_type,
            resource_name=name,
            principal=principal,
            host=host,
            operation=reader.int8(),
            permission=reader.int8(),
        )

    def _set_user(self, reader: ValueReader) -> None:
        name, mechanism = reader.text(), MECHANISMS.get(reader.int8())
        entry = ScramEntry(reader.data(), reader.data(), reader.data(), reader.int32())
        if mechanism is not None:
            self.scram_users.setdefault(name, {})[mechanism] = entry

    def _remove_user(self, name: str, code: int) -> None:
        mechanisms = self.scram_users.get(name, {})
        mechanisms.pop(MECHANISMS.get(code, ""), None)
        if not mechanisms:
            self.scram_users.pop(name, None)

    def _set_quota(self, reader: ValueReader) -> None:
        parts: dict[str, str | None] = {}
        for _ in range(reader.count()):
            kind = reader.text()
            parts[kind] = reader.nullable_text()
            reader.skip_tags()
        entity = tuple(sorted(parts.items()))
        key, value, is_removal = reader.text(), reader.float64(), reader.int8() != 0
        values = self.client_quotas.setdefault(entity, {})
        if is_removal:
            values.pop(key, None)
        else:
            values[key] = value
        if not values:
            del self.client_quotas[entity]
