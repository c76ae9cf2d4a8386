"""Divides a limit among parties of different sizes by max-min fairness.

Rule. Parties below an equal share keep what they have, and what they leave goes to the others in
equal parts. So a party gets less only if it is one of the largest.
"""

from collections.abc import Sequence


def max_min_share(sizes: Sequence[int], limit: int) -> int | None:
    """Return the most that each party may have so that all together have at most `limit`.

    None if they have no more than that.
    """
    if sum(sizes) <= limit:
        return None
    ascending = sorted(sizes)
    for index, size in enumerate(ascending):
        share = limit // (len(ascending) - index)
        if size > share:
            return share
        limit -= size
    raise AssertionError("the sum is above the limit")
