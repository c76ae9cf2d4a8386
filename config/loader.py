"""Load a settings file and command-line flags; report each error with file, line and key.

Only the composition root and `varve check-config` call this module. Flags override the file, and
the file overrides the defaults.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from config.printable import printable
from config.settings import Settings
from config.topics.keys import TOPIC_KEYS
from config.yaml_tree import FILE_BYTES_MAX, Path, YamlProblemError, YamlTree, read_tree

DEFAULT_FILE: Final = "config/default.yaml"  # its name in messages
FLAGS: Final = {
    "listeners": "--listen",
    "advertise": "--advertise",
    "http": "--http",
    "log_dirs": "--data",
}
COMMAND_LINE: Final = "command line"  # the file of a problem with a flag, in messages
# The first line that is no comment, if it is KEY=VALUE as in Kafka's `server.properties`.
_PROPERTY: Final = re.compile(r"\A(?:\s|[#!].*$)*([\w.-]+[ \t]*=)", re.ASCII | re.MULTILINE)
_PROPERTIES_HINT: Final = (
    "this is not YAML, but KEY=VALUE as in Kafka's server.properties; to move from Kafka, see "
    "docs/how-to/move-from-and-to-kafka.md"
)
PROBLEMS_MAX: Final = 50  # problems reported of one file


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One error. `line` is 0 if the error has no line; `key` has dots between levels."""

    file: str
    line: int
    key: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{self.key}: {self.reason}" if self.key else self.reason
        return f"{where}: {printable(text)}"


class ConfigFileError(Exception):
    """The settings are invalid. The text has one line for each problem."""

    def __init__(self, problems: Sequence[SettingsProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    @property
    def is_usage(self) -> bool:
        """Return whether all problems are on the command line."""
        return all(problem.file == COMMAND_LINE for problem in self.problems)


def load(path: str | None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of a file (None: the built-in one); `overrides` replace top-level keys.

    Raises ConfigFileError.
    """
    file = DEFAULT_FILE if path is None else path
    tree = _read(file, _text(path, file))
    values, overrides = _sections(file, tree), dict(overrides or {})
    values.update(overrides)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        details = [*error.errors(), *_contradictions(values, error)]
        problems = [p for detail in details for p in _problems(detail, file, tree, overrides)]
        problems = sorted(dict.fromkeys(problems), key=_order)
        raise ConfigFileError(problems[:PROBLEMS_MAX]) from None


def _contradictions(values: dict[str, Any], error: ValidationError) -> list[Any]:
    """Return the errors between the sections and topics in which `error` finds no fault.

    Pydantic compares sections only if each of them is valid.
    """
    paths = [detail["loc"] for detail in error.errors() if detail["loc"]]
    bad_topics = {path[1] for path in paths if path[0] == "topics" and len(path) > 1}
    invalid = {path[0] for path in paths if path[0] != "topics" or len(path) == 1}
    if not paths:
        return []
    rest = {key: value for key, value in values.items() if key not in invalid}
    if bad_topics and "topics" in rest:
        rest["topics"] = {n: t for n, t in rest["topics"].items() if n not in bad_topics}
    try:
        Settings.model_validate(rest, context=invalid)
    except ValidationError as more:
        return more.errors()
    return []


def default_text() -> str:
    """Return the text of the built-in file."""
    return resources.files("config").joinpath("default.yaml").read_text(encoding="utf-8")


def _text(path: str | None, file: str) -> str:
    if path is None:
        return default_text()
    try:
        with FilePath(path).open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigFileError([SettingsProblem(file, 0, "", reason)]) from None
    if len(data) > FILE_BYTES_MAX:
        reason = f"the file is larger than {FILE_BYTES_MAX} bytes"
        raise ConfigFileError([SettingsProblem(file, 1, "", reason)])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigFileError([SettingsProblem(file, line, "", "is not UTF-8 text")]) from None


def _read(file: str, text: str) -> YamlTree:
    if match := _PROPERTY.search(text):
        line = text.count("\n", 0, match.start(1)) + 1
        raise ConfigFileError([SettingsProblem(file, line, "", _PROPERTIES_HINT)])
    try:
        return read_tree(text)
    except YamlProblemError as error:
        raise ConfigFileError(
            [SettingsProblem(file, error.line, _key(error.path), error.reason)]
        ) from None


def _sections(file: str, tree: YamlTree) -> dict[str, Any]:
    """Return top-level values in the shape of the models: topic configs moved under `keys`."""
    if tree.value is None:
        return {}
    if not isinstance(tree.value, dict):
        raise ConfigFileError([SettingsProblem(file, 1, "", "expected keys and values")])
    values = dict(tree.value)
    if isinstance(values.get("topic_defaults"), dict):
        values["topic_defaults"] = _split(values["topic_defaults"])
    if isinstance(values.get("topics"), dict):
        values["topics"] = {
            name: {} if topic is None else _split(topic) if isinstance(topic, dict) else topic
            for name, topic in values["topics"].items()
        }
    # A section without a value is empty: all its keys are commented out.
    return {
        key: value
        for key, value in values.items()
        if value is not None or key not in Settings.model_fields or key == "advertise"
    }


def _split(topic: dict[str, Any]) -> dict[str, Any]:
    keys = {key: value for key, value in topic.items() if key != "partitions"}
    own = {"partitions": topic["partitions"]} if "partitions" in topic else {}
    return {**own, "keys": keys}


def _problems(
    detail: Any, file: str, tree: YamlTree, overrides: Mapping[str, object]
) -> list[SettingsProblem]:
    path: Path = tuple(part for part in detail["loc"] if part != "keys")
    context = detail.get("ctx", {})
    result = []
    for reason, inner_paths in context.get("problems") or [(_reason(detail), [()])]:
        file_problems = []
        for inner in inner_paths:
            full = (*path, *inner)
            if full and full[0] in overrides:
                flag = FLAGS.get(str(full[0]), str(full[0]))
                file_problems.append(SettingsProblem(COMMAND_LINE, 0, flag, reason))
            else:
                file_problems.append(SettingsProblem(file, tree.line_of(full), _key(full), reason))
        # Of two keys that contradict each other, one may be missing in the file.
        result += [
            problem for problem in file_problems if problem.line or problem.file != file
        ] or file_problems
    return result


def _reason(detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    value = _shown(detail["input"]) if not _is_secret(detail["loc"]) else "this value"
    match kind:
        case "extra_forbidden":
            return f"unknown setting{_suggestion(detail['loc'])}"
        case "value_error":
            return str(context["error"])
        case "greater_than_equal":
            return f"{value} is below {context['ge']}"
        case "less_than_equal":
            return f"{value} is above {context['le']}"
        case "literal_error":
            return f"expected {context['expected']}, not {value}"
        case "too_short" | "string_too_short":
            return "may not be empty"
    requested = {
        "int_type": "a whole number",
        "bool_type": "true or false",
        "string_type": "text",
        "tuple_type": "a list",
        "mapping_type": "keys and values",
        "dict_type": "keys and values",
        "model_type": "keys and values",
    }.get(kind)
    if requested is None:
        return f"{detail['msg'].lower()}: {value}"
    if kind == "tuple_type" and isinstance(detail["input"], str) and value != "this value":
        requested += f" such as [{detail['input'][:60]}]"
    return f"expected {requested}, not {value}"


def _suggestion(path: Path) -> str:
    """Return a hint at the known key with the most similar spelling on the same level."""
    model: type[BaseModel] = Settings
    for part in path[:-1]:
        info = model.model_fields.get(str(part))
        inner = info.annotation if info else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        model = inner
    of_flags = {flag.removeprefix("--"): key for key, flag in FLAGS.items()}
    if model is Settings and path[-1] in of_flags:
        return f"; did you mean {of_flags[path[-1]]}?"
    # Only Kafka's names have dots: log.dirs is log_dirs, but advertised.listeners is not listeners.
    cutoff = 0.8 if "." in str(path[-1]) else 0.6
    near = difflib.get_close_matches(str(path[-1]), model.model_fields, n=1, cutoff=cutoff)
    if near:
        return f"; did you mean {'.'.join((*map(str, path[:-1]), near[0]))}?"
    return _hint_at_kafka(str(path[-1]))


def _hint_at_kafka(name: str) -> str:
    """Return where a setting of Kafka's `server.properties` belongs; "" for other names."""
    for key in TOPIC_KEYS.values():
        if key.synonym == name:
            return f"; it is topic_defaults: {{{key.name}: ...}} here"
    return "; docs/how-to/move-from-and-to-kafka.md has Kafka's names" if "." in name else ""


def _is_secret(path: Path) -> bool:
    """Return whether a value may be a secret that is written into the file by mistake."""
    return path[:2] == ("sasl", "users") or path[-1:] == ("key_password",)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _key(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _order(problem: SettingsProblem) -> tuple[int, str]:
    return problem.line, problem.key
