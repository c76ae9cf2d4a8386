"""The division of the tests among the workers of pytest-xdist."""

import pytest

from tests.support.workers import divide

pytestmark = pytest.mark.xdist_group("division of tests")


def test_a_group_is_named_where_the_scheduler_looks_for_it(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the id of the test: another place is not an error to xdist, which then has no groups."""
    if not hasattr(request.config, "workerinput"):
        monkeypatch.setattr(request.config, "workerinput", {}, raising=False)
        monkeypatch.setattr(request.node, "_id", request.node.id)  # restored
        divide(request.config, [request.node])
    assert request.node.nodeid.endswith("@division of tests")
