"""Resolves regular expressions of consumer groups to topic names (KIP-848).

The syntax is RE2's, as in Kafka; broker/client_patterns.py bounds the cost. Only names that the
client may describe are matched: otherwise the time of the answer would depend on the others.
Requests that need the same topics at the same time wait for one search of all names. It ends when
none of them waits any more: its answer is there, or its client has left. Searches share slots,
because each takes turns of the event loop: one may need seconds, and a client can begin one on each
of its connections.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from broker.client_patterns import ClientPattern, PatternError
from broker.event_loop.client_presence import ClientLeftError, ClientPresence
from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.groups.consumer.model import MembershipError, ResolvedRegex, TopicLookup
from protocol.errors import ErrorCode

# As Kafka: a change of topics reaches the groups within this time and a heartbeat.
REFRESH_MS: Final = 10_000
SEARCHES_AT_ONCE: Final = 2  # one of a client
# Limits of the cache: expressions, and the names that they match. The least recently used go first.
EXPRESSIONS_MAX: Final = 10_000
NAMES_MAX: Final = 1_000_000  # 64 bytes each in sets; one expression may match more


@dataclass(frozen=True, slots=True)
class TopicViewer:
    """The client that resolves an expression: it sees only topics that it may describe."""

    identity: Hashable  # of clients with the same permissions
    client: Hashable  # among which searches share slots: one user may have many addresses
    may_describe: Callable[[str], bool]
    has_left: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class _Search:
    """A search that is under way, and how many requests wait for it."""

    task: asyncio.Task[ResolvedRegex]
    waiting: int = 0


EVERYTHING: Final = TopicViewer(None, None, lambda _topic: True)


class TopicRegexes:
    """The expressions in use, with the topics that they matched last."""

    def __init__(self, topics: TopicLookup, wall_ms: Callable[[], int]) -> None:
        self._topics = topics
        self._wall_ms = wall_ms
        self._resolved: OrderedDict[tuple[str, Hashable], ResolvedRegex] = OrderedDict()
        self._names = 0  # in all of them
        self._searches: dict[tuple[str, Hashable], _Search] = {}
        self._slots = FairSlots(SEARCHES_AT_ONCE)

    def is_recent(self, resolved: ResolvedRegex) -> bool:
        """Return whether topics need not be looked up again yet."""
        return abs(self._wall_ms() - resolved.resolved_ms) < REFRESH_MS

    async def resolve(self, expression: str, viewer: TopicViewer = EVERYTHING) -> ResolvedRegex:
        """Return the topics that the whole expression matches. Raises MembershipError."""
        await yield_to_loop()  # a client compiles one expression in a round of the loop
        key = (expression, viewer.identity)
        resolved = self._resolved.get(key)
        if resolved is None or not self.is_recent(resolved):
            resolved = await self._search(key, viewer)
        if key in self._resolved:  # another task may have dropped it
            self._resolved.move_to_end(key)
        while len(self._resolved) > EXPRESSIONS_MAX or self._names > NAMES_MAX:
            _, dropped = self._resolved.popitem(last=False)
            self._names -= self._size(dropped)
        return resolved

    async def resolve_all(
        self, expressions: Iterable[str], viewer: TopicViewer
    ) -> Mapping[str, ResolvedRegex]:
        """Return the topics of expressions, without those that are refused.

        The search goes on if the client leaves.
        """
        viewer, resolved = replace(viewer, has_left=lambda: False), {}
        for expression in sorted(expressions):
            with suppress(MembershipError):
                resolved[expression] = await self.resolve(expression, viewer)
        return resolved

    @staticmethod
    def _size(resolved: ResolvedRegex | None) -> int:
        return 0 if resolved is None else len(resolved.topics)

    async def _search(self, key: tuple[str, Hashable], viewer: TopicViewer) -> ResolvedRegex:
        """Search all names, or wait for a search that has begun. Raises MembershipError."""
        search = self._searches.get(key)
        if search is None:
            # A task of its own, because the first client may disconnect while others wait.
            resolving = self._resolve_anew(key, _compile(key[0]), viewer)
            task = asyncio.create_task(resolving, name="match topics")
            search = self._searches[key] = _Search(task)
        search.waiting += 1
        try:
            return await ClientPresence(viewer.has_left).wait(search.task)
        except ClientLeftError as error:
            raise MembershipError(ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)) from error
        finally:
            search.waiting -= 1
            if not search.waiting:
                search.task.cancel()
                del self._searches[key]

    async def _resolve_anew(
        self, key: tuple[str, Hashable], pattern: ClientPattern, viewer: TopicViewer
    ) -> ResolvedRegex:
        now_ms = self._wall_ms()
        resolved = ResolvedRegex(await self._match(pattern, viewer), now_ms)
        self._names += len(resolved.topics) - self._size(self._resolved.get(key))
        self._resolved[key] = resolved
        return resolved

    async def _match(self, pattern: ClientPattern, viewer: TopicViewer) -> frozenset[str]:
        async with self._slots.slot(viewer.client):
            matching, turns = [], Turns()
            for name in tuple(self._topics.names()):
                await turns.take()
                try:
                    if viewer.may_describe(name) and pattern.matches(name):
                        matching.append(name)
                except PatternError as error:
                    reason = f"SubscribedTopicRegex takes too long: {error}"
                    raise MembershipError(ErrorCode.INVALID_REGULAR_EXPRESSION, reason) from error
        return frozenset(matching)


def _compile(expression: str) -> ClientPattern:
    try:
        return ClientPattern(expression)
    except PatternError as error:
        reason = f"SubscribedTopicRegex is not an RE2 expression: {error}"
        raise MembershipError(ErrorCode.INVALID_REGULAR_EXPRESSION, reason) from error
