"""The command `varve`: reads the command line, calls the command, turns errors into exit codes.

Exit codes: config/exit_codes.py. Each command imports the modules that it needs, so that
`varve serve` loads no compiler and `varve version` starts at once.
"""

# ruff: noqa: E402  the handler of Ctrl-C is set before the imports

import errno
import gc
import os
import signal
import sys
import threading

# Python's own handler prints a traceback if Ctrl-C arrives during the imports. Until they are done,
# Ctrl-C ends the process silently.
_is_quiet = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _is_quiet:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from functools import partial
from typing import Any, NoReturn

import click

from admin.command import command_security, with_command_config
from admin.http.cleaner import cleaner
from admin.http.erase import erase
from admin.http.leases import leases
from admin.http.log import log_group
from admin.http.verify import verify
from admin.http.views import view
from admin.kafka.acls import acls
from admin.kafka.groups import groups
from admin.kafka.records import consume, produce
from admin.kafka.topics import topics
from admin.kafka.users import users
from admin.profiles import profile_option, profiles
from admin.rangeless_option import RangelessOption
from admin.tls import tls
from config import exit_codes

if _is_quiet:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SETTINGS_HELP = "Settings file (YAML); default: the built-in settings."
ADDRESS = "HOST:PORT"


def _print_version(context: click.Context, _parameter: click.Parameter, requested: bool) -> None:
    if requested:
        click.echo(version_text())
        context.exit()


class _Commands(click.Group):
    """A group whose commands end with a line and a code after Ctrl-C, and at a full disk."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See click.Group; for `varve status`, name the groups that have this command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            matches = [
                f"'varve {name} {args[0]}'"
                for name, group in sorted(self.commands.items())
                if isinstance(group, click.Group) and args[0] in group.commands
            ]
            if not matches:
                raise
            reason = f"No such command {args[0]!r}. Did you mean {' or '.join(matches)}?"
            raise click.UsageError(reason, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """See click.Group."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _hint_at_address(error) from None
        except KeyboardInterrupt:
            click.echo("varve: interrupted", err=True)
            sys.exit(exit_codes.INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # The interpreter writes what is left in the buffer at its end, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail(f"varve: cannot write the output: {error.strerror}")


def _hint_at_address(error: click.NoSuchOption) -> click.UsageError:
    """Return the error; after --bootstrap for a command that takes --http, or the reverse, name it.

    Commands connect to one of the two addresses of a broker.
    """
    other = {"--bootstrap": "--http", "--http": "--bootstrap"}.get(error.option_name)
    for option in error.ctx.command.params if error.ctx is not None else ():
        if isinstance(option, click.Option) and other in option.opts:
            reason = f"No such option {error.option_name!r}. This command takes {other} "
            return click.UsageError(f"{reason}{option.metavar}: {option.help}", error.ctx)
    return error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False,
              callback=_print_version, help="Print the version and exit.")  # fmt: skip
@profile_option
def main() -> None:
    """Varve: a Kafka-compatible broker built for log compaction."""


@main.command()
@click.option("--config", "config_file", metavar="FILE", help=SETTINGS_HELP)
@click.option("--data", multiple=True, metavar="DIR", help="Data directory. Repeatable.")
@click.option(
    "--listen", multiple=True, metavar=ADDRESS, help="Address for Kafka clients. Repeatable."
)
@click.option(
    "--advertise", metavar=ADDRESS, help="Address to give to clients; default: the one they use."
)
@click.option("--http", metavar=ADDRESS, help="Address of metrics, health checks and HTTP API.")
def serve(
    config_file: str | None,
    data: tuple[str, ...],
    listen: tuple[str, ...],
    advertise: str | None,
    http: str | None,
) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    Options override the settings file, which overrides the defaults: data in ./data, Kafka clients
    at 127.0.0.1:9092, HTTP at 127.0.0.1:9644.
    """
    flags = {
        "log_dirs": list(data) or None,
        "listeners": list(listen) or None,
        "advertise": advertise,
        "http": http,
    }
    overrides = {key: value for key, value in flags.items() if value is not None}
    try:
        code = _serve(config_file, overrides)
    except KeyboardInterrupt:  # before the broker set its own handler, so nothing has started
        code = exit_codes.DONE
    sys.exit(code)


def _serve(config_file: str | None, overrides: dict[str, Any]) -> int:
    from config.loader import ConfigFileError, load

    try:
        settings = load(config_file, overrides)
    except ConfigFileError as error:
        _fail(str(error), exit_codes.USAGE if error.is_usage else exit_codes.FAILED)
    # Modules are never garbage: without collections, the imports take a tenth less time.
    gc.disable()
    from broker.daemon import run
    from broker.logging import configure, open_audit_file

    gc.freeze()
    gc.enable()
    logs, audit_stream = settings.logging, None
    if logs.audit_file is not None:
        try:
            audit_stream = open_audit_file(logs.audit_file)
        except OSError as error:
            _fail(f"cannot open logging.audit_file: {error}")
    configure(logs.level, logs.format, audits=logs.audit_level != "off", audit_stream=audit_stream)
    reload = partial(load, config_file, overrides) if config_file is not None else None
    return run(settings, reload)


@main.command("check-config", short_help="Check a settings file.")
@click.argument("file", metavar="FILE")
@click.option(
    "--settings-only",
    is_flag=True,
    help="Do not read the certificates, passwords and tokens that the file names.",
)
def check_config(file: str, settings_only: bool) -> None:
    """Check a settings file as `serve` does, and list its errors, without starting a broker.

    This also reads the files and environment variables that the settings name, such as
    certificates.
    """
    from broker.lifecycle.reload import secret_problems
    from config.loader import ConfigFileError, load
    from config.units import counted

    try:
        settings = load(file)
    except ConfigFileError as error:
        _fail(str(error))
    if not settings_only and (problems := secret_problems(settings)):
        _fail("\n".join(f"{file}: {problem}" for problem in problems))
    listeners = ", ".join(str(address) for address in settings.listeners)
    if "listeners" not in settings.model_fields_set:
        listeners = f"{listeners}, the default"
    click.echo(f"{file}: valid; listeners {listeners}; {counted(len(settings.topics), 'topic')}")


@main.command(short_help="Show how compaction shrinks a log.")
@click.option(
    "--bootstrap", metavar=ADDRESS, help="Address of a running broker; default: a temporary one."
)
@click.option("--rate", cls=RangelessOption, type=click.IntRange(min=1), metavar="N",
              help="Updates per second; default: no limit.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Leave the topic on the broker of --bootstrap.")
@with_command_config
def demo(bootstrap: str | None, rate: int | None, keep: bool) -> None:
    """Produce a million keyed updates, watch the log shrink, verify the last value of each key."""
    from broker.demo import run
    from config.security.clients import Cluster

    if keep and bootstrap is None:
        raise click.UsageError(
            "--keep needs a running broker: start one with `varve serve` and name it with "
            "--bootstrap. The temporary broker is removed with its topic"
        )
    try:
        cluster = None if bootstrap is None else Cluster(bootstrap, command_security())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bootstrap") from None
    sys.exit(run(cluster, rate=rate, keep=keep))


@main.command(short_help="Compile the native code before the first clean.")
def warmup() -> None:
    """Compile the native code now, so that the first clean need not wait for it."""
    import time

    from storage.kernels import COMPILING, NUMBA_VARIABLE
    from storage.kernels import warm_up as warm_up_storage

    click.echo(COMPILING, err=True)
    started = time.monotonic()
    warm_up_storage()
    from cleaner.engine.kernels import warm_up as warm_up_cleaner

    warm_up_cleaner()
    seconds = time.monotonic() - started
    click.echo(f"native code ready in {seconds:.1f} s, cached in {os.environ[NUMBA_VARIABLE]}")


main.add_command(acls)
main.add_command(cleaner)
main.add_command(consume)
main.add_command(erase)
main.add_command(groups)
main.add_command(leases)
main.add_command(log_group)
main.add_command(produce)
main.add_command(profiles)
main.add_command(tls)
main.add_command(topics)
main.add_command(users)
main.add_command(verify)
main.add_command(view)


@main.command(
    short_help="Run jobs over whole topics, locally or on Spark.",
    add_help_option=False,  # `python -m pipeline` answers --help
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def pipeline(arguments: tuple[str, ...]) -> None:
    """Run jobs over whole topics outside the broker, in local processes or on Spark."""
    from importlib.util import find_spec

    from config.extras import PIPELINE_PACKAGES, install_command

    asks_help = not {"-h", "--help"}.isdisjoint(arguments)
    if not asks_help and any(find_spec(name) is None for name in PIPELINE_PACKAGES):
        click.echo(f"varve: this needs more packages: run {install_command('pipeline')}", err=True)
        sys.exit(exit_codes.USAGE)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "pipeline", *arguments])


@main.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script that completes the commands and options of varve in a shell.

    For bash, add this line to ~/.bashrc; zsh and fish likewise:

    eval "$(varve completion bash)"
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(main, {}, "varve", "_VARVE_COMPLETE").source())


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(version_text())


def version_text() -> str:
    """Return the line that `varve version` and `varve --version` print."""
    import platform

    from broker.version import installed_version

    return f"varve {installed_version()} (Python {platform.python_version()})"


def _fail(message: str, code: int = exit_codes.FAILED) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
