"""Rules of style that no linter checks: unfinished work, private paths, vague module names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "config",
    "storage",
    "protocol",
    "cleaner",
    "admin",
    "broker",
    "pipeline",
    "pyspark_varve",
)
FOLDERS = (*PACKAGES, "bench", "tests", "deploy", "docs", ".ci")
TEXTS = {".py", ".pyi", ".md", ".yaml", ".toml", ".service", ".txt", ""}
# Written in two halves, so that this file does not match.
_MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "NotImplemented" + "Error")
UNFINISHED = re.compile(r"\b(" + "|".join(_MARKS) + r")\b")
# Paths of one machine are of no use to readers elsewhere.
PRIVATE = re.compile(
    "(/ro" + r"ot/|/ho" + r"me/\w|/wo" + r"rk/|\bshared" + r"/(design|reference|seeds|sketches))"
)


def ours(*suffixes: str) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.suffix in suffixes and not path.name.startswith(".git"):
            yield path


def test_the_search_finds_our_files() -> None:
    assert len(list(ours(".py"))) > 100


@pytest.mark.parametrize("words", [UNFINISHED, PRIVATE], ids=["unfinished", "private"])
def test_no_text_has_words_that_do_not_belong(words: re.Pattern[str]) -> None:
    results = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in ours(*TEXTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := words.search(line))
    ]
    assert results == []


def test_no_module_has_a_vague_name() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    names = [
        path for folder in (*PACKAGES, "tests/support") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in names if path.stem in vague] == []


def test_every_module_has_a_docstring() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not re.match(r'(#.*\n|\n)*r?"""\S', path.read_text())
    ]
    assert silent == []
