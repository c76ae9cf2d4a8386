"""Administration of a broker in memory, by its HTTP API and by the command line."""

import asyncio
import json
from typing import Any

from click.testing import CliRunner

from broker.app import Broker
from broker.cli import main
from tests.support.broker.http_client import call_api


async def api(
    broker: Broker, method: str, path: str, body: Any = None
) -> tuple[int, dict[str, Any]]:
    """Send a request to a path below /api/v1 -> (status, document)."""
    sent = json.dumps(body or {}).encode() if method == "POST" else None
    return await call_api(broker, method, f"/api/v1/{path}", sent)


async def cli(broker: Broker, *args: str) -> tuple[int, str]:
    """Run a command of `varve` for the broker -> (exit code, output)."""

    def run() -> tuple[int, str]:
        result = CliRunner().invoke(main, [*args, "--http", str(broker.http.address)])
        return result.exit_code, result.output

    return await asyncio.to_thread(run)
