"""The settings file as rows for people: key, value in effect, default and help.

The help of a key are the comment lines directly above it in default.yaml; some keys have none.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from pydantic import BaseModel

from config.loader import default_text
from config.reload import FIXED_INSIDE, LIVE
from config.security.secrets import SecretReference
from config.settings import Settings

# Topics have pages of their own, and their defaults Kafka's names.
LEFT_OUT: Final = frozenset({"topics", "topic_defaults"})
_KEY: Final = re.compile(r"( *)([a-z][a-z0-9_]*):(?: |$)")
_COMMENT: Final = re.compile(r" *# ?(.*)")


@dataclass(frozen=True, slots=True)
class FileSetting:
    """One key of the settings file. Levels of the key are separated by dots."""

    name: str
    value: str
    default: str
    text: str
    needs_restart: bool  # a change does not take effect at a reload


def file_settings(running: Settings) -> Iterator[FileSetting]:
    """Yield a row for each key."""
    defaults, texts = dict(_leaves(Settings())), help_texts()
    for name, value in _leaves(running):
        yield FileSetting(
            name=name,
            value=_shown(value),
            default=_shown(defaults[name]),
            text=texts.get(name, ""),
            needs_restart=name.partition(".")[0] not in LIVE or name in FIXED_INSIDE,
        )


@cache
def help_texts() -> Mapping[str, str]:
    """Return the help of each key that has some."""
    texts: dict[str, str] = {}
    path: list[tuple[int, str]] = []  # indentation and name of the sections around a line
    comment: list[str] = []
    for line in default_text().splitlines():
        if match := _COMMENT.fullmatch(line):
            comment.append(match[1])
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [level for level in path if level[0] < indent] + [(indent, match[2])]
            if comment:
                texts[".".join(name for _, name in path)] = " ".join(comment)
            comment = []
        else:
            comment = []
    return texts


def _leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if f"{prefix}{name}" in LEFT_OUT:
            continue
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: object) -> str:
    """Return a value as text. Secrets are not in the settings, only where to find them."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(map(_shown, value))
        case Mapping():
            return ", ".join(map(str, value))
        case SecretReference():
            return f"{value.kind} {value.name}"
    return str(value)
