"""`varve --profile`, `varve profiles` and `varve completion`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.profiles import VARIABLES
from broker.cli import main
from config import exit_codes
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("profiles"), {}) as running:
        yield running


def run(file: Path, *arguments: str, **environment: str) -> Result:
    names: dict[str, str | None] = dict.fromkeys((*VARIABLES.values(), "VARVE_PROFILE"))
    return CliRunner().invoke(
        main, arguments, env=names | {"VARVE_PROFILES": str(file)} | environment
    )


def test_a_profile_connects_commands_of_both_protocols(broker: VarveBroker, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    (tmp_path / "here.properties").write_text("security.protocol=PLAINTEXT\n")
    file.write_text(
        f"here:\n  bootstrap: {broker.bootstrap}\n  http: {broker.url}\n"
        "  command_config: here.properties\n"
        f"away:\n  bootstrap: 127.0.0.1:{free_port()}\n"
    )
    assert run(file, "--profile", "here", "topics", "list").exit_code == exit_codes.DONE
    assert run(file, "--profile", "here", "cleaner", "status").exit_code == exit_codes.DONE
    assert run(file, "topics", "list", VARVE_PROFILE="here").exit_code == exit_codes.DONE
    other = {"VARVE_BOOTSTRAP": broker.bootstrap}
    away = run(file, "--profile", "away", "topics", "list", **other)
    assert away.exit_code == exit_codes.UNREACHABLE  # the profile counts, not the variable
    option = ("--bootstrap", broker.bootstrap)
    assert run(file, "--profile", "away", "topics", "list", *option).exit_code == exit_codes.DONE


def test_variables_that_a_profile_does_not_have_are_unset(tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text("bare: {}\n")
    seen = {}

    @main.command("look")
    def look() -> None:
        seen.update({name: os.environ.get(name) for name in VARIABLES.values()})

    try:
        result = run(file, "--profile", "bare", "look", VARVE_HTTP="http://elsewhere:1")
    finally:
        del main.commands["look"]
    assert result.exit_code == exit_codes.DONE, result.output
    assert set(seen.values()) == {None}


def test_profiles_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    assert run(file, "profiles").output == f"There are no profiles: {file} does not exist.\n"
    file.write_text("b: {http: 'http://b:9644'}\na: {token_file: token}\n")
    assert (
        run(file, "profiles").output == f"a: token_file {tmp_path}/token\nb: http http://b:9644\n"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the profiles in"),
        ("other: {}\n", "no profile prod in"),
        ("", "it has: none"),
        ("- a\n", "expected a name and settings for each profile"),
        ("prod: [1]\n", "prod: expected settings"),
        ("prod: {https: x}\n", "prod: unknown setting https; there are bootstrap, http"),
        ("prod: {http: 1}\n", "prod: http has to be text"),
        ("prod: {http: ''}\n", "prod: http has to be text"),
        ('prod: {http: "a\\0b"}\n', "prod: http has to be text"),
        ("prod: {http: 'ftp://x'}\n", "ftp://x"),
        ("{", "is not valid YAML"),
        ("a: \x00", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
    ],
)
def test_a_wrong_profile_ends_the_command_with_the_reason(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    file = tmp_path / "profiles.yaml"
    if content is not None:
        file.write_text(content)
    result = run(file, "--profile", "prod", "cleaner", "status")
    assert (result.exit_code, result.stdout) == (exit_codes.USAGE, ""), repr(result.exception)
    assert reason in " ".join(result.stderr.split())


def test_the_script_for_bash_completes_commands() -> None:
    script = CliRunner().invoke(main, ["completion", "bash"])
    assert script.exit_code == exit_codes.DONE
    line = 'COMP_WORDS=(varve top); COMP_CWORD=1; _varve_completion varve; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", f"{script.stdout}\n{line}"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "topics\n", done.stderr
