"""`varve users`: list, set and delete users with stored passwords, over the Kafka protocol.

Passwords are salted here: the broker never receives them. They come from a file, an environment
variable or the terminal, never from the command line, which other users of the machine can read.
"""

from typing import Final

import click

from admin.client import Json
from admin.command import confirm_deletion, fail, json_option, show, with_command_config
from admin.kafka.client import bootstrap_option, connected
from admin.watch import watched
from config import exit_codes
from config.printable import printable
from config.security.clients import SCRAM
from config.security.secrets import SECRET_BYTES_MAX, SecretError, SecretReference

ITERATIONS: Final = 4096

mechanism_option = click.option(
    "--mechanism",
    "mechanisms",
    type=click.Choice(tuple(SCRAM)),
    multiple=True,
    metavar="NAME",
    help=f"{' or '.join(SCRAM)}; default: both. Repeatable.",
)


@click.group(short_help="List, set and delete users and their passwords.")
def users() -> None:
    """List, set and delete users whose salted passwords the broker stores.

    These commands do not show users of the broker's settings file; change those there. If all
    listeners of the broker have SASL, name an existing user with --command-config.
    """


@users.command("list", short_help="List stored users.")
@click.argument("names", nargs=-1, metavar="[USER]...")
@json_option
@bootstrap_option
@with_command_config
@watched
def list_users(names: tuple[str, ...], *, as_json: bool, bootstrap: str) -> None:
    """List the stored users with their mechanisms and iterations."""
    from protocol.client.administration import SCRAM_CODES, UsersClient

    with connected(bootstrap, UsersClient, needs="DESCRIBE on the cluster") as client:
        rows = client.describe(names)
    by_code = {code: mechanism for mechanism, code in SCRAM_CODES.items()}
    errors = [row.error_message or "" for row in rows if row.error_code]
    answer = {
        "users": [
            {
                "user": row.user,
                "credentials": [
                    {
                        "mechanism": by_code.get(info.mechanism, str(info.mechanism)),
                        "iterations": info.iterations,
                    }
                    for info in row.credential_infos
                ],
            }
            for row in sorted(rows, key=lambda row: row.user)
            if not row.error_code
        ]
    }
    if answer["users"] or not errors:
        show(answer, as_json, _list_lines)
    if errors:
        fail("\n".join(errors))


def _list_lines(answer: Json) -> list[str]:
    lines = []
    for row in answer["users"]:
        infos = ", ".join(
            f"{credential['mechanism']} ({credential['iterations']} iterations)"
            for credential in row["credentials"]
        )
        lines.append(f"{row['user']}: {infos}")
    return lines or ["The broker stores no users."]


@users.command("set", short_help="Create a user, or change a password.")
@click.argument("user")
@mechanism_option
@click.option(
    "--iterations",
    type=click.IntRange(4096, 16_384),
    default=ITERATIONS,
    show_default=True,
    metavar="N",
    help="Number of rounds in which the password is hashed.",
)
@click.option(
    "--password",
    "source",
    metavar="SOURCE",
    help="Where the password is: file:PATH or env:NAME; default: ask on the terminal.",
)
@bootstrap_option
@with_command_config
def set_user(
    user: str, mechanisms: tuple[str, ...], iterations: int, source: str | None, bootstrap: str
) -> None:
    """Store the password of USER.

    Existing connections continue; the user's next connection needs the new password.
    """
    from protocol.client.administration import BlockingClient, UsersClient

    if source is None:
        with connected(bootstrap, BlockingClient):
            pass  # the broker can be reached, so that the user does not type in vain
    password = _read_password(source)
    with connected(bootstrap, UsersClient, needs="ALTER on the cluster") as client:
        for mechanism in mechanisms or SCRAM:
            client.set_password(user, password, mechanism, iterations)
    click.echo(f"The password of {printable(user)} is stored.")


@users.command("delete", short_help="Delete a user or one of its passwords.")
@click.argument("user")
@mechanism_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@bootstrap_option
@with_command_config
def delete_user(user: str, mechanisms: tuple[str, ...], *, yes: bool, bootstrap: str) -> None:
    """Delete the stored passwords of USER. Existing connections continue."""
    from protocol.client.administration import UsersClient

    needs = "ALTER on the cluster" if mechanisms else "DESCRIBE and ALTER on the cluster"
    with connected(bootstrap, UsersClient, needs=needs) as client:
        chosen = mechanisms or client.mechanisms(user)
        if not yes:
            confirm_deletion(f"Delete {printable(user)} for {', '.join(chosen)}?")
        for mechanism in chosen:
            client.delete_password(user, mechanism)
    click.echo(f"{printable(user)} is deleted for {', '.join(chosen)}.")


def _read_password(source: str | None) -> str:
    """Return the password; end the process if there is none."""
    if source is None:
        text: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        if len(text.encode()) > SECRET_BYTES_MAX:
            fail(f"the password has more than {SECRET_BYTES_MAX} bytes", exit_codes.USAGE)
        return text
    kind, _, name = source.partition(":")
    if kind not in ("file", "env") or not name:
        # Without the value: it may be a password.
        raise click.BadParameter("expected file:PATH or env:NAME", param_hint="--password")
    try:
        return SecretReference(kind, name).read()
    except SecretError as error:
        fail(str(error), exit_codes.USAGE)
