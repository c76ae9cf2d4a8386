"""What happens to the broker meanwhile: kills, restarts, throttles, an operator's hands."""

import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from protocol import messages as m
from protocol.api import ApiKey
from tests.soak.watch import workers_of
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker, start_varve

API: Final = "/api/v1/cleaner"
PAUSE_SECONDS: Final = 3.0
RATES: Final = (None, "4MiB", "16MiB")
POLICIES: Final = ("compact", "delete", "compact,delete")
TOGGLE_SECONDS_MAX: Final = 0.2
TOPIC_RESOURCE: Final = 2


@dataclass
class Patient:
    """The broker, whichever process it is at the moment, and what was done to it."""

    directory: Path
    settings: dict[str, Any]
    partitions: list[tuple[str, int]]
    toggled: str  # the topic whose policy changes
    rng: random.Random
    port: int
    broker: VarveBroker
    done: Counter[str] = field(default_factory=Counter)
    cleans: float = 0.0  # of the processes that are gone
    start_seconds: list[float] = field(default_factory=list)
    _seen_cleans: float = 0.0
    _deck: list[Callable[[], None]] = field(default_factory=list)
    _paused: list[tuple[float, tuple[str, int]]] = field(default_factory=list)

    def disturb(self) -> None:
        """Do one thing of many; each has its turn before the next round of all of them."""
        if not self._deck:
            self._deck = [
                *[self.kill_worker, self.kill_broker, self.throttle] * 2,
                *[self.pause, self.abort, self.run_now] * 2,
                *[self.move, self.toggle_policy] * 2,
                self.restart_broker,
            ]
            self.rng.shuffle(self._deck)
        action = self._deck.pop()
        action()
        self.done[action.__name__.replace("_", " ")] += 1

    def resume_due(self, *, everything: bool = False) -> None:
        """End the pauses that have lasted long enough."""
        now = time.monotonic()
        for until, where in list(self._paused):
            if everything or until <= now:
                self.post(where, "resume")
                self._paused.remove((until, where))

    def note_cleans(self) -> float:
        """Cleans so far, over all processes."""
        self._seen_cleans = self.broker.metric("varve_cleaner_cleans_total")
        return self.cleans + self._seen_cleans

    # Processes

    def kill_worker(self) -> None:
        workers = workers_of(self.broker.process.pid)
        if workers:
            worker = self.rng.choice(workers)
            try:
                worker.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                return

    def kill_broker(self) -> None:
        self.note_cleans()
        self.broker.kill()
        self._start()

    def restart_broker(self) -> None:
        self.note_cleans()
        assert self.broker.stop() == 0, self.broker.log_text[-3000:]
        self._start()

    def _start(self) -> None:
        self.cleans += self._seen_cleans
        self._seen_cleans = 0.0
        began = time.monotonic()
        self.broker = start_varve(self.directory, self.settings, port=self.port)
        self.start_seconds.append(time.monotonic() - began)

    # Settings

    def throttle(self) -> None:
        """Another rate, by the file and SIGHUP."""
        rate = self.rng.choice(RATES)
        cleaner = self.settings["cleaner"]
        cleaner["read_bytes_per_second"] = cleaner["write_bytes_per_second"] = rate
        path = self.directory / "varve.yaml"
        config = yaml.safe_load(path.read_text())
        config["cleaner"] = cleaner
        path.write_text(yaml.safe_dump(config))
        self.broker.process.send_signal(signal.SIGHUP)

    def toggle_policy(self) -> None:
        """Change a topic between compact and delete, faster than a clean; nothing expires."""
        with RawClient(self.port) as client:
            for policy in (*self.rng.choices(POLICIES, k=self.rng.randrange(1, 6)), POLICIES[0]):
                change = m.IncrementalAlterConfigsRequestConfig(name="cleanup.policy", value=policy)
                topic = m.IncrementalAlterConfigsRequestResource(
                    resource_type=TOPIC_RESOURCE, resource_name=self.toggled, configs=[change]
                )
                body = m.IncrementalAlterConfigsRequest(resources=[topic])
                answer = client.request(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, body)
                assert isinstance(answer, m.IncrementalAlterConfigsResponse)
                assert answer.responses[0].error_code == 0, answer
                time.sleep(self.rng.uniform(0, TOGGLE_SECONDS_MAX))

    # The operator

    def move(self) -> None:
        """Begin to move a partition to a data directory, perhaps the one where it is."""
        topic, partition = self.rng.choice(self.partitions)
        row = m.AlterReplicaLogDirsRequestTopic(name=topic, partitions=[partition])
        path = self.rng.choice(self.settings["log_dirs"])
        body = m.AlterReplicaLogDirsRequest(
            dirs=[m.AlterReplicaLogDirsRequestDir(path=path, topics=[row])]
        )
        with RawClient(self.port) as client:
            answer = client.request(ApiKey.ALTER_REPLICA_LOG_DIRS, 2, body)
        assert isinstance(answer, m.AlterReplicaLogDirsResponse)
        assert answer.results[0].partitions[0].error_code == 0, answer

    def pause(self) -> None:
        where = self.rng.choice(self.partitions)
        self.post(where, "pause")
        self._paused.append((time.monotonic() + PAUSE_SECONDS, where))

    def abort(self) -> None:
        self.post(self.rng.choice(self.partitions), "abort")

    def run_now(self) -> None:
        where = self.rng.choice(self.partitions)
        if all(paused != where for _, paused in self._paused):
            self.post(where, "run", {"roll": True})

    def post(self, where: tuple[str, int], action: str, body: dict[str, Any] | None = None) -> Any:
        """One of the API's actions; the answer."""
        path = f"{API}/partitions/{where[0]}/{where[1]}/{action}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.broker.http_port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise AssertionError(f"{path}: {error.code} {text}") from error

    def get(self, path: str) -> Any:
        """What the API says."""
        return json.loads(self.broker.get(f"{API}{path}"))
