"""Shared parts of the commands that use the Kafka protocol: address, connection, errors.

Requests that librdkafka supports go through it (`librdkafka`); the others use the small client in
protocol/client (`connected`).
"""

import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from admin.client import reason_of
from admin.command import TOPICS_HINT, command_security, fail
from config import exit_codes
from config.security.clients import ClientSecurity, Cluster

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from protocol.client.administration import BlockingClient

    C = TypeVar("C", bound=BlockingClient)

REQUEST_SECONDS: Final = 30.0
KAFKA_ADDRESS_HINT: Final = (
    "Give the broker's address for Kafka clients, one of its listeners (--bootstrap)"
)

bootstrap_option = click.option(
    "--bootstrap",
    envvar="VARVE_BOOTSTRAP",
    default="127.0.0.1:9092",
    show_default=True,
    metavar="HOST:PORT",
    help="The broker's address for Kafka clients (VARVE_BOOTSTRAP).",
)


@contextmanager
def connected(
    bootstrap: str, make_client: "Callable[[Cluster], C]", *, needs: str = ""
) -> "Iterator[C]":
    """Connect a client to the broker; turn its errors into exit codes.

    `needs`: the permissions of the command, for the message when the broker refuses it.
    """
    from protocol.client.administration import RefusedError
    from protocol.client.connection import NotKafkaError, WireError
    from protocol.errors import ProtocolError

    try:
        with make_client(_cluster(bootstrap)) as client:
            yield client
    except OSError as error:
        fail(unreachable_text(bootstrap, error, command_security()), exit_codes.UNREACHABLE)
    except RefusedError as error:
        permissions = _permissions(error.name, needs)
        fail(f"{str(error).rstrip('.')}{permissions}" if permissions else str(error))
    except NotKafkaError as error:
        fail(f"{error}. {KAFKA_ADDRESS_HINT}", exit_codes.UNREACHABLE)
    except (WireError, ProtocolError) as error:
        fail(str(error))


@contextmanager
def librdkafka(bootstrap: str, *, needs: str = "") -> Iterator[dict[str, Any]]:
    """Yield the settings of a librdkafka client; turn its errors into exit codes.

    librdkafka repeats failed connections and hides their cause, so a small client connects first:
    its errors appear at once. `needs` as in `connected`.
    """
    from confluent_kafka import KafkaError, KafkaException

    from protocol.client.administration import BlockingClient
    from protocol.client.librdkafka import connection_settings

    with connected(bootstrap, BlockingClient) as client:
        client.check_session()
    silent = logging.getLogger("varve.librdkafka")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    try:
        yield connection_settings(_cluster(bootstrap)) | {"logger": silent}
    except TimeoutError:
        fail(
            f"{bootstrap} did not complete the request within {REQUEST_SECONDS:g} s. Its log names "
            "what it does not serve, such as a damaged partition of __consumer_offsets"
        )
    except KafkaException as error:
        _fail_with(error.args[0], needs)
    # A client cannot be made, because its token has just expired. Though the library raises it,
    # this class has no base class.
    except KafkaError as error:  # type: ignore[misc]
        _fail_with(error, needs)


def reader_settings(settings: dict[str, Any], *, uncommitted: bool = False) -> dict[str, Any]:
    """Return the settings of a consumer that is told what to read, and reports each end."""
    return settings | {
        # The library requires a group and looks for its coordinator. No offset is
        # committed, and a user needs no permission for the group.
        "group.id": "varve-consume",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_uncommitted" if uncommitted else "read_committed",
    }


def hides_resources() -> bool:
    """Return whether the command's broker has authorization, and may hide names from the user."""
    from protocol.acl_codes import ResourceType
    from protocol.client.administration import AclsClient, RefusedError
    from protocol.errors import ErrorCode

    bootstrap: str = click.get_current_context().params["bootstrap"]
    with connected(bootstrap, AclsClient) as client:
        try:
            client.describe(principal=None, resource_type=ResourceType.CLUSTER, name=None)
        except RefusedError as error:
            return error.code != ErrorCode.SECURITY_DISABLED
    return True


def error_text(error: "KafkaError", needs: str = "") -> str:
    """Return the broker's message, or librdkafka's where it sent none.

    A refusal for want of permissions also names those that the request `needs`.
    """
    text = (error.str() or error.name()).removeprefix("Broker: ")
    permissions = _permissions(error.name(), needs)
    return f"{text.rstrip('.')}{permissions}" if permissions else text


def _permissions(error_name: str, needs: str) -> str:
    if not needs or not error_name.endswith("AUTHORIZATION_FAILED"):
        return ""
    return f": the user needs {needs} (`varve acls`)"


def _fail_with(error: "KafkaError", needs: str) -> None:
    from confluent_kafka import KafkaError

    gone = {
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
    }
    text = error_text(error, needs)
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        text = f"{text.rstrip('.')}; {TOPICS_HINT}"
    fail(text, exit_codes.UNREACHABLE if error.code() in gone else exit_codes.FAILED)


def unreachable_text(bootstrap: object, error: OSError, security: ClientSecurity) -> str:
    """Say why no broker could be reached, and what may help."""
    return f"cannot reach {bootstrap}: {reason_of(error)}. {_hint(error, security)}"


def _hint(error: OSError, security: ClientSecurity) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "A listener without TLS needs security.protocol=PLAINTEXT or SASL_PLAINTEXT"
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        if security.kafka_tls is not None and security.kafka_sasl is None:
            return "A listener with SASL needs security.protocol=SASL_SSL in --command-config"
        return "A listener with TLS or SASL needs --command-config"
    return "Is the broker running, and is this its address for Kafka clients (--bootstrap)?"


def _cluster(bootstrap: str) -> Cluster:
    try:
        return Cluster(bootstrap, command_security())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bootstrap") from None
