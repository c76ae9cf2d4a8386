"""Decorators that compile the cleaner's kernels: without the GIL, cached on disk.

The decorators have identity types, so that mypy checks kernels as plain Python.

Numba caches a function by the time and size of its own file, although code of other files is
inlined into it. So each state of all kernel sources has a cache folder of its own.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import config
from numba.extending import intrinsic as _intrinsic

import storage.kernels  # sets Numba's cache directory, and has to come before numba

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# Inside a kernel every int is an int64, which mypy does not know.
int64: Any = np.int64

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = numba.njit  # whose stubs do not know `_nrt`


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    folders = (Path(storage.kernels.__file__).parent, Path(__file__).parent)  # both are called
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = f"cleaner-{_digest_of_sources()}"


@contextmanager
def _own_cache() -> Iterator[None]:
    """Set Numba's cache folder, which it reads when it decorates a function."""
    shared: str = vars(config)["CACHE_DIR"]
    vars(config)["CACHE_DIR"] = os.path.join(shared, _FOLDER) if shared else shared
    try:
        yield
    finally:
        vars(config)["CACHE_DIR"] = shared


def kernel(function: F) -> F:
    """Compile the function at its first call, or load it from the cache.

    Arrays are not reference-counted: that costs two atomic operations per array and call. So a
    kernel can neither create nor return an array, and its caller must keep all arrays alive.
    """
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False)(function))


def inlined(function: F) -> F:
    """Compile the function into each kernel that calls it."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function))


def allocating(function: F) -> F:
    """Compile a rarely called function that creates arrays."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True)(function))


def emitted(function: Callable[..., Any]) -> Any:
    """Register a function that generates LLVM code."""
    return _intrinsic(function)
