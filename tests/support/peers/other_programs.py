"""Programs in other languages: builds each in `.kafka`, once for each version of its files.

`python -m tests.support.peers.other_programs` builds all of them, and names those that it cannot.
"""

import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.support.peers.maven import FOLDER, make_once

SOURCES = Path(__file__).parent
FETCH_SECONDS = 300
BUILDS = {
    "kafkajs": (["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], "node"),
    "franz_go": (["go", "build", "-o", "round", "."], "go"),
    "compose_go": (["go", "build", "-o", "compose", "."], "go"),
    # A minute on two CPUs.
    "rskafka": (
        ["cargo", "install", "--path", ".", "--root", ".", "--debug", "--locked", "--quiet"],
        "rustc",
    ),
}
PROGRAMS = {"franz_go": "round", "compose_go": "compose", "rskafka": "bin/round"}


def folder(name: str) -> Path:
    """The folder of the built program: its name says what it was built from."""
    content = b"".join(
        path.read_bytes() for path in sorted((SOURCES / name).iterdir()) if path.is_file()
    )
    return FOLDER / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"


def command(name: str) -> list[str]:
    """The command that runs the program; after `unavailable` returned None."""
    if name == "kafkajs":
        return ["node", str(folder(name) / "round.js")]
    return [str(folder(name) / PROGRAMS[name])]


@cache
def unavailable(name: str) -> str | None:
    """Why the program cannot be run here, or None after it has been built."""
    build, interpreter = BUILDS[name]
    for tool in (build[0], interpreter):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"

    def build_in(draft: Path) -> str | None:
        shutil.copytree(SOURCES / name, draft)
        try:
            done = subprocess.run(
                build, cwd=draft, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(build[:2])} did not end in {FETCH_SECONDS} s"
        if done.returncode != 0:
            return f"{' '.join(build[:2])} failed: {done.stderr[-300:]}"
        shutil.rmtree(draft / "target", ignore_errors=True)  # 300 MB that cargo leaves
        return None

    return make_once(folder(name), build_in)


if __name__ == "__main__":
    for program in BUILDS:
        if (problem := unavailable(program)) is not None:
            print(f"{program} cannot be run here: {problem}")
