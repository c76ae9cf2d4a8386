"""One budget over all receive buffers: who gets memory, who waits, who loses it."""

import random
from collections.abc import Callable

import pytest

from broker.network.buffer_budget import BufferBudget
from tests.support.draws import cases

MIB = 1 << 20
LIMIT = 10 * MIB


class Loop:
    """Runs what was put off, in order."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []

    def call_soon(self, work: Callable[[], None]) -> None:
        self.later.append(work)

    def run(self) -> None:
        while self.later:
            self.later.pop(0)()


class Client:
    """A connection whose frame needs `wanted` bytes, in steps."""

    def __init__(
        self, budget: BufferBudget, *, is_unauthenticated: bool = False, client: str | None = None
    ) -> None:
        self.budget = budget
        self.client = client or str(id(self))
        self.is_unauthenticated = is_unauthenticated
        self.held = 0
        self.asked = 0
        self.is_idle = False  # between two requests: what it holds is kept for the next
        self.is_closed = False
        self.give_backs = 0  # how often it was asked for memory

    def ask(self, growth: int) -> bool:
        self.asked, self.is_idle = growth, False
        return self.memory_freed()

    def memory_freed(self) -> bool:
        if not self.is_closed and self.budget.reserve(self, self.asked):
            self.held += self.asked
            self.asked = 0
            return True
        return False

    def finish(self, keeps: int = 0) -> None:
        """The request is answered."""
        self.is_idle, self.held, self.is_unauthenticated = True, keeps, False
        self.budget.set_reserved(self, keeps)
        self.budget.note_idle(self)

    def give_back(self) -> None:
        self.give_backs += 1
        if self.is_idle:
            self.finish()

    def close(self, reason: str) -> None:
        assert reason
        self.is_closed, self.held = True, 0
        self.budget.forget(self)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def budget(loop: Loop) -> BufferBudget:
    return BufferBudget(LIMIT, loop.call_soon)


def test_who_finds_no_room_waits_and_goes_on_when_others_are_done(
    loop: Loop, budget: BufferBudget
) -> None:
    first, over, last = Client(budget), Client(budget), Client(budget)
    assert first.ask(LIMIT)
    assert over.ask(MIB)  # one may exceed the budget, or two halves would wait for each other
    assert not last.ask(MIB)
    assert (budget.used_bytes, budget.waiting, budget.waits) == (LIMIT + MIB, 1, 1)
    first.finish()
    loop.run()
    assert last.held == MIB
    assert (budget.used_bytes, budget.waiting) == (2 * MIB, 0)


def test_those_who_wait_are_served_in_order(loop: Loop, budget: BufferBudget) -> None:
    holder, over = Client(budget), Client(budget)
    assert holder.ask(LIMIT)
    assert over.ask(1)
    waiting = [Client(budget) for _ in range(3)]
    sizes = [6 * MIB, 6 * MIB, MIB]
    assert not any(client.ask(size) for client, size in zip(waiting, sizes, strict=True))
    holder.finish()
    loop.run()
    assert [client.held for client in waiting] == [6 * MIB, 0, 0]  # a small one overtakes nobody
    waiting[0].finish()
    loop.run()
    assert [client.held for client in waiting] == [0, 6 * MIB, MIB]


def test_buffers_that_idle_clients_keep_are_given_back_first(budget: BufferBudget) -> None:
    """As many as it takes."""
    idle = [Client(budget) for _ in range(10)]
    for client in idle:
        assert client.ask(MIB)
        client.finish(keeps=MIB)
    other = Client(budget, is_unauthenticated=True)
    assert other.ask(5 * MIB)
    assert not other.is_closed
    assert [client.held for client in idle] == [0] * 5 + [MIB] * 5
    assert budget.used_bytes == LIMIT


def test_unauthenticated_connections_lose_their_buffers_before_a_working_client_waits(
    budget: BufferBudget,
) -> None:
    """Of those the largest first, and no more than it takes."""
    small, large = Client(budget, is_unauthenticated=True), Client(budget, is_unauthenticated=True)
    assert small.ask(3 * MIB)
    assert large.ask(7 * MIB)
    client = Client(budget)
    assert client.ask(4 * MIB)
    assert (large.is_closed, small.is_closed, budget.closed) == (True, False, 1)


def test_unauthenticated_connections_alone_hold_no_more_than_the_budget(
    budget: BufferBudget,
) -> None:
    """Fifteen frames of 90 MB that never become complete."""
    clients = [Client(budget, is_unauthenticated=True) for _ in range(15)]
    for _ in range(9):
        for client in clients:
            if not client.is_closed:
                client.ask(MIB)
            assert budget.used_bytes <= LIMIT
    client = Client(budget)
    assert client.ask(LIMIT)


def test_finding_memory_does_not_search_all_connections(budget: BufferBudget) -> None:
    """Those in the middle of a request are asked once, however often others want memory."""
    clients = [Client(budget) for _ in range(1_000)]
    for client in clients:
        assert client.ask(1_000)
        client.finish(keeps=1_000)
        client.is_idle = False  # its next request has begun, in the buffer that it kept
    assert Client(budget).ask(LIMIT)
    late = [Client(budget) for _ in range(1_000)]
    assert not any(client.ask(1) for client in late)
    assert sum(client.give_backs for client in clients) == 1_000


def test_who_has_sent_a_request_since_it_reserved_is_not_closed(budget: BufferBudget) -> None:
    client, other = Client(budget, is_unauthenticated=True), Client(budget, is_unauthenticated=True)
    assert client.ask(6 * MIB)
    client.is_unauthenticated = False
    assert other.ask(4 * MIB)
    assert Client(budget).ask(2 * MIB)
    assert (client.is_closed, other.is_closed) == (False, True)


def test_a_client_with_many_connections_leaves_memory_for_others(
    loop: Loop, budget: BufferBudget
) -> None:
    attackers = [Client(budget, client="a") for _ in range(100)]
    for _ in range(4):
        for attacker in attackers:
            if not attacker.asked:
                attacker.ask(MIB // 4)
    assert LIMIT // 2 <= budget.used_bytes <= LIMIT // 2 + MIB
    other = Client(budget, client="b")
    assert other.ask(MIB)
    assert budget.is_short(attackers[0])
    assert not budget.is_short(other)
    for _ in range(1000):  # the others of the client follow, in their order
        attacker = next((item for item in attackers if item.held and not item.asked), None)
        if attacker is None:
            break
        attackers.remove(attacker)
        attacker.finish()
        attacker.close("done")
        loop.run()
    assert not attackers
    assert budget.used_bytes == MIB
    other.close("done")
    assert not any((budget._counted, budget._client_bytes, budget._held_back, budget._over_share))


def test_a_client_gets_the_buffers_that_it_keeps_for_later(budget: BufferBudget) -> None:
    idle = [Client(budget, client="a") for _ in range(5)]
    for client in idle:
        assert client.ask(MIB)
        client.finish(keeps=MIB)
    assert Client(budget, client="a").ask(4 * MIB)
    assert sum(client.give_backs for client in idle) == 5


@pytest.mark.parametrize("owners", [1, 3, 100])
@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
def test_every_frame_of_a_working_client_is_received_in_the_end(seed: int, owners: int) -> None:
    print("seed", seed)
    rng, loop = random.Random(seed), Loop()
    limit = rng.choice((MIB, LIMIT))
    budget = BufferBudget(limit, loop.call_soon)
    clients = [Client(budget, client=str(rng.randrange(owners))) for _ in range(12)]
    expected = {client: rng.randrange(1, 8 * MIB) for client in clients}
    for _ in range(10_000):
        unfinished = [client for client in clients if expected[client]]
        if not unfinished:
            break
        client = rng.choice(unfinished)
        if client.asked:  # it waits; others go on
            loop.run()
            continue
        if client.held >= expected[client]:
            expected[client] = 0
            client.finish(keeps=rng.choice((0, MIB)) if client.held > MIB else 0)
        else:
            client.ask(min(expected[client] - client.held, max(client.held, MIB // 4)))
        loop.run()
        assert budget.used_bytes <= limit + 8 * MIB
        assert budget.used_bytes == sum(client.held for client in clients)
    assert not any(expected.values())
