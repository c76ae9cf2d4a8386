"""Expecting an error of the operating system by its number."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_errno(*numbers: int) -> Iterator[pytest.ExceptionInfo[OSError]]:
    """Like pytest.raises, for an OSError with one of these numbers."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the number is what tells them apart)
        yield caught
    assert caught.value.errno in numbers
