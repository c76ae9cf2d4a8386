"""Compiled loops over records. Importing this package is cheap; its modules import Numba.

Numba's cache directory is chosen here, before Numba is imported anywhere: kernels are compiled
once per machine and loaded from there by every later process.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Final

CACHE_VARIABLE: Final = "VARVE_KERNEL_CACHE"
NUMBA_VARIABLE: Final = "NUMBA_CACHE_DIR"


def choose_cache_directory(environ: Mapping[str, str]) -> str:
    """Where compiled kernels are kept: VARVE_KERNEL_CACHE, the installation, the user's cache.

    A directory that is named but cannot be used is an error (OSError) and not a reason to look
    further: whoever named it has filled it. As the last resort a private directory, for this
    process alone: one under a known name in a shared place could be filled by somebody else, and
    what lies in it is executed.
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
    os.environ[NUMBA_VARIABLE] = directory  # for Numba, and for processes started from here
    numba_config = sys.modules.get("numba.core.config")
    if numba_config is not None:
        numba_config.CACHE_DIR = directory  # type: ignore[attr-defined]


def warm_up() -> None:
    """Import Numba and load or compile the kernels of the produce path (seconds when cold)."""
    from storage.kernels.records import warm_up_records

    warm_up_records()


_set_cache_directory()
