"""Compiled loops over records. Importing this package is cheap; its modules import Numba.

This package sets Numba's cache directory and must be imported before Numba. Kernels are compiled
once per machine; later processes load them from the cache.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Final

CACHE_VARIABLE: Final = "VARVE_KERNEL_CACHE"
NUMBA_VARIABLE: Final = "NUMBA_CACHE_DIR"


def choose_cache_directory(environ: Mapping[str, str]) -> str:
    """Return the cache directory: VARVE_KERNEL_CACHE, in the installation, or the user's cache.

    Raises OSError if the environment names a directory that cannot be used: compiling everything
    again elsewhere would hide that mistake. The last resort is a private directory for this process
    only. A fixed name in a shared place would be unsafe, because cached code is executed and
    another user could write it.
    """
    for variable in (CACHE_VARIABLE, NUMBA_VARIABLE):
        if named := environ.get(variable):
            os.makedirs(named, exist_ok=True)
            return named
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    candidates = [
        os.path.join(sys.prefix, "var", "varve", "kernels"),
        os.path.join(home, "varve", "kernels"),
    ]
    for candidate in candidates:
        if os.path.isabs(candidate) and _is_usable(candidate):
            return candidate
    return tempfile.mkdtemp(prefix="varve-kernels-")


def _is_usable(directory: str) -> bool:
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _set_cache_directory() -> None:
    directory = choose_cache_directory(os.environ)
    os.environ[NUMBA_VARIABLE] = directory  # for Numba, and for child processes
    numba_config = sys.modules.get("numba.core.config")
    if numba_config is not None:
        numba_config.CACHE_DIR = directory  # type: ignore[attr-defined]


def warm_up() -> None:
    """Import Numba and load the kernels of the produce path, or compile them (takes seconds)."""
    from storage.kernels.records import warm_up_records

    warm_up_records()


_set_cache_directory()
