"""Shared parts of the commands that use the HTTP API: options, output, exit codes.

The exit codes: config/exit_codes.py.
"""

import difflib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from http import HTTPStatus
from typing import Any, Final, NoReturn, ParamSpec

import click

from admin.client import ApiClient, ApiRefusedError, Json, UnreachableError
from admin.rangeless_option import RangelessOption
from admin.watch import current_watch, terminal_height
from config import exit_codes
from config.printable import printable
from config.security.clients import (
    PLAINTEXT,
    ClientSecurity,
    ClientSecurityError,
    read_command_config,
)

DEFAULT_URL: Final = "http://127.0.0.1:9644"
POLL_SECONDS: Final = 0.25  # between two polls
P = ParamSpec("P")


_NO_TOPIC: Final = "there is no topic "  # the beginning of the broker's reason
TOPICS_HINT: Final = "`varve topics list` shows all"  # after the name of an unknown topic
_SECURITY: Final = "varve.client_security"  # in the context of a command


def with_command_config(function: Callable[P, None]) -> Callable[P, None]:
    """Add the option of TLS and SASL, once; `command_security` returns them.

    Kafka's tools have the same option and format. A file keeps passwords off the command line.
    """

    def parsed(context: click.Context, _parameter: click.Parameter, path: str | None) -> None:
        if path is None:
            return
        try:
            context.meta[_SECURITY] = read_command_config(path)
        except ClientSecurityError as error:
            raise click.BadParameter(str(error)) from None

    name = "command_config"
    if any(option.name == name for option in getattr(function, "__click_params__", ())):
        return function
    return click.option(
        "--command-config",
        name,
        envvar="VARVE_COMMAND_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=parsed,
        metavar="FILE",
        help="File with TLS and SASL settings, in Kafka's format (VARVE_COMMAND_CONFIG).",
    )(function)


def command_security() -> ClientSecurity:
    """Return TLS and SASL of the current command, from `--command-config`."""
    security: ClientSecurity = click.get_current_context().meta.get(_SECURITY, PLAINTEXT)
    return security


def _checked(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        ApiClient(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return url


def with_client(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options that name the broker's HTTP address; the command gets a `client`.

    The command raises TokenFileError if the token cannot be read.
    """

    @with_command_config
    @click.option(
        "--http",
        "url",
        envvar="VARVE_HTTP",
        default=DEFAULT_URL,
        show_default=True,
        callback=_checked,
        metavar="URL",
        help="The broker's HTTP address (VARVE_HTTP).",
    )
    @click.option(
        "--token-file",
        envvar="VARVE_TOKEN_FILE",
        metavar="FILE",
        help="File with the broker's HTTP token (VARVE_TOKEN_FILE).",
    )
    @wraps(function)
    def run(*args: Any, url: str, token_file: str | None, **options: Any) -> None:
        from config.security.token import read_token

        token = None if token_file is None else read_token(token_file).decode()
        try:
            client = ApiClient(url, token, command_security())
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--http") from None
        function(*args, client=client, **options)  # type: ignore[arg-type]

    return run  # type: ignore[return-value]


def api_command(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options that every command has, and turn errors into exit codes."""

    @with_client
    @json_option
    @wraps(function)
    def ask(*args: Any, client: ApiClient, **options: Any) -> None:
        try:
            function(*args, client=client, **options)  # type: ignore[arg-type]
        except ApiRefusedError as error:
            fail(refusal_text(error, client), code_of_refusal(error))

    @wraps(ask)
    def run(*args: P.args, **options: P.kwargs) -> None:
        from config.security.token import TokenFileError

        try:
            ask(*args, **options)  # type: ignore[arg-type]
        except TokenFileError as error:
            fail(str(error))
        except UnreachableError as error:
            fail(str(error), exit_codes.UNREACHABLE)
        except KeyboardInterrupt:
            fail("interrupted; the broker still carries out the request", exit_codes.INTERRUPTED)

    return run


def refusal_text(error: Exception, client: ApiClient | None = None) -> str:
    """Return the reason of a refusal, and what helps where the broker cannot know it.

    With a `client`, the text names a topic with a similar name.
    """
    if isinstance(error, ApiRefusedError) and error.status == HTTPStatus.UNAUTHORIZED:
        if client is not None and client.sends_credentials:
            return str(error)  # they are wrong
        return f"{error}: name them with --command-config or --token-file"
    if isinstance(error, ApiRefusedError) and str(error).startswith(_NO_TOPIC):
        topics = [] if client is None else _topic_names(client)
        return f"{error}; {topic_hint(str(error).removeprefix(_NO_TOPIC), topics)}"
    return str(error)


def topic_hint(topic: str, topics: Iterable[str], hint: str = TOPICS_HINT) -> str:
    """Return what helps if a topic does not exist: the name of a similar one, or the `hint`."""
    near = difflib.get_close_matches(topic, topics, n=1)
    return f"did you mean {near[0]}?" if near else hint


def _topic_names(client: ApiClient) -> list[str]:
    """Return the topics that the user may describe; none if the broker refuses to list them."""
    try:
        return [row["name"] for row in client.below("/api/v1").pages("/topics", "topics")]
    except (ApiRefusedError, UnreachableError):
        return []


def code_of_refusal(error: Exception) -> int:
    """Return USAGE if the topic does not allow the request, FAILED for every other refusal."""
    is_usage = isinstance(error, ApiRefusedError) and error.status == HTTPStatus.BAD_REQUEST
    return exit_codes.USAGE if is_usage else exit_codes.FAILED


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
seconds_type = click.FloatRange(min=0, min_open=True)
TIMEOUT_HELP: Final = "Maximum time to wait; after it, the exit code is 1."
timeout_option = click.option(
    "--timeout",
    cls=RangelessOption,
    type=seconds_type,
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help=TIMEOUT_HELP,
)


class PartitionNumber(click.IntRange):
    """The number of a partition; refusals call it that, not an "integer range"."""

    name = "partition number"


partition_type = PartitionNumber(0, (1 << 31) - 1)
ONE_PARTITION: Final = "Give `customers 0` or `customers-0` for a partition"
PARTITION_OR_TOPIC: Final = f"{ONE_PARTITION}, `customers` for all of a topic"


def partition_arguments(function: Callable[P, None]) -> Callable[P, None]:
    """Add the arguments that name one partition: see `select_partition`."""
    return add_partition_arguments(function, f"{ONE_PARTITION}.")


def optional_partition_arguments(function: Callable[P, None]) -> Callable[P, None]:
    """Add the arguments that name a partition, or a whole topic: see `select_partitions`."""
    return add_partition_arguments(function, f"{PARTITION_OR_TOPIC}.")


def add_partition_arguments(
    function: Callable[P, None], text: str, *, required: bool = True
) -> Callable[P, None]:
    """Add TOPIC and [PARTITION], and a last paragraph to the help that says how to give them."""
    function.__doc__ = f"{function.__doc__}\n\n    {text}"
    number = click.argument("partition", type=partition_type, required=False)
    return click.argument("topic", required=required)(number(function))


def show(answer: Json, as_json: bool, lines: Callable[[Json], Sequence[str]]) -> None:
    """Print an answer as it is, or as lines for people.

    Lines contain names that clients chose, so nothing in them may have an effect on a terminal.
    With --watch, JSON takes one line for each answer: see admin/watch.py.
    """
    watch = current_watch()
    if as_json:
        click.echo(json.dumps(answer, indent=None if watch else 2))  # escapes them itself
        return
    text = list(map(printable, lines(answer)))
    if watch is None:
        click.echo("\n".join(text))
    else:
        click.echo(watch.frame(text, now=datetime.now(), height=terminal_height()))


def show_progress(text: str) -> None:
    """Replace the last line of the terminal; an empty text removes it."""
    room = shutil.get_terminal_size().columns - 1  # only the last line can be replaced
    click.echo(f"\r\033[K{printable(text)[:room]}", nl=False, err=True)


def confirm_deletion(question: str) -> None:
    """Ask on the terminal; end the process if the answer is not yes."""
    try:
        if click.confirm(question, err=True):
            return
    except click.Abort:  # Ctrl-C, or there is nobody to answer
        click.echo(err=True)
    fail("nothing was deleted; --yes deletes without a question")


def fail(message: str, code: int = exit_codes.FAILED) -> NoReturn:
    """End the process with a reason on standard error."""
    lines = f"varve: {message}".split("\n")
    click.echo("\n".join(map(printable, lines)), err=True)
    sys.exit(code)
