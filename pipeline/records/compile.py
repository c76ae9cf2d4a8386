"""How the kernels of this package are compiled: as the cleaner's, which they are made of.

Numba keeps compiled code under the time and size of the file a function stands in, and the
cleaner's functions are compiled into these. So the cache has one folder per state of both.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import config

import cleaner.engine.kernels
from cleaner.engine.kernels.compile import F

_njit: Any = numba.njit  # whose stubs do not know `_nrt`
_SOURCES = (Path(__file__).parent, Path(cleaner.engine.kernels.__file__).parent)


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = f"records-{_digest_of_sources()}"


@contextmanager
def _own_cache() -> Iterator[None]:
    """Numba looks at its setting while it decorates."""
    shared: str = vars(config)["CACHE_DIR"]
    vars(config)["CACHE_DIR"] = os.path.join(shared, _FOLDER) if shared else shared
    try:
        yield
    finally:
        vars(config)["CACHE_DIR"] = shared


def kernel(function: F) -> F:
    """Compile on first call, from the cache where it is there; no GIL, no arrays of its own."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False)(function))


def inlined(function: F) -> F:
    """A part of kernels, compiled into each of its callers."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function))
