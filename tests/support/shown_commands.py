"""The commands that the documents show: in blocks of code, and whole ones in quotes.

A command is whole if it has all its arguments and no placeholder such as TOPIC. Decisions are left
out, because they may name what is gone, and so is the changelog.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from broker.cli import main

ROOT = Path(__file__).resolve().parents[2]
# A test pastes the blocks of this page into one shell: tests/pipeline/jobs/test_tutorial.py.
PASTED = "docs/tutorials/topic-to-delta-table.md"
# Their comments show commands, indented by three blanks.
COMMENTED = ("Dockerfile", "deploy/compose.yaml", "deploy/prometheus/prometheus.yaml",
             "deploy/prometheus/varve-rules.yaml", "deploy/varve.service")  # fmt: skip
PROGRAM = re.compile(
    r"varve|make|curl|kcat|kafka-[a-z-]+\.sh|python3?|pip|pre-commit|go|docker|kubectl|helm|"
    r"systemctl|journalctl|dmesg|smartctl|iostat|timedatectl|free|df|openssl|promtool|sed|"
    r"install|useradd|mkdir|cp|echo|printf"
)
PLACEHOLDER = re.compile(r"(?:\S*=)?(?:[A-Z][A-Z_]+|[Nn])|\.\.\.")
BLOCK = r"^ *```(?P<kind>\w*)\n(?P<block>.*?)^ *```$"
INDENTED = r"^ {4}(?P<indented>\S.*)$"
QUOTED = r"`(?P<quoted>[^`]+)`"
SHOWN = re.compile(f"{BLOCK}|{INDENTED}|{QUOTED}", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command of a page. `is_refused`: the output that the page shows is an error."""

    page: str
    words: tuple[str, ...]
    lines: str = ""  # of standard input
    is_refused: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def program(self) -> str:
        return self.words[0]


def pages() -> list[str]:
    """Return the paths of the pages, relative to the root."""
    docs = sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
    names = [str(path.relative_to(ROOT)) for path in docs]
    names.remove(PASTED)
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", *names, *COMMENTED]


@cache
def commands_of(page: str) -> tuple[ShownCommand, ...]:
    """Return the commands of a page, in their order."""
    text = (ROOT / page).read_text()
    if page in COMMENTED:
        comments = "\n".join(re.findall(r"^# {3}(\S.*|  .*)$", text, re.MULTILINE))
        return tuple(_of_block(page, comments))
    found: list[ShownCommand] = []
    for shown in SHOWN.finditer(text):
        if shown["block"] is not None and shown["kind"] in ("", "sh"):
            found += _of_block(page, shown["block"])
        elif shown["indented"] is not None:
            found += _of_block(page, shown["indented"])
        elif shown["quoted"] is not None:
            quoted = _of_line(page, " ".join(shown["quoted"].split()))
            found += [command for command in quoted if _is_whole(command.words)]
    return tuple(found)


def all_commands() -> list[ShownCommand]:
    """Return the commands of all pages."""
    return [command for page in pages() for command in commands_of(page)]


def _of_block(page: str, text: str) -> Iterator[ShownCommand]:
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        yield from _of_line(page, line, is_refused=following.startswith("varve: "))


def _of_line(page: str, line: str, *, is_refused: bool = False) -> Iterator[ShownCommand]:
    """Yield the commands of a line, without what a shell would run beside them."""
    line = line.removeprefix("$ ")
    first = line.partition(" ")[0].removeprefix(".venv/bin/")
    if not PROGRAM.fullmatch(first):
        return
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|")
        lexer.whitespace_split = True
        tokens = list(lexer)
    except ValueError:
        return  # a sentence with an apostrophe
    for words in _split(tokens, "&&"):
        before, *behind = _split(words, "|")
        lines = ""
        if before[0] in ("printf", "echo") and behind:
            end = "\n" if before[0] == "echo" else ""
            lines = before[1].replace("\\t", "\t").replace("\\n", "\n") + end
            before = behind[0]
        program = before[0].removeprefix(".venv/bin/")
        yield ShownCommand(page, (program, *before[1:]), lines, is_refused)


def _split(words: Sequence[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _is_whole(words: Sequence[str]) -> bool:
    program, *arguments = words
    if not arguments or any(
        PLACEHOLDER.fullmatch(part) for word in arguments for part in word.split()
    ):
        return False
    if program.startswith("kafka-"):
        return "--bootstrap-server" in arguments
    return program != "varve" or called(words) is not None


def called(words: Sequence[str]) -> str | None:
    """Return the command of `varve` that a whole command line calls, such as `cleaner run`.

    None for a group of commands, and for a line that lacks an argument.
    """
    if "--help" in words or "--version" in words:
        return str(words[-1])
    if words[1:2] == ("pipeline",) and len(words) < 4 and words[2:] != ("warmup",):
        return None  # a job without its topic
    arguments = list(words[3 if words[1:2] == ("--profile",) else 1 :])
    context = main.make_context("varve", arguments, resilient_parsing=True)
    names = []
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return None
        name, command, rest = context.command.resolve_command(context, rest)
        if command is None:
            return None
        names.append(str(name))
        context = command.make_context(name, rest, parent=context, resilient_parsing=True)
    options = {option for parameter in context.command.params for option in parameter.opts}
    if "--all" in options and "--all" not in words and context.params["topic"] is None:
        return None  # it takes a topic or --all
    missing = [
        parameter.name
        for parameter in context.command.params
        if parameter.required and context.params.get(str(parameter.name)) in (None, ())
    ]
    return None if missing else " ".join(names)
