"""Profiles: named sets of the options that connect commands to a broker (`varve --profile NAME`).

They are in one YAML file, for example:

    prod:
      bootstrap: kafka.example.com:9094
      http: https://kafka.example.com:9644
      command_config: prod.properties
"""

import os
from pathlib import Path
from typing import Any, Final

import click

from admin.command import fail
from config import exit_codes
from config.printable import printable

FILE_VARIABLE: Final = "VARVE_PROFILES"
FILE_BYTES_MAX: Final = 1 << 20
# The setting of a profile -> the environment variable that all commands read.
VARIABLES: Final = {
    "bootstrap": "VARVE_BOOTSTRAP",
    "http": "VARVE_HTTP",
    "command_config": "VARVE_COMMAND_CONFIG",
    "token_file": "VARVE_TOKEN_FILE",
}
_FILE_SETTINGS: Final = ("command_config", "token_file")


def profiles_file() -> Path:
    """Return the path of the file: VARVE_PROFILES, or varve/profiles.yaml in XDG_CONFIG_HOME."""
    if path := os.environ.get(FILE_VARIABLE):
        return Path(path)
    folder = os.environ.get("XDG_CONFIG_HOME")  # of the XDG Base Directory Specification
    return (Path(folder) if folder else Path.home() / ".config") / "varve" / "profiles.yaml"


def use_profile(_context: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Set the environment variables of the profile `name`, and unset those it does not have.

    A variable of another broker could otherwise direct half of a command to that broker.
    """
    if name is None:
        return
    profiles = read_profiles(profiles_file())
    if name not in profiles:
        names = ", ".join(sorted(profiles)) or "none"
        raise click.BadParameter(f"no profile {name} in {profiles_file()}; it has: {names}")
    for setting, variable in VARIABLES.items():
        value = profiles[name].get(setting)
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def read_profiles(path: Path) -> dict[str, dict[str, str]]:
    """Return the settings of each profile; ends the process if the file is not valid.

    Paths of files are relative to the folder of this file.
    """
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        fail(f"cannot read the profiles in {path}: {error.strerror}", exit_codes.USAGE)
    if len(data) > FILE_BYTES_MAX:
        fail(f"{path} has more than {FILE_BYTES_MAX} bytes", exit_codes.USAGE)
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        fail(f"{path} is not valid YAML: {error}", exit_codes.USAGE)
    if content is None:
        return {}
    if not isinstance(content, dict):
        fail(f"{path}: expected a name and settings for each profile", exit_codes.USAGE)
    return {str(name): _profile(path, str(name), value) for name, value in content.items()}


def _profile(path: Path, name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        fail(f"{path}: {name}: expected settings", exit_codes.USAGE)
    profile = {}
    for setting, text in value.items():
        if setting not in VARIABLES:
            names = ", ".join(VARIABLES)
            fail(f"{path}: {name}: unknown setting {setting}; there are {names}", exit_codes.USAGE)
        if not isinstance(text, str) or not text or "\0" in text:
            fail(f"{path}: {name}: {setting} has to be text", exit_codes.USAGE)
        is_file = setting in _FILE_SETTINGS
        profile[setting] = str(path.parent / os.path.expanduser(text)) if is_file else text
    return profile


profile_option = click.option(
    "--profile",
    envvar="VARVE_PROFILE",
    is_eager=True,
    expose_value=False,
    callback=use_profile,
    metavar="NAME",
    help="Connect to the broker of a profile (VARVE_PROFILE); see `varve profiles`.",
)


@click.command(short_help="List the profiles for --profile.")
def profiles() -> None:
    """List the profiles, which `varve --profile NAME COMMAND` uses.

    The file is VARVE_PROFILES, by default varve/profiles.yaml in ~/.config. It has a name and
    settings for each profile:

    \b
    production:
      bootstrap: kafka.example.com:9093
      http: https://kafka.example.com:9644
      command_config: production.properties

    docs/reference/client-security.md describes the settings.
    """
    path = profiles_file()
    if not path.exists():
        click.echo(f"There are no profiles: {path} does not exist.")
        return
    for name, settings in sorted(read_profiles(path).items()):
        values = ", ".join(f"{setting} {value}" for setting, value in settings.items())
        click.echo(printable(f"{name}: {values or 'the defaults'}"))
