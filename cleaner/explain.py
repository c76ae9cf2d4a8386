"""Why is this not compacting? One partition's chain of verdicts, and what it means in words.

Pure: numbers in, an answer out. The console and the command line print `sentences`.
"""

from dataclasses import dataclass

from cleaner.history import JobRecord
from cleaner.plan import Verdict
from cleaner.registry import StoryEntry
from cleaner.states import Quarantined, State
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one partition at this moment. Times in wall ms."""

    partition: TopicPartition
    at_ms: int
    state: State
    verdict: Verdict | None  # judged now; None where its numbers make no sense
    story: list[StoryEntry]  # its last transitions, oldest first
    queue_position: int | None  # 1 is next; None: it does not wait for a worker
    next_attempt_ms: int | None  # not before that; None: nothing is planned
    quarantine: Quarantined | None
    last_job: JobRecord | None
    held: bool  # paused by an operator
