"""format("varve") is found by Spark wherever a script runs, however this project is installed.

Spark looks for packages named pyspark_* with pkgutil, in a worker: a process of PYSPARK_PYTHON, or
else of the first python3 on the path. The environments here are fresh: they have the dependencies
of the one that runs the tests, and this project by a wheel, as an editable install, or not at all.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from pipeline.engines.java import NoJavaError, find_java
from tests.support.draws import only_in_ci

ROOT = Path(__file__).parents[3]
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
LOOKUP = """
import io
from pyspark.sql.worker.lookup_data_sources import _main
found = io.BytesIO()
_main(io.BytesIO(), found)
print(int.from_bytes(found.getvalue()[:4], "big"), b"varve" in found.getvalue())
"""
JOB = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
reader = spark.read.format("varve").option("kafka.bootstrap.servers", "127.0.0.1:1")
print(reader.option("subscribe", "t").load().columns)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: building leaves files beside the sources."""
    folder: Path = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def environment_at(folder: Path) -> tuple[Path, Path]:
    """Make an environment with the dependencies alone -> its python, its site-packages."""
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    packages = Path(paths["purelib"])
    # As a plain entry of the path: what else is installed there by a .pth file is not.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Path(paths["scripts"]) / "python", packages


def install(how: str, checkout: Path, folder: Path) -> Path:
    """Make an environment that has the project, too -> its python."""
    python, packages = environment_at(folder)
    build = f"from setuptools.build_meta import build_{how}; print(build_{how}({str(folder)!r}))"
    done = subprocess.run(
        [python, "-c", build], cwd=checkout, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("varve-*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    return python


def run_elsewhere(python: Path, program: str, folder: Path, **variables: str) -> str:
    """Run a program in a folder that has nothing to do with the project -> what it prints."""
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PY")}
    done = subprocess.run(
        [python, "-c", program],
        cwd=folder,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["editable", "wheel"])
def test_spark_finds_the_source_in_an_environment_with_the_project(
    how: str, checkout: Path, tmp_path: Path
) -> None:
    python = install(how, checkout, tmp_path / "env")
    assert run_elsewhere(python, LOOKUP, tmp_path / "elsewhere") == "1 True"


def test_spark_does_not_find_the_source_in_an_environment_without_the_project(
    tmp_path: Path,
) -> None:
    """Otherwise the tests above would prove nothing."""
    python, _ = environment_at(tmp_path / "env")
    assert run_elsewhere(python, LOOKUP, tmp_path / "elsewhere") == "0 False"


@pytest.mark.spark
@only_in_ci("the lookup itself is tested in each run")
def test_a_driver_without_the_project_reads_with_that_of_pyspark_python(
    checkout: Path, tmp_path: Path
) -> None:
    try:
        java = find_java()
    except NoJavaError as error:
        pytest.skip(str(error))
    driver, _ = environment_at(tmp_path / "driver")
    workers = install("editable", checkout, tmp_path / "workers")
    columns = run_elsewhere(
        driver,
        JOB,
        tmp_path / "elsewhere",
        JAVA_HOME=str(java.home),
        PYSPARK_PYTHON=str(workers),
        SPARK_LOCAL_IP="127.0.0.1",
    )
    assert columns.startswith("['key', 'value', 'topic'")
