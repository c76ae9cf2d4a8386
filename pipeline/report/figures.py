"""The figures of a surveyed topic; pure.

Rules
- The bytes of live records are estimated: a segment's bytes are divided equally among its records.
- Survival is a product-limit estimate by bins, as in a life table: records cut off by the end of
  the log are at risk for half of the bin in which they are cut off. It estimates how likely a
  record is still the last of its key after a given age.
- Ages use the records' own timestamps, and end with the latest one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.stages.histories import HistoriesResult, bin_edge
from pipeline.stages.tasks import SegmentCounts

Curve = list[tuple[float, float]]  # (age in ms or distance in offsets, share still live)


@dataclass(frozen=True, slots=True)
class SegmentFigures:
    """One segment. `age_ms` is the time from its middle to the end of the log."""

    topic: str
    partition: int
    base_offset: int
    next_base_offset: int
    size_bytes: int
    records: int
    live: int
    tombstones: int
    garbage: int
    keyless: int
    aborted: int
    first_ms: int
    last_ms: int
    age_ms: int
    live_share: float
    live_bytes: int


@dataclass(slots=True)
class PartitionFigures:
    """One partition. No offset from `whole_from` on is missing: nothing was cleaned there."""

    partition: int
    first_offset: int
    end_offset: int
    records: int
    live: int
    tombstones: int
    garbage: int
    keyless: int
    aborted: int
    keys: int
    size_bytes: int
    live_bytes: int
    whole_from: int
    damaged: list[str] = field(default_factory=list)


@dataclass(slots=True)
class KeySkew:
    """The distribution of records over keys. `top`: (Base64 key, records, share of keyed ones).

    If `missed_max` is above 0, some keys were not counted; they have at most that many records.
    """

    keys: int = 0
    records: int = 0
    missed_max: int = 0
    is_exact: bool = True
    shares: dict[str, float] = field(
        default_factory=dict
    )  # part of the busiest keys -> share of the records
    top: list[tuple[str, int, float]] = field(default_factory=list)
    by_records: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Survival:
    """How long records stay live. `keys_share` is the share of keys that were tracked."""

    by_age: Curve = field(default_factory=list)
    by_distance: Curve = field(default_factory=list)
    ended: int = 0
    cut: int = 0
    keys_share: float = 1.0
    half_life_ms: float | None = None  # None: more than half outlive the log
    half_life_offsets: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting with its current value, the advised value and the reason."""

    setting: str
    now: str
    advised: str
    why: str


@dataclass(slots=True)
class SpaceOverhead:
    """Disk space beyond the live records: now, and its range under the advised policy."""

    now_bytes: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    why: str = ""


@dataclass(slots=True)
class TopicFigures:
    """The figures of a topic."""

    topic: str
    partitions: list[PartitionFigures] = field(default_factory=list)
    segments: list[SegmentFigures] = field(default_factory=list)
    skew: KeySkew = field(default_factory=KeySkew)
    survival: Survival = field(default_factory=Survival)
    settings: dict[str, str] = field(default_factory=dict)
    policy: str = ""
    policy_why: str = ""
    advice: list[Advice] = field(default_factory=list)
    overhead: SpaceOverhead = field(default_factory=SpaceOverhead)

    def total(self, name: str) -> int:
        """Return the sum of a count over the partitions."""
        return sum(int(getattr(figures, name)) for figures in self.partitions)

    def share(self, name: str) -> float:
        """Return a count as a share of the records, or 0."""
        records = self.total("records")
        return self.total(name) / records if records else 0.0

    @property
    def first_ms(self) -> int:
        """Return the earliest timestamp, or -1."""
        return min(
            (segment.first_ms for segment in self.segments if segment.first_ms >= 0), default=-1
        )

    @property
    def last_ms(self) -> int:
        """Return the latest timestamp, or -1."""
        return max((segment.last_ms for segment in self.segments), default=-1)

    @property
    def is_cleaned(self) -> bool:
        """Return whether the cleaner has removed records."""
        return any(figures.whole_from > figures.first_offset for figures in self.partitions)


def segment_figures(
    topic: str, partition: int, counts: Sequence[SegmentCounts]
) -> list[SegmentFigures]:
    """Return the figures of a partition's segments."""
    end_ms = max((counts.last_ms for counts in counts), default=-1)
    segments = []
    for count in counts:
        middle_ms = (count.first_ms + count.last_ms) // 2
        records = count.records + count.control
        share = count.live / count.records if count.records else 0.0
        segments.append(
            SegmentFigures(
                topic=topic,
                partition=partition,
                base_offset=count.base_offset,
                next_base_offset=count.next_base_offset,
                size_bytes=count.size_bytes,
                records=count.records,
                live=count.live,
                tombstones=count.tombstones,
                garbage=max(count.garbage - count.aborted, 0),
                keyless=count.keyless,
                aborted=count.aborted,
                first_ms=count.first_ms,
                last_ms=count.last_ms,
                age_ms=end_ms - middle_ms if count.last_ms >= 0 else 0,
                live_share=share,
                live_bytes=count.size_bytes * count.live // records if records else 0,
            )
        )
    return segments


def whole_from(counts: Sequence[SegmentCounts], log_start_offset: int) -> int:
    """Return the offset from which on no offset is missing, or the end offset."""
    first_whole = counts[-1].next_base_offset if counts else log_start_offset
    for count in reversed(counts):
        start = max(count.base_offset, log_start_offset)
        if count.records + count.control < count.next_base_offset - start:
            break
        first_whole = start
    return first_whole


def merge_survival(results: Sequence[HistoriesResult]) -> Survival:
    """Merge the lifetimes of all partitions; sampled ones are scaled up."""

    def bins(name: str) -> dict[int, float]:
        totals: dict[int, float] = {}
        for result in results:
            for place, count in getattr(result, name).items():
                totals[int(place)] = totals.get(int(place), 0) + count * 2**result.sampled_bits
        return totals

    ages = survival_curve(bins("ages_ended"), bins("ages_cut"))
    distances = survival_curve(bins("distances_ended"), bins("distances_cut"))
    most = max((result.sampled_bits for result in results), default=0)
    return Survival(
        by_age=ages,
        by_distance=distances,
        ended=int(sum(bins("ages_ended").values())),
        cut=int(sum(bins("ages_cut").values())),
        keys_share=0.5**most,
        half_life_ms=reached(ages, 0.5),
        half_life_offsets=reached(distances, 0.5),
    )


def survival_curve(ended: Mapping[int, float], cut: Mapping[int, float]) -> Curve:
    """Return the share still live at the end of each bin; [] without lifetimes."""
    at_risk = sum(ended.values()) + sum(cut.values())
    if not at_risk:
        return []
    share, curve = 1.0, [(0.0, 1.0)]
    for place in range(max(max(ended, default=0), max(cut, default=0)) + 1):
        died, gone = ended.get(place, 0), cut.get(place, 0)
        if died:
            share *= max(1 - died / max(at_risk - gone / 2, died), 0.0)
        if died or gone:
            curve.append((bin_edge(place + 1), share))
        at_risk -= died + gone
    return curve


def reached(curve: Curve, share: float) -> float | None:
    """Return the age at which a curve reaches a share, or None."""
    before = (0.0, 1.0)
    for at, level in curve:
        if level <= share:
            fall = before[1] - level
            part = (before[1] - share) / fall if fall else 1.0
            return before[0] + part * (at - before[0])
        before = (at, level)
    return None


def level_at(curve: Curve, at: float) -> float:
    """Return the share at an age; past the end of the curve, its last share; 1 if it is empty."""
    level = 1.0
    for place, share in curve:
        if place > at:
            break
        level = share
    return level


def merge_skew(results: Sequence[HistoriesResult], top: int) -> KeySkew:
    """Merge the key counts of all partitions; a key in two partitions counts twice."""
    records = sum(histories_result.records for histories_result in results)
    named = sorted(
        ((key.key, key.records) for histories_result in results for key in histories_result.top),
        key=lambda item: -item[1],
    )
    bins: dict[int, list[int]] = {}
    for result in results:
        for place, (keys, count) in result.by_records.items():
            both = bins.setdefault(int(place), [0, 0])
            both[0] += keys
            both[1] += count
    missed = max((histories_result.missed_max for histories_result in results), default=0)
    return KeySkew(
        keys=sum(histories_result.keys for histories_result in results),
        records=records,
        missed_max=missed,
        is_exact=missed == 0,
        shares=_shares(bins, records),
        top=[(key, count, count / records) for key, count in named[:top]],
        by_records=[(bin_edge(place), bins[place][0], bins[place][1]) for place in sorted(bins)],
    )


def _shares(bins: Mapping[int, Sequence[int]], records: int) -> dict[str, float]:
    """Return the share of the records of the busiest 0.1, 1, 10 and 50 percent of the keys."""
    keys = sum(item[0] for item in bins.values())
    if not keys or not records:
        return {}
    shares = {}
    for part in (0.001, 0.01, 0.1, 0.5):
        keys_left, covered_records = keys * part, 0.0
        for place in sorted(bins, reverse=True):
            count, together = bins[place]
            taken_keys = min(count, keys_left)
            covered_records += together * taken_keys / count
            keys_left -= taken_keys
            if keys_left <= 0:
                break
        shares[f"{part:.1%}"] = covered_records / records
    return shares


def percent(share: float) -> str:
    """Format a share as "12 %"; small ones get one more digit."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")
