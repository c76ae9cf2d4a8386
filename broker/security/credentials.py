"""The users and their salted passwords: those of the settings file, and those in the metadata.

Rules
- A user of the settings file takes precedence over a stored user of the same name.
- The broker keeps salted passwords only. It salts those of the settings file when it reads them.
- Nothing shows whether a user exists: an unknown user gets an entry that no password matches, and
  always the same one. Its iterations and salt format are drawn from those of the existing users,
  with the same frequency. The format matters because it shows which program salted the password:
  Kafka's tools make salts of 25 or 26 digits, librdkafka of 64 bytes.
- Salting takes milliseconds, so one thread does it for all. An attacker that tries passwords can
  delay this thread, but not the event loop, and not a user whose password was accepted before.
  Addresses take turns: each address of an attacker delays another user by one check only.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns
from broker.security.entry_formats import EntryFormats
from broker.security.principal import Principal
from broker.security.scram import (
    HASHES,
    ITERATIONS,
    SALT_BYTES,
    make_entry,
    matches,
    salt_password,
)
from config.security.secrets import SecretError
from config.settings import SaslSettings
from storage.directory.cluster_metadata import ClusterMetadata
from storage.directory.security_entries import ScramEntry, ScramUsers

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PLAIN_HASH: Final = "SCRAM-SHA-256"  # salts the passwords of users whom only PLAIN needs
PASSWORD_LENGTH_MAX: Final = 4096  # longer ones are never right; also the limit of secret files


# Salts of Kafka's Java code: a number of 130 random bits in base 36 (UserScramCredentialUpsertion).
JAVA_SALT_BITS: Final = 130
_DIGITS: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"


def read_passwords(settings: SaslSettings) -> Mapping[str, str]:
    """Return the passwords of the settings file by user. Raises SecretError."""
    passwords: dict[str, str] = {}
    for user, reference in settings.users.items():
        try:
            passwords[user] = reference.read()
        except SecretError as error:
            raise SecretError(f"sasl.users.{user}: {error}") from None
    return passwords


class Credentials:
    """Checks passwords, and finds the entries for SCRAM."""

    def __init__(self, metadata: Callable[[], ClusterMetadata]) -> None:
        self._metadata = metadata
        self._file_users: ScramUsers = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="passwords")
        self._turns = FairSlots(1)  # of the addresses whose passwords are checked
        self._is_closed = False
        # Verified passwords: user -> its entry then, and the password's digest. They are accepted
        # again without salting.
        self._accepted: dict[str, tuple[ScramEntry, bytes]] = {}
        self._digest_key = secrets.token_bytes(32)
        self._formats = EntryFormats()
        self._counted: tuple[ScramUsers, ScramUsers] = {}, {}  # the users in `_formats`

    @property
    def file_users(self) -> frozenset[str]:
        """Return the names of the users of the settings file."""
        return frozenset(self._file_users)

    async def load(self, passwords: Mapping[str, str], mechanisms: tuple[str, ...]) -> None:
        """Replace the users of the settings file."""
        salted_for = [name for name in HASHES if name in mechanisms] or [PLAIN_HASH]
        self._file_users = {
            user: {
                mechanism: await self._run(self._salt, mechanism, user, password)
                for mechanism in salted_for
            }
            for user, password in passwords.items()
        }
        await self.count_formats()

    def close(self) -> None:
        """Drop checks that wait, and end the thread. Later checks raise ConnectionAbortedError."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check_password(self, user: str, password: str, address: str = "") -> Principal | None:
        """Return the principal of a user if the password, from a client's address, is right.

        A stored user may have a password for each SCRAM mechanism: that of SCRAM-SHA-256 counts.
        """
        if len(password) > PASSWORD_LENGTH_MAX:
            return None
        entries = self._entries(user)
        mechanism = next((name for name in HASHES if name in entries), None)
        if mechanism is None:
            mechanism, entry = self._unknown_user(user)
        else:
            entry = entries[mechanism]
        digest = hmac.digest(self._digest_key, password.encode(), "sha256")
        accepted_entry, accepted = self._accepted.get(user, (None, b""))
        is_right = accepted_entry is entry and hmac.compare_digest(accepted, digest)
        if not is_right:
            async with self._turns.slot(address):
                is_right = await self._run(matches, mechanism, password, entry)
        if not (is_right and entries):
            return None
        self._accepted[user] = entry, digest
        return Principal(user)

    def find_entry(self, mechanism: str, user: str) -> tuple[ScramEntry, bool]:
        """Return the entry of a user, and whether the user exists."""
        entry = self._entries(user).get(mechanism)
        if entry is not None:
            return entry, True
        return self._unmatched_entry(mechanism, user), False

    def _entries(self, user: str) -> Mapping[str, ScramEntry]:
        return self._file_users.get(user) or self._metadata().scram_users.get(user, {})

    def _salt(self, mechanism: str, user: str, password: str) -> ScramEntry:
        salt = self._fixed_salt(mechanism, user)
        salted = salt_password(mechanism, password, salt)
        return make_entry(mechanism, salted, salt, ITERATIONS)

    def _fixed_salt(self, mechanism: str, user: str) -> bytes:
        """Return a salt that stays the same after a restart."""
        return self._fixed_bytes(f"salt {mechanism} {user}", SALT_BYTES)

    def _fixed_bytes(self, text: str, size: int) -> bytes:
        """Return bytes that cannot be distinguished from random ones without the key."""
        return hashlib.shake_256(self._metadata().hash_key + text.encode()).digest(size)

    def _unknown_user(self, user: str) -> tuple[str, ScramEntry]:
        """Return a mechanism and an entry that cost as much time as those of most users."""
        mechanism = self._present_formats().most_used() or PLAIN_HASH
        return mechanism, self._unmatched_entry(mechanism, user)

    def _unmatched_entry(self, mechanism: str, user: str) -> ScramEntry:
        bits = int.from_bytes(self._fixed_bytes(f"form {mechanism} {user}", 8))
        entry_format = self._present_formats().draw(mechanism, bits)
        salt = self._fixed_bytes(f"salt {mechanism} {user}", entry_format.salt_bytes or SALT_BYTES)
        if entry_format.salt_bytes is None:
            salt = _java_salt(salt)
        size = hashlib.new(HASHES[mechanism]).digest_size
        return ScramEntry(salt, bytes(size), bytes(size), entry_format.iterations)

    async def count_formats(self) -> None:
        """Count the users after a change of them, in turns."""
        turns = Turns()
        for _ in self._formats.count("stored", self._metadata().scram_users):
            await turns.take()
        self._counted = {}, {}  # newer users may have been counted between two turns

    def _present_formats(self) -> EntryFormats:
        of_file, stored = self._file_users, self._metadata().scram_users
        if self._counted[0] is not of_file or self._counted[1] is not stored:
            for source, users in (("file", of_file), ("stored", stored)):
                for _ in self._formats.count(source, users):
                    pass
            self._counted = of_file, stored
        return self._formats

    async def _run(
        self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **_: _Arguments.kwargs
    ) -> _Result:
        if self._is_closed:
            raise ConnectionAbortedError("the broker stops")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _java_salt(bits: bytes) -> bytes:
    """Return a salt as Kafka's Java code makes it, from at least JAVA_SALT_BITS random bits."""
    number = int.from_bytes(bits) % (1 << JAVA_SALT_BITS)
    digits = bytearray()
    while number:
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return bytes(reversed(digits))
