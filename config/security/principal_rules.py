"""Rules that turn the distinguished name of a certificate into a principal's name.

As Kafka's `ssl.principal.mapping.rules`: the first rule whose pattern matches the whole name gives
the principal. A rule is `DEFAULT` (the name itself) or `RULE:pattern/replacement/`, with `L` or `U`
at the end for lower or upper case. `$1` in the replacement is a group of the pattern; `\\/` in
either part is a slash. Patterns run in linear time (RE2): they have no backreferences and no
look-around.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import re2

DEFAULT: Final = "DEFAULT"
RULE_CHARACTERS_MAX: Final = 4096
_PROGRAM_BYTES_MAX: Final = 1 << 20
_RULE: Final = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)")
_GROUP: Final = re.compile(r"\$(\d)|\\(.)")  # Kafka's rules have at most nine groups


@dataclass(frozen=True, slots=True)
class PrincipalRule:
    """One rule as the settings file has it."""

    text: str
    pattern: Any = field(compare=False, repr=False, default=None)  # None: DEFAULT
    replacement: str = ""
    letter_case: str = ""  # L, U or nothing

    def __str__(self) -> str:
        return self.text

    def apply(self, name: str) -> str | None:
        """Return the principal's name; None if the rule does not match."""
        if self.pattern is None:
            return name
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        groups = match.groups()

        def expand(part: re.Match[str]) -> str:
            if part[1] is None:
                return str(part[2])
            number = int(part[1])
            if number > len(groups):
                return part[0]
            return match[0] if number == 0 else groups[number - 1] or ""

        result = _GROUP.sub(expand, self.replacement)
        if self.letter_case == "L":
            return result.lower()
        return result.upper() if self.letter_case == "U" else result


def parse_principal_rule(value: object) -> PrincipalRule:
    """Read a rule of the settings file. Raises ValueError."""
    if isinstance(value, PrincipalRule):
        return value
    if not isinstance(value, str) or len(value) > RULE_CHARACTERS_MAX:
        raise ValueError("expected DEFAULT or RULE:pattern/replacement/")
    if value == DEFAULT:
        return PrincipalRule(value)
    parts = _RULE.fullmatch(value)
    if parts is None:
        raise ValueError("expected DEFAULT or RULE:pattern/replacement/, with L or U at the end")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PROGRAM_BYTES_MAX
    try:
        pattern = re2.compile(parts[1], options)
    except re2.error as error:
        raise ValueError(f"its pattern is invalid: {error}") from None
    return PrincipalRule(value, pattern, parts[2], parts[3])


def map_principal(rules: Iterable[PrincipalRule], name: str) -> str | None:
    """Return the principal's name by the first rule that matches; None if none does."""
    for rule in rules:
        principal = rule.apply(name)
        if principal is not None:
            return principal
    return None
