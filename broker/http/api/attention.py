"""What needs the attention of an operator, the worst first; pure.

Each kind lists at most `LISTED_MAX` problems, and one more that counts the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cleaner.states import Quarantined
from config.units import counted
from storage.model import TopicPartition

LISTED_MAX: Final = 20  # of a kind: more than a person reads


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem; `topic` and `partition` are None unless it concerns a single one."""

    kind: str
    text: str
    topic: str | None = None
    partition: int | None = None


def problems(
    *,
    not_served: Sequence[str],
    damaged: Mapping[str, int],
    quarantines: Mapping[TopicPartition, Quarantined],
    policy_unknown: Iterable[str],
    over_max_lag: int,
    erasures_unknown: str | None,
    erasures_at_risk: int,
    paused: int,
    paused_internal: int,
    cleaner_enabled: bool,
    reload_problem: str | None,
) -> list[Problem]:
    """Return the problems.

    `not_served` has a line for each disk and partition that is not served, `damaged` the number
    of damaged partitions of each topic, `policy_unknown` the topics that are neither cleaned nor
    expired until somebody sets their policy. `over_max_lag`, `erasures_at_risk` and `paused` count
    partitions, and `paused_internal` those of internal topics among the paused.
    `erasures_unknown` says why no erasure is carried out, if so. `reload_problem` is that of
    the last reload of the settings, if it failed.
    """
    problems = [
        *_bounded("not_served", (Problem("not_served", text) for text in not_served)),
        *_bounded("damaged", _damaged(damaged)),
        *_bounded("quarantined", _quarantined(quarantines)),
        *_bounded("policy_unknown", _policy_unknown(policy_unknown)),
    ]
    if reload_problem is not None:
        problems.append(Problem("not_reloaded", reload_problem))
    if over_max_lag:
        text = f"{counted(over_max_lag, 'partition')} behind max.compaction.lag.ms"
        problems.append(Problem("over_max_lag", text))
    if erasures_unknown is not None:
        problems.append(Problem("erasures_unknown", erasures_unknown))
    if erasures_at_risk:
        text = (
            f"{counted(erasures_at_risk, 'partition')} with an erasure that will miss its deadline"
        )
        problems.append(Problem("erasure_at_risk", text))
    if paused:
        internal = f" (and {paused_internal} of internal topics)" if paused_internal else ""
        text = f"{counted(paused - paused_internal, 'partition')}{internal} paused by an operator"
        problems.append(Problem("paused", text))
    if not cleaner_enabled:
        problems.append(Problem("cleaner_off", "the cleaner is switched off (cleaner.enabled)"))
    return problems


def _damaged(counts: Mapping[str, int]) -> Iterator[Problem]:
    for topic in sorted(counts):
        text = f"{topic}: {counted(counts[topic], 'partition')} with damaged batches"
        yield Problem("damaged", text, topic)


def _quarantined(quarantines: Mapping[TopicPartition, Quarantined]) -> Iterator[Problem]:
    for partition in sorted(quarantines):
        text = f"{partition} is in quarantine: {quarantines[partition].reason}"
        yield Problem("quarantined", text, partition.topic, partition.partition)


def _policy_unknown(topics: Iterable[str]) -> Iterator[Problem]:
    for topic in topics:
        text = f"{topic} is neither cleaned nor expired: policy unknown"
        yield Problem("policy_unknown", text, topic)


def _bounded(kind: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    more = 0
    for position, problem in enumerate(problems):
        if position < LISTED_MAX:
            yield problem
        else:
            more += 1
    if more:
        yield Problem(kind, f"and {more} more")
