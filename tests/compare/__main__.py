"""`make compare`: our cleaner beside Apache Kafka's on random cases, record by record."""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.compare.comparison import compare_cases
from tests.support.peers.kafka import unavailable

TOLD_MAX = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compare", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--without", action="append", default=[], metavar="TRAIT")
    arguments = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing to compare with: {reason}", file=sys.stderr)
        return 2
    print(f"seeds {arguments.seed} to {arguments.seed + arguments.cases - 1}")
    folder = Path(tempfile.mkdtemp(prefix="varve-compare-"))
    began = time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    result = compare_cases(folder, seeds, frozenset(arguments.without))
    print(f"{result.cases} cases, {result.dumps} looks, {time.monotonic() - began:.0f} s")
    print(f"{result.records} records and {result.markers} markers left by Kafka, ", end="")
    print(f"{result.empty} empty batches; by our own rule {result.own_empty}")
    traits = Counter(trait for case in result.traits for trait in case)
    print(", ".join(f"{trait} {count}" for trait, count in sorted(traits.items())))
    for difference in result.differences[:TOLD_MAX]:
        print(difference)
    if result.differences:
        print(f"{len(result.differences)} cases differ; see {folder}")
        return 1
    shutil.rmtree(folder)
    print("no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
