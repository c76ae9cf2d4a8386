"""Which HTTP connection gives way to a new one."""

from contextlib import ExitStack
from typing import Any, cast

from aiohttp import web

from broker.http.authentication import Sender
from broker.http.connections import HttpConnections, mark_authorized
from broker.security.principal import Principal

LIMIT = 8
OPERATOR = Sender(Principal("operator"))
OWNER = Sender(Principal("owner"))  # of a topic
TOKEN = Sender(Principal("http", "Token"), is_unlimited=True)


class Connection:
    """One connection as aiohttp has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.transport = self
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Request(dict[Any, Any]):
    """A request that came on a connection."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol


class World:
    """Connections in the order in which they were made, and their requests in progress."""

    def __init__(self, stack: ExitStack) -> None:
        self.connections = HttpConnections()
        self.open: list[Connection] = []
        self._stack = stack

    def connect(self, name: str) -> Connection:
        connection = Connection(name)
        self.open.append(connection)
        return connection

    def ask(self, name: str, sender: Sender | None, *, in_progress: bool = False) -> None:
        """Connect and send a request, authorized if it has a sender."""
        request = Request(self.connect(name))
        handling = self.connections.handling(cast(web.Request, request))
        handling.__enter__()
        if sender is not None:
            mark_authorized(cast(web.Request, request), sender)
        if in_progress:
            self._stack.push(handling)
        else:
            handling.__exit__(None, None, None)

    def make_room(self) -> list[str] | None:
        """Return what was closed for another connection; None if nothing may be."""
        if not self.connections.make_room(cast(Any, self.open), LIMIT):
            return None
        closed = [item for item in self.open if item.is_aborted]
        self.open = [item for item in self.open if not item.is_aborted]
        return [item.name for item in closed]


def test_a_user_with_most_connections_gives_way_even_with_requests_in_progress() -> None:
    with ExitStack() as stack:
        world = World(stack)
        for number in range(6):
            world.ask(f"owner {number}", OWNER, in_progress=number != 3)
        world.ask("operator", OPERATOR, in_progress=True)
        world.connect("new")
        assert world.make_room() == ["owner 3"]  # it waits for its next request
        world.connect("newer")
        assert world.make_room() == ["owner 0"]
        world.connect("newest")
        assert world.make_room() == ["new"]  # half of the connections are enough for a user


def test_senders_that_may_do_everything_keep_their_requests_in_progress() -> None:
    with ExitStack() as stack:
        world = World(stack)
        for number in range(LIMIT):
            world.ask(str(number), TOKEN, in_progress=True)
        assert world.make_room() is None
