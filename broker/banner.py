"""What `varve serve` prints on standard output once clients are served."""

import os
import sys
from collections.abc import Sequence

from config.address import Address


def ready_text(
    *,
    version: str,
    listeners: Sequence[Address],
    http: Address,
    log_dirs: Sequence[str],
    topics: int,
    partitions: int,
) -> str:
    """A few lines: what listens (as bound), where the data is, what to try next."""
    reach = reachable(listeners[0])
    command = command_name()
    rows = [
        ("Kafka", ", ".join(str(address) for address in listeners)),
        ("HTTP", f"http://{reachable(http)}  (/metrics, /healthz, /readyz)"),
        ("data", ", ".join(os.path.abspath(path) for path in log_dirs)),
        ("topics", f"{topics} with {partitions} partitions" if topics else "none yet"),
        ("try", f"{command} demo --bootstrap {reach}"),
        ("", f"kcat -b {reach} -L"),
        ("stop", "Ctrl-C"),
    ]
    lines = [f"varve {version} is ready"] + [f"  {name:<7} {text}" for name, text in rows]
    return "\n".join(lines)


def reachable(address: Address) -> Address:
    """An address that can be connected to from this machine: loopback instead of a wildcard."""
    if not address.is_wildcard:
        return address
    return Address("::1" if ":" in address.host else "127.0.0.1", address.port)


def command_name() -> str:
    """How the user can call this program again from where they are."""
    program = sys.argv[0]
    if os.path.basename(program) != "varve":
        return "varve"
    near = os.path.relpath(program)
    return program if near.startswith("..") else near
