"""The tutorial does what it says: its shell blocks run in order, pasted into one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.fs import DeltaStorageHandler

from tests.pipeline.delta_reading import read_delta
from tests.support.draws import only_in_ci
from tests.support.varve import ROOT, VarveBroker

PAGE = ROOT / "docs" / "tutorials" / "topic-to-delta-table.md"


def test_its_reader_has_no_python_object_that_outlives_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrow's threads release it after the interpreter has ended, and the process aborts."""
    page = PAGE.read_text()
    program = re.search(r'read\.py" <<\'PY\'\n(.*?)^PY$', page, re.DOTALL | re.MULTILINE)
    assert program is not None
    times = pa.array([1, 2], pa.timestamp("ms", "UTC"))
    values = [{"state": "new"}, {"state": "paid"}]
    write_deltalake(str(tmp_path), pa.table({"timestamp": times, "value": values}))
    monkeypatch.setattr(DeltaStorageHandler, "from_table", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(sys, "argv", ["read.py", str(tmp_path)])
    exec(compile(program[1], "read.py", "exec"), {})
    assert "version 0: 2 orders" in capsys.readouterr().out


@pytest.mark.spark
@pytest.mark.timeout(620)  # four jobs, each with a Spark of its own
@only_in_ci("each of its jobs has tests of its own")
def test_the_tutorial_can_be_pasted(broker: VarveBroker, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    environment = {
        **os.environ,
        "OUT": str(tmp_path),
        "VARVE_BOOTSTRAP": broker.bootstrap,
        "VARVE_HTTP": f"http://127.0.0.1:{broker.http_port}",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail"], input="\n".join(blocks), env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the records are superseded" in done.stdout
    assert "<svg" in (tmp_path / "orders.html").read_text()
    assert sum(pq.read_table(tmp_path / "segments.parquet").column("records").to_pylist()) == 60_000
    assert DeltaTable(str(tmp_path / "orders")).version() == 1  # made once, then one batch
    assert 1500 < read_delta(tmp_path / "orders").num_rows <= 2000
    then = read_delta(tmp_path / "orders-then")
    assert max(then.column("offset").to_pylist()) < 10_000
    assert done.stdout.count(" orders, the last at ") == 3
