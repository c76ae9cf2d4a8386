"""What the parts of a simulation share: files, clock, broker, models and trace of one run."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from broker.app import Broker
from broker.leases.model import LeaseError
from broker.topics.partition import Partition
from broker.topics.topics import TopicError
from broker.views.compaction import ViewError
from cleaner.host import NotServedError
from storage.errors import StorageError
from storage.model import TopicPartition
from tests.sim.interleaving import Fibers, SimulatedEnv, SimulatedLoop
from tests.sim.model import PartitionModel
from tests.sim.script import Script

HOMES = ("/disk1", "/disk2")  # data directories; the second one only if replicas move
# What a client or an operator may be answered; anything else is a mistake.
OPERATION_ERRORS = (StorageError, TopicError, ViewError, LeaseError, OSError, NotServedError)


class World:
    """State of one run. `broker`, `loop` and `fibers` are those of the present life."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.rng = random.Random(f"run {script.seed}")
        self.env = SimulatedEnv(script.seed)
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.models: dict[str, PartitionModel] = {}
        self.erased_keys: dict[str, bytes] = {}  # by id of the erasure
        self.fibers: Fibers
        self.broker: Broker
        self.loop: SimulatedLoop
        self.tasks: set[asyncio.Task[Any]] = set()  # of this life
        self.has_news = False  # something was published since the last check
        self.has_rot = False  # a bit was flipped in this run
        # Whether recovery points are among the state that is lost. Such a run loses no power: the
        # zeros that this leaves in a closed segment count as damage without a recovery point.
        self.loses_points = (
            script.loses_state and random.Random(f"points {script.seed}").random() < 0.5
        )
        self.losses: tuple[str, ...] = ()  # files that the next life does not find
        self.clock_set_ms = 0  # by which the wall clock is set before the next life
        self.how = "kill"  # what follows where a process ends by itself

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.env.clock.passed / 1000:9.3f} {text}")

    def served(self, name: str) -> Partition | None:
        return self.broker.topics.partition(TopicPartition(name, 0))

    def note_config(self, name: str) -> None:
        topic = self.broker.topics.get(name)
        assert topic is not None
        model, now_ms = self.models[name], self.env.clock.passed_ms
        model.retention.append((now_ms, topic.config.delete_retention_ms))
        model.expiry_ms.add(topic.config.retention_ms)
        model.note_lag(topic.config.min_compaction_lag_ms, now_ms)

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """In the background; what is refused is no mistake."""

        async def quietly() -> None:
            try:
                await work()
            except OPERATION_ERRORS as error:
                self.note(f"    refused: {error!r:.200}")

        task = asyncio.ensure_future(quietly())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
