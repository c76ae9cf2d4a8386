"""Kafka's properties files, and the login modules in `sasl.jaas.config`.

The format is that of java.util.Properties. A login module is read as Java's JaasConfig reads it:
class, flag, options `name="value"`, and a semicolon.
"""

import re
from typing import Final

_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPACE: Final = " \t\f"  # no other white space: it may be part of a password
_KEY: Final = re.compile(r"((?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_CONTINUES: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")

_TOKEN: Final = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s="';]+|[=;])""")
_QUOTED_ESCAPE: Final = re.compile(r"\\([0-3][0-7]{0,2}|[0-7]{1,2}|.)", re.DOTALL)
_QUOTED_CONTROLS: Final = {**_CONTROLS, "a": "\a", "b": "\b", "v": "\v"}


def parse_properties(text: str) -> dict[str, str]:
    """Return the properties of a file; the last value of a name counts."""
    result: dict[str, str] = {}
    pending = ""
    for raw in _LINE_END.split(text):
        line = pending + raw.lstrip(_SPACE)
        if not pending and line[:1] in ("", "#", "!"):
            continue
        if _CONTINUES.search(line):
            pending = line[:-1]
            continue
        pending = ""
        _add(result, line)
    if pending:
        _add(result, pending)
    return result


def _add(result: dict[str, str], line: str) -> None:
    match = _KEY.fullmatch(line)
    assert match is not None, "every line has a key, which may be empty"
    result[_unescape(match[1])] = _unescape(match[2])


def _unescape(text: str) -> str:
    def replace(match: "re.Match[str]") -> str:
        escaped = match[1]
        if len(escaped) > 1:
            return chr(int(escaped[1:], 16))
        return _CONTROLS.get(escaped, escaped)

    return _ESCAPE.sub(replace, text)


def parse_login_module(text: str) -> tuple[str, dict[str, str]]:
    """Return the class and the options of the first login module.

    Raises ValueError without repeating the text, which contains passwords.
    """
    tokens = _tokens(text)
    if ";" not in tokens:
        raise ValueError("the login module does not end with a semicolon")
    module = tokens[: tokens.index(";")]
    options = module[2:]
    is_complete = len(module) >= 2 and len(options) % 3 == 0
    if not is_complete or any(sign != "=" for sign in options[1::3]):
        raise ValueError('expected CLASS required NAME="VALUE" ...;')
    names = (_unquote(name) for name in options[0::3])
    return module[0], dict(zip(names, map(_unquote, options[2::3]), strict=True))


def _tokens(text: str) -> list[str]:
    tokens = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError("the login module has a quote without an end")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _unquote(token: str) -> str:
    if token[0] not in "\"'":
        return token

    def replace(match: "re.Match[str]") -> str:
        escaped = match[1]
        if escaped[0] in "01234567":
            return chr(int(escaped, 8))
        return _QUOTED_CONTROLS.get(escaped, escaped)

    return _QUOTED_ESCAPE.sub(replace, token[1:-1])
