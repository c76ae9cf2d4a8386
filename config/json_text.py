"""Check JSON that somebody else wrote."""

import json
from typing import Any


def is_unicode(document: Any) -> bool:
    """Return whether the strings in a parsed document are Unicode.

    JSON escapes can name half of a surrogate pair, which is no character. The result is also False
    for a document that is nested too deeply to be checked.
    """
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
