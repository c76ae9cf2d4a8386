"""The text of /metrics.

The client library of Prometheus writes the head and the first sample of each family. It takes 4 us
for each further one, mostly to check names again, so those are written here if the first one shows
that the library would write the same: no timestamps, exemplars or escaped names.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from broker.event_loop.loop_turns import FreedLater, Turns

Encode: TypeAlias = Callable[[Collector], bytes]

ENCODED_SAMPLES: Final = 64  # at a time: 1 to 4 us each
OPENMETRICS_END: Final = b"# EOF\n"
_number: Final[Callable[[float], str]] = floatToGoString
# Samples that the text format moves after the others of their family.
_MOVED: Final = ("_created", "_gsum", "_gcount")


async def encoded(families: Iterable[Metric], encode: Encode, freed: FreedLater) -> bytes:
    """Return the families as text, made in turns of the loop.

    A thread would compete with the event loop for the interpreter. `freed` frees the samples: to
    free 20,000 at once takes 10 ms.
    """
    turns, parts, labels, used = Turns(), list[bytes](), _LabelTexts(), list[list[Sample]]()
    try:
        for family in families:
            used.append(family.samples.copy())  # `families` may hold the last other references
            await _append_family(parts, family, encode, labels, turns)
        if encode(_Families(())) == OPENMETRICS_END:
            parts.append(OPENMETRICS_END)
        return b"".join(parts)
    finally:
        freed.add(labels, parts, *used)


async def _append_family(
    parts: list[bytes], family: Metric, encode: Encode, labels: "_LabelTexts", turns: Turns
) -> None:
    samples = family.samples
    if not await _are_plain(samples, turns):
        parts.append(_encode_part(family, samples, encode))
        return
    head = _encode_part(family, samples[:1], encode)
    parts.append(head)
    is_same = head.endswith(_lines(samples[:1], labels))
    for first in range(1, len(samples), ENCODED_SAMPLES):
        await turns.take()
        part = samples[first : first + ENCODED_SAMPLES]
        if is_same:
            parts.append(_lines(part, labels))
        else:
            parts.append(_without_head(_encode_part(family, part, encode)))
    await turns.take()


class _Families(Collector):
    """Families as the library's encoders expect them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _encode_part(family: Metric, samples: Sequence[Sample], encode: Encode) -> bytes:
    part = Metric(family.name, family.documentation, family.type, family.unit)
    part.samples = list(samples)
    return encode(_Families((part,))).removesuffix(OPENMETRICS_END)


def _without_head(text: bytes) -> bytes:
    while text.startswith(b"# "):
        text = text.partition(b"\n")[2]  # each family has one head
    return text


async def _are_plain(samples: Sequence[Sample], turns: Turns) -> bool:
    """Return whether a family may be divided; no family of ours that is long may not."""
    for first in range(0, len(samples), ENCODED_SAMPLES):
        if not all(map(_is_plain, samples[first : first + ENCODED_SAMPLES])):
            return False
        await turns.take()
    return True


def _is_plain(sample: Sample) -> bool:
    return (
        sample.timestamp is None
        and sample.exemplar is None
        and sample.native_histogram is None
        and not sample.name.endswith(_MOVED)
    )


class _LabelTexts(dict[tuple[tuple[str, str], ...], str]):
    """The text of the labels of a sample: many families have the same."""

    def __missing__(self, labels: tuple[tuple[str, str], ...]) -> str:
        text = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels))
        self[labels] = f"{{{text}}}" if labels else ""
        return self[labels]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _lines(samples: Sequence[Sample], labels: _LabelTexts) -> bytes:
    """Return the lines of plain samples."""
    return "".join(
        f"{sample.name}{labels[tuple(sample.labels.items())]} {_number(sample.value)}\n"
        for sample in samples
    ).encode()
