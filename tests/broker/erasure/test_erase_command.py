"""`varve erase` against a broker in this process."""

import asyncio
import base64
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.http.erase import erase
from broker.app import Broker
from config import exit_codes
from tests.support.broker.erasure import ADA, ORDERS, broker_of, write
from tests.support.storage.memory_env import MemoryEnv


async def run(broker: Broker, *arguments: str) -> Result:
    url = f"http://127.0.0.1:{broker.http.address.port}"
    return await asyncio.to_thread(CliRunner().invoke, erase, ["orders", *arguments, "--http", url])


async def test_a_key_from_a_file_is_erased_and_its_receipt_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(ADA.encode() + b"\n")
    async with broker_of(MemoryEnv(seed=5)) as broker:
        write(broker, f"{ADA}=secret-1")
        result = await run(broker, "--key-file", str(file), "--wait")
        assert (result.exit_code, ADA in result.output) == (0, False)
        assert "orders-0: no value is left below offset 2" in result.output


async def test_a_timeout_before_the_receipt_is_a_failure_and_the_erasure_goes_on() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        write(broker, f"{ADA}=secret-1")
        broker.pool.operator.pause(ORDERS)
        result = await run(
            broker, "--key", ADA, "--by", "1h", "--wait", "--timeout", "0.2", "--json"
        )
        assert result.exit_code == exit_codes.FAILED
        assert "has no receipt after 0.2 s; it goes on" in result.stderr
        (erasure_now,) = broker.erasures.all()
        assert erasure_now.deadline_ms - erasure_now.requested_ms == 3_600_000
        shown = await run(broker, "--status", "--key", ADA)
        assert erasure_now.erasure_id in shown.output
        other = base64.b64encode(b"another").decode()
        shown = await run(broker, "--status", "--key-base64", other)
        assert erasure_now.erasure_id not in shown.output
        cancelled = await run(broker, "--cancel", erasure_now.erasure_id)
        assert "cancelled: User:ANONYMOUS cancelled it" in cancelled.output


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--key", "a", "--key-base64", "YQ=="),
        ("--key-base64", "?"),
        ("--key", "a", "--by", "soon"),
        ("--key", "a", "--by", "1ms"),
        ("--status", "--cancel", "5"),
    ],
)
async def test_a_command_line_that_makes_no_sense_is_a_usage_error(
    arguments: tuple[str, ...],
) -> None:
    result = CliRunner().invoke(erase, ["orders", *arguments])
    assert result.exit_code == exit_codes.USAGE
