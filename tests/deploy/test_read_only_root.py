"""The daemon where it can write to its data directory and a temporary one only."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.kernels import CACHE_VARIABLE, NUMBA_VARIABLE
from tests.support.ports import free_port
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
# In a mount namespace of its own: $1 stays writable, $2 is a small tmpfs, all else is read-only.
READ_ONLY = """set -e
mount --bind "$1" "$1"
mount -t tmpfs -o size=64m tmpfs "$2"
mount -o remount,bind,ro /
shift 2
exec "$@"
"""


def read_only(data: Path, temporary: Path, *command: str) -> list[str]:
    for folder in (data, temporary):
        folder.mkdir(exist_ok=True)
    return ["unshare", "-rm", "sh", "-c", READ_ONLY, "sh", str(data), str(temporary), *command]


def environment(temporary: Path) -> dict[str, str]:
    """As in the image: the compiled kernels are in a folder of the read-only root."""
    return {
        **os.environ,
        CACHE_VARIABLE: os.environ[NUMBA_VARIABLE],
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The data directory, and the temporary one."""
    data, temporary = tmp_path / "data", tmp_path / "temporary"
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    tried = subprocess.run(
        read_only(data, temporary, "sh", "-c", f"! touch {tmp_path}/x && touch {data}/x"),
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"no mount namespace with a read-only root: {tried.stderr.strip()}")
    return data, temporary


@pytest.fixture
def broker(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[VarveBroker]:
    data, temporary = folders
    port, http_port = free_port(), free_port()
    options = ["--data", str(data), "--listen", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "broker.cli", "serve", *options]
    with (tmp_path / "varve.log").open("wb") as log:
        process = subprocess.Popen(
            read_only(data, temporary, *command, "--http", f"127.0.0.1:{http_port}"),
            stdout=log,
            stderr=log,
            env=environment(temporary),
        )
    broker = VarveBroker(tmp_path, port, http_port, process)
    try:
        yield broker
    finally:
        assert broker.stop() == 0, broker.log_text


def is_ready(broker: VarveBroker) -> bool:
    try:
        return broker.get("/readyz") == "ok\n"
    except OSError:
        return False


def test_the_broker_and_its_workers_run_on_a_read_only_root(broker: VarveBroker) -> None:
    def is_up() -> bool:
        assert broker.process.poll() is None, broker.log_text
        return is_ready(broker)

    wait_until(is_up, "the broker is ready", 60)
    wait_until(lambda: '"ready": true' in broker.get("/api/v1/cleaner"), "a worker is ready", 60)


def test_compiled_kernels_of_a_read_only_root_are_used(folders: tuple[Path, Path]) -> None:
    data, temporary = folders
    done = subprocess.run(
        read_only(data, temporary, sys.executable, "-m", "broker.cli", "warmup"),
        capture_output=True,
        text=True,
        env=environment(temporary),
        timeout=110,
        check=False,
    )
    seconds, cache = re.findall(r"in ([\d.]+) s, cached in (\S+)", done.stdout)[0]
    assert Path(cache).parent == temporary
    assert float(seconds) < 20, "they were compiled again"
