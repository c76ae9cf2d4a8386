"""Log lines are short phrases with fields, in one style over all packages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

ROOT = Path(__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# The cause has one name: reason.
OTHER_NAMES_OF_REASON = {"why", "how", "error", "err", "cause", "exc"}
Lines = list[tuple[str, ast.Call]]


@pytest.fixture(scope="module")
def lines() -> Lines:
    """Every call of a module's `logger` with its file and line."""
    return list(find_lines())


def find_lines() -> Iterator[tuple[str, ast.Call]]:
    for package in ("broker", "admin", "cleaner", "protocol", "storage", "config"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "logger." in text else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "logger"
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_an_event_is_a_phrase_in_lower_case_without_a_full_stop(lines: Lines) -> None:
    messages = [
        (where, call.args[0].value)
        for where, call in lines
        if isinstance(call.args[0], ast.Constant)
    ]
    assert len(messages) > 80
    # Lower case words: no snake_case, no name of a part in front.
    good = re.compile(r"[a-z][a-z'.]*([,:;]? [a-z][a-z'.]*)*(?<!\.)")
    assert [item for item in messages if not good.fullmatch(str(item[1]))] == []


def test_an_event_is_a_constant_text(lines: Lines) -> None:
    assert [where for where, call in lines if isinstance(call.args[0], ast.JoinedStr)] == []


def test_the_cause_is_in_the_field_reason(lines: Lines) -> None:
    named = [(where, {keyword.arg for keyword in call.keywords}) for where, call in lines]
    assert [item for item in named if item[1] & OTHER_NAMES_OF_REASON] == []


def test_an_exception_that_a_test_logs_is_a_plain_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hundreds of tests cause one; with the variables of all frames it takes half a second."""
    try:
        raise RuntimeError("as planned")
    except RuntimeError:
        structlog.get_logger("tests").exception("job failed")
    output = capsys.readouterr().out
    assert "Traceback (most recent call last)" in output
    assert "locals" not in output
