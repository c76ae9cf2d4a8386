"""The tutorial does what it says: its shell blocks run in order, pasted into one shell."""

import os
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.support.draws import only_in_ci
from tests.support.varve import ROOT, VarveBroker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
PAGE = ROOT / "docs" / "tutorials" / "topic-to-delta-table.md"


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
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the records are superseded" in done.stdout
    assert "<svg" in (tmp_path / "orders.html").read_text()
    assert sum(pq.read_table(tmp_path / "segments.parquet").column("records").to_pylist()) == 60_000
    table = DeltaTable(str(tmp_path / "orders"))
    assert table.version() == 1  # made once, then one batch
    assert 1500 < table.to_pyarrow_dataset().count_rows() <= 2000
    then = DeltaTable(str(tmp_path / "orders-then")).to_pyarrow_dataset().to_table()
    assert max(then.column("offset").to_pylist()) < 10_000
    assert done.stdout.count(" orders, the last at ") == 3
