"""Regular expressions that clients send: topics of a consumer group, and transactional ids.

Rules. The time of RE2 grows linearly with the text, but the constant factor can reach seconds, and
RE2 holds the interpreter lock meanwhile. The limits below bound it: the slowest expression that we
found takes 3 ms to compile, or to be refused, and 5 ms to match a name of 249 characters.
- Groups capture nothing: finding their positions takes seconds for thousands of groups.
- Optional parts in a row, such as x{0,1000}, are nested in each other: the time to compile them
  grows with the square of their number. RE2 writes repetitions out before it finds them too large.
- A Unicode class such as \\PL has hundreds of ranges, and takes 0.5 ms.
- A long text does not match an expression that needs many steps for each of its characters. Names
  of topics are short; a transactional id can have 1,000 characters.
- A search of many names ends with an error after a second of processor time. RE2 needs some 2 us
  for a name as long as it can compile the expression to a table, as with those of ordinary clients.
"""

import re
from time import thread_time
from typing import Final

import re2

PATTERN_CHARS_MAX: Final = 2_000
PROGRAM_BYTES_MAX: Final = 64 << 10
REPETITIONS_MAX: Final = 500  # of all operators together; two times a whole name, [a-z]{1,249}
UNICODE_CLASSES_MAX: Final = 5
STEPS_MAX: Final = 700_000  # the largest program and the longest name of a topic
SEARCH_SECONDS_MAX: Final = 1.0
MEASURED_STEPS: Final = 10_000  # fewer take less time than to measure it is worth
_UNICODE_CLASS: Final = re.compile(r"\\[pP]")
_REPETITION: Final = re.compile(r"[*+?]|\{([0-9]+),?([0-9]*)\}")


class PatternError(Exception):
    """The expression is invalid, or takes too long."""


class ClientPattern:
    """An expression of a client, compiled for one search. Raises PatternError."""

    def __init__(self, text: str) -> None:
        if len(text) > PATTERN_CHARS_MAX:
            raise PatternError(f"it has {len(text)} characters, more than {PATTERN_CHARS_MAX}")
        if (repetitions := _repetitions(text)) > REPETITIONS_MAX:
            reason = f"its repetitions add up to {repetitions}, more than {REPETITIONS_MAX}"
            raise PatternError(reason)
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
        self._program_size = self._compiled.programsize
        self._seconds = 0.0  # of processor time in `matches`

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the whole text.

        Raises PatternError if all texts together took too long.
        """
        steps = len(text) * self._program_size
        if steps > STEPS_MAX:
            return False
        if steps <= MEASURED_STEPS:
            return self._compiled.fullmatch(text) is not None
        if self._seconds > SEARCH_SECONDS_MAX:
            raise PatternError(f"the search took more than {SEARCH_SECONDS_MAX:.0f} s")
        began = thread_time()
        match = self._compiled.fullmatch(text)
        self._seconds += thread_time() - began
        return match is not None


def _repetitions(text: str) -> int:
    """Return the sum of all repetitions: the larger number of {n,m}, and 1 for *, + and ?."""
    return sum(max(int(least or 1), int(most or 1)) for least, most in _REPETITION.findall(text))
