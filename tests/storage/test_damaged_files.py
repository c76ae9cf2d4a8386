"""docs/reference/damaged-files.md matches what the code does with each damaged file."""

import pytest

from tests.support.storage import damaged_files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tables as trying makes them; a case that breaks a rule raises BrokenRuleError."""
    return damaged_files.tables(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("name", ["start", "parts"])
def test_the_page_on_damaged_files_says_what_happens(made: dict[str, str], name: str) -> None:
    again = "python -m tests.support.storage.damaged_files writes the page anew"
    assert damaged_files.table_in_page(name) == made[name], again


def test_a_broken_rule_is_noticed() -> None:
    """A start that lost a record for a damaged checkpoint would not be a row of the table."""
    world = damaged_files.world(damaged_files.ORDERLY)
    path = next(path for path in world.files if path.endswith("recovery-point-offset-checkpoint"))
    other = sorted(path for path in world.files if path.endswith(".log"))[1]
    files = {**world.files, path: b"", other: world.files[other][:100]}
    with pytest.raises(damaged_files.BrokenRuleError, match="missing"):
        damaged_files.outcome_of(world, files, path)
