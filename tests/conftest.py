"""What every test may ask for."""

from pathlib import Path

import pytest

GOLDEN_FOLDER = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the text tables in tests/golden anew, to be reviewed line by line",
    )


class Golden:
    """Compares a text with a reviewed file of tests/golden, or rewrites the file."""

    def __init__(self, *, rewrite: bool) -> None:
        self._rewrite = rewrite

    def check(self, name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if self._rewrite:
            path.write_text(text)
        assert path.exists(), f"{name} is missing: run with --rewrite and review it"
        assert text == path.read_text(), f"{name} differs: run with --rewrite and review the diff"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(rewrite=request.config.getoption("--rewrite"))
