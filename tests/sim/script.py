"""What happens in one run, drawn from its seed before it begins.

A script is a list of operations; each carries all that it needs, so that any of them may be taken
away and the others stay what they are. A seed also draws what kind of run it is: which operations
occur at all, how slow the workers are, how fast tombstones go. Runs that do little of everything
find little.
"""

import errno
import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

from storage.format.compression import GZIP, LZ4, NONE, ZSTD
from tests.sim.interleaving import NEEDS_ROOM, Pace

KEYS: Final = [b"a", b"b", b"c", b"d"]
OPERATIONS: Final = 30
BIG_BYTES: Final = 4_000  # of a value that compresses well
UNPACKED_MAX: Final = 2_000  # varve.decompressed.batch.bytes where such values occur

QUICK = Pace(4, (0.0, 0.001, 0.02))
SLOW = Pace(6, (0.05, 0.5, 2.0))
VERY_SLOW = Pace(4, (1.0, 4.0, 12.0))
PAUSES: Final = [0.0, 0.0, 0.01, 0.3, 1.0, 3.0]

HOUR_MS: Final = 3_600_000
CLOCK_STEPS: Final = [HOUR_MS, 10 * HOUR_MS, 365 * 24 * HOUR_MS, 3650 * 24 * HOUR_MS]

OFFSETS_GO_BACK: Final = "offsets go back"  # in a closed segment: its `.log` is damaged

OPENS: Final = frozenset({"open", "open_folder", "listdir", "read_file"})
FAULTS: Final = [
    (errno.EMFILE, OPENS),
    (errno.ENOSPC, NEEDS_ROOM),
    (errno.EIO, frozenset({"pread", "read_file"})),
    (errno.EIO, frozenset({"sync", "sync_dir", "pwrite", "rename"})),
]
# Where a process ends: on any operation, or between the steps of a swap, a roll or a publication.
POINTS: Final = [
    ("", "", 60),
    ("unlink", ".log", 3),
    ("rename", ".log", 4),
    ("rename", ".journal", 1),
    ("sync_dir", "", 10),
    ("rename", ".tmp", 4),
    ("link", "", 4),
    ("rename", "view", 2),
]


@dataclass(frozen=True)
class Operation:
    """One step. `pause`: virtual seconds after it."""

    kind: str
    topic: str = "t"
    values: dict[str, Any] = field(default_factory=dict)
    pause: float = 0.0

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value!r:.60}" for name, value in self.values.items())
        return f"{self.kind} {self.topic} {values}"


@dataclass(frozen=True)
class Script:
    """All of one run."""

    seed: int
    operations: tuple[Operation, ...]
    worker: Pace  # of the pool
    other_worker: Pace  # of views and adoptions
    threads: Pace
    thread_share: float  # of calls in threads that interleave with the loop
    shares: bool = False  # whether several workers share each clean
    has_versions: bool = False  # whether views go by timestamp or version
    loses_state: bool = False  # whether starts do not find checkpoints and the cleaner's state
    leaves_open: bool = False  # whether transactions stay open over starts

    @property
    def verifies(self) -> bool:
        """Whether each clean is verified. One that several workers share never is."""
        return not self.shares and self.seed % 4 == 3

    @property
    def moves(self) -> bool:
        """Whether replicas move between two data directories."""
        return any(operation.kind == MOVE for operation in self.operations)


def _first_config(rng: random.Random) -> dict[str, str]:
    config = {
        "cleanup.policy": rng.choice(["compact", "compact", "compact,delete", "delete"]),
        "delete.retention.ms": rng.choice(["0", "2000", "8000"]),
        "min.cleanable.dirty.ratio": rng.choice(["0", "0", "0.4"]),
        "segment.ms": rng.choice(["1000", "5000", "100000000"]),
        "segment.bytes": rng.choice(["400", "900", "1048576"]),
        "index.interval.bytes": rng.choice(["0", "200"]),
        "file.delete.delay.ms": rng.choice(["0", "3000"]),
        "retention.ms": rng.choice(["-1", "8000", "20000"]),
        "varve.decompressed.batch.bytes": str(UNPACKED_MAX),
        "varve.view.min.bytes": rng.choice(["-1", "0", "300"]),
    }
    if rng.random() < 0.6:
        config["varve.view"] = "compacted"
    return config


def _changes(rng: random.Random) -> list[dict[str, str]]:
    return [
        {"cleanup.policy": rng.choice(["compact", "compact,delete", "delete"])},
        {"cleanup.policy": "compact"},
        {"delete.retention.ms": rng.choice(["0", "2000", "8000"])},
        {"segment.bytes": rng.choice(["400", "900", "1048576"])},
        {"retention.ms": rng.choice(["-1", "8000"])},
        {"varve.view": rng.choice(["none", "compacted"])},
        {"min.compaction.lag.ms": rng.choice(["0", "3000"])},
        {"varve.flush.on.ack": rng.choice(["true", "false"])},
    ]


USUAL: Final = {
    "produce": 10.0,
    "burst": 4.0,
    "delete key": 5.0,
    "roll": 3.0,
    "clean": 4.0,
    "wait": 2.0,
    "check": 1.0,
}
SPECIAL: Final = {  # of these a run has some
    "transaction": 3.0,
    "view": 4.0,
    "alter": 2.5,
    "delete records": 1.0,
    "lease": 2.5,
    "replace topic": 1.5,
    "end": 1.5,
    "end at": 4.0,
    "end in swap": 3.0,
    "fault": 2.5,
    "big": 2.0,
}


MOVE: Final = "move"  # a run with moves has two data directories
ERASE: Final = "erase"
CLOCK: Final = "clock"
IDEMPOTENT: Final = "idempotent"
FULL_DISK: Final = "full disk"
REPAIRS: Final = {"rot": 3.0, "skip": 2.0, "truncate": 2.0}  # bytes change; operators repair logs
# Not drawn by themselves.
REQUESTED: Final = {MOVE: 5.0, ERASE: 3.0, **REPAIRS, FULL_DISK: 2.0, CLOCK: 6.0, IDEMPOTENT: 24.0}
SENDS: Final = {  # of an idempotent producer
    "next": 6.0,
    "twice": 1.5,
    "again": 3.0,
    "gap": 0.7,
    "new epoch": 0.7,
    "old epoch": 0.7,
}
# No operations: what is drawn stays the same.
SHARED_CLEANS: Final = "shared cleans"
VERSIONS: Final = "versions"
LOST_STATE: Final = "lost state"  # of data directories, at starts after a kill
OPEN: Final = "open transactions"  # over starts, and several at once


def make_script(
    seed: int, operations: int = OPERATIONS, *, has: tuple[str, ...] = (), **config: str
) -> Script:
    """The script of a seed. `has`: kinds of operations, `config`: settings that it has for sure."""
    rng = random.Random(f"script {seed}")
    chosen = [name for name in SPECIAL if rng.random() < 0.45 or name in has]
    weights = USUAL | {name: SPECIAL[name] for name in chosen}
    weights |= {name: weight for name, weight in REQUESTED.items() if name in has}
    topics = ["t"] if rng.random() < 0.7 else ["t", "u"]
    fixed = {name.replace("_", "."): value for name, value in config.items()}
    steps = [Operation("create", name, {"config": _first_config(rng) | fixed}) for name in topics]
    while len(steps) < operations:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        pause = rng.choice(PAUSES)
        steps.append(Operation(kind, rng.choice(topics), _values(kind, rng), pause))
    _draw_strategies(random.Random(f"strategies {seed}"), steps, fixed)
    if OPEN in has:
        _leave_open(random.Random(f"open {seed}"), steps)
    if VERSIONS in has:
        steps = [_with_versions(step, seed) for step in steps]
    return Script(
        seed,
        tuple(steps),
        rng.choice([QUICK, QUICK, SLOW, VERY_SLOW]),
        rng.choice([QUICK, SLOW, VERY_SLOW]),
        rng.choice([QUICK, QUICK, SLOW]),
        rng.choice([0.0, 0.2, 0.6]),
        SHARED_CLEANS in has,
        VERSIONS in has,
        LOST_STATE in has,
        OPEN in has,
    )


def _with_versions(step: Operation, seed: int) -> Operation:
    """A step of a run whose views keep the largest timestamp or version, and are never off.

    Deleted keys are stored for longer than records are late, as the user has to see to.
    """
    values = dict(step.values)
    if "config" in values:
        values["config"] = values["config"] | {
            "varve.view": "compacted",
            "varve.view.strategy": ("timestamp", "header")[seed % 2],
            "varve.view.version.header": "version",
            "delete.retention.ms": "100000000",
        }
    if "changes" in values:
        values["changes"] = {
            name: value
            for name, value in values["changes"].items()
            if name not in ("varve.view", "delete.retention.ms")
        }
    return replace(step, values=values)


def _leave_open(rng: random.Random, steps: list[Operation]) -> None:
    """Let transactions stay open while others begin."""
    for step in steps:
        if step.kind == "transaction":
            step.values.update(keeps=rng.random() < 0.7, joins=rng.random() < 0.3)


def _draw_strategies(rng: random.Random, steps: list[Operation], fixed: dict[str, str]) -> None:
    """Add strategies of the cleaner to the settings of topics and to their changes."""
    for step in steps:
        strategy = {
            "varve.cleaner.strategy": rng.choice(["dirty-ratio", "generational", "generational"]),
            "varve.compaction.slack": rng.choice(["0", "0.2", "0.5"]),
        }
        if strategy["varve.cleaner.strategy"] == "generational":
            # Of a ratio of 0 follows a slack of 0.
            strategy["min.cleanable.dirty.ratio"] = rng.choice(["0", "0.4", "0.7"])
        if "config" in step.values:
            step.values["config"].update(strategy | fixed)
        elif "changes" in step.values and rng.random() < 0.3:
            step.values["changes"].update(strategy)


# One branch for each operation.
def _values(kind: str, rng: random.Random) -> dict[str, Any]:  # noqa: C901, PLR0912
    match kind:
        case "produce":
            return _records(rng, rng.randint(1, 4), deletes=0.35)
        case "burst":
            return _records(rng, rng.randint(6, 16), deletes=0.25)
        case "delete key":
            return {"records": [(rng.choice(KEYS), None)], "codec": NONE}
        case "big":
            return {"records": [(rng.choice(KEYS), b"0" * BIG_BYTES)], "codec": GZIP}
        case "transaction":
            values = _records(rng, rng.randint(1, 3), deletes=0.3)
            return values | {"commits": rng.random() < 0.5, "batches": rng.randint(1, 2)}
        case "wait":
            return {"seconds": rng.choice([3.0, 6.0, 12.0])}
        case "clean":
            return {"rolls": rng.random() < 0.7}
        case "view":
            return {"waits": rng.random() < 0.3, "from_scratch": rng.random() < 0.1}
        case "alter":
            return {"changes": rng.choice(_changes(rng))}
        case "delete records":
            return {"share": rng.random()}
        case "lease":
            return {
                "seconds": rng.choice([0.0, 3.0, 10.0]),
                "rolls": rng.random() < 0.7,
                "ttl": rng.choice([5, 60]),
            }
        case "rot":
            return {"where": rng.random(), "bit": rng.randrange(1 << 16)}
        case "truncate":
            return {"share": rng.choice([0.3, 0.6, 0.8, 0.95])}
        case "erase":
            return {"key": rng.choice(KEYS), "cancels": rng.random() < 0.1}
        case "move":
            return {"waits": rng.random() < 0.3}
        case "replace topic":
            return {"waits": rng.random() < 0.5, "config": _first_config(rng)}
        case "end":
            return {"how": rng.choice(["stop", "kill", "power"]), "loses": _losses(rng)}
        case "end at":
            operation, part, countdown = rng.choice(POINTS)
            return {
                "point": (operation, part, rng.randint(1, countdown)),
                "how": rng.choice(["kill", "power"]),
                "loses": _losses(rng),
            }
        case "end in swap":
            step = rng.choice([("unlink", ".log"), ("unlink", "index"), ("sync_dir", "/t-0")])
            point = (*step, rng.randint(1, 3))
            return {"point": point, "how": "kill", "loses": (".journal",)}
        case "idempotent":
            values = _records(rng, rng.randint(1, 3), deletes=0.3)
            how = rng.choices(list(SENDS), list(SENDS.values()))[0]
            back = rng.choice([0, 0, 1, 2, 4, 5, 6])
            return values | {"producer": rng.randint(0, 1), "how": how, "back": back}
        case "clock":
            by_ms = rng.choice([1, -1]) * rng.choice(CLOCK_STEPS)
            return {"by_ms": by_ms, "while_down": rng.random() < 0.3}
        case "full disk":
            return {"seconds": rng.choice([2.0, 10.0, 40.0]), "share": rng.choice([0.5, 1.0])}
        case "fault":
            number, operations = rng.choice(FAULTS)
            return {"errno": number, "operations": operations, "countdown": rng.randint(1, 12)}
    return {}


def _losses(rng: random.Random) -> tuple[str, ...]:
    """Files beside the log's that are gone, or rotten, at the next start."""
    if rng.random() < 0.5:
        return ()
    if rng.random() < 0.15:
        return (OFFSETS_GO_BACK,)
    return tuple(
        kind for kind in (".journal", ".index", ".timeindex", ".snapshot") if rng.random() < 0.5
    )


def _records(rng: random.Random, count: int, *, deletes: float) -> dict[str, Any]:
    records = [
        (rng.choice(KEYS), None if rng.random() < deletes else b"v%d" % rng.randrange(1000))
        for _ in range(count)
    ]
    return {"records": records, "codec": rng.choice([NONE, NONE, NONE, GZIP, LZ4, ZSTD])}
