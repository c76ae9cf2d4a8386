"""Every file that a start reads, damaged in every way: what comes of it, found by trying.

`python -m tests.support.storage.damaged_files` rewrites the tables of
docs/reference/damaged-files.md. The test compares them with what the code does,
and checks what must hold whatever the table says.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from crc32c import crc32c
from structlog.testing import capture_logs

from broker.erasure.model import Erasure, PartitionErasure
from broker.erasure.store import FILE_NAME as ERASURES_NAME
from broker.erasure.store import ErasureStore
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import (
    LEASE_MAGIC,
    LEASE_NAME,
    LEASE_VERSION,
    LeaseRecord,
    read_lease,
)
from broker.security.oauthbearer import JwksError, read_jwks
from broker.security.tls import TlsError, load_server_tls
from cleaner import typed_json
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.remote_compaction import PartitionPlan, Purpose
from cleaner.scheduler.cleaner_state_store import STATE_NAME, _load, encode_cleaner_state
from cleaner.scheduler.history import HISTORY_NAME, JobRecord, encode_record
from config.loader import ConfigFileError
from config.loader import load as load_settings
from config.security.clients import ClientSasl, ClientSecurityError, read_command_config
from config.security.secrets import SecretError, SecretReference
from config.security.token import TokenFileError, read_token
from config.settings import OauthSettings, TlsSettings
from storage.directory.cluster_metadata import FILE_NAME
from storage.directory.log_directory import LogDirectory
from storage.errors import DamagedSegmentError, InvalidViewError, StorageError
from storage.format import filenames, sealed_json
from storage.format.batch import (
    verify_crc,
    walk_headers,
)
from storage.log.log_state import index_limits
from storage.manager.known_damage import DamageEntry, KnownDamage, encode_damage
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
from storage.swap.swap_journal import JOURNAL_PREFIX
from storage.view.deleted_keys import DELETED_KEYS_MAGIC, DELETED_KEYS_NAME
from storage.view.ledger import check_deleted_keys, open_ledger
from storage.view.manifest import (
    MANIFEST_NAME,
    VIEW_FOLDER,
    DeletedKeys,
    LedgerSegment,
    ViewManifest,
    decode_manifest,
    encode_manifest,
)
from tests.support.certificates import Authority
from tests.support.cleaner.cleaner_jobs import job as job_of
from tests.support.identity_provider import IdentityProvider
from tests.support.storage.damaged_worlds import (
    DAMAGES,
    FOLDER_HERE,
    KILLED,
    METADATA_LOG,
    METADATA_SNAPSHOT,
    ORDERLY,
    OTHER,
    OTHER_HOME,
    Files,
    World,
    aborted_in,
    damaged,
    disk_of,
    opened,
    readable,
    world,
    world_before_kafkas_swap,
    world_in_a_swap,
    world_in_kafkas_swap,
    world_late_in_kafkas_swap,
    world_of_kafka,
    world_of_two,
    world_with_key_indexes,
)
from tests.support.storage.logs import (
    FOLDER,
    HOME,
    NOW_MS,
    PARTITION,
    SMALL,
    TOPIC_ID,
    append,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv

PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "damaged-files.md"
# --- outcomes -----------------------------------------------------------------------------------

SERVED: Final = "served"
LOGGED: Final = "served, logged"
TAKEN_OVER: Final = "taken over again"
OLDER_CONFIGS: Final = "older configs are taken over"
UNREADABLE: Final = "served but for damaged records"
CUT: Final = "tail cut"
ABORTED_SHOWN: Final = "aborted records are shown"
REAPPEARS: Final = "deleted records are back"
PARTITION_OFFLINE: Final = "partition offline"
DIRECTORY_OFFLINE: Final = "directory offline"
REFUSED: Final = "start refused"


class BrokenRuleError(Exception):
    """What must hold of any start does not."""


def outcome_of(before: World, files: Files, path: str) -> str:
    """Start on these files, of which `path` was damaged. Raises BrokenRuleError."""
    env = disk_of(files)
    logs = {name: data for name, data in files.items() if name.endswith(filenames.LOG)}
    name = path.rpartition("/")[2]
    try:
        manager, report = opened(env, before.directories)
    except (StorageError, OSError) as error:
        if name not in str(error):
            raise BrokenRuleError(f"the refusal does not name {name}: {error}") from error
        if any(env.read_file(item) != data for item, data in logs.items() if data != FOLDER_HERE):
            raise BrokenRuleError("a refused start changed a log file") from error
        return REFUSED
    if report.offline_directories:
        _check_other_directory(manager, report, files, path)
        return DIRECTORY_OFFLINE
    if report.offline:
        [(partition, reason)] = report.offline.items()
        is_of_other = path.startswith(f"{OTHER_HOME}/")
        if name.removesuffix(filenames.SWAP) not in reason or (partition == OTHER) != is_of_other:
            raise BrokenRuleError(f"the reason does not name {name}: {report.offline}")
        return PARTITION_OFFLINE
    is_log = name.endswith((filenames.LOG, f"{filenames.LOG}{filenames.SWAP}"))
    outcome = _compare(before, manager, report, is_log=is_log)
    is_reported = bool(report.notes or report.directory_notes)
    if outcome == CUT and not is_reported and files.get(path):
        raise BrokenRuleError("a cut was not logged")
    _check_that_it_goes_on(manager, env, before)
    return outcome


def _check_other_directory(
    manager: LogManager, report: OpenReport, files: Files, path: str
) -> None:
    """One directory is offline for its file, which the reason names; the other one is served."""
    home, _, name = path.rpartition("/")
    if set(report.offline_directories) != {home} or name not in report.offline_directories[home]:
        raise BrokenRuleError(f"offline: {report.offline_directories}")
    served = PARTITION if home == OTHER_HOME else OTHER
    if manager.table.logs[served].log_end_offset == 0:
        raise BrokenRuleError("the other directory is not served")


def _compare(before: World, manager: LogManager, report: OpenReport, *, is_log: bool) -> str:
    log = manager.table.logs[PARTITION]
    results = readable(log)
    missing = before.records.keys() - results.keys()
    changed = [item for item in results if before.records.get(item, results[item]) != results[item]]
    is_reported = bool(report.notes or report.directory_notes)
    if changed or (missing and not is_log):
        raise BrokenRuleError(f"missing {sorted(missing)}, changed {changed}")
    if log.log_end_offset < before.end_offset:
        return CUT
    if missing:
        return UNREADABLE
    if aborted_in(log) != before.aborted:
        return ABORTED_SHOWN
    if log.log_start_offset < before.start_offset:
        return f"{REAPPEARS}, logged" if is_reported else REAPPEARS
    if report.taken_over:
        dynamic = manager.metadata.topics[PARTITION.topic].dynamic
        if not before.configs:
            return TAKEN_OVER
        if dynamic == before.configs:
            return SERVED
        is_reported = any(event == "kafka metadata not read" for event, _ in report.settings)
        if is_reported != (not dynamic):
            raise BrokenRuleError(f"taken over with {dynamic}: {report.settings}")
        return f"{TAKEN_OVER}, logged" if is_reported else OLDER_CONFIGS
    return LOGGED if is_reported else SERVED


def _check_that_it_goes_on(manager: LogManager, env: MemoryEnv, before: World) -> None:
    """Appending goes on at the end, and the next start has nothing left to mend."""
    log = manager.table.logs[PARTITION]
    end = log.log_end_offset
    if append(log, value_at(end)).first_offset != end:
        raise BrokenRuleError("an append was not put at the end")
    log.roll(NOW_MS)
    manager.table.checkpoint()
    manager.close()
    readable_before = readable(log)
    again, report = opened(env, before.directories)
    # Damage below the recovery point stays as it is, and is told at each start that meets it.
    fresh = [note for note in report.notes if "damage" not in note[1] and "cannot" not in note[1]]
    if report.directory_notes or report.offline or report.taken_over:
        raise BrokenRuleError(f"a second start mends again: {list(report.lines())} {fresh}")
    if readable(again.table.logs[PARTITION]).items() < readable_before.items():
        raise BrokenRuleError("a second start lost records")


# --- the table ----------------------------------------------------------------------------------


def segment_files(kind: str, files: Files) -> list[str]:
    return sorted(path for path in files if path.startswith(FOLDER) and path.endswith(kind))


def targets(value: World) -> dict[str, str]:
    """Rows: what is damaged, and its path."""
    files = value.files
    logs = segment_files(filenames.LOG, files)
    bases = [int(path.rpartition("/")[2][:20]) for path in logs]
    flushed = 28  # see `world`
    active = logs[-1]
    unflushed = next(p for p, base in zip(logs, bases, strict=True) if base >= flushed)
    rows = {
        "`.log`, flushed": logs[1],
        "`.log`, closed and not flushed": unflushed,
        "`.log`, the last": active,
        "`.index`": segment_files(filenames.INDEX, files)[1],
        "`.index`, the last": segment_files(filenames.INDEX, files)[-1],
        "`.timeindex`": segment_files(filenames.TIME_INDEX, files)[1],
        "`.timeindex`, the last": segment_files(filenames.TIME_INDEX, files)[-1],
        "`.txnindex`": segment_files(filenames.TXN_INDEX, files)[0],
        "`.snapshot`": segment_files(filenames.SNAPSHOT, files)[-1],
    }
    for name in (filenames.LEADER_EPOCH_CHECKPOINT, filenames.PARTITION_METADATA):
        rows[f"`{name}`"] = f"{FOLDER}/{name}"
    for name in (
        filenames.RECOVERY_POINT_CHECKPOINT,
        filenames.LOG_START_CHECKPOINT,
        filenames.CLEANER_CHECKPOINT,
        filenames.REPLICATION_CHECKPOINT,
        filenames.META_PROPERTIES,
        filenames.CLEAN_SHUTDOWN,
        FILE_NAME,
    ):
        rows[f"`{name}`"] = f"{HOME}/{name}"
    return {row: path for row, path in rows.items() if path in files}


def metadata_targets(_: World) -> dict[str, str]:
    return {
        "Kafka's metadata: `.checkpoint`": METADATA_SNAPSHOT,
        "Kafka's metadata: `.log`": METADATA_LOG,
    }


def suffix_targets(suffix: str) -> Callable[[World], dict[str, str]]:
    """The files of one segment whose names have a suffix."""

    def targets_of(value: World) -> dict[str, str]:
        return {
            f"`{kind}{suffix}`": path
            for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX)
            for path in value.files
            if path.endswith(f"{kind}{suffix}")
        }

    return targets_of


def late_swap_targets(value: World) -> dict[str, str]:
    rows = suffix_targets(filenames.SWAP)(value)
    return {f"{row}, old segments deleted": path for row, path in rows.items()}


def key_targets(value: World) -> dict[str, str]:
    keys = next(path for path in value.files if path.endswith(filenames.KEYS))
    return {"`.keys`": keys, f"`{filenames.CONTENT_IDS}`": f"{FOLDER}/{filenames.CONTENT_IDS}"}


def directory_targets(value: World) -> dict[str, str]:
    """Files that both of two directories have: those beside the log under test come first."""
    places = {"one of two directories": HOME, "the other directory": OTHER_HOME}
    return {
        f"`{name}` in {place}": f"{home}/{name}"
        for name in (filenames.META_PROPERTIES, FILE_NAME)
        for place, home in places.items()
    }


def swap_targets(value: World) -> dict[str, str]:
    journal = next(path for path in value.files if f"/{JOURNAL_PREFIX}" in path)
    return {"swap journal": journal}


def cases() -> Iterator[tuple[str, str, str, World, str]]:
    """(row, damage, kind of stop, world, path) of every case."""
    scenes: list[tuple[str, World, Callable[[World], dict[str, str]]]] = [
        (ORDERLY, world(ORDERLY), targets),
        (KILLED, world(KILLED), targets),
        (KILLED, world_in_a_swap(), swap_targets),
        (ORDERLY, world_with_key_indexes(ORDERLY), key_targets),
        (KILLED, world_with_key_indexes(KILLED), key_targets),
        (KILLED, world_in_kafkas_swap(), suffix_targets(filenames.SWAP)),
        (KILLED, world_late_in_kafkas_swap(), late_swap_targets),
        (KILLED, world_before_kafkas_swap(), suffix_targets(filenames.CLEANED)),
        (ORDERLY, world_of_kafka(ORDERLY), metadata_targets),
        (KILLED, world_of_kafka(KILLED), metadata_targets),
        (ORDERLY, world_of_two(ORDERLY), directory_targets),
        (KILLED, world_of_two(KILLED), directory_targets),
    ]
    for stop, result, targets_of in scenes:
        for row, path in targets_of(result).items():
            for how in DAMAGES:
                if damaged(result.files, path, how) is not None:
                    yield row, how, stop, result, path


def start_outcomes() -> dict[tuple[str, str, str], str]:
    """Every case of the first table tried. Raises BrokenRuleError, with the case in its notes."""
    outcomes = {}
    for row, how, stop, result, path in cases():
        files = damaged(result.files, path, how)
        assert files is not None
        try:
            outcomes[row, how, stop] = outcome_of(result, files, path)
        except BaseException as error:
            error.add_note(f"{row}, {how}, {stop}")
            raise
    return outcomes


# --- files that are read by themselves -----------------------------------------------------------

NOTHING_LOST: Final = "as before"
FORGOTTEN: Final = "forgotten, logged"
SOME_FORGOTTEN: Final = "some lines skipped, logged"
NONE_YET: Final = "as if there had been none"
VIEW_OFFLINE: Final = "view not served, logged"
UNKNOWN: Final = "kept; erasures are refused with the reason"
RUN_ENDED: Final = "lease ended, files removed"
RUNNING: Final = "run goes on"


@dataclass(frozen=True)
class Part:
    """A file that one function reads, and what comes of reading it."""

    row: str
    files: Files
    path: str
    read: Callable[[MemoryEnv], str]


def parts() -> Iterator[Part]:
    yield _damage_part()
    yield _erasures_part()
    yield from _cleaner_parts()
    yield from _view_parts()
    folder = f"{FOLDER}/varve.leases/run-1"
    plan = PartitionPlan(job_of(), TOPIC_ID, 100)
    lease = LeaseRecord("run-1", "t", Purpose.COMPACT, NOW_MS, 60, bytes(32), plan, 1, 9, 0, (1, 2))
    data = sealed_json.seal_body(LEASE_MAGIC, LEASE_VERSION, typed_json.dumps(lease))
    path = f"{folder}/{LEASE_NAME}"
    yield Part(
        "lease of a remote compaction", {path: data}, path, lambda env: _read_lease(env, folder)
    )


def _read_lease(env: MemoryEnv, folder: str) -> str:
    return RUN_ENDED if isinstance(read_lease(env, folder), str) else RUNNING


def _cleaner_parts() -> Iterator[Part]:
    path = f"{HOME}/{STATE_NAME}"
    cleaner_states = {PARTITION: PartitionCleanerState(first_seen_ms=NOW_MS)}
    data = encode_cleaner_state(cleaner_states)
    yield Part(f"`{STATE_NAME}`", {path: data}, path, lambda env: _read_memory(env, cleaner_states))
    path = f"{HOME}/{HISTORY_NAME}"
    records = [JobRecord(PARTITION, f"run-{n}", n, n + 1, "finished") for n in range(4)]
    data = b"".join(map(encode_record, records))
    yield Part(f"`{HISTORY_NAME}`", {path: data}, path, lambda env: _read_history(env, records))


def _damage_part() -> Part:
    path = f"{HOME}/{filenames.DAMAGE}"
    entries = {PARTITION: (DamageEntry(TOPIC_ID.hex(), 0, 0, 80, 0, 1, 7, "CRC does not match"),)}

    def read(env: MemoryEnv) -> str:
        known, directory = KnownDamage(env), LogDirectory(env, HOME)
        known.read(directory)
        restored = known.entries(directory)
        if restored:
            return NOTHING_LOST if restored == entries else f"changed: {restored}"
        return FORGOTTEN if directory.notes else NONE_YET

    return Part(f"`{filenames.DAMAGE}`", {path: encode_damage(entries)}, path, read)


def _erasure_store(env: MemoryEnv) -> ErasureStore:
    return ErasureStore(env, lambda: (HOME,), DirectoryThreads(env.monotonic))


def _erasures_part() -> Part:
    path = f"{HOME}/{ERASURES_NAME}"
    erasure = Erasure(
        "1", "t", TOPIC_ID, "0" * 32, b"key", "User:ada", 1, 2, (PartitionErasure(0),)
    )
    env = MemoryEnv(seed=1)
    env.mkdir(HOME)
    asyncio.run(_erasure_store(env).add(erasure))

    def read(env: MemoryEnv) -> str:
        store = _erasure_store(env)
        asyncio.run(store.load())
        if store.unknown_because is not None:
            return UNKNOWN
        return NOTHING_LOST if store.all() == [erasure] else NONE_YET

    return Part(f"`{ERASURES_NAME}`", {path: env.read_file(path)}, path, read)


def _read_memory(env: MemoryEnv, before: Mapping[TopicPartition, PartitionCleanerState]) -> str:
    with capture_logs() as lines:
        entries, _ = _load(env, HOME)
    if entries:
        return NOTHING_LOST if entries == before else f"changed: {entries}"
    return FORGOTTEN if lines else NONE_YET


def _read_history(env: MemoryEnv, before: list[JobRecord]) -> str:
    with capture_logs() as lines:
        _, records = _load(env, HOME)
    if any(record not in before for record in records):
        return "a record is changed"  # a line carries no checksum; the history is for people
    if len(records) == len(before):
        return NOTHING_LOST
    if not lines:
        return NONE_YET if not records else "some lines lost"
    return SOME_FORGOTTEN if records else FORGOTTEN


def _view_parts() -> Iterator[Part]:
    log_path = next(path for path in sorted(world(ORDERLY).files) if path.endswith(filenames.LOG))
    base = log_path.removesuffix(filenames.LOG)
    run = f"{FOLDER}/{VIEW_FOLDER}/run-1"
    kinds = (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX)
    files = {
        f"{run}/{base.rpartition('/')[2]}{kind}": world(ORDERLY).files[base + kind]
        for kind in kinds
    }
    keys = DELETED_KEYS_MAGIC + bytes(16) + bytes(range(40))
    files[f"{run}/{DELETED_KEYS_NAME}"] = keys
    content = files[f"{run}/{log_path.rpartition('/')[2]}"]
    segment = LedgerSegment(0, 5, len(content), crc32c(content))
    deleted = DeletedKeys(len(keys), crc32c(keys))
    manifest = ViewManifest(
        TOPIC_ID, "run-1", 5, (segment,), 5, NOW_MS, "keep", "timestamp", deleted=deleted
    )
    path = f"{FOLDER}/{VIEW_FOLDER}/{MANIFEST_NAME}"
    files[path] = files[f"{run}/{MANIFEST_NAME}"] = encode_manifest(manifest)
    yield Part("view `manifest`", files, path, _read_view)
    yield Part("view `manifest`, the copy", files, f"{run}/{MANIFEST_NAME}", _read_view)
    for kind in kinds:
        path = f"{run}/{log_path.rpartition('/')[2].removesuffix(filenames.LOG)}{kind}"
        yield Part(f"view `{kind}`", files, path, _read_view)
    yield Part(f"view `{DELETED_KEYS_NAME}`", files, f"{run}/{DELETED_KEYS_NAME}", _read_keys)


def _read_view(env: MemoryEnv) -> str:
    try:
        ledger = open_ledger(env, FOLDER, TOPIC_ID, index_limits(SMALL))
    except (InvalidViewError, OSError) as error:  # as broker/views/views.py
        if FOLDER not in str(error):
            raise BrokenRuleError(f"the reason names no file: {error}") from error
        return VIEW_OFFLINE
    if ledger is None:
        raise BrokenRuleError("the view is gone")
    result = set()
    for offset in range(5):
        with suppress(DamagedSegmentError):
            data = ledger.read(offset, 1, at_least_one=True).read()
            for position, header in walk_headers(data):
                if verify_crc(data, position, header):
                    result.add(header.base_offset)
    if len(result) < 5:
        return UNREADABLE
    return SERVED if ledger.has_manifest else LOGGED  # broker/views/maintenance.py restores it


def _read_keys(env: MemoryEnv) -> str:
    path = f"{FOLDER}/{VIEW_FOLDER}/{MANIFEST_NAME}"
    manifest = decode_manifest(env.read_file(path), path)
    assert manifest.deleted is not None
    try:
        check_deleted_keys(env, f"{FOLDER}/{VIEW_FOLDER}/run-1", manifest.deleted)
    except (InvalidViewError, OSError) as error:
        if DELETED_KEYS_NAME not in str(error):
            raise BrokenRuleError(f"the reason names no file: {error}") from error
        return "served; its compactions fail with the reason"
    return SERVED


def part_outcomes() -> dict[tuple[str, str, str], str]:
    """Every case of the second table tried."""
    outcomes = {}
    for part in parts():
        for how in DAMAGES:
            files = damaged(part.files, part.path, how)
            if files is not None:
                outcomes[part.row, how, "outcome"] = part.read(disk_of(files))
    return outcomes


# --- the operator's files, on the real disk -------------------------------------------------------

SETTINGS: Final = b"log_dirs:\n  - /data\nlisteners:\n  - 127.0.0.1:9092\n"
KEY_BEGIN: Final = b"-----BEGIN PRIVATE"
TOKEN: Final = b"a-token-of-more-than-16-letters\n"
PROPERTIES: Final = b"""security.protocol=SASL_PLAINTEXT
sasl.mechanism=PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
  username="ann" password="ann-secret";
"""
CLIENT_REFUSED: Final = "the client ends with the reason"
REFUSALS: Final = (
    ConfigFileError, TokenFileError, SecretError, TlsError, JwksError, ClientSecurityError,
)  # fmt: skip


def setting_outcomes(folder: Path) -> dict[tuple[str, str, str], str]:
    """The settings file and the token file, damaged in `folder`."""
    outcomes = {}
    readers: dict[str, tuple[bytes, Callable[[Path], object], str]] = {
        "settings file": (SETTINGS, lambda path: load_settings(str(path)), "defaults are used"),
        "token file": (TOKEN, lambda path: read_token(str(path)), "another token is required"),
        "password file": (TOKEN, _read_password, "another password is required"),
        **_tls_readers(folder),
        "JWKS file": (IdentityProvider().jwks(), _read_keys_of_tokens, "other keys are accepted"),
        "client's properties file": (
            PROPERTIES,
            lambda path: read_command_config(str(path)),
            "the client connects with other settings",
        ),
        "client's token file": (
            TOKEN,
            lambda path: ClientSasl("OAUTHBEARER", token_file=str(path)).read_token(),
            "the client sends another token",
        ),
    }
    for row, (content, read, otherwise) in readers.items():
        whole = folder / row.replace(" ", "-")
        whole.write_bytes(content)
        before = read(whole)
        for number, how in enumerate(DAMAGES):
            path = folder / f"{row.replace(' ', '-')}-{number}"
            files = damaged({str(path): content}, str(path), how)
            if files is None or (row.startswith(("TLS", "JWKS")) and how == "one bit flipped"):
                continue  # which byte a flip meets differs from key to key
            data = files.get(str(path))
            if data == FOLDER_HERE:
                path.mkdir()
            elif data is not None:
                path.write_bytes(data)
            try:
                is_same = read(path) == before
            except REFUSALS as error:
                if str(path) not in str(error):
                    raise BrokenRuleError(f"the refusal does not name {path}: {error}") from error
                outcomes[row, how, "outcome"] = REFUSED if "client" not in row else CLIENT_REFUSED
            else:
                outcomes[row, how, "outcome"] = NOTHING_LOST if is_same else otherwise
    return outcomes


def _read_password(path: Path) -> object:
    return SecretReference("file", str(path)).read()


def _read_keys_of_tokens(path: Path) -> object:
    settings = OauthSettings.model_validate({"audience": ["a"], "jwks_file": str(path)})
    return {name: key.algorithms for name, key in read_jwks(settings).items()}


def _tls_readers(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], object], str]]:
    """Each of the three files of a listener with TLS; the other two are whole."""
    authority = Authority(folder)
    leaf = authority.leaf("localhost").pem()
    certificate, key = leaf[: leaf.index(KEY_BEGIN)], leaf[leaf.index(KEY_BEGIN) :]
    whole = {
        "certificate_file": authority.write("certificate.pem", certificate),
        "key_file": authority.write("key.pem", key),
        "ca_file": authority.path,
    }

    def reader(name: str) -> tuple[bytes, Callable[[Path], object], str]:
        def read(path: Path) -> object:
            files: dict[str, Any] = {**whole, name: str(path)}
            tls = load_server_tls(TlsSettings(client_auth="required", **files))
            assert tls is not None
            return tls.chain, tls.context.get_ca_certs()

        return Path(whole[name]).read_bytes(), read, "other clients are accepted"

    rows = {"certificate_file": "certificate", "key_file": "key", "ca_file": "CA certificates"}
    return {f"TLS {row}": reader(name) for name, row in rows.items()}


# --- the tables ---------------------------------------------------------------------------------

Outcomes = Mapping[tuple[str, str, str], str]


def table(outcomes: Outcomes, columns: tuple[str, ...]) -> str:
    """Markdown: a row for each file, damages with the same outcomes together."""
    lines = [f"| file | damage | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row, how in dict.fromkeys((row, how) for row, how, _ in outcomes):
        cells = tuple(outcomes.get((row, how, column), "-") for column in columns)
        rows.setdefault((row, cells), []).append(how)
    for (row, cells), damages in rows.items():
        lines.append(f"| {row} | {', '.join(damages)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(folder: Path) -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        "start": table(start_outcomes(), (ORDERLY, KILLED)),
        "parts": table(part_outcomes() | setting_outcomes(folder), ("outcome",)),
    }


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- begin table: {name} -->", f"<!-- end table: {name} -->"


def table_in_page(name: str) -> str:
    """The table as it stands in the page."""
    begin, end = _marks(name)
    return PAGE.read_text().partition(begin)[2].partition(end)[0].strip()


def main() -> None:
    """Write the tables of the page anew."""
    with TemporaryDirectory() as folder:
        made = tables(Path(folder))
    text = PAGE.read_text()
    for name, content in made.items():
        begin, end = _marks(name)
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
