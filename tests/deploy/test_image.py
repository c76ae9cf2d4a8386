"""The image is built by buildah, as root and without a registry: its base is made from packages.

The base stands in for `python:3.11-slim`: Debian's Python, with pip's settings and the certificates
of this machine. Steps run in a changed root, on this machine's network.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.draws import only_in_ci
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
OF_THIS_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
COMPILED_SECONDS = 30  # compiling takes more than a minute of processor time

# $0 starts the broker, $1 asks it. Ends with the exit code of the broker, or once it is gone.
SERVE_UNTIL_READY = """set -e
$0 & broker=$!
until python -c "$1" 2>/dev/null; do kill -0 $broker; done
kill -TERM $broker
wait $broker
"""

Buildah = Callable[..., str]

pytestmark = [
    only_in_ci("test_shipping.py reads the steps; a build takes some minutes"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    """Runs buildah with a store of its own, and returns what it prints."""
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"not installed: {', '.join(missing)}" if missing else "needs root")
    folder = tmp_path_factory.mktemp("buildah")
    program = ["buildah", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    if subprocess.run([*program, "info"], capture_output=True, env=environment).returncode != 0:
        environment["STORAGE_DRIVER"] = "vfs"  # in a container; it copies each layer

    def run(*words: str) -> str:
        done = subprocess.run(
            [*program, *words], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
        return done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def container(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A container of the image."""
    base = str(tmp_path_factory.mktemp("base") / "base.tar")
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    assert release is not None
    subprocess.run(
        ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", release[1], base],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    empty = buildah("from", "scratch")
    buildah("add", empty, base, "/")
    for file in filter(os.path.exists, OF_THIS_MACHINE):
        buildah("copy", empty, file, file)
    buildah("commit", "--rm", empty, BASE)
    buildah("build", "--pull-never", "--layers=false", "--tag", "varve", str(ROOT))
    container = buildah("from", "--pull-never", "localhost/varve")
    yield container
    buildah("rm", container)


def test_the_image_has_an_unprivileged_user_and_compiled_kernels(
    buildah: Buildah, container: str
) -> None:
    assert buildah("run", container, "--", "id", "-u") == "9092"
    ready = re.search(r"ready in ([\d.]+) s", buildah("run", container, "--", "varve", "warmup"))
    assert ready is not None
    assert float(ready[1]) < COMPILED_SECONDS, "the kernels of the image were not used"


def test_the_image_serves_and_stops_with_its_own_settings(buildah: Buildah, container: str) -> None:
    image = json.loads(buildah("inspect", container))
    entrypoint = " ".join(image["OCIv1"]["config"]["Entrypoint"])
    kafka, http = free_port(), free_port()
    ask = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{http}/readyz', timeout=2)"
    serve = f"{entrypoint} --listen 127.0.0.1:{kafka} --http 127.0.0.1:{http}"
    buildah("run", container, "--", "sh", "-c", SERVE_UNTIL_READY, serve, ask)  # its exit code is 0
