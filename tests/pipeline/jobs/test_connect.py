"""The engine over Spark Connect, whose session has no JVM of its own."""

import socket
from collections.abc import Iterator

import pytest

from pipeline.engines.spark_session import SparkSessionError, build_session
from tests.pipeline.cluster import running_connect_server
from tests.pipeline.spark_driver import Driver, driving
from tests.support.draws import only_in_ci

pytestmark = pytest.mark.spark

SAME_IN_ONE_SESSION = "test_spark_engine.py has the same rule in one session"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with (
        running_connect_server(tmp_path_factory.mktemp("connect")) as master,
        driving(master, tmp_path_factory.mktemp("driver"), {}) as running,
    ):
        yield running


@only_in_ci(SAME_IN_ONE_SESSION)
def test_results_come_in_the_order_of_the_tasks(driver: Driver) -> None:
    tasks = [str(number * 7919 % 100) for number in range(20)]
    answer = driver.ask(stage="echo", tasks=tasks)
    assert answer["found"] == tasks
    assert answer["parallelism"] == 2
    assert answer["reported"] == sorted(answer["reported"])
    assert answer["reported"][-1] == 20


@only_in_ci(SAME_IN_ONE_SESSION)
def test_a_reason_comes_back(driver: Driver) -> None:
    assert (
        driver.run("fail", "no such thing") == 'ValueError: no: "no such thing"\nand a second line'
    )
    assert driver.errors == ""


def test_a_server_that_is_not_there_is_an_error_in_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        master = f"sc://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(SparkSessionError, match="does not answer") as caught:
            build_session(master)
    assert "\n" not in str(caught.value)
