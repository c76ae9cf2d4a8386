"""What one case of the comparison does: a list of operations that both cleaners carry out."""

from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = int | str | bytes


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of a script; `bytes` are written in hex.

    config KEY=VALUE ... | now MS | append EPOCH BATCH | roll OFFSET | delete-records OFFSET |
    expire-producers | retain | reopen clean/unclean | clean SLOTS BUFFER_BYTES | dump
    """

    name: str
    values: tuple[Value, ...] = ()

    def __str__(self) -> str:
        words = (value.hex() if isinstance(value, bytes) else str(value) for value in self.values)
        return " ".join([self.name, *words])


@dataclass(frozen=True)
class Case:
    """A script, and what its seed decided about it."""

    seed: int
    operations: tuple[Operation, ...]
    traits: frozenset[str]  # what it has: "transactions", "codecs", "small map", ...

    @property
    def text(self) -> str:
        """The script as the Java side reads it."""
        return "".join(f"{operation}\n" for operation in self.operations)
