"""A question about permissions, and the resources that questions name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from protocol.api import ApiKey
from protocol.messages import Message
from tests.support.protocol.requests import advertised_range

TOPIC: Final = "orders"

CREATED: Final = ("victim", "other-victim")  # topics of each user, which it tries to delete

GROUP: Final = "billing"  # a classic group with committed offsets of both partitions

MODERN_GROUP: Final = "modern"  # a group of the consumer protocol with a member

MODERN_MEMBER: Final = "member-of-modern-00000"


def victims(user: str) -> list[str]:
    """Return the names of the topics of a user."""
    return [f"{name}-{user}" for name in CREATED]


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, and the ids of topics, which differ between brokers."""

    user: str
    topic_ids: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Question:
    """One request, which `make` builds."""

    name: str
    key: ApiKey
    version: int
    make: Callable[[Asked], Message]


class Questions:
    """The questions of one family of APIs, in the order in which each user asks them."""

    def __init__(self) -> None:
        self._questions: list[Question] = []

    def __iter__(self) -> Iterator[Question]:
        return iter(self._questions)

    def add(
        self, key: ApiKey, version: int | None = None
    ) -> Callable[[Callable[[Asked], Message]], Callable[[Asked], Message]]:
        """Add a question that the decorated function builds; by default of the newest version."""
        newest = advertised_range(key).max_version if version is None else version

        def register(make: Callable[[Asked], Message]) -> Callable[[Asked], Message]:
            label = make.__name__.replace("_", " ")
            self._questions.append(Question(f"{label} (version {newest})", key, newest, make))
            return make

        return register
