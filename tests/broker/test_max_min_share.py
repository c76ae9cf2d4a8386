"""How a limit is divided among parties of different sizes."""

import pytest

from broker.max_min_share import max_min_share


@pytest.mark.parametrize(
    ("sizes", "limit", "share"),
    [
        ([], 10, None),
        ([4, 6], 10, None),
        ([4, 7], 10, 6),
        ([100, 100], 10, 5),
        ([1, 2, 100, 100], 20, 8),
        ([30, 0, 0], 10, 10),
        ([3, 3, 3, 3], 2, 0),
    ],
)
def test_small_parties_keep_what_they_have_if_all_have_too_much(
    sizes: list[int], limit: int, share: int | None
) -> None:
    assert max_min_share(sizes, limit) == share
    if share is not None:
        assert sum(min(size, share) for size in sizes) <= limit
