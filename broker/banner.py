"""The text that `varve serve` prints on standard output when it is ready."""

import os
import sys
from collections.abc import Sequence

from config.address import Address


def ready_text(
    *,
    version: str,
    listeners: Sequence[Address],
    http: str,
    log_dirs: Sequence[str],
    topics: int,
    partitions: int,
) -> str:
    """Return the bound addresses, the data directories and commands to try next."""
    bootstrap = reachable(listeners[0])
    command = command_name()
    rows = [
        ("Kafka", ", ".join(str(address) for address in listeners)),
        ("HTTP", f"{http}/  (console, /metrics, /healthz, /readyz)"),
        ("data", ", ".join(os.path.abspath(path) for path in log_dirs)),
        ("topics", f"{topics} with {partitions} partitions" if topics else "none yet"),
        ("try", f"{command} demo --bootstrap {bootstrap}"),
        ("", f"kcat -b {bootstrap} -L"),
        ("stop", "Ctrl-C"),
    ]
    lines = [f"varve {version} is ready"] + [f"  {name:<7} {text}" for name, text in rows]
    return "\n".join(lines)


def reachable(address: Address) -> Address:
    """Return an address that this machine can connect to: loopback instead of a wildcard."""
    if not address.is_wildcard:
        return address
    return Address("::1" if ":" in address.host else "127.0.0.1", address.port)


def command_name() -> str:
    """Return the command that starts this program again from the current directory."""
    program = sys.argv[0]
    if os.path.basename(program) != "varve":
        return "varve"
    relative = os.path.relpath(program)
    return program if relative.startswith("..") else relative
