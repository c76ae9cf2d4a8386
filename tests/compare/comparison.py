"""Cases generated, carried out on both sides, and compared."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.compare.differences import Difference, compare, look
from tests.compare.generator import make_case
from tests.compare.kafka_side import run_kafka
from tests.compare.our_side import Rule, run_ours
from tests.compare.script import Case

SLACKS = (0.0, 0.2, 1.0)  # of the selective cleans


@dataclass
class Result:
    """How much was compared, and what differed."""

    cases: int = 0
    dumps: int = 0
    records: int = 0
    markers: int = 0
    empty: int = 0
    own_empty: int = 0
    traits: list[frozenset[str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def compare_cases(
    folder: Path, seeds: Iterable[int], without: frozenset[str] = frozenset()
) -> Result:
    """Run the cases of these seeds in folders of `folder`, one each."""
    result = Result()
    done: list[tuple[Case, Path]] = []
    for seed in seeds:
        case = make_case(seed, without=without)
        home = folder / f"seed-{seed}"
        home.mkdir()
        (home / "script").write_text(case.text)
        result.cases += 1
        result.traits.append(case.traits)
        try:
            run_ours(case, home / "varve", Rule.LAST_OF_ROUND)
            run_ours(case, home / "varve-own", Rule.LAST_OF_LOG)
            slack = SLACKS[seed % len(SLACKS)]
            run_ours(case, home / "varve-selective", Rule.LAST_OF_LOG, slack=slack)
        except Exception:
            text = traceback.format_exc()
            result.differences.append(Difference(seed, "-", "ours failed", "", text))
            (home / "script").unlink()
            continue
        done.append((case, home))
    run_kafka(folder)
    for case, home in done:
        difference = compare(case, home)
        if difference is not None:
            result.differences.append(difference)
        _count(result, home)
    return result


def _count(result: Result, home: Path) -> None:
    for path in (home / "kafka").glob("*.batches"):
        result.dumps += 1
        for batch in look(home / "kafka", path.stem).batches:
            result.empty += not batch.records
            result.markers += batch.is_control
            result.records += 0 if batch.is_control else len(batch.records)
        own = look(home / "varve-own", path.stem).batches
        result.own_empty += sum(not batch.records for batch in own)
