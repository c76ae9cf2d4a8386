"""Parse a small part of YAML into plain values, and record the line of each key.

It accepts mappings, lists, and scalars that are null, true, false, a decimal number or text (so a
topic may be called `no` or `on`). It refuses, with a message for each: duplicate keys, tags,
anchors and aliases (they could make a small file huge), several documents. Depth and size are
limited before any value is built.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import yaml

FILE_BYTES_MAX: Final = 4 << 20  # some 50,000 topics
DEPTH_MAX: Final = 16  # the settings need four
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_FLOAT = re.compile(r"[+-]?[0-9]{1,20}\.[0-9]{0,20}([eE][+-]?[0-9]{1,3})?", re.ASCII)
_CONSTANTS: Final = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip

Path = tuple[str | int, ...]


class YamlProblemError(Exception):
    """The text is not supported YAML; `line` counts from 1, `path` is the path in the tree."""

    def __init__(self, line: int, path: Path, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.path = path
        self.reason = reason


@dataclass(slots=True)
class YamlTree:
    """The value of a document, and the line on which each key or list item starts."""

    value: object = None
    lines: dict[Path, int] = field(default_factory=dict)

    def line_of(self, path: Path) -> int:
        """Return the line of the key at `path`, or of the nearest key around it; 0 if unknown."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 0


def read_tree(text: str) -> YamlTree:
    """Parse one document. Raises YamlProblemError."""
    tree = YamlTree()
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark, begin = error.problem_mark or error.context_mark, error.context_mark
        line = mark.line + 1 if mark else 1
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        if mark and begin and begin.line < mark.line:
            if text[mark.index :].strip():
                reason = f"{reason}; it begins on line {begin.line + 1}"
            else:  # it is not closed before the end of the file
                line = begin.line + 1
        if mark and _is_indented_with_tab(text, mark.index):
            reason = "is indented with a tab; YAML allows only spaces"
        raise YamlProblemError(line, (), reason) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, max(error.position, 0)) + 1
        raise YamlProblemError(line, (), "has a character that YAML does not allow") from None
    if node is not None:
        tree.value = _value(node, (), tree.lines)
    return tree


def _is_indented_with_tab(text: str, index: int) -> bool:
    """Return whether a tab is among the white space before this place in its line."""
    before = text[:index].rpartition("\n")[2] + text[index : index + 1]
    return before.isspace() and "\t" in before


def _check_events(text: str) -> None:
    """Refuse unsupported YAML before any value is built. Raises YamlProblemError."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > DEPTH_MAX:
            raise YamlProblemError(line, (), f"is nested deeper than {DEPTH_MAX} levels")
        if documents > 1:
            raise YamlProblemError(line, (), "contains more than one document")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise YamlProblemError(line, (), "anchors and aliases are not supported")
        if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
            raise YamlProblemError(line, (), "contains a NUL character")
        tag = getattr(event, "tag", None)
        if tag:
            raise YamlProblemError(line, (), f"tags are not supported: {tag}")


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> object:
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _plain(node.value)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            items.append(_value(item, (*path, index), lines))
        return items
    return dict(_pairs(node, path, lines))


def _pairs(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Iterator[tuple[str, object]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlProblemError(line, path, "a key has to be text")
        key = str(key_node.value)
        if key in seen:
            raise YamlProblemError(line, (*path, key), f"is given twice, first on line {seen[key]}")
        seen[key] = line
        lines[(*path, key)] = line
        yield key, _value(value_node, (*path, key), lines)


def _plain(text: str) -> object:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
