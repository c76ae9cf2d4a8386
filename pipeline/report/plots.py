"""The plots of a survey, as SVG with the colours of the surrounding page.

Rules
- matplotlib draws with placeholder colours, which are replaced by the page's CSS variables, so a
  plot is readable on dark and light displays.
- Text stays text in the page's fonts, nothing is loaded, and text of a topic is never parsed as a
  formula. Equal figures give equal bytes.
"""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from config.units import about_size
from pipeline.report.figures import TopicFigures
from pipeline.report.ticks import Ticks, even_ticks, log_ticks

# Placeholder colour -> CSS variable of the page.
COLOURS: Final = {
    "#010203": "--ink",
    "#040506": "--faint",
    "#070809": "--grid",
    "#0a0b0c": "--live",
    "#0d0e0f": "--tombstone",
    "#101112": "--garbage",
    "#131415": "--keyless",
    "#161718": "--accent",
}
INK, FAINT, GRID, LIVE, TOMBSTONE, GARBAGE, KEYLESS, ACCENT = COLOURS
BARS_MAX: Final = 160
_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "varve",
    "font.size": 10.0,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Draw = Callable[[Any, TopicFigures], None]


def survival_by_age(axes: Any, topic: TopicFigures) -> None:
    """The product-limit estimate, and each segment as a dot."""
    curve = topic.survival.by_age
    whole = {figures.partition: figures.whole_from for figures in topic.partitions}
    if curve:
        _steps(axes, [(at / 1000, share) for at, share in curve], "records, estimated")
    for is_whole, colour, label in (
        (True, LIVE, "segments"),
        (False, GARBAGE, "segments that were cleaned"),
    ):
        dots = [
            (max(segment.age_ms / 1000, 0.001), segment.live_share, segment.size_bytes)
            for segment in topic.segments
            if segment.records and (segment.base_offset >= whole[segment.partition]) == is_whole
        ]
        if dots:
            ages, shares, _ = zip(*dots, strict=True)
            axes.scatter(ages, shares, s=16, color=colour, alpha=0.55, lw=0, label=label)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    _set_ticks(axes, log_ticks(low, high))
    axes.set_xlabel("age")
    _share_axis(axes, "still live")


def survival_by_distance(axes: Any, topic: TopicFigures) -> None:
    """The same, by the number of records written since."""
    curve = topic.survival.by_distance
    _steps(axes, [(max(at, 1), share) for at, share in curve], "records, estimated")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_formatter(_count))
    axes.set_xlabel("offsets written to the partition since")
    _share_axis(axes, "still live")


def _steps(axes: Any, curve: Sequence[tuple[float, float]], label: str) -> None:
    shown = [(max(at, 0.001), share) for at, share in curve]
    if not shown:
        return
    places, shares = zip(*shown, strict=True)
    axes.step(places, shares, where="post", color=ACCENT, lw=2, label=label)
    axes.fill_between(places, shares, step="post", color=ACCENT, alpha=0.12, lw=0)


def where_garbage_is(axes: Any, topic: TopicFigures) -> None:
    """Bytes by kind along the log; adjacent segments are merged if there are many."""
    ordered = sorted(
        topic.segments,
        key=lambda segment: (segment.first_ms, segment.partition, segment.base_offset),
    )
    step = -(-len(ordered) // BARS_MAX) or 1
    parts = [ordered[at : at + step] for at in range(0, len(ordered), step)]
    base = [0.0] * len(parts)
    kinds = (
        ("live", LIVE),
        ("keyless", KEYLESS),
        ("tombstones", TOMBSTONE),
        ("garbage", GARBAGE),
        ("aborted", FAINT),
    )
    for name, colour in kinds:
        heights = [
            sum(
                segment.size_bytes * getattr(segment, name) / max(segment.records, 1)
                for segment in part
            )
            for part in parts
        ]
        if any(heights):
            axes.bar(range(len(parts)), heights, 1.0, base, color=colour, label=_KINDS[name], lw=0)
        base = [low + high for low, high in zip(base, heights, strict=True)]
    _bytes_axis(axes)
    axes.set_xticks([])
    axes.set_xlim(-0.5, max(len(parts), 1) - 0.5)
    axes.set_xlabel("segments, from the oldest to the newest")
    axes.grid(visible=False, axis="x")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


_KINDS: Final = {
    "live": "live",
    "keyless": "without a key",
    "tombstones": "deletes",
    "garbage": "superseded",
    "aborted": "aborted",
}


def bytes_over_time(axes: Any, topic: TopicFigures) -> None:
    """Cumulative bytes by time of writing, and the live part of them."""
    ordered = sorted(
        (figures for figures in topic.segments if figures.last_ms >= 0), key=lambda o: o.last_ms
    )
    if not ordered:
        return
    begin_ms = topic.first_ms
    times, all_bytes, live_bytes = [0.0], [0.0], [0.0]
    for segment in ordered:
        times.append((segment.last_ms - begin_ms) / 1000)
        all_bytes.append(all_bytes[-1] + segment.size_bytes)
        live_bytes.append(live_bytes[-1] + segment.live_bytes)
    axes.fill_between(times, all_bytes, step="post", color=GARBAGE, alpha=0.35, lw=0,
                      label="in the log")  # fmt: skip
    axes.fill_between(times, live_bytes, step="post", color=LIVE, alpha=0.7, lw=0,
                      label="live")  # fmt: skip
    _bytes_axis(axes)
    _set_ticks(axes, even_ticks(times[-1]))
    axes.set_xlabel("since the first record")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.legend(loc="upper left")


def keys_by_records(axes: Any, topic: TopicFigures) -> None:
    """The shares of keys and of records, by the number of records of a key."""
    rows = topic.skew.by_records
    if not rows:
        return
    records = sum(row[2] for row in rows) or 1
    keys = sum(row[1] for row in rows) or 1
    places = range(len(rows))
    axes.bar([place - 0.2 for place in places], [row[1] / keys for row in rows], 0.4, color=LIVE,
             label="of the keys", lw=0)  # fmt: skip
    axes.bar([place + 0.2 for place in places], [row[2] / records for row in rows], 0.4,
             color=ACCENT, label="of the records", lw=0)  # fmt: skip
    ticks = range(0, len(rows), max(len(rows) // 10, 1))
    axes.set_xticks(list(ticks), [_count(-(-rows[place][0] // 1)) for place in ticks])
    axes.set_xlabel("records per key, at least")
    axes.grid(visible=False, axis="x")
    _share_axis(axes, "")


PLOTS: Final[tuple[tuple[str, str, Draw], ...]] = (
    (
        "Where the garbage is",
        "Each bar is a segment, or several adjacent segments.",
        where_garbage_is,
    ),
    (
        "How long records stay live",
        "The line shows the share of records that are still the latest of their key at a given age;"
        " each dot is a segment. If the line falls early, wait before cleaning: an early clean"
        " copies records that are soon superseded.",
        survival_by_age,
    ),
    (
        "How long records stay live, by later records",
        "Use this plot if timestamps are unreliable: replays, bursts, records without a timestamp.",
        survival_by_distance,
    ),
    (
        "Growth",
        "Bytes by the time of their last record. The gap between the two is what compaction"
        " can give back.",
        bytes_over_time,
    ),
    (
        "How records are spread over keys",
        "A topic in which few keys have most of the records compacts well.",
        keys_by_records,
    ),
)


def plot(draw: Draw, topic: TopicFigures, *, label: str) -> str:
    """Return one plot as an SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 3.3), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, topic)
        if not axes.has_data():
            axes.set_axis_off()
            axes.text(0.5, 0.5, "nothing to show", ha="center", transform=axes.transAxes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _themed(out.getvalue(), label)


def _themed(svg: str, label: str) -> str:
    """Return an SVG file as an element of a page: without its header, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for drawn, name in COLOURS.items():
        svg = svg.replace(drawn, f"var({name})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"(<svg [^>]*?) width=\"[^\"]*\"", r"\1", svg, count=1)
    svg = re.sub(r"(<svg [^>]*?) height=\"[^\"]*\"", r"\1", svg, count=1)
    # Element ids repeat in every drawing: make them unique within the page.
    mark = re.sub(r"\W", "", label)
    svg = re.sub(r"(id=\"|#)([A-Za-z][\w]*)", rf"\g<1>{mark}-\g<2>", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _share_axis(axes: Any, label: str) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(_formatter(lambda value: f"{value:.0%}"))
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _bytes_axis(axes: Any) -> None:
    """Ticks at round numbers of the field's units, up to eight of them."""
    axes.autoscale_view()
    most = max(axes.get_ylim()[1], 1)
    step = 1 << max(int(most / 8).bit_length(), 0)
    ticks = list(range(0, int(most) + 1, step))
    axes.set_yticks(ticks, [about_size(tick).replace(".0 ", " ") for tick in ticks])


def _set_ticks(axes: Any, ticks: Ticks) -> None:
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.minorticks_off()


def _formatter(words: Callable[[float], str]) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: words(value))


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
