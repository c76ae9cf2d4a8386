"""Log lines are sentences with fields: one way of saying things, over all packages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# Why something happened has one name.
OTHER_NAMES_OF_REASON = {"why", "how", "error", "err", "cause", "exc"}


def lines() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a module's `log`, and where it stands."""
    for package in ("broker", "admin", "cleaner", "protocol", "storage", "config"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "log"
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_an_event_is_a_sentence_without_prefix_or_stop() -> None:
    messages = [
        (where, call.args[0].value)
        for where, call in lines()
        if isinstance(call.args[0], ast.Constant)
    ]
    assert len(messages) > 80
    # Lower case words: no snake_case, no name of a part in front.
    good = re.compile(r"[a-z][a-z'.]*([,:;]? [a-z][a-z'.]*)*(?<!\.)")
    assert [item for item in messages if not good.fullmatch(str(item[1]))] == []


def test_an_event_is_told_in_words_and_never_formatted() -> None:
    assert [where for where, call in lines() if isinstance(call.args[0], ast.JoinedStr)] == []


def test_why_it_happened_stands_in_the_field_reason() -> None:
    named = [(where, {keyword.arg for keyword in call.keywords}) for where, call in lines()]
    assert [item for item in named if item[1] & OTHER_NAMES_OF_REASON] == []
