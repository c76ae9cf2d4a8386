"""What commands that ask a broker over its HTTP API have in common: options, answers, exit codes.

Exit codes: 0 done; 1 refused, or failed, or not in time; 2 the command line makes no sense; 3 no
broker answered.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, NoReturn, ParamSpec

import click

from broker.api_client import ApiClient, ApiRefusedError, Json, UnreachableError

DEFAULT_URL: Final = "http://127.0.0.1:9644"
EXIT_REFUSED: Final = 1
EXIT_UNREACHABLE: Final = 3
POLL_SECONDS: Final = 0.25  # between two looks at what goes on
P = ParamSpec("P")


def _checked(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        ApiClient(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return url


def asking(function: Callable[P, None]) -> Callable[P, None]:
    """Adds the options that every command has, and turns errors into exit codes."""

    @click.option(
        "--url",
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
    @click.option("--json", "as_json", is_flag=True, help="The API's answer as it is.")
    @wraps(function)
    def run(*args: Any, url: str, token_file: str | None, **options: Any) -> None:
        from config.token import TokenFileError, read_token

        try:
            token = None if token_file is None else read_token(token_file).decode()
            function(*args, client=ApiClient(url, token), **options)  # type: ignore[arg-type]
        except TokenFileError as error:
            fail(str(error))
        except ApiRefusedError as error:
            fail(str(error))
        except UnreachableError as error:
            fail(str(error), EXIT_UNREACHABLE)

    return run  # type: ignore[return-value]


longest_wait = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait.",
)


def of_partition(function: Callable[P, None]) -> Callable[P, None]:
    """Adds the arguments that name a partition."""
    function = click.argument("partition", type=click.IntRange(0, (1 << 31) - 1))(function)
    return click.argument("topic")(function)


def show(answer: Json, as_json: bool, lines: Callable[[Json], Sequence[str]]) -> None:
    """An answer as it is, or as lines for people."""
    click.echo(json.dumps(answer, indent=2) if as_json else "\n".join(lines(answer)))


def fail(message: str, code: int = EXIT_REFUSED) -> NoReturn:
    """Ends the process with a reason on standard error."""
    click.echo(f"varve: {message}", err=True)
    sys.exit(code)
