"""The leader epochs of many logs, entered together: their files are synced several at a time."""

from collections.abc import Iterable
from os import path as paths

from storage.env import Env, write_file
from storage.log import Log


def enter_epochs(env: Env, logs: Iterable[Log]) -> None:
    """Note durably where the present epoch of each begins, as `Log.enter_epoch` does.

    After an orderly stop the files say so already, and nothing is written. OSError as it comes, and
    LogDirectoryError.
    """
    files: dict[str, bytes] = {}

    def collect(_env: Env, path: str, data: bytes) -> None:
        if not env.exists(path) or env.read_file(path) != data:
            files[path] = data

    for log in logs:
        log.enter_epoch(collect)
    for path, data in files.items():
        write_file(env, f"{path}.tmp", data)
    env.sync_all([f"{path}.tmp" for path in files], [])
    for path in files:
        env.rename(f"{path}.tmp", path)
    env.sync_all([], [paths.dirname(path) for path in files])
