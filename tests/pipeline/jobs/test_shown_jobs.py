"""The commands of `varve pipeline` that the documents show run, each on a topic of its own."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import write_deltalake

from pipeline.cli import JOBS, pipeline
from tests.pipeline.table_topics import make_topic, write
from tests.support.draws import only_in_ci
from tests.support.shown_commands import ShownCommand, all_commands
from tests.support.varve import VarveBroker

NOT_RUN = ("--master spark://host:7077", "warmup")  # tests/test_doc_commands.py has the exceptions
SHOWN = {
    command.words: command
    for command in all_commands()
    if command.words[:2] == ("varve", "pipeline")
    and not any(words in command.text for words in NOT_RUN)
}


@pytest.mark.spark
@pytest.mark.usefixtures("shared_session")
@only_in_ci("each job has tests of its own")
@pytest.mark.parametrize("command", SHOWN.values(), ids=lambda command: command.text)
def test_a_job_of_a_page_runs(
    broker: VarveBroker, command: ShownCommand, topic: str, tmp_path: Path
) -> None:
    words = list(command.words[2:])
    if "--create" not in words:
        make_topic(broker, topic)
        write(broker, topic, [(b"a", b'{"id": 1, "state": "new"}'), (b"a", b'{"id": 1}')] * 50)
    for name in ("customers", "left"):
        table = pa.table({"id": ["a", "b"], "name": ["Ada", "Bea"]})
        write_deltalake(str(tmp_path / name), table)
    place = re.compile(r"^/(data|tables)/|^(?=[a-z]+\.(html|json)$)")
    words = [place.sub(f"{tmp_path}/", word) for word in words]
    words = [topic if word in ("orders", "customers") else word for word in words]
    environment = {"VARVE_HTTP": broker.url, "VARVE_BOOTSTRAP": broker.bootstrap}
    done = CliRunner().invoke(pipeline, words, env=environment, catch_exceptions=False)
    assert done.exit_code == 0, (words, done.output)


def test_every_job_is_shown_or_has_tests_of_its_own() -> None:
    shown = {command.words[2] for command in SHOWN.values()}
    assert JOBS.keys() - shown == {"adopt"}  # test_what_was_left_is_adopted_later
