"""Whether the folder of a log was changed, by the stamps of the system (`Env.stamp`)."""

import struct
from typing import Final

from storage.env import Env
from storage.format import filenames

_STAMP: Final = struct.Struct("<Qq")


def folder_stamp(env: Env, directory: str) -> bytes:
    """Return bytes that differ after every change of a name or of the last segment.

    Those of earlier segments are not compared. Raises OSError.
    """
    files = filenames.classify(env.listdir(directory))
    paths = [directory]
    if files.logs:
        last = files.logs[-1]
        paths.append(f"{directory}/{filenames.file_name(last, filenames.LOG)}")
        for kind, bases in (
            (filenames.INDEX, files.indexes),
            (filenames.TIME_INDEX, files.time_indexes),
            (filenames.TXN_INDEX, files.txn_indexes),
        ):
            if last in bases:
                paths.append(f"{directory}/{filenames.file_name(last, kind)}")
    return b"".join(_STAMP.pack(*env.stamp(path)) for path in paths)
