"""Reading a Delta table in a test's own process."""

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem


def read_delta(path: Path) -> pa.Table:
    """All rows of a table, read by Arrow itself.

    Through the file system of deltalake, Arrow's threads hold Python objects beyond the end of a
    read. If the process ends meanwhile, Python ends such a thread in the middle of a destructor,
    and the process aborts ("terminate called without an active exception").
    """
    files = SubTreeFileSystem(str(path), LocalFileSystem())
    return pa.table(DeltaTable(str(path)).to_pyarrow_dataset(filesystem=files).to_table())
