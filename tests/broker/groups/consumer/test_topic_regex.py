"""What is kept of the regular expressions of clients."""

import pytest

from broker.groups import topic_regex
from broker.groups.topic_regex import TopicRegexes
from tests.support.broker.consumer_group_world import FakeTopics


class CountedTopics(FakeTopics):
    """Counts how often an expression is matched with all names."""

    matched = 0

    def names(self) -> list[str]:
        self.matched += 1
        return super().names()


async def test_the_names_that_expressions_have_matched_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_regex, "NAMES_MAX", 30)
    topics = CountedTopics({f"t{index}": 1 for index in range(10)})
    now_ms = 0
    regexes = TopicRegexes(topics, lambda: now_ms)
    for letter in "abc":
        await regexes.resolve(f"t.*|{letter}")
    for letter in "abc":
        await regexes.resolve(f"t.*|{letter}")
    assert topics.matched == 3, "three times ten names are kept"
    await regexes.resolve("t.*|d")
    await regexes.resolve("t.*|c")
    assert topics.matched == 4
    await regexes.resolve("t.*|a")
    assert topics.matched == 5, "the least recently used has left"
    now_ms = topic_regex.REFRESH_MS
    topics.counts = {"t0": 1}
    for letter in "bcdefg":
        assert (await regexes.resolve(f"t.*|{letter}")).topics == {"t0"}
    assert topics.matched == 11


async def test_an_expression_that_matches_more_than_may_be_kept_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_regex, "NAMES_MAX", 5)
    topics = FakeTopics({f"t{index}": 1 for index in range(10)})
    regexes = TopicRegexes(topics, lambda: 0)
    assert len((await regexes.resolve("t.*")).topics) == 10
