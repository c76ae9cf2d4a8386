"""Key indexes of the small logs of these tests."""

from collections.abc import Iterator

import pytest

from tests.support.cleaner.key_indexes import small_records_are_indexed


@pytest.fixture(scope="package", autouse=True)
def indexes_of_small_logs() -> Iterator[None]:
    with small_records_are_indexed():
        yield
