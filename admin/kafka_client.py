"""What commands that speak the Kafka protocol share: the address and the connection."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click

from admin.command import command_security, fail
from config import exit_codes
from config.security.clients import Cluster

if TYPE_CHECKING:
    from protocol.client.administration import BlockingClient

    C = TypeVar("C", bound=BlockingClient)

bootstrap_option = click.option(
    "--bootstrap",
    default="127.0.0.1:9092",
    show_default=True,
    metavar="HOST:PORT",
    help="The broker's address for Kafka clients.",
)


@contextmanager
def connected(bootstrap: str, make_client: "Callable[[Cluster], C]") -> "Iterator[C]":
    """Connect a client to the broker; turn its errors into exit codes."""
    from protocol.client.administration import RefusedError
    from protocol.client.connection import WireError
    from protocol.errors import ProtocolError

    try:
        cluster = Cluster(bootstrap, command_security())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bootstrap") from None
    try:
        with make_client(cluster) as client:
            yield client
    except OSError as error:
        fail(f"cannot reach {bootstrap}: {error}", exit_codes.UNREACHABLE)
    except (RefusedError, WireError, ProtocolError) as error:
        fail(str(error))
