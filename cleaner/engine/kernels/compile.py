"""How every kernel of the cleaner is compiled: no GIL, and kept on disk between processes.

The decorators are typed as if they did nothing, so that kernels are checked as the plain Python
they also are.

Numba keeps compiled code under the time and size of the file a function stands in. What was
compiled into it from another file may be out of date then, and a release may change one file of
ours and not the other. So the cache has one folder per state of all these sources.
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

import storage.kernels  # sets Numba's cache directory, and has to come before numba  # noqa: F401

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]

# Inside a kernel every int is an int64; type checkers see NumPy's scalars as something else.
int64: Any = np.int64

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = numba.njit  # whose stubs do not know `_nrt`


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = f"cleaner-{_digest_of_sources()}"


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
    """Compile on first call, from the cache where it is there.

    Without reference counts for arrays: counting costs two atomic operations per array and call,
    more than most of these functions do. So a kernel can neither make nor return an array; its
    caller holds all of them while it runs.
    """
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False)(function))


def inlined(function: F) -> F:
    """A part of kernels, compiled into each of its callers."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function))


def allocating(function: F) -> F:
    """A rarely called part of kernels that makes arrays of its own."""
    with _own_cache():
        return cast(F, _njit(cache=True, nogil=True)(function))


def emitted(function: Callable[..., Any]) -> Any:
    """A function of kernels that writes its own LLVM code."""
    return _intrinsic(function)
