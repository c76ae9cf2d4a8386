"""Regular expressions that clients send: topics of a consumer group, and transactional ids.

Rules. The time of RE2 grows linearly with the text, but the constant factor can reach seconds, and
RE2 holds the interpreter lock meanwhile. The limits below bound it: the slowest expression that we
found takes 6 ms to compile, and 8 ms to match a name of 249 characters.
- Groups capture nothing: finding their positions takes seconds for thousands of groups.
- A Unicode class such as \\pL has hundreds of ranges, and takes 0.2 ms.
- A long text does not match an expression that needs many steps for each of its characters. Names
  of topics are short; a transactional id can have 1,000 characters.
"""

import re
from typing import Final

import re2

PATTERN_CHARS_MAX: Final = 2_000
PROGRAM_BYTES_MAX: Final = 64 << 10
UNICODE_CLASSES_MAX: Final = 10
STEPS_MAX: Final = 700_000  # the largest program and the longest name of a topic
_UNICODE_CLASS: Final = re.compile(r"\\[pP]")


class PatternError(Exception):
    """The expression is invalid, or takes too long."""


class ClientPattern:
    """An expression of a client, compiled. Raises PatternError."""

    def __init__(self, text: str) -> None:
        if len(text) > PATTERN_CHARS_MAX:
            raise PatternError(f"it has {len(text)} characters, more than {PATTERN_CHARS_MAX}")
        if len(_UNICODE_CLASS.findall(text)) > UNICODE_CLASSES_MAX:
            raise PatternError(f"it has more than {UNICODE_CLASSES_MAX} Unicode classes (\\p, \\P)")
        options = re2.Options()
        options.log_errors = False
        options.max_mem = PROGRAM_BYTES_MAX
        options.never_capture = True
        try:
            self._compiled = re2.compile(text, options)
        except re2.error as error:
            (reason,) = error.args
            raise PatternError(
                reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            ) from None
        self._length_max = STEPS_MAX // self._compiled.programsize

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the whole text."""
        return len(text) <= self._length_max and self._compiled.fullmatch(text) is not None
