"""Runs over HTTP: what is answered, who may move files, and what is refused."""

import asyncio
import http.client
import json
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from crc32c import crc32c
from structlog.testing import capture_logs

from broker.app import Broker
from broker.http import server
from broker.leases import file_transfer, lease_folder
from cleaner import remote_compaction
from cleaner.remote_compaction import LeasePlan, OutputManifest, encode_manifest, parse_plan
from storage.format import filenames
from tests.support.broker.http_client import exchange
from tests.support.broker.leases import FOLDER, RECORDS, carried_out, fill, leasing_broker, staged
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

ROOT = "/api/v1/remote-compactions"
JSON = {"Content-Type": "application/json"}
SECRET = "0123456789abcdef"
NAME = filenames.file_name(0, filenames.LOG)


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=34)


async def raw(
    broker: Broker, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    answer = await exchange(broker, method, path, body, named)
    return answer.status, answer.body, dict(answer.headers)


async def ask(
    broker: Broker, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    status, document, _ = await raw(broker, method, path, data, Content_Type=JSON["Content-Type"],
                                 **headers)  # fmt: skip
    return status, json.loads(document)


async def opened(broker: Broker, **expected: object) -> LeasePlan:
    status, result = await ask(broker, "POST", ROOT, {"topic": "orders", **expected})
    assert status == 201, result
    return parse_plan(result)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def files(plan: LeasePlan, partition: int = 0) -> str:
    return f"{ROOT}/{plan.compaction_id}/partitions/{partition}"


# --- runs -----------------------------------------------------------------------------------------


async def test_a_run_from_its_plan_to_its_adoption(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker, ttl_seconds=30)
        assert plan.expires_ms == env.wall_ms() + 30_000
        _, listed = await ask(broker, "GET", ROOT)
        assert [compaction["compaction_id"] for compaction in listed["remote_compactions"]] == [
            plan.compaction_id
        ]
        assert "token" not in json.dumps(listed)
        made = carried_out(env, plan)
        data = encode_manifest(made.manifest)
        status, _, _ = await raw(broker, "PUT", f"{files(plan)}/manifest", data,
                                 **bearer(plan.token))  # fmt: skip
        assert status == 200
        env.advance_ms(20_000)
        status, result = await ask(broker, "POST", f"{ROOT}/{plan.compaction_id}/renew", {})
        assert (status, result["expires_ms"]) == (200, env.wall_ms() + 30_000)
        status, result = await ask(broker, "POST", f"{ROOT}/{plan.compaction_id}/adopt", {})
        assert (status, result["done"]) == (200, True)
        assert [result["outcome"] for result in result["results"]] == ["adopted"]
        status, result = await ask(broker, "GET", f"{ROOT}/{plan.compaction_id}")
        assert (status, result["state"]) == (200, "adopted")
        status, _ = await ask(broker, "DELETE", f"{ROOT}/{plan.compaction_id}")
        assert status == 410


async def test_manifests_are_decoded_in_a_thread(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16,000 segments, that takes long: when it arrives, and when it is adopted."""
    decode = remote_compaction.decode_manifest
    threads: list[int] = []

    def watched(*arguments: Any) -> OutputManifest:
        threads.append(threading.get_ident())
        return decode(*arguments)

    for module in (file_transfer, lease_folder):
        monkeypatch.setattr(module, "decode_manifest", watched)
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        data = encode_manifest(carried_out(env, plan).manifest)
        status, _, _ = await raw(broker, "PUT", f"{files(plan)}/manifest", data,
                                 **bearer(plan.token))  # fmt: skip
        assert (status, len(threads)) == (200, 1)
        status, _ = await ask(broker, "POST", f"{ROOT}/{plan.compaction_id}/adopt", {})
        assert status in (200, 202)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_second_run_is_told_which_one_has_the_partition(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        status, result = await ask(broker, "POST", ROOT, {"topic": "orders"})
        assert status == 409
        assert plan.compaction_id in result["detail"]
        status, _ = await ask(broker, "DELETE", f"{ROOT}/{plan.compaction_id}")
        assert status == 200
        await opened(broker)


async def test_whoever_waits_long_for_an_adoption_is_told_how_far_it_is(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.running_adoptions.ANSWER_SECONDS", 0)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        answers = []
        while not answers or not answers[-1]["done"]:
            status, result = await ask(broker, "POST", f"{ROOT}/{plan.compaction_id}/adopt", {})
            assert status == 200
            answers.append(result)
        assert len(answers) > 1
        assert answers[0]["results"] == []
        assert answers[0]["remote_compaction"]["partitions"][0]["state"] == "adopting"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "topic"),
        ({"topic": 5}, "topic"),
        ({"topic": "orders", "partitions": "0"}, "partitions"),
        ({"topic": "orders", "partitions": [True]}, "partitions"),
        ({"topic": "orders", "purpose": "other"}, "purpose"),
        ({"topic": "orders", "roll": 1}, "roll"),
        ({"topic": "orders", "ttl_seconds": "60"}, "ttl_seconds"),
        ({"topic": "orders", "ttl_seconds": 10**6}, "ttl_seconds"),
        ({"topic": "orders", "wish": 1}, "unknown key"),
        ([], "object"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(
    env: MemoryEnv, body: object, reason: str
) -> None:
    async with leasing_broker(env) as broker:
        status, result = await ask(broker, "POST", ROOT, body)
        assert (status, reason in result["detail"]) == (400, True), result


async def test_what_is_null_is_what_is_not_said(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, ttl_seconds=None, partitions=None)
        status, result = await ask(broker, "GET", f"{ROOT}/{plan.compaction_id}")
        assert (status, result["ttl_seconds"]) == (200, 120)


# --- who may --------------------------------------------------------------------------------------


async def test_runs_are_an_operators_and_files_the_runs_own(env: MemoryEnv) -> None:
    async with leasing_broker(env, token=SECRET.encode()) as broker:
        fill(env, broker, 2)
        body = json.dumps({"topic": "orders"}).encode()
        assert (await raw(broker, "POST", ROOT, body, **JSON_HEADER))[0] == 401
        _, answer, _ = await raw(broker, "POST", ROOT, body, **JSON_HEADER, **bearer(SECRET))
        plan = parse_plan(json.loads(answer))
        path = f"{files(plan)}/inputs/{NAME}"
        assert (await raw(broker, "GET", path, **bearer(plan.token)))[0] == 200
        for headers, status in (
            ({}, 401),
            (bearer(SECRET), 404),  # the operator's opens no files, and the run's no runs
            (bearer(plan.token[:-1]), 404),
            (bearer("é"), 404),
        ):
            assert (await raw(broker, "GET", path, **headers))[0] == status
        renew = f"{ROOT}/{plan.compaction_id}/renew"
        assert (await raw(broker, "POST", renew, b"{}", **JSON_HEADER, **bearer(plan.token)))[
            0
        ] == 401
        foreign = {"Origin": "http://evil.example", **bearer(plan.token)}
        assert (await raw(broker, "GET", path, **foreign))[0] == 403
        foreign = {"Host": "evil.example", **bearer(plan.token)}
        assert (await raw(broker, "GET", path, **foreign))[0] == 403


JSON_HEADER = {"Content_Type": "application/json"}


@pytest.mark.parametrize(
    "path",
    [
        f"{ROOT}/x%2Fpartitions%2F0%2Fmanifest/renew",
        f"{ROOT}/partitions/renew",
        "/api/v1/cleaner/partitions/orders/0/pause",
    ],
)
async def test_no_path_looks_like_a_transfer_to_the_guard_and_like_an_order_to_the_rest(
    env: MemoryEnv, path: str
) -> None:
    async with leasing_broker(env, token=SECRET.encode()) as broker:
        assert (await raw(broker, "POST", path, b"{}", **JSON_HEADER))[0] == 401


async def test_the_token_ends_with_the_lease(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker, ttl_seconds=10)
        path = f"{files(plan)}/inputs/{NAME}"
        assert (await raw(broker, "GET", path, **bearer(plan.token)))[0] == 200
        env.advance_ms(10_000)
        broker.leases.expire_due()
        assert (await raw(broker, "GET", path, **bearer(plan.token)))[0] == 410


# --- files out ------------------------------------------------------------------------------------


async def test_inputs_come_in_ranges_with_their_checksum(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        data = env.read_file(f"{FOLDER}/{NAME}")
        path, token = f"{files(plan)}/inputs/{NAME}", bearer(plan.token)
        for reported, status, piece in (
            ("bytes=0-99", 206, data[:100]),
            ("bytes=100-199", 206, data[100:200]),
            (f"bytes={len(data) - 5}-{len(data) + 500}", 206, data[-5:]),
            ("bytes=3-", 206, data[3:]),
            (None, 200, data),
        ):
            requested = {} if reported is None else {"Range": reported}
            results = await raw(broker, "GET", path, **token, **requested)
            assert (results[0], results[1]) == (status, piece)
            assert results[2]["X-Varve-Crc32c"] == f"{crc32c(piece):08x}"
            if reported is not None:
                first = data.index(piece)
                expected = f"bytes {first}-{first + len(piece) - 1}/{len(data)}"
                assert results[2]["Content-Range"] == expected
        for reported, status in (
            (f"bytes={len(data)}-", 416),
            ("bytes=9-3", 416),
            ("bytes=-5", 400),
            ("bytes=0-1,4-5", 400),
            ("lines=0-1", 400),
        ):
            assert (await raw(broker, "GET", path, **token, Range=reported))[0] == status


async def test_a_large_file_is_given_in_ranges_only(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.file_transfer.RANGE_BYTES_MAX", 100)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        path, token = f"{files(plan)}/inputs/{NAME}", bearer(plan.token)
        assert (await raw(broker, "GET", path, **token))[0] == 400
        status, data, _ = await raw(broker, "GET", path, **token, Range="bytes=0-999")
        assert (status, len(data)) == (206, 100)


@pytest.mark.parametrize(
    "name",
    [
        "..%2Flease",
        "lease",
        "..",
        "%2e%2e%2flease",
        "..%2F..%2F..%2F00000000000000000000.log",
        "00000000000000000000.snapshot",
        "00000000000000000000.log.deleted",
        "99999999999999999999.log",
        "00000000000000000030.log",
    ],
)
async def test_nothing_but_pinned_segments_is_given(env: MemoryEnv, name: str) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        status, data, _ = await raw(broker, "GET", f"{files(plan)}/inputs/{name}",
                                    **bearer(plan.token))  # fmt: skip
        assert status == 404, data


# --- files in -------------------------------------------------------------------------------------


def cleaned(plan: LeasePlan) -> str:
    return filenames.cleaned_name(0, filenames.LOG, plan.compaction_id)


def upload_headers(data: bytes, plan: LeasePlan) -> dict[str, str]:
    return {"X_Varve_Crc32c": f"{crc32c(data):08x}", **bearer(plan.token)}


async def test_outputs_are_kept_and_given_back(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        data = bytes(range(256)) * 15_000  # some four pieces
        for folder, name in (("attempt-1", cleaned(plan)), ("scratch-1", "rows.bin")):
            path = f"{files(plan)}/outputs/{folder}/{name}"
            status, _, _ = await raw(broker, "PUT", path, data, **upload_headers(data, plan))
            assert status == 200
            retained = f"{FOLDER}/varve.leases/{plan.compaction_id}/out/{folder}"
            assert env.listdir(retained) == [name]
            assert env.read_file(f"{retained}/{name}") == data
            status, result, _ = await raw(broker, "GET", path, **bearer(plan.token))
            assert (status, result) == (200, data)
        _, result = await ask(broker, "GET", f"{ROOT}/{plan.compaction_id}")
        assert result["partitions"][0]["staged_bytes"] == 2 * len(data)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("..", "{cleaned}"),
        ("%2e%2e", "{cleaned}"),
        ("a%2Fb", "{cleaned}"),
        ("a.b", "{cleaned}"),
        ("attempt-1", "manifest"),
        ("attempt-1", "00000000000000000000.log"),
        ("attempt-1", "00000000000000000000.log.other.cleaned"),
        ("attempt-1", "..%2F{cleaned}"),
        ("scratch-1", ".hidden"),
        ("scratch-1", "..%2F..%2Fmanifest"),
        ("scratch-1", "a%00b"),
        ("scratch-1", "x" * 300),
    ],
)
async def test_nothing_is_kept_under_another_name_than_an_outputs(
    env: MemoryEnv, folder: str, name: str
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        path = f"{files(plan)}/outputs/{folder}/{name.format(cleaned=cleaned(plan))}"
        before = len(env.history)
        status, _, _ = await raw(broker, "PUT", path, b"x", **upload_headers(b"x", plan))
        assert status in (400, 404)
        assert [op for op in env.history[before:] if op[0] in ("open", "mkdir", "pwrite")] == []


async def test_what_is_not_what_it_claims_to_be_is_not_kept(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        path = f"{files(plan)}/outputs/attempt-1/{cleaned(plan)}"
        wrong = {**upload_headers(b"other", plan)}
        assert (await raw(broker, "PUT", path, b"data", **wrong))[0] == 422
        assert (await raw(broker, "PUT", path, b"data", **bearer(plan.token)))[0] == 400
        chunked = {**upload_headers(b"data", plan), "Transfer_Encoding": "chunked"}
        assert (await raw(broker, "PUT", path, b"4\r\ndata\r\n0\r\n\r\n", **chunked))[0] == 411
        assert env.listdir(f"{FOLDER}/varve.leases/{plan.compaction_id}/out/attempt-1") == []
        _, result = await ask(broker, "GET", f"{ROOT}/{plan.compaction_id}")
        assert result["partitions"][0]["staged_bytes"] == 0


async def test_an_upload_that_breaks_off_leaves_nothing(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        path = f"{files(plan)}/outputs/attempt-1/{cleaned(plan)}"

        def break_off() -> None:
            address = broker.http.address
            connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
            connection.putrequest("PUT", path)
            for key, value in {
                **upload_headers(b"x", plan),
                "Content_Length": str(5 << 20),
            }.items():
                connection.putheader(key.replace("_", "-"), value)
            connection.endheaders()
            connection.send(b"x" * (2 << 20))
            connection.close()

        await asyncio.to_thread(break_off)
        folder = f"{FOLDER}/varve.leases/{plan.compaction_id}/out/attempt-1"
        async with asyncio.timeout(20):
            while not env.is_dir(folder) or env.listdir(folder):  # noqa: ASYNC110 - of the server
                await asyncio.sleep(0.01)


async def test_a_client_that_left_before_its_request_is_handled_causes_no_error(
    env: MemoryEnv,
) -> None:
    ended = BaseProtocol(asyncio.get_running_loop())
    request = make_mocked_request("POST", ROOT, transport=Mock())  # is_closing() is true

    async def read(_: web.Request) -> web.StreamResponse:
        return web.Response(body=await StreamReader(ended, 1 << 16).read())

    async with leasing_broker(env) as broker:
        with capture_logs() as lines:
            response = await broker.http.server._translate_errors(request, read)
    assert (response.status, lines) == (400, [])


async def test_there_is_a_bound_to_what_comes(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.model.STAGED_BYTES_MIN", 1000)
    monkeypatch.setattr("broker.leases.model.STAGED_FACTOR", 0)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        path = f"{files(plan)}/outputs/scratch-1/rows"
        data = bytes(600)
        assert (await raw(broker, "PUT", path, data, **upload_headers(data, plan)))[0] == 200
        assert (await raw(broker, "PUT", f"{path}2", data, **upload_headers(data, plan)))[0] == 413
        env.free_space_bytes = 1 << 30
        small = b"x"
        assert (await raw(broker, "PUT", f"{path}3", small, **upload_headers(small, plan)))[
            0
        ] == 507


async def test_slow_uploads_of_one_lease_do_not_keep_others_out(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 4)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        connections = broker.http.server._connections
        address, writers = broker.http.address, []
        for number in range(4):
            _, writer = await asyncio.open_connection(address.host, address.port)
            head = (
                f"PUT {files(plan)}/outputs/scratch-1/rows{number} HTTP/1.1\r\nHost: localhost\r\n"
            )
            headers = {"Content-Length": "2000", **upload_headers(b"x", plan)}
            head += "".join(
                f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()
            )
            writer.write(f"{head}\r\nx".encode())
            writers.append(writer)
        await until(lambda: sum(map(connections.is_authorized, connections._requests)) == 4)
        assert (await raw(broker, "GET", "/metrics"))[0] == 200
        for writer in writers:
            writer.close()


async def test_a_manifest_whose_response_was_lost_may_be_sent_again(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        made = carried_out(env, plan)
        path = f"{files(plan)}/manifest"
        data = encode_manifest(made.manifest)
        for _ in range(2):
            assert (await raw(broker, "PUT", path, data, **bearer(plan.token)))[0] == 200
        part = broker.leases.table.find(plan.compaction_id).parts[0]
        env.unlink(f"{part.folder}/manifest")  # as while the first one is being written
        assert (await raw(broker, "PUT", path, data, **bearer(plan.token)))[0] == 503


async def test_nothing_comes_behind_the_manifest(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        made = carried_out(env, plan)
        path = f"{files(plan)}/manifest"
        assert (await raw(broker, "PUT", path, b"rubbish", **bearer(plan.token)))[0] == 422
        data = encode_manifest(made.manifest)
        torn = data[:-1]
        assert (await raw(broker, "PUT", path, torn, **bearer(plan.token)))[0] == 422
        assert (await raw(broker, "PUT", path, data, **bearer(plan.token)))[0] == 200
        other = encode_manifest(replace(made.manifest, engine="another"))
        assert (await raw(broker, "PUT", path, other, **bearer(plan.token)))[0] == 409
        late = f"{files(plan)}/outputs/attempt-1/{cleaned(plan)}"
        assert (await raw(broker, "PUT", late, b"x", **upload_headers(b"x", plan)))[0] == 409


async def test_metrics_tell_what_is_pinned_and_how_runs_ended(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        _, text, _ = await raw(broker, "GET", "/metrics")
        pinned = plan.partitions[0].inputs_bytes
        assert b'varve_remote_compactions{purpose="compact"} 1.0' in text
        assert f'varve_lease_pinned_bytes{{purpose="compact"}} {float(pinned)}'.encode() in text
        carried_out(env, plan).leave_manifest(env)
        await ask(broker, "POST", f"{ROOT}/{plan.compaction_id}/adopt", {})
        _, text, _ = await raw(broker, "GET", "/metrics")
        assert b'varve_remote_compaction_adoptions_total{outcome="adopted"} 1.0' in text
        assert b'varve_remote_compactions{purpose="compact"} 0.0' in text
        assert staged(env) == []


async def test_a_linked_input_is_no_way_around(env: MemoryEnv) -> None:
    """A folder in the place of a file, as an executor on the same disk could leave one."""
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        folder = plan.partitions[0].job.directory
        env.unlink(f"{folder}/{NAME}")
        env.mkdir(f"{folder}/{NAME}")
        put(env, f"{folder}/{NAME}/x", b"x")
        path = f"{files(plan)}/inputs/{NAME}"
        assert (await raw(broker, "GET", path, **bearer(plan.token)))[0] == 404
        assert plan.partitions[0].job.end_offset == 2 * RECORDS
