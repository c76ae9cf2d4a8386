"""`make soak`: a broker under load, kills and cleaning; see tests/soak/soak.py."""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.soak.soak import run_soak, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="varve-soak-"))
    try:
        soak = run_soak(
            directory, arguments.minutes, arguments.seed, lambda text: print(text, flush=True)
        )
    except BaseException:
        traceback.print_exc()
        print(f"failed; everything is left in {directory}")
        return 1
    print(summary(soak))
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
