"""The API below /api/v1: what it answers, what it refuses and how, over a broker in memory."""

import errno
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.http.api.compaction.cleaner import CleanerApi
from broker.http.api.openapi import openapi
from broker.http.server import PROBLEM_TYPE
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import ask, call_api
from tests.support.storage.logs import append
from tests.support.storage.memory_env import MemoryEnv

ROOT = "/api/v1/cleaner"
TOPICS = {
    "orders": {"partitions": 3, "keys": {"cleanup.policy": "compact"}},
    "audit": {"keys": {"cleanup.policy": "delete"}},
}
SECRET = "0123456789abcdef"


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=12)


# --- looking --------------------------------------------------------------------------------------


async def test_the_status_counts_partitions_and_names_the_settings(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        await broker.coordinators.offsets_topic.ensure()
        status, result = await call_api(broker, "GET", ROOT)
    assert status == 200
    assert result["enabled"] is False
    assert result["partitions"]["compacted"] == 3
    assert result["partitions"]["internal"] > 0
    assert result["partitions"]["paused"] == result["partitions"]["quarantined"] == 0
    assert result["settings"]["workers"] == 1
    assert result["read_bytes_per_second"] is None


async def test_partitions_come_in_pages_in_order(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        names, after = [], ""
        while True:
            _, page = await call_api(broker, "GET", f"{ROOT}/partitions?limit=2{after}")
            names += [(row["topic"], row["partition"]) for row in page["partitions"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        _, audit = await call_api(broker, "GET", f"{ROOT}/partitions?topic=audit")
    assert names == [("orders", 0), ("orders", 1), ("orders", 2)]  # compacted ones only
    assert [row["cleanup_policy"] for row in audit["partitions"]] == [["delete"]]


async def test_explain_answers_with_sentences_and_findings(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        status, result = await call_api(broker, "GET", f"{ROOT}/partitions/orders/1")
        _, audit = await call_api(broker, "GET", f"{ROOT}/partitions/audit/0")
    assert status == 200
    assert result["state"] == "idle"
    assert result["sentences"][0] == "orders-1 is empty: there is nothing to clean."
    assert {key: result["findings"][-1][key] for key in ("reason", "blocks")} == {
        "reason": "nothing dirty",
        "blocks": True,
    }
    assert "Its cleanup.policy is" in audit["sentences"][1]


async def test_explain_states_the_end_of_all_cleans_also_after_a_change_of_policy(
    env: MemoryEnv,
) -> None:
    path = f"{ROOT}/partitions/orders/1"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        _, new = await call_api(broker, "GET", path)
        _, audit = await call_api(broker, "GET", f"{ROOT}/partitions/audit/0")
        partition = broker.topics.partition(TopicPartition("orders", 1))
        assert partition is not None
        append(partition.log, b"1", b"2", b"3")
        await broker.pool.state_store.prepare_publication(partition.partition, 2)
        change = b'{"set": {"cleanup.policy": "delete"}}'
        status, _ = await call_api(
            broker, "PATCH", "/api/v1/topics/orders", change, **{"Content-Type": "application/json"}
        )
        assert status == 200
        _, after = await call_api(broker, "GET", path)
    assert (new["cleaned_end_offset"], audit["cleaned_end_offset"]) == (0, 0)
    assert (after["first_dirty_offset"], after["cleaned_end_offset"]) == (None, 2)


async def test_an_offline_partition_is_explained_and_not_steered(env: MemoryEnv) -> None:
    async with broker_in_memory(env, "/disk1", topics=TOPICS) as broker:
        broker.topics.take_offline([TopicPartition("orders", 1)], "its disk is gone")
        status, result = await call_api(broker, "GET", f"{ROOT}/partitions/orders/1")
        assert (status, result["state"]) == (200, "offline")
        assert "its disk is gone" in result["sentences"][1]
        for action in ("run", "pause", "resume", "abort", "retry"):
            status, result = await call_api(broker, "POST", f"{ROOT}/partitions/orders/1/{action}")
            assert (status, result["detail"]) == (409, "orders-1 is offline: its disk is gone")


async def test_the_history_is_empty_where_nothing_ran(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for query in ("", "?topic=orders", "?topic=orders&partition=0&limit=5"):
            assert await call_api(broker, "GET", f"{ROOT}/history{query}") == (200, {"jobs": []})


# --- acting ---------------------------------------------------------------------------------------


async def test_a_pause_holds_until_it_is_resumed_and_once_is_enough(env: MemoryEnv) -> None:
    path = f"{ROOT}/partitions/orders/2"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for changed in (True, False):
            _, result = await call_api(broker, "POST", f"{path}/pause")
            assert (result["changed"], result["paused"], result["state"]) == (
                changed,
                True,
                "paused",
            )
            assert result["durable"] is True
        for changed in (True, False):
            _, result = await call_api(broker, "POST", f"{path}/resume")
            assert (result["changed"], result["paused"], result["state"]) == (
                changed,
                False,
                "idle",
            )


async def test_a_pause_survives_a_restart(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        await call_api(broker, "POST", f"{ROOT}/partitions/orders/2/pause")
    async with broker_in_memory(env, topics=TOPICS) as broker:
        _, result = await call_api(broker, "GET", f"{ROOT}/partitions/orders/2")
        assert result["paused"] is True


async def test_right_after_a_pause_it_is_what_stands_in_the_way(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        await call_api(broker, "POST", f"{ROOT}/partitions/orders/2/pause")
        _, page = await call_api(broker, "GET", f"{ROOT}/partitions?topic=orders")
        rows = {row["partition"]: row for row in page["partitions"]}
        assert rows[2]["blocked_by"] == "paused by an operator"
        assert rows[1]["blocked_by"] != rows[2]["blocked_by"]
        await call_api(broker, "POST", f"{ROOT}/partitions/orders/2/resume")
        _, page = await call_api(broker, "GET", f"{ROOT}/partitions?topic=orders")
        assert {row["blocked_by"] for row in page["partitions"]} == {rows[1]["blocked_by"]}


async def test_a_pause_that_cannot_be_written_is_in_force_and_says_so(env: MemoryEnv) -> None:
    path = f"{ROOT}/partitions/orders/2"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        fault = env.fail_on(lambda _, path: "varve.cleaner" in path, 28)
        _, result = await call_api(broker, "POST", f"{path}/pause")
        assert (result["paused"], result["durable"]) == (True, False)
        _, every = await call_api(broker, "POST", f"{ROOT}/pause")
        assert every == {"changed": 2, "durable": False}
        fault.remove()
        _, result = await call_api(broker, "POST", f"{path}/pause")
        assert (result["changed"], result["durable"]) == (False, True)
    async with broker_in_memory(env, topics=TOPICS) as broker:
        _, result = await call_api(broker, "GET", path)
        assert result["paused"] is True


@asynccontextmanager
async def failing_disk(env: MemoryEnv) -> AsyncIterator[Broker]:
    """A broker with two disks, of which the first one can no longer be read."""
    async with broker_in_memory(env, "/disk1", "/disk2", topics=TOPICS) as broker:
        for partition in broker.topics.partitions():
            append(partition.log, b"value")
        env.fail_on(lambda op, path: op == "pread" and path.startswith("/disk1/"), errno.EIO)
        yield broker


async def test_a_pause_of_all_partitions_leaves_out_what_has_just_failed(env: MemoryEnv) -> None:
    async with failing_disk(env) as broker:
        logs = [partition.log for partition in broker.topics.existing("orders").partitions.values()]
        count = sum(log.directory.startswith("/disk2/") for log in logs)
        answer = await call_api(broker, "POST", f"{ROOT}/pause")
        assert answer == (200, {"changed": count, "durable": True})
        assert 0 < count < len(logs)


async def test_a_pause_of_a_partition_that_has_just_failed_is_refused(env: MemoryEnv) -> None:
    async with failing_disk(env) as broker:
        topic = broker.topics.existing("orders")
        failed = next(
            n for n, p in topic.partitions.items() if p.log.directory.startswith("/disk1")
        )
        status, answer = await call_api(broker, "POST", f"{ROOT}/partitions/orders/{failed}/pause")
        assert (status, answer["detail"]) == (
            409,
            f"orders-{failed} is not served: see the broker's log",
        )
        assert failed in topic.offline


async def test_a_roll_without_a_file_descriptor_is_refused_with_the_reason(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This broker has no workers, and so refuses every clean.
    monkeypatch.setattr(CleanerApi, "_check_cleanable", lambda *_: None)
    path = f"{ROOT}/partitions/orders/0/run"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        partition = broker.topics.partition(TopicPartition("orders", 0))
        assert partition is not None
        append(partition.log, b"value")
        fault = env.fail_on(lambda operation, _: operation == "open", errno.EMFILE)
        with capture_logs() as lines:
            code, answer = await call_api(broker, "POST", path, b'{"roll": true}')
        fault.remove()
        assert code == 409
        assert "cannot be closed: [Errno 24]" in answer["detail"]
        assert "request failed" not in [line["event"] for line in lines]


async def test_all_compacted_partitions_are_paused_and_resumed_at_once(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for action, changed in (("pause", 3), ("pause", 0), ("resume", 3)):
            answer = await call_api(broker, "POST", f"{ROOT}/{action}")
            assert answer == (200, {"changed": changed, "durable": True})


async def test_what_finds_nothing_to_do_says_so_and_is_no_error(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for action in ("abort", "retry"):
            status, result = await call_api(broker, "POST", f"{ROOT}/partitions/orders/0/{action}")
            assert (status, result["changed"]) == (200, False)


async def test_a_run_that_makes_no_sense_is_refused_in_words(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        status, result = await call_api(broker, "POST", f"{ROOT}/partitions/audit/0/run")
        assert (status, result["detail"]) == (
            400, "audit-0 is not compacted: its cleanup.policy is delete",
        )  # fmt: skip
        status, result = await call_api(broker, "POST", f"{ROOT}/partitions/orders/0/run")
        assert (status, result["detail"]) == (409, "the cleaner is switched off (cleaner.enabled)")
        status, result = await call_api(broker, "GET", f"{ROOT}/partitions/orders/0")
        assert result["sentences"][-1].startswith("The cleaner is switched off.")


# --- bad requests ---------------------------------------------------------------------------------


BAD_PATHS = (
    ("/partitions/nowhere/0", 404, "there is no topic nowhere"),
    ("/partitions/orders/3", 404, "orders has no partition 3; its last one is 2"),
    ("/partitions/orders/2147483647", 404, "its last one is 2"),
    ("/partitions/orders/-1", 400, "expected 0 to 2147483647"),
    ("/partitions/orders/2147483648", 400, "expected 0 to"),
    ("/partitions/orders/" + "9" * 4000, 400, "expected 0 to"),
    ("/partitions/orders/1e3", 400, "expected 0 to"),
    ("/partitions/orders/%D9%A3", 400, "expected 0 to"),  # a digit, and not of ours
    ("/partitions/orders/0x1", 400, "expected 0 to"),
    ("/partitions/..%2F..%2Fetc/0", 404, "there is no topic"),
    ("/partitions/orders/0/dance", 404, "Not Found"),
    ("/partitions?topic=nowhere", 404, "there is no topic"),
    ("/partitions?limit=0", 400, "limit: expected 1 to 5000"),
    ("/partitions?limit=5001", 400, "limit: expected 1 to 5000"),
    ("/partitions?after=orders", 400, "after: expected"),
    ("/partitions?limit=1&limit=2", 400, "given twice"),
    ("/partitions?sort=size", 400, "unknown parameter 'sort'"),
    ("/history?topic=nowhere", 404, "there is no topic"),
    ("/history?topic=nowhere&partition=0", 404, "there is no topic"),
    ("/history?topic=orders&partition=3", 404, "its last one is 2"),
    ("/history?partition=1", 400, "together with its topic"),
    ("/history?topic=orders&partition=x", 400, "partition: expected"),
    ("/partitions/orders/0/estimate", 409, "no closed segment"),
    ("/partitions/orders/3/estimate", 404, "its last one is 2"),
    ("/partitions/orders/0/estimate?slack=-1", 400, "slack: expected a number from 0 to 100"),
    ("/partitions/orders/0/estimate?slack=1e2", 400, "slack: expected"),
    ("/partitions/orders/0/estimate?slack=1001", 400, "slack: expected"),
    ("/nothing", 404, "Not Found"),
)


async def test_a_bad_request_gets_a_status_and_words_in_json(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for path, status, words in BAD_PATHS:
            code, result = await call_api(broker, "GET", ROOT + path)
            assert (path, code) == (path, status)
            assert words in result["detail"], path


BAD_BODIES = (
    (b"{", 400, "not JSON"),
    (b"[" * 60_000, 400, "not JSON"),
    (b"[]", 400, "expected a JSON object"),
    (b'{"roll": 1}', 400, "roll: expected true or false"),
    (b'{"drop": true}', 400, "unknown key 'drop'"),
    (b"\xff\xfe", 400, "not JSON"),
    (b" " * (1 << 20), 413, "Too Large"),
)


async def test_a_body_that_makes_no_sense_changes_nothing(env: MemoryEnv) -> None:
    path = f"{ROOT}/partitions/orders/0"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        for body, status, words in BAD_BODIES:
            for action in ("run", "pause"):
                code, result = await call_api(broker, "POST", f"{path}/{action}", body)
                assert (body[:20], code) == (body[:20], status)
                assert words in result["detail"] or action == "pause"
        _, after = await call_api(broker, "GET", path)
    assert (after["state"], after["paused"]) == ("idle", False)


async def test_a_change_is_refused_without_json_from_afar_or_by_another_method(
    env: MemoryEnv,
) -> None:
    path = f"{ROOT}/partitions/orders/0/pause"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        form = {"Content_Type": "text/plain"}
        assert (await call_api(broker, "POST", path, b"{}", **form))[0] == 415
        assert (await call_api(broker, "POST", path, Origin="http://evil.example"))[0] == 403
        assert (await call_api(broker, "POST", path, Origin="null"))[0] == 403
        assert (await call_api(broker, "POST", path, Host="evil.example"))[0] == 403
        answer = await ask(broker, "GET", path)
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert "Method Not Allowed" in answer.document["detail"]
        local = f"http://{broker.http.address}"
        assert (await call_api(broker, "POST", path, Origin=local))[0] == 200


async def test_an_error_of_the_api_is_a_problem_document(env: MemoryEnv) -> None:
    path = f"{ROOT}/partitions/orders/7"
    async with broker_in_memory(env, topics=TOPICS) as broker:
        answer = await ask(broker, "GET", path)
        result = answer.document
        assert answer.headers["Content-Type"].partition(";")[0] == PROBLEM_TYPE
        assert set(result) == {"type", "title", "status", "detail"}
        assert (result["type"], result["title"], result["status"]) == (
            "about:blank",
            "Not Found",
            404,
        )
        unrouted = f"{ROOT}/no-such-path"
        _, result = await call_api(broker, "GET", unrouted)
        assert (result["title"], result["status"]) == ("Not Found", 404)
        _, result = await call_api(broker, "GET", openapi.PATH)
    problem = result["components"]["schemas"]["Problem"]
    assert set(problem["properties"]) == {"type", "title", "status", "detail"}


async def test_with_a_token_everything_but_health_asks_for_it(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics=TOPICS, token=SECRET.encode()) as broker:
        for path in (ROOT, "/metrics", openapi.PATH, f"{ROOT}/nothing"):
            status, headers, _ = await ask(broker, "GET", path)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="varve"')
        assert (await call_api(broker, "GET", "/readyz"))[0] == 200
        wrong = {"Authorization": f"Bearer {SECRET[:-1]}"}
        assert (await call_api(broker, "GET", ROOT, **wrong))[0] == 401
        right = {"Authorization": f"Bearer {SECRET}"}
        assert (await call_api(broker, "GET", ROOT, **right))[0] == 200
        assert (await call_api(broker, "GET", "/metrics", **right))[0] == 200


# --- the document ---------------------------------------------------------------------------------


async def test_the_first_page_links_to_the_openapi_document_and_every_link_leads_somewhere(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env) as broker:
        page = await ask(broker, "GET", "/")
        links = re.findall(r'href="([^"]+)"', page.text)
        for link in links:
            assert (await ask(broker, "GET", link)).status == 200, link
    assert page.headers["Content-Type"].startswith("text/html")
    assert openapi.PATH in links


async def test_the_openapi_document_has_every_route_and_no_other(env: MemoryEnv) -> None:
    async with broker_in_memory(env) as broker:
        _, result = await call_api(broker, "GET", openapi.PATH)
        routes = {
            (route.method, route.resource.canonical)
            for route in broker.http.server.application.router.routes()
            if route.resource is not None and route.resource.canonical.startswith("/api/")
        }
    reported = {(m.upper(), path) for path, item in result["paths"].items() for m in item}
    assert reported == {(method, path) for method, path in routes if method != "HEAD"}
    for path, operations in result["paths"].items():
        for operation in operations.values():
            named = {
                parameter["name"]
                for parameter in operation["parameters"]
                if parameter["in"] == "path"
            }
            assert named == set(re.findall(r"\{(\w+)\}", path))
