"""Positions in a log as command line options name them: earliest, latest, an offset or a time."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

POSITION_HELP: Final = "earliest, latest, an offset, or a time such as 2026-11-01T12:00:00Z."


@dataclass(frozen=True, slots=True)
class TopicPosition:
    """A place in each partition of a topic. One field is set; none means the end."""

    is_earliest: bool = False
    offset: int | None = None
    at_ms: int | None = None  # since 1970

    def resolve(
        self, admin: "AdminClient", topic: str, partitions: Iterable[int], seconds: float
    ) -> dict[int, int]:
        """Return the offset in each partition, between its first and its end offset.

        A time means the first record that is not older; the end if there is none. Raises
        KafkaException.
        """
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        numbers = tuple(partitions)

        def ask(spec: Any) -> dict[int, int]:
            asked = {TopicPartition(topic, number): spec for number in numbers}
            answers = admin.list_offsets(asked, request_timeout=seconds)
            return {key.partition: future.result().offset for key, future in answers.items()}

        if self.is_earliest:
            return ask(earliest)
        ends = ask(latest)
        if self.at_ms is not None:
            offsets = ask(OffsetSpec.for_timestamp(self.at_ms))
            return {
                number: ends[number] if offsets[number] < 0 else offsets[number] for number in ends
            }
        if self.offset is None:
            return ends
        starts = ask(earliest)
        return {number: min(max(self.offset, starts[number]), ends[number]) for number in ends}


def _parse(text: str) -> TopicPosition:
    """Return a position. Raises click.BadParameter."""
    if text in ("earliest", "latest"):
        return TopicPosition(is_earliest=text == "earliest")
    if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        return TopicPosition(offset=int(text))
    try:
        return TopicPosition(at_ms=max(0, int(datetime.fromisoformat(text).timestamp() * 1000)))
    except (ValueError, OverflowError):
        raise click.BadParameter(f"expected {POSITION_HELP.rstrip('.')}, not {text!r}") from None


class _PositionType(click.ParamType):  # type: ignore[type-arg]
    name = "position"

    def convert(
        self, value: Any, _parameter: click.Parameter | None, _context: click.Context | None
    ) -> TopicPosition:
        """See click.ParamType."""
        return value if isinstance(value, TopicPosition) else _parse(value)


position: Final = _PositionType()
