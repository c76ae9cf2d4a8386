"""Pages of rows: their order, and how many rows are held for one."""

import random
from collections.abc import AsyncIterator, Sequence
from operator import itemgetter

import pytest

from broker.http.api.requests import first_page


async def rows_of(numbers: Sequence[int]) -> AsyncIterator[tuple[int]]:
    for number in numbers:
        yield (number,)


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
async def test_a_page_has_the_first_rows_in_order_and_says_whether_more_follow(limit: int) -> None:
    generator = random.Random(limit)
    for count in (0, limit - 1, limit, limit + 1, 2 * limit, 10 * limit + 3):
        numbers = generator.sample(range(100_000), count)
        page, last = await first_page(rows_of(numbers), limit, key=itemgetter(0))
        expected = [(number,) for number in sorted(numbers)]
        assert page == expected[:limit], f"seed {limit}"
        assert last == (expected[limit - 1] if count > limit else None)


async def test_a_page_never_sorts_more_than_twice_its_rows_at_once() -> None:
    keys = list[int]()

    def key(row: tuple[int]) -> int:
        keys.append(row[0])
        return row[0]

    longest = 0

    async def rows() -> AsyncIterator[tuple[int]]:
        nonlocal longest
        for number in random.Random(1).sample(range(100_000), 5000):
            longest = max(longest, len(keys))
            keys.clear()
            yield (number,)

    await first_page(rows(), 50, key)
    assert longest == 100
