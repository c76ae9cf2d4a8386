"""Check the value of one topic config and return it in canonical form.

Import these names from config.topics.keys.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

from config.topics.table import INT_MAX, LONG_MAX, TOPIC_KEYS, TopicKey, ValueKind
from config.units import parse_duration_ms, parse_size

_INT_MIN: Final = -(2**31)
_LONG_MIN: Final = -(2**63)
# Twenty digits hold every signed 64-bit number; more would only cost time to convert.
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_DECIMAL = re.compile(
    r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?", re.ASCII
)
# "*" or "partition:broker" pairs (Kafka's ThrottledReplicaListValidator).
_THROTTLED_REPLICAS = re.compile(r"\*|[0-9]+:[0-9]+", re.ASCII)


class InvalidTopicConfigError(Exception):
    """The name or value of a topic config is invalid; INVALID_CONFIG (40) on the wire."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


def parse_value(key: str, raw: object, *, units: bool = False) -> str:
    """Return the canonical Kafka string of a value.

    `units` (for the settings file and `varve topics`) allows sizes and durations with a unit.
    Raises InvalidTopicConfigError for an unknown name, a wrong type or a value out of range.
    """
    topic_key = TOPIC_KEYS.get(key)
    if topic_key is None:
        raise unknown_config(key, TOPIC_KEYS)
    if raw is None:
        raise InvalidTopicConfigError(key, "has no value")
    match topic_key.kind:
        case ValueKind.BOOLEAN:
            return _boolean(topic_key, raw)
        case ValueKind.INT | ValueKind.LONG:
            return _whole_number(topic_key, raw, units)
        case ValueKind.DOUBLE:
            return _decimal(topic_key, raw)
        case ValueKind.LIST:
            return _list(topic_key, raw)
        case ValueKind.STRING:
            return _string(topic_key, raw)


def unknown_config(key: str, names: Iterable[str]) -> InvalidTopicConfigError:
    """Return the error of an unknown setting, with the most similar of these names."""
    # Kafka's name for the whole broker, log.retention.ms, resembles other topic configs.
    near = [own.name for own in TOPIC_KEYS.values() if own.synonym == key]
    near = near or difflib.get_close_matches(key[:100], names, n=1)
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return InvalidTopicConfigError(key[:100], f"unknown setting{suggestion}")


def _boolean(key: TopicKey, raw: object) -> str:
    text = str(raw).strip().lower() if isinstance(raw, bool | str) else ""
    if text not in ("true", "false"):
        raise InvalidTopicConfigError(key.name, f"expected true or false, not {_shown(raw)}")
    return text


def _whole_number(key: TopicKey, raw: object, units: bool) -> str:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise InvalidTopicConfigError(key.name, f"expected a whole number, not {_shown(raw)}")
    if isinstance(raw, int):
        value = raw
    elif _WHOLE.fullmatch(raw.strip()):
        # Strip as in the match above: str.strip removes separators that int() does not accept.
        value = int(raw.strip())
    elif units and key.unit:
        try:
            value = parse_size(raw) if key.unit == "bytes" else parse_duration_ms(raw)
        except ValueError as error:
            raise InvalidTopicConfigError(key.name, str(error)) from None
    else:
        raise InvalidTopicConfigError(key.name, f"expected a whole number, not {_shown(raw)}")
    low, high = (_INT_MIN, INT_MAX) if key.kind is ValueKind.INT else (_LONG_MIN, LONG_MAX)
    if not low <= value <= high:
        raise InvalidTopicConfigError(key.name, f"{_shown(raw)} is outside {low} to {high}")
    _check_range(key, value, raw)
    if key.name == "compression.gzip.level" and value == 0:
        raise InvalidTopicConfigError(key.name, "expected -1 or 1 to 9, not 0")
    return str(value)


def _decimal(key: TopicKey, raw: object) -> str:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise InvalidTopicConfigError(key.name, f"expected a number, not {_shown(raw)}")
    if isinstance(raw, str) and not _DECIMAL.fullmatch(raw.strip()):
        raise InvalidTopicConfigError(key.name, f"expected a number, not {_shown(raw)}")
    try:
        value = float(raw.strip() if isinstance(raw, str) else raw)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise InvalidTopicConfigError(key.name, f"expected a number, not {_shown(raw)}")
    _check_range(key, value, raw)
    return repr(value)


def _check_range(key: TopicKey, value: float, raw: object) -> None:
    if key.minimum is not None and value < key.minimum:
        raise InvalidTopicConfigError(key.name, f"{_shown(raw)} is below {key.minimum}")
    if key.maximum is not None and value > key.maximum:
        raise InvalidTopicConfigError(key.name, f"{_shown(raw)} is above {key.maximum}")


def _string(key: TopicKey, raw: object) -> str:
    if not isinstance(raw, str) or (key.choices and raw.strip() not in key.choices):
        requested = f"one of {', '.join(key.choices)}" if key.choices else "text"
        raise InvalidTopicConfigError(key.name, f"expected {requested}, not {_shown(raw)}")
    return raw.strip()


def _list(key: TopicKey, raw: object) -> str:
    items = raw.split(",") if isinstance(raw, str) and raw.strip() else raw
    if items == "" or (isinstance(items, str) and not items.strip()):
        items = []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidTopicConfigError(key.name, f"expected a list of words, not {_shown(raw)}")
    words = [word.strip() for word in items]
    if key.name == "cleanup.policy":
        words = ["compact" if word == "dedupe" else word for word in words]
    for word in words:
        allowed = word in key.choices if key.choices else _THROTTLED_REPLICAS.fullmatch(word)
        if not allowed:
            requested = " and ".join(key.choices) or "partition:broker pairs or *"
            raise InvalidTopicConfigError(key.name, f"{_shown(word)} is not one of {requested}")
    return ",".join(dict.fromkeys(words))


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
