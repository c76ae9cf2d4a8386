"""Compiled loops over records. Importing this package is cheap; its modules import Numba.

This package sets Numba's cache directory and must be imported before Numba. Kernels are compiled
once per machine; later processes load them from the cache.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Final

COMPILING: Final = (
    "compiling native code, the first time only: half a minute, or longer on a busy machine"
)
CACHE_VARIABLE: Final = "VARVE_KERNEL_CACHE"
NUMBA_VARIABLE: Final = "NUMBA_CACHE_DIR"


def choose_cache_directory(environ: Mapping[str, str]) -> str:
    """Return the cache directory: VARVE_KERNEL_CACHE, in the installation, or the user's cache.

    Raises OSError if the environment names a directory that cannot be used: compiling everything
    again elsewhere would hide that mistake. Numba needs to write to its cache: a directory that can
    only be read, as in a container with a read-only root, is copied to a private one. The last
    resort is an empty private directory.
    """
    for variable in (CACHE_VARIABLE, NUMBA_VARIABLE):
        if named := environ.get(variable):
            os.makedirs(named, exist_ok=True)
            return named if _is_usable(named) else _private_directory(named)
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    candidates = [
        os.path.join(sys.prefix, "var", "varve", "kernels"),
        os.path.join(home, "varve", "kernels"),
    ]
    for candidate in candidates:
        if os.path.isabs(candidate) and _is_usable(candidate):
            return candidate
    return _private_directory()


def _private_directory(source: str | None = None) -> str:
    """Return a new directory, with a copy of `source`; it is removed when this process ends.

    Its mode is 0700. A fixed name in a shared place would be unsafe, because cached code is
    executed and another user could write it.
    """
    directory, owner = tempfile.mkdtemp(prefix="varve-kernels-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a fork
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    if source is not None:
        shutil.copytree(source, directory, dirs_exist_ok=True)
        os.chmod(directory, 0o700)  # copytree sets the mode of the source
    return directory


def _is_usable(directory: str) -> bool:
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _set_cache_directory() -> None:
    directory = choose_cache_directory(os.environ)
    os.environ[NUMBA_VARIABLE] = directory  # for Numba, and for child processes
    if CACHE_VARIABLE in os.environ:
        os.environ[CACHE_VARIABLE] = directory  # for child processes: one copy serves them all
    numba_config = sys.modules.get("numba.core.config")
    if numba_config is not None:
        numba_config.CACHE_DIR = directory  # type: ignore[attr-defined]


def is_first_compilation() -> bool:
    """Return whether the cache is empty: no process has compiled a kernel yet."""
    with os.scandir(os.environ[NUMBA_VARIABLE]) as entries:
        return next(entries, None) is None


def warm_up() -> None:
    """Import Numba and load the kernels of the produce path, or compile them (takes seconds)."""
    from storage.kernels.records import warm_up_records

    warm_up_records()


_set_cache_directory()
