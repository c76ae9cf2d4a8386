"""JSON that somebody else wrote."""

import json

import pytest

from config.json_text import is_unicode

DEEP = 500


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (r'{"a": ["\ud83d\ude00", 1, null]}', True),
        (r'{"a": ["\ud83d", 1]}', False),
        (r'{"\udc00": 1}', False),
        (DEEP * "[" + DEEP * "]", True),
    ],
)
def test_half_of_a_surrogate_pair_is_no_unicode(text: str, result: bool) -> None:
    assert is_unicode(json.loads(text)) is result


def test_a_document_that_is_nested_too_deeply_is_refused() -> None:
    document: list[object] = []
    for _ in range(100_000):
        document = [document]
    assert is_unicode(document) is False
