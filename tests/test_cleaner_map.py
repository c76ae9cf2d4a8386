"""docs/reference/kafka-cleaner-tests.md maps Kafka's cleaner tests to our tests."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/kafka-cleaner-tests.md").read_text()
# How many tests each of Kafka's classes has.
THEIRS = {"C": 49, "M": 31, "I": 9, "O": 6, "T": 2}
INVARIANTS = 16


def names_in(path: Path) -> set[str]:
    """The names that pytest collects from a module: functions, and classes by any way."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def named() -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_named_on_the_page_exists() -> None:
    expected = set(named())
    assert len(expected) > 100
    results = {path: names_in(ROOT / path) for path in {path for path, _ in expected}}
    assert sorted(f"{path}::{name}" for path, name in expected if name not in results[path]) == []


def test_every_test_of_kafkas_stands_on_the_page_once() -> None:
    rows = Counter(re.findall(r"^\| ([CMIOT]\d+) ", PAGE, re.MULTILINE))
    expected = [f"{letter}{n}" for letter, count in THEIRS.items() for n in range(1, count + 1)]
    assert rows == Counter(expected)


def test_every_row_names_a_test_of_ours_or_says_why_not() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| ([CMIOT]\d+|\d+) ", line)]
    applying, others = PAGE.split("## What does not apply")
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        assert len(cells[1]) > 10, row
        assert "::test_" in row or (row in others and row not in applying), row


def test_every_invariant_has_its_tests() -> None:
    section = PAGE.split("## Invariants")[1]
    numbers = [int(number) for number in re.findall(r"^\| (\d+) ", section, re.MULTILINE)]
    assert numbers == list(range(1, INVARIANTS + 1))
