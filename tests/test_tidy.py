"""The limits of the house style: length of functions, words that mark unfinished work."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUNCTION_LINES_MAX = 70
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
# Written in two halves, so that this file does not accuse itself.
_MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "NotImplemented" + "Error")
UNFINISHED = re.compile(r"\b(" + "|".join(_MARKS) + r")\b")
# Folders of one machine, and the workplace: such a text is of no use to a reader elsewhere.
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


def test_there_is_something_to_look_at() -> None:
    assert len(list(ours(".py"))) > 100


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                assert docstring.end_lineno is not None
                lines -= docstring.end_lineno - docstring.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"


def test_no_function_is_longer_than_a_page() -> None:
    assert [where for path in ours(".py") for where in long_functions(path)] == []


@pytest.mark.parametrize("words", [UNFINISHED, PRIVATE], ids=["unfinished", "private"])
def test_no_text_has_words_that_do_not_belong(words: re.Pattern[str]) -> None:
    results = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in ours(*TEXTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := words.search(line))
    ]
    assert results == []


def test_nothing_is_called_by_no_name() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    names = [
        path for folder in (*PACKAGES, "tests/support") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in names if path.stem in vague] == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []
