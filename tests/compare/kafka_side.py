"""The same scripts carried out by Apache Kafka's own log and cleaner, all in one JVM."""

import subprocess
from pathlib import Path
from typing import Final

from tests.support.peers.java_programs import java_command
from tests.support.peers.kafka import LIB, unavailable

SECONDS_MAX: Final = 600


def run_kafka(path: Path) -> None:
    """Run `script` of every folder in `path`; what comes out stands in its kafka/.

    Each dump leaves NN.batches and NN.state there, and NN.batches beside every NN.log that was
    found in varve/ (and varve-own/): both sides are printed by Kafka's classes. A script that
    failed leaves kafka/failed.
    """
    assert unavailable() is None
    command = java_command(LIB, "KafkaCleaner", str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
