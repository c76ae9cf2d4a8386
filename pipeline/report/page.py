"""The report of a survey: one self-contained HTML file, for dark and light displays.

Rule: everything from a topic is escaped, and the page has no scripts and loads nothing, which its
Content-Security-Policy enforces.
"""

import html
from base64 import b64decode
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from config.units import about_size, about_span, counted
from pipeline.records.key_text import key_text
from pipeline.report.figures import SegmentFigures, TopicFigures, percent
from pipeline.report.plots import PLOTS, plot

SEGMENTS_SHOWN: Final = 200

_CSS: Final = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #22252b; --faint: #71757f;
  --grid: #e4e2dd; --live: #2b7a5b; --tombstone: #b7791f; --garbage: #c2554d; --keyless: #7a6aa8;
  --accent: #2f5fa8; --mark: #eef3fb; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --card: #1e2126; --ink: #e4e3df;
  --faint: #9a9ea8; --grid: #343841; --live: #4fb38c; --tombstone: #d9a24a; --garbage: #e07f76;
  --keyless: #a597d6; --accent: #7aa7ee; --mark: #232c3b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.35rem; margin: 3rem 0 .4rem;
  overflow-wrap: anywhere; } h3 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; }
p { margin: .3rem 0 .8rem; } .faint { color: var(--faint); } code { font: .9em ui-monospace,
  monospace; overflow-wrap: anywhere; }
.verdict { background: var(--mark); border-left: 4px solid var(--accent); padding: .8rem 1rem;
  border-radius: 0 .4rem .4rem 0; margin: 1rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem;
  margin: 1rem 0; padding: 0; }
.tiles div { background: var(--card); border: 1px solid var(--grid); border-radius: .5rem;
  padding: .6rem .8rem; } .tiles dt { color: var(--faint); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: .9rem; border-radius: .45rem; overflow: hidden;
  background: var(--grid); } .bar i { display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); } th { color: var(--faint); font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1.6rem 0; background: var(--card); border: 1px solid var(--grid);
  border-radius: .6rem; padding: 1rem 1.1rem; } figcaption b { display: block; }
figcaption { margin-bottom: .6rem; font-size: .92rem; } .warn { color: var(--garbage); }
details { margin: 1rem 0; } summary { cursor: pointer; } nav a { margin-right: 1rem; }
a { color: var(--accent); } .name { white-space: nowrap; }
"""

_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{css}</style></head><body>
"""


def page(topics: Sequence[TopicFigures], *, made_ms: int) -> str:
    """Return the report as HTML."""
    title = f"Survey of {topics[0].topic}" if len(topics) == 1 else "Survey of topics"
    parts = [_HEAD.format(title=_text(title), css=_CSS), f"<header><h1>{_text(title)}</h1>"]
    parts.append(
        f'<p class="faint">Taken {_day(made_ms)}, over the closed segments. A record is live if it'
        " is the last of its key and not a tombstone.</p>"
    )
    if len(topics) > 1:
        parts.append(_overview(topics))
    parts.append("</header>")
    parts += [_topic(topic, place) for place, topic in enumerate(topics)]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _overview(topics: Sequence[TopicFigures]) -> str:
    rows = [
        [
            f'<a href="#topic-{place}">{_text(topic.topic)}</a>',
            _number(topic.total("records")),
            percent(topic.share("live")),
            percent(topic.share("garbage")),
            about_size(topic.total("size_bytes")),
            about_size(topic.overhead.now_bytes),
            _text(topic.policy),
        ]
        for place, topic in enumerate(topics)
    ]
    heads = ["topic", "records", "live", "superseded", "on disk", "not live", "advice"]
    return _table(heads, rows, numbers={1, 2, 3, 4, 5})


def _topic(topic: TopicFigures, place: int) -> str:
    parts = [f'<section id="topic-{place}"><h2>{_text(topic.topic)}</h2>', _span(topic)]
    parts.append(
        f'<div class="verdict"><b>{_text(topic.policy)}.</b> {_text(topic.policy_why)}</div>'
    )
    parts += [_tiles(topic), _shares(topic), _damage(topic)]
    if topic.advice:
        parts.append("<h3>Settings</h3>")
        rows = [
            [f'<code class="name">{_text(advice.setting)}</code>',
             _text(_setting(advice.setting, advice.now)),
             f"<b>{_text(_setting(advice.setting, advice.advised))}</b>", _text(advice.why)]
            for advice in topic.advice
        ]  # fmt: skip
        parts.append(_table(["setting", "now", "advised", "why"], rows))
    parts.append(f"<h3>Space overhead</h3><p>{_text(topic.overhead.why)}</p>")
    if topic.total("records"):
        for title, text, draw in PLOTS:
            drawn = plot(draw, topic, label=_text(f"{title} ({place})"))
            caption = f"<figcaption><b>{_text(title)}</b>{_text(text)}</figcaption>"
            parts.append(f"<figure>{caption}{drawn}</figure>")
        parts += [_survival_words(topic), _keys(topic)]
    parts += [_segments(topic), "</section>"]
    return "\n".join(parts)


def _span(topic: TopicFigures) -> str:
    if topic.first_ms < 0:
        return '<p class="faint">No records in closed segments.</p>'
    spent = about_span(topic.last_ms - topic.first_ms)
    return f'<p class="faint">{_day(topic.first_ms)} to {_day(topic.last_ms)} ({spent})</p>'


def _tiles(topic: TopicFigures) -> str:
    tiles = [
        ("records", _number(topic.total("records"))),
        ("keys", _number(topic.total("keys"))),
        ("live", percent(topic.share("live"))),
        ("superseded", percent(topic.share("garbage"))),
        ("deletes", _number(topic.total("tombstones"))),
        ("without a key", _number(topic.total("keyless"))),
        ("aborted", _number(topic.total("aborted"))),
        ("on disk", about_size(topic.total("size_bytes"))),
        ("live bytes", about_size(topic.total("live_bytes"))),
        ("partitions", _number(len(topic.partitions))),
        ("segments", _number(len(topic.segments))),
    ]
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{rows}</dl>'


def _shares(topic: TopicFigures) -> str:
    kinds = (("live", "live"), ("keyless", "keyless"), ("tombstones", "tombstone"),
             ("garbage", "garbage"), ("aborted", "faint"))  # fmt: skip
    parts = "".join(
        f'<i style="width:{topic.share(name):.3%};background:var(--{colour})"'
        f' title="{name} {percent(topic.share(name))}"></i>'
        for name, colour in kinds
    )
    return f'<div class="bar">{parts}</div>'


def _damage(topic: TopicFigures) -> str:
    results = [text for figures in topic.partitions for text in figures.damaged]
    rows = "".join(f"<li>{_text(text)}</li>" for text in results)
    return (
        f'<p class="warn">Damaged; records after the damage are not counted:</p><ul>{rows}</ul>'
        * (len(results) > 0)
    )


def _survival_words(topic: TopicFigures) -> str:
    survival = topic.survival
    if not survival.by_age:
        return ""
    half = (
        f"Half of the records are superseded within <b>{about_span(int(survival.half_life_ms))}</b>"
        if survival.half_life_ms is not None
        else f"After {about_span(int(survival.by_age[-1][0]))}, the longest observed age,"
        f" <b>{percent(survival.by_age[-1][1])}</b> of the records are still live"
    )
    how = "All keys were tracked" if survival.keys_share == 1 else (
        f"One key in {round(1 / survival.keys_share)} was tracked"
    )  # fmt: skip
    cleaned = (
        " Only the uncleaned part of the log was used: removed records leave no lifetimes."
        if topic.is_cleaned
        else ""
    )
    return (
        f"<p>{half}. {how}: {survival.ended:,} records were superseded, {survival.cut:,} are still"
        f" live at the end of the log.{cleaned}</p>"
    )


def _keys(topic: TopicFigures) -> str:
    skew = topic.skew
    if not skew.top:
        return ""
    parts = [f"the busiest {part} of the keys have {percent(share)}"
             for part, share in skew.shares.items()]  # fmt: skip
    exact = "Counted exactly." if skew.is_exact else (
        "Approximate: keys with at most"
        f" {counted(skew.missed_max, 'record')} may be missing."
    )  # fmt: skip
    rows = [
        [f"<code>{_text(key_text(b64decode(key)))}</code>", _number(count), percent(share)]
        for key, count, share in skew.top
    ]
    return (
        f"<h3>Keys with the most records</h3><p>Of {counted(skew.records, 'record')} with a key,"
        f" {'; '.join(parts)}. {exact}</p>{_table(['key', 'records', 'share'], rows, {1, 2})}"
    )


def _segments(topic: TopicFigures) -> str:
    if not topic.segments:
        return ""
    shown = sorted(topic.segments, key=lambda segment: -(segment.size_bytes - segment.live_bytes))
    rows = [_segment(segment) for segment in shown[:SEGMENTS_SHOWN]]
    more = f", the {SEGMENTS_SHOWN} with the most garbage" if len(shown) > SEGMENTS_SHOWN else ""
    heads = ["partition", "first offset", "size", "records", "live", "superseded", "deletes", "age"]
    return (
        f"<details><summary>{len(topic.segments):,} segments{more}</summary>"
        f"{_table(heads, rows, set(range(8)))}</details>"
    )


def _segment(segment: SegmentFigures) -> list[str]:
    return [
        str(segment.partition), _number(segment.base_offset), about_size(segment.size_bytes),
        _number(segment.records), percent(segment.live_share), _number(segment.garbage),
        _number(segment.tombstones), about_span(segment.age_ms),
    ]  # fmt: skip


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()
) -> str:
    """Return a table of cells that are already HTML."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{cell}</{tag}>' if place in numbers else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th", heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _setting(name: str, value: str) -> str:
    if not value.isdecimal():
        return value
    if name.endswith(".bytes"):
        return about_size(int(value))
    return about_span(int(value)) if name.endswith(".ms") and int(value) < 1 << 53 else value


def _text(value: str) -> str:
    return html.escape(value)


def _number(value: int) -> str:
    return f"{value:,}"


def _day(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
