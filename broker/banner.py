"""The text that `varve serve` prints on standard output when it is ready."""

import os
import sys
from dataclasses import dataclass
from typing import Final

from config.address import Address
from config.settings import Settings
from config.units import counted

STOP: Final = "Ctrl-C or SIGTERM"
DEMO: Final = "demo --bootstrap {} --rate 50000 --keep"  # as README and tutorial say


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFacts:
    """The facts that a broker prints when it is ready."""

    version: str
    listeners: tuple[Address, ...]  # bound
    http: Address  # bound
    http_scheme: str
    log_dirs: tuple[str, ...]
    topics: int
    partitions: int
    is_open: bool  # clients of the first listener need neither credentials nor permissions

    def text(self) -> str:
        """Return the bound addresses, the data directories and commands to try next."""
        bootstrap = self.listeners[0].here
        topics = f"{counted(self.topics, 'topic')} with {counted(self.partitions, 'partition')}"
        rows = [
            ("Kafka", ", ".join(str(address) for address in self.listeners)),
            ("HTTP", f"{self.console}  (console, /metrics, /healthz, /readyz)"),
            ("data", ", ".join(os.path.abspath(path) for path in self.log_dirs)),
            ("topics", topics if self.topics else "none yet"),
        ]
        if self.is_open:
            rows += [
                ("try", demo_command(self.listeners[0])),
                ("", f"kcat -b {bootstrap} -L"),
            ]
        rows.append(("stop", f"{STOP} (process {os.getpid()})"))
        lines = [f"varve {self.version} is ready"]
        lines += [f"  {name:<7} {text}" for name, text in rows]
        return "\n".join(lines)

    def fields(self) -> dict[str, object]:
        """Return the same for a line of the log."""
        return {
            "version": self.version,
            "listeners": [str(address) for address in self.listeners],
            "http": str(self.http),
            "console": self.console,
            "log_dirs": list(self.log_dirs),
            "topics": self.topics,
            "partitions": self.partitions,
            "pid": os.getpid(),
            "stop": STOP,
        }

    @property
    def console(self) -> str:
        """Return the address of the console for a browser on this machine."""
        return f"{self.http_scheme}://{self.http.here}/"


def is_open(settings: Settings) -> bool:
    """Return whether clients of the first listener need neither credentials nor permissions."""
    return not settings.authorization.enabled and settings.listeners[0].protocol == "PLAINTEXT"


def demo_command(listener: Address) -> str:
    """Return the command that runs the demo on a bound listener."""
    return f"{command_name()} {DEMO.format(listener.here)}"


def command_name() -> str:
    """Return the command that starts this program again from the current directory."""
    program = sys.argv[0]
    if os.path.basename(program) != "varve":
        return "varve"
    relative = os.path.relpath(program)
    return program if relative.startswith("..") else relative
