"""What the documents say is what the code does: generated pages, links, names, settings."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from broker.cli import main
from config import exit_codes
from config.loader import load
from config.reference import page
from config.settings import Settings
from protocol.api import APIS, ApiKey
from protocol.messages import ApiVersionsRequest
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.memory_env import MemoryEnv
from tests.support.varve import running_varve

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs/reference/glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_page_is_current() -> None:
    written = (ROOT / "docs/reference/configuration.md").read_text()
    assert written == page(), "run `make docs` and review the change"


async def test_the_compatibility_page_lists_every_api_and_version() -> None:
    page = (ROOT / "docs/reference/kafka-compatibility.md").read_text()
    listed = re.findall(r"^\| (\d+) \| (\w+) \| (\d+)-(\d+) \|", page, re.M)
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        client = PrincipalClient(broker, "anyone")
        answer = await client.request(ApiKey.API_VERSIONS, 0, ApiVersionsRequest())
    reported = [
        (str(row.api_key), APIS[row.api_key].name, str(row.min_version), str(row.max_version))
        for row in answer.api_keys
    ]
    assert listed == reported


def test_the_index_of_decisions_lists_each_with_its_title() -> None:
    folder = ROOT / "docs/decisions"
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("0*.md")}
    listed = re.findall(r"^- \[(\d+)\]\((.+?)\): (.+)$", (folder / "README.md").read_text(), re.M)
    assert {name: f"# {number}: {title}" for number, name, title in listed} == titles


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs/README.md"
    listed = {
        (index.parent / name).resolve() for name in re.findall(r"\]\((\S+?)\)", index.read_text())
    }
    pages = {path for path in (ROOT / "docs").rglob("*.md") if not path.match("decisions/0*.md")}
    assert pages - {index} == {path for path in listed if path.suffix == ".md"}


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
        local = [target for target in targets if "://" not in target]
        assert [target for target in local if not (path.parent / target).exists()] == [], path


def test_paths_in_quotes_exist() -> None:
    packages = "config|storage|protocol|cleaner|admin|broker|pipeline|pyspark_varve"
    folders = f"{packages}|docs|tests|bench|deploy"
    for path in PAGES:
        quoted = re.findall(rf"`((?:{folders})/[\w./-]+)`", path.read_text())
        assert [name for name in quoted if not (ROOT / name).exists()] == [], path


def test_modules_in_quotes_exist() -> None:
    modules = {path.name for path in ROOT.glob("[a-z]*/**/*.py")}
    for path in PAGES:
        # Decisions may name modules of the past.
        if "decisions" not in path.parts:
            named = set(re.findall(r"`(\w+\.py)`", path.read_text()))
            assert named - modules == set(), path


def test_functions_and_tests_in_quotes_exist() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in PAGES:
        if "decisions" in path.parts:
            continue  # they may name what is gone
        page = path.read_text()
        for file, name in re.findall(r"`([\w./-]+\.py):(\w+)`", page):
            code = (ROOT / file).read_text()
            defined = re.search(rf"^ *(?:async )?(?:def|class) {name}\b", code, re.MULTILINE)
            assert defined, (path, file, name)
        named = set(re.findall(r"`(test_\w+)`", page))
        assert [name for name in named if f"def {name}(" not in tests] == [], path


def test_decisions_that_the_code_names_exist() -> None:
    named = {
        number
        for folder in (
            "config",
            "storage",
            "protocol",
            "cleaner",
            "admin",
            "broker",
            "pipeline",
            "tests",
            "bench",
        )
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"docs/decisions/(\d{4})", path.read_text())
    }
    existing = {path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")}
    assert named - existing == set()


def test_decisions_have_numbers_of_their_own() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs/decisions/0001-dependencies.md").read_text()
    reasons += (ROOT / "docs/decisions/0018-pipeline-dependencies.md").read_text()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = [re.split(r"[>=<;\[ ]", expected)[0] for group in groups for expected in group]
    plugins_and_stubs = re.compile(r"pytest-.*|types-.*")
    assert [n for n in names if n not in reasons and not plugins_and_stubs.fullmatch(n)] == []


def test_settings_in_the_documents_can_be_used(tmp_path: Path) -> None:
    for path in PAGES:
        for number, example in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.S)):
            file = tmp_path / f"{path.stem}-{number}.yaml"  # an error names it
            file.write_text(example)
            assert isinstance(load(str(file)), Settings)


def test_commands_in_the_documents_exist() -> None:
    existing = set(main.commands)
    for path in PAGES:
        # Where a command is shown: in a code block or in quotes.
        text = "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", path.read_text(), re.DOTALL))
        named = set(re.findall(r"(?:\.venv/bin/|\b)varve ([a-z][a-z-]+)", text))
        assert named <= existing, path


def shown_commands(text: str) -> Iterator[str]:
    """Yield what follows `varve` in code blocks and in quotes."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    for part in [*blocks, *re.findall(r"`(varve [^`\n]+)`", text)]:
        for line in part.replace("\\\n", " ").splitlines():
            if shown := re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?varve (.+)", line):
                yield shown[1]


def refusal(words: list[str]) -> str | None:
    """Why the command line refuses a command whose values are not looked at."""
    try:
        context = main.make_context("varve", words)
        while isinstance(context.command, click.Group):
            rest = [*context._protected_args, *context.args]
            name, command, rest = context.command.resolve_command(context, rest)
            assert command is not None
            context = command.make_context(name, rest, parent=context)
    except (click.BadParameter, click.exceptions.NoArgsIsHelpError):
        return None  # a placeholder such as PARTITION, or a group
    except click.UsageError as error:
        return error.format_message()
    except (click.exceptions.Exit, SystemExit):
        return None  # help, or a profile that is not on this machine
    return None


def test_options_of_commands_in_the_documents_exist() -> None:
    refused = {}
    for path in PAGES:
        for shown in shown_commands(path.read_text()):
            words = shlex.split(shown, comments=True)
            ends = [at for at, word in enumerate(words) if word in {"|", "<", ">", "&&"}]
            if reason := refusal(words[: ends[0]] if ends else words):
                refused[path.name, shown] = reason
    assert refused == {}


def test_an_unknown_option_in_a_document_would_be_found() -> None:
    assert refusal(["cleaner", "estimate", "customers", "--survival"]) is None
    for wrong in (["cleaner", "guess"], ["cleaner", "estimate", "customers", "--survive"]):
        assert refusal(wrong) is not None
    assert refusal(["topics", "list", "extra", "words"]) is not None


def test_every_exit_code_is_in_the_one_table_of_the_documents() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    listed = {
        name.replace(" ", "_").upper(): int(code)
        for code, name in re.findall(r"^\| (\d+) \| ([a-z ]+) \|", page, re.MULTILINE)
    }
    defined = {name: code for name, code in vars(exit_codes).items() if name.isupper()}
    defined = {name: code for name, code in defined.items() if not name.startswith("_")}
    assert listed == defined


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert named <= targets, path


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert [name for name in main.commands if name not in shown] == []


def test_environment_variables_are_documented() -> None:
    code = "".join(
        path.read_text()
        for folder in ("config", "storage", "admin", "broker", "pipeline", "pyspark_varve")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = set(re.findall(r"\"(VARVE_[A-Z_]+)\"", code))
    assert len(named) > 5
    pages = "".join(path.read_text() for path in PAGES)
    assert [name for name in sorted(named) if f"`{name}`" not in pages] == []


def test_options_of_the_spark_source_are_documented() -> None:
    code = (ROOT / "pipeline/datasource/options.py").read_text()
    named = set(re.findall(r"\.(?:text|flag|number|duration_ms)\(\s*\"([\w.]+)\"", code))
    assert len(named) > 12
    page = (ROOT / "docs/reference/spark-source.md").read_text()
    refused = {"kafka.security.protocol"}
    assert [name for name in sorted(named - refused) if f"`{name}`" not in page] == []


def test_the_glossary_has_every_word_once_and_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    words = [word for word in rows if word != "word"]
    assert 20 < len(words) <= 60
    assert len(words) == len(set(words))
    assert words == sorted(words, key=str.casefold)


def leaves(model: type[BaseModel]) -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        names += (
            leaves(inner) if isinstance(inner, type) and issubclass(inner, BaseModel) else [name]
        )
    return names


def test_every_setting_is_read_by_the_broker() -> None:
    code = "".join(
        path.read_text()
        for folder in ("storage", "cleaner", "broker")
        for path in (ROOT / folder).rglob("*.py")
    )
    # Read through Settings.layers and Settings.partitions, and by the flags of the command line.
    elsewhere = {"keys", "topics", "allow_insecure"}
    names = set(leaves(Settings)) - elsewhere
    assert sorted(name for name in names if not re.search(rf"\.{name}\b", code)) == []


def test_example_settings_are_good() -> None:
    for path in sorted((ROOT / "deploy").glob("*.yaml")):
        if "listeners" in (yaml.safe_load(path.read_text()) or {}):
            assert isinstance(load(str(path)), Settings)


def test_the_first_session_of_the_documents_works(tmp_path: Path) -> None:
    sessions = [
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
        for name in (
            "README.md",
            "docs/tutorials/getting-started.md",
            "docs/how-to/work-with-topics.md",
        )
    ]
    (readme,), (started,), (alter,) = sessions
    alter = (
        "from confluent_kafka.admin import AdminClient, NewTopic\n"
        "admin = AdminClient({'bootstrap.servers': '127.0.0.1:9092'})\n"
        "admin.create_topics([NewTopic('twins')])['twins'].result()\n"
    ) + alter
    assert len(readme.splitlines()) == 5
    with running_varve(tmp_path) as broker:
        for program, output in ((readme, "b'hello'\n"), (started, ""), (alter, "")):
            done = subprocess.run(
                [sys.executable, "-c", program.replace("127.0.0.1:9092", broker.bootstrap)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.stdout, done.returncode) == (output, 0), done.stderr
        assert (broker.data / "customers-2").is_dir()
