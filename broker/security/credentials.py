"""The users and their salted passwords: those of the settings file, and those in the metadata.

Rules
- A user of the settings file takes precedence over a stored user of the same name.
- The broker keeps salted passwords only. It salts those of the settings file when it reads them.
- Nothing shows whether a user exists: for an unknown user there is an entry that no password
  matches, with the number of iterations that most users have, and always the same salt.
- Salting takes milliseconds, so one thread does it for all. An attacker that tries passwords can
  delay this thread, but not the event loop, and not a user whose password was accepted before.
"""

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

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
        # Passwords that were right: user -> its entry then, and the password's digest. They are
        # checked without salting again.
        self._accepted: dict[str, tuple[ScramEntry, bytes]] = {}
        self._digest_key = secrets.token_bytes(32)
        self._counted: tuple[ScramUsers, ScramUsers] = {}, {}  # the users in `_counts`
        self._counts: dict[str, Counter[int]] = {}

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

    def close(self) -> None:
        """Drop checks that wait, and end the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check_password(self, user: str, password: str) -> Principal | None:
        """Return the principal of a user if the password is right.

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
        text = f"salt {mechanism} {user}".encode()
        return hmac.digest(self._metadata().hash_key, text, "sha256")[:SALT_BYTES]

    def _unknown_user(self, user: str) -> tuple[str, ScramEntry]:
        """Return a mechanism and an entry that cost as much time as those of most users."""
        counts = self._usual_iterations()
        mechanism = max(counts, key=lambda name: counts[name].total(), default=PLAIN_HASH)
        return mechanism, self._unmatched_entry(mechanism, user)

    def _unmatched_entry(self, mechanism: str, user: str) -> ScramEntry:
        counts = self._usual_iterations().get(mechanism)
        iterations = counts.most_common(1)[0][0] if counts else ITERATIONS
        size = hashlib.new(HASHES[mechanism]).digest_size
        return ScramEntry(self._fixed_salt(mechanism, user), bytes(size), bytes(size), iterations)

    def _usual_iterations(self) -> Mapping[str, Counter[int]]:
        """Return how many users have which number of iterations, by mechanism."""
        of_file, stored = self._file_users, self._metadata().scram_users
        if self._counted[0] is not of_file or self._counted[1] is not stored:
            self._counts = {}
            for entries in itertools.chain(of_file.values(), stored.values()):
                for mechanism, entry in entries.items():
                    self._counts.setdefault(mechanism, Counter())[entry.iterations] += 1
            self._counted = of_file, stored
        return self._counts

    async def _run(
        self, work: Callable[_Arguments, _Result], *args: _Arguments.args, **_: _Arguments.kwargs
    ) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
