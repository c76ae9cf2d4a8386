// Strata: a partition drawn as layers of sediment, the oldest offsets on the left.
//
// The width of a segment is its bytes, its colour the age of its newest record. Dirty segments are
// hatched. What is known to be garbage is washed out from the top. The band below shows what a clean is
// expected to leave. All states of a log have one scale: the largest one fills the frame, and a smaller
// one leaves the rest of it empty, so that a log is seen to shrink. It can fill the frame on demand.
// pages/partition.js reads the data, which broker/http/api/topics.py answers (/segments, /history).

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { ago, bytes, clock, number, offsets, percent, plural, sentence, span, STAGES } from "../format.js";

const NEVER = -1; // no tombstone in the segment waits for removal
const HEIGHT = 244;
const BAND = { top: 44, height: 128 };
const MARKS = 194; // the baseline of their names
const AFTER = { top: 208, height: 26 };
const ZOOM_MAX = 400;
const EXTENT_MIN = 0.004; // of the frame: a small log stays visible, and an empty one has this width
const EXTENT_FULL = 0.97; // of the frame: from here on nothing seems to be missing
const SHRINK_MS = 700;
// Sediment from the youngest to the oldest.
const AGES = [
  [246, 224, 178],
  [228, 184, 118],
  [193, 136, 78],
  [143, 90, 50],
  [88, 55, 35],
];
const MIDDLE = 0.35; // the place in AGES of a log of one age
const CONTRAST = 0.1; // ages that differ by a tenth have all colours
const LAMINAE = 9;

// Model ----------------------------------------------------------------------------------------

// Joins what the cleaner says of a partition with its segments.
export function toModel(facts, answer, atMs) {
  const damage = facts.damage || [];
  const damaged = new Set(damage.map((entry) => entry.segment_base_offset));
  const segments = answer.segments.map(([baseOffset, nextOffset, sizeBytes, oldestMs, newestMs, horizonMs, liveBytes], index) => ({
    baseOffset,
    nextOffset,
    sizeBytes,
    oldestMs,
    newestMs,
    horizonMs,
    garbageBytes: liveBytes < 0 ? null : sizeBytes - liveBytes,
    isDamaged: damaged.has(baseOffset),
    kind: kindOf(baseOffset, index === answer.segments.length - 1, facts),
  }));
  const total = segments.reduce((sum, segment) => sum + segment.sizeBytes, 0);
  const cleanable = (facts.clean_bytes || 0) + (facts.dirty_bytes || 0);
  return {
    atMs,
    facts,
    segments,
    offsets: answer,
    total,
    cleanable,
    expectedBytes: facts.live_bytes === null || facts.live_bytes === undefined || !facts.dirty_bytes
      ? null
      : total - cleanable + Math.min(facts.live_bytes, cleanable),
    fingerprint: [segments.length, total, facts.first_dirty_offset, facts.end_offset, Boolean(facts.job)].join(),
  };
}

function kindOf(baseOffset, isActive, facts) {
  if (isActive) return "active";
  if (facts.first_dirty_offset === null || facts.first_dirty_offset === undefined) return "kept";
  if (baseOffset < facts.first_dirty_offset) return "clean";
  return baseOffset < facts.end_offset ? "dirty" : "waiting";
}

export function stratumName(segment) {
  const names = { active: "active", kept: "not compacted", clean: "clean", dirty: "dirty", waiting: "not cleanable yet" };
  return segment.isDamaged ? `${names[segment.kind]}, damaged` : names[segment.kind];
}

// Component ------------------------------------------------------------------------------------

// `largest` is the state whose bytes give the scale: { atMs, total }. `isLive`: the model is the present
// state, and a change of its size is shown as a movement.
export function Strata({ model, largest, isLive }) {
  const canvas = useRef(null);
  const [chosen, setChosen] = useState(null); // an index
  const [view, setView] = useState({ from: 0, to: 1 });
  const [fills, setFills] = useState(false);
  const toScale = model.total ? Math.max(EXTENT_MIN, model.total / largest.total) : EXTENT_MIN;
  const extent = fills && model.total ? 1 : toScale; // the share of the frame that the log takes
  const shares = useMemo(() => sharesOf(model, extent), [model, extent]);
  const drawn = useRef(extent); // on the screen: another one during a movement
  const painted = useRef(0); // the width of the picture
  const draw = () => {
    painted.current = canvas.current.clientWidth || 600;
    const factor = drawn.current / extent;
    const places = shares.map(([left, right]) => [left * factor, right * factor]);
    paint(canvas.current, painted.current, model, places, view, extent < EXTENT_FULL ? ghostOf(model, largest, isLive) : null);
  };
  const drawAgain = useRef(draw); // the latest one, for what happens outside of this component
  drawAgain.current = draw;
  useLayoutEffect(() => {
    if (isLive) return moved(drawn, extent, drawAgain);
    drawn.current = extent;
    draw();
  }, [model, view, extent, largest]);
  useEffect(() => {
    const redraw = () => drawAgain.current();
    const resize = () => canvas.current.clientWidth !== painted.current && redraw();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const observer = new ResizeObserver(resize);
    observer.observe(canvas.current);
    scheme.addEventListener("change", redraw);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", redraw);
    };
  }, []);

  const point = (event) => {
    const box = canvas.current.getBoundingClientRect();
    setChosen(indexAt(shares, view.from + (view.to - view.from) * ((event.clientX - box.left) / box.width)));
  };
  const zoom = (factor) => setView((old) => zoomed(old, factor, centre(shares[chosen] || [0, extent], old)));
  const showWhole = () => setView({ from: 0, to: 1 });
  const press = (event) => {
    const last = model.segments.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key in steps) {
      const start = chosen === null ? (steps[event.key] > 0 ? -1 : last + 1) : chosen;
      setChosen(Math.max(0, Math.min(last, start + steps[event.key])));
    } else if (event.key === "+") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") showWhole();
    else return;
    event.preventDefault();
  };
  const segment = chosen === null ? null : model.segments[chosen];
  return html`<figure class="strata">
    <div class="layers">
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${useMemo(() => summary(model, largest), [model, largest])}
        onPointerMove=${point} onPointerDown=${point} onPointerLeave=${(event) => event.pointerType === "mouse" && setChosen(null)} onKeyDown=${press}></canvas>
      ${shares[chosen] && html`<div class="frame" style=${placeOf(shares[chosen], view)}></div>`}
    </div>
    <div class="under">
      <p class="reading" aria-live="polite">${segment ? describe(segment, model) : hint(model)}</p>
      <div class="zoom" role="group" aria-label="Zoom">
        ${(fills || toScale < EXTENT_FULL) && model.total > 0 && html`<button type="button" aria-pressed=${fills} onClick=${() => {
          setFills(!fills);
          showWhole();
        }}>Fill the width</button>`}
        <button type="button" aria-label="Zoom out" onClick=${() => zoom(2)} disabled=${view.to - view.from >= 1}>−</button>
        <button type="button" onClick=${showWhole} disabled=${view.to - view.from >= 1}>Whole log</button>
        <button type="button" aria-label="Zoom in" onClick=${() => zoom(0.5)}>+</button>
      </div>
    </div>
    <figcaption>${useMemo(() => html`<${Legend} model=${model} />`, [model])}</figcaption>
  </figure>`;
}

function Legend({ model }) {
  const kinds = new Set(model.segments.map((segment) => segment.kind));
  const isEmpty = model.segments.some((segment) => segment.kind === "active" && !segment.sizeBytes);
  return html`<ul class="legend">
    <li><span class="swatch young"></span><span class="swatch middle"></span><span class="swatch old"></span>young to old</li>
    ${kinds.has("dirty") && html`<li><span class="swatch hatched"></span>dirty: may hold garbage</li>`}
    ${model.segments.some((segment) => segment.garbageBytes) && html`<li><span class="swatch washed"></span>known to be garbage</li>`}
    ${kinds.has("waiting") && html`<li><span class="swatch dotted"></span>not cleanable yet</li>`}
    <li><span class="swatch active"></span>active segment${isEmpty && ", an outline while it is empty"}</li>
    ${model.segments.some((segment) => segment.horizonMs > NEVER) && html`<li><span class="swatch horizon"></span>tombstones wait here</li>`}
    ${model.segments.some((segment) => segment.isDamaged) && html`<li><span class="swatch damaged"></span>damaged</li>`}
  </ul>`;
}

function summary(model, largest) {
  const { facts } = model;
  const parts = [`${plural(model.segments.length, "segment")}, ${bytes(model.total)}`];
  if (model.total < EXTENT_FULL * largest.total) parts.push(`${bytes(largest.total)} at ${clock(largest.atMs)}`);
  if (facts.clean_bytes !== null && facts.clean_bytes !== undefined) {
    parts.push(`${bytes(facts.clean_bytes)} clean, ${bytes(facts.dirty_bytes)} dirty, ${bytes(facts.waiting_bytes)} not cleanable yet`);
  }
  if (model.expectedBytes !== null) parts.push(`about ${bytes(model.expectedBytes)} after the next clean`);
  return `${parts.join("; ")}. Arrow keys move between segments, plus and minus zoom.`;
}

function hint(model) {
  const { job } = model.facts;
  if (job) return `A clean runs: ${STAGES[job.stage] || "starting"}, ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}.`;
  return matchMedia("(pointer: coarse)").matches ? "Tap a segment to see what it is." : "Point at a segment, or use the arrow keys.";
}

function describe(segment, model) {
  if (!segment.sizeBytes) return sentence(`${stratumName(segment)}, empty, next offset ${number(segment.nextOffset)}.`);
  const parts = [
    offsets(segment.baseOffset, segment.nextOffset),
    `${bytes(segment.sizeBytes)} (${percent(segment.sizeBytes / model.total)})`,
    stratumName(segment),
    `newest record ${ago(segment.newestMs)}`,
  ];
  if (segment.garbageBytes) parts.push(`at least ${percent(segment.garbageBytes / segment.sizeBytes)} garbage`);
  if (segment.horizonMs > NEVER) {
    const wait = segment.horizonMs - model.atMs;
    parts.push(wait > 0 ? `a tombstone expires in ${span(wait)}` : "a tombstone has expired");
  }
  return sentence(`${parts.join(", ")}.`);
}

// Geometry -------------------------------------------------------------------------------------

function zoomed(view, factor, at) {
  const width = Math.min(1, Math.max(1 / ZOOM_MAX, (view.to - view.from) * factor));
  const middle = view.from + (view.to - view.from) * at;
  const from = Math.min(1 - width, Math.max(0, middle - width * at));
  return { from, to: from + width };
}

// The place of a segment in the view, 0..1.
function centre([left, right], view) {
  return Math.min(1, Math.max(0, ((left + right) / 2 - view.from) / (view.to - view.from)));
}

function indexAt(shares, share) {
  const at = shares.findIndex(([left, right]) => share >= left && share < right);
  return at < 0 ? null : at;
}

// The style of a frame around a segment.
function placeOf([left, right], view) {
  const width = view.to - view.from;
  return { left: `${(100 * (left - view.from)) / width}%`, width: `${(100 * (right - left)) / width}%` };
}

// The places [left, right] of the segments in the frame, by bytes, if the log takes `extent` of it. The
// active one is never too small to see.
function sharesOf(model, extent) {
  const least = Math.max(1, model.total / 120);
  const weights = model.segments.map((segment) =>
    segment.kind === "active" ? Math.max(segment.sizeBytes, least) : segment.sizeBytes,
  );
  const sum = weights.reduce((total, weight) => total + weight, 0) || 1;
  let left = 0;
  return weights.map((weight) => {
    const right = left + (extent * weight) / sum;
    const place = [left, right];
    left = right;
    return place;
  });
}

function endOf(shares) {
  return shares.at(-1)?.[1] ?? 1;
}

// The place of an offset, by the segment that holds it.
function shareOfOffset(model, shares, offset) {
  const index = model.segments.findIndex((segment) => offset < segment.nextOffset || offset === segment.baseOffset);
  if (index < 0) return endOf(shares);
  const segment = model.segments[index];
  const [left, right] = shares[index];
  const within = (offset - segment.baseOffset) / Math.max(1, segment.nextOffset - segment.baseOffset);
  return left + (right - left) * Math.min(1, Math.max(0, within));
}

// Painting -------------------------------------------------------------------------------------

// Draws until `drawn` is `extent`: with a movement if it is another one. Returns what ends the movement.
function moved(drawn, extent, drawAgain) {
  const from = drawn.current;
  const isCalm = Math.abs(extent - from) < 0.01 || matchMedia("(prefers-reduced-motion: reduce)").matches;
  const began = performance.now();
  let frame = null;
  const step = (now) => {
    const share = isCalm ? 1 : Math.min(1, Math.max(0, (now - began) / SHRINK_MS));
    drawn.current = extent + (from - extent) * (1 - share) ** 3;
    drawAgain.current();
    if (share < 1) frame = requestAnimationFrame(step);
  };
  step(began);
  return () => cancelAnimationFrame(frame);
}

// What is written where the log was when it was larger.
function ghostOf(model, largest, isLive) {
  if (!largest.total) return ["No records yet"];
  return [`${bytes(largest.total)} at ${clock(largest.atMs)}`, `${bytes(model.total)} ${isLive ? "now" : `at ${clock(model.atMs)}`}`];
}

// Draws the log.
function paint(canvas, width, model, shares, view, ghost) {
  const context = prepare(canvas, width);
  const toX = (share) => ((share - view.from) / (view.to - view.from)) * width;
  const places = shares.map(([left, right]) => [toX(left), toX(right)]);
  const colors = readColors();
  const end = endOf(shares);
  if (ghost) paintGhost(context, ghost, Math.max(0, toX(end)), Math.min(width, toX(1)), colors);
  paintSegments(context, model, places, width, colors);
  paintLaminae(context, Math.max(0, toX(0)), Math.min(width, toX(end)), colors);
  paintBrackets(context, model, places, width, colors);
  paintAfter(context, model, toX, end, width, colors);
  paintMarks(context, model, shares, toX, width, colors);
  paintJob(context, model, places, colors);
}

// Empties a canvas and scales it to the pixels of the screen.
function prepare(canvas, width) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(HEIGHT * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, HEIGHT);
  return context;
}

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  return {
    ink: color("--ink"),
    soft: color("--soft"),
    line: color("--line"),
    paper: color("--card"),
    dirty: color("--dirty"),
    accent: color("--accent"),
    active: color("--active"),
    bad: color("--bad"),
    horizon: color("--horizon"),
  };
}

function paintSegments(context, model, places, width, colors) {
  const [youngest, oldest] = ageRange(model);
  const hatch = hatching(context, colors.dirty, colors.paper);
  const dots = dotting(context, colors.ink, colors.paper);
  let lastDiamond = -Infinity;
  model.segments.forEach((segment, index) => {
    const [left, right] = places[index];
    if (right < 0 || left > width || right <= left) return;
    // Wide segments have a gap between them; narrow ones overlap, or their seams would show, and many gaps
    // beside the hatching would flicker.
    const wide = right - left > 12 ? right - left - 1 : right - left + 0.7;
    if (!segment.sizeBytes) {
      context.strokeStyle = colors.active;
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, BAND.top + 0.5, Math.max(1, wide - 1), BAND.height - 1);
      return;
    }
    context.fillStyle = segment.kind === "active" ? colors.active : ageColor(model.atMs - segment.newestMs, youngest, oldest);
    context.fillRect(left, BAND.top, wide, BAND.height);
    if (segment.kind === "dirty") fill(context, hatch, left, wide);
    if (segment.kind === "waiting") fill(context, dots, left, wide);
    if (segment.garbageBytes) paintGarbage(context, left, wide, segment.garbageBytes / segment.sizeBytes, colors);
    if (segment.isDamaged) {
      context.fillStyle = colors.bad;
      context.fillRect(left, BAND.top, Math.max(2, wide), BAND.height);
    }
    const middle = (left + right) / 2;
    if (segment.horizonMs > NEVER && middle >= lastDiamond + 9) {
      paintDiamond(context, middle, BAND.top - 5, colors.horizon);
      lastDiamond = middle;
    }
  });
}

function paintGarbage(context, left, width, share, colors) {
  context.globalAlpha = 0.72;
  context.fillStyle = colors.paper;
  context.fillRect(left, BAND.top, width, BAND.height * share);
  context.globalAlpha = 1;
}

function fill(context, pattern, left, width) {
  context.fillStyle = pattern;
  context.fillRect(left, BAND.top, width, BAND.height);
}

// The active segment has its own colour, so its age does not count.
function ageRange(model) {
  const ages = model.segments.filter((s) => s.kind !== "active" && s.newestMs > 0).map((s) => Math.max(1, model.atMs - s.newestMs));
  return ages.length ? [Math.min(...ages), Math.max(...ages)] : [1, 1];
}

// On a logarithmic scale between the youngest and the oldest segment of this log. The closer their ages are,
// the closer are their colours, so that no colour jumps while the log only ages.
function ageColor(age, youngest, oldest) {
  const low = Math.log(youngest + 1);
  const high = Math.log(oldest + 1);
  const share = (Math.log(Math.max(youngest, age) + 1) - low) / (high - low || 1);
  const contrast = Math.min(1, (high - low) / CONTRAST);
  const at = Math.min(0.9999, Math.max(0, MIDDLE + contrast * (share - MIDDLE))) * (AGES.length - 1);
  const [first, second] = [AGES[Math.floor(at)], AGES[Math.floor(at) + 1]];
  const mixed = first.map((part, index) => Math.round(part + (second[index] - part) * (at % 1)));
  return `rgb(${mixed.join(" ")})`;
}

const tiles = new Map(); // of patterns, by kind and colour

// Returns a pattern of a tile that is painted once.
function pattern(context, name, size, paintTile) {
  if (!tiles.has(name)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    paintTile(tile.getContext("2d"));
    tiles.set(name, tile);
  }
  return context.createPattern(tiles.get(name), "repeat");
}

// Lines on a pale edge: red alone is hard to see on the browns of the middle ages.
function hatching(context, color, edge) {
  const size = 9;
  return pattern(context, `hatching ${color}`, size, (pen) => {
    for (const [style, width] of [[edge, 4.2], [color, 2.2]]) {
      pen.strokeStyle = style;
      pen.lineWidth = width;
      for (const shift of [-size, 0, size]) {
        pen.beginPath();
        pen.moveTo(shift - 2, size + 2);
        pen.lineTo(shift + size + 2, -2);
        pen.stroke();
      }
    }
  });
}

// Dots with an edge: each age is like one of the two colours, in one of the two themes.
function dotting(context, color, edge) {
  return pattern(context, `dotting ${color}`, 9, (pen) => {
    pen.fillStyle = edge;
    pen.fillRect(2, 2, 3.6, 3.6);
    pen.fillStyle = color;
    pen.fillRect(3, 3, 1.6, 1.6);
  });
}

// The outline of what the log was at its largest, beside what is left.
function paintGhost(context, lines, left, right, colors) {
  if (right - left < 4) return;
  context.fillStyle = colors.line;
  context.globalAlpha = 0.3;
  context.fillRect(left, BAND.top, right - left, BAND.height);
  context.globalAlpha = 1;
  context.strokeStyle = colors.soft;
  context.setLineDash([3, 3]);
  context.strokeRect(left + 0.5, BAND.top + 0.5, right - left - 1, BAND.height - 1);
  context.setLineDash([]);
  context.font = "14px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  if (Math.max(...lines.map((line) => context.measureText(line).width)) > right - left - 28) return;
  lines.forEach((line, index) => {
    context.fillStyle = index ? colors.ink : colors.soft;
    context.fillText(line, left + 14, BAND.top + BAND.height / 2 - 5 + 22 * index);
  });
}

// Fine wavy lines, as in real varves.
function paintLaminae(context, left, right, colors) {
  context.save();
  context.beginPath();
  context.rect(left, BAND.top, right - left, BAND.height);
  context.clip();
  context.strokeStyle = colors.ink;
  context.globalAlpha = 0.1;
  context.lineWidth = 1;
  for (let line = 1; line < LAMINAE; line += 1) {
    const y = BAND.top + (BAND.height * line) / LAMINAE;
    context.beginPath();
    for (let x = 0; x <= right + 12; x += 12) {
      context.lineTo(x, y + 2.4 * Math.sin(x / 53 + line * 1.7) + 1.5 * Math.sin(x / 17 + line));
    }
    context.stroke();
  }
  context.restore();
}

// Names above the band: where it is clean, dirty, not cleanable yet.
function paintBrackets(context, model, places, width, colors) {
  const names = { clean: "clean", dirty: "dirty", waiting: "not cleanable yet", kept: "not compacted", active: "active" };
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  let begin = 0;
  let free = -Infinity; // where the next name may begin
  for (let index = 1; index <= model.segments.length; index += 1) {
    const kind = model.segments[begin].kind;
    if (index < model.segments.length && model.segments[index].kind === kind) continue;
    const left = Math.max(0, places[begin][0]);
    const right = Math.min(width, places[index - 1][1]);
    const nbytes = model.segments.slice(begin, index).reduce((sum, segment) => sum + segment.sizeBytes, 0);
    begin = index;
    if (right - left < 2 || !nbytes) continue;
    context.strokeStyle = kind === "dirty" ? colors.dirty : colors.soft;
    context.lineWidth = kind === "dirty" ? 3 : 1.5;
    context.beginPath();
    context.moveTo(left + 1, 31);
    context.lineTo(right - 1, 31);
    context.stroke();
    // A name may run over what follows, which then has none.
    const text = `${names[kind]} ${bytes(nbytes)}`;
    const wide = context.measureText(text).width;
    const at = Math.max(0, Math.min(left + 2, width - wide));
    if (at < free) continue;
    context.fillStyle = colors.ink;
    context.fillText(text, at, 22);
    free = at + wide + 10;
  }
}

// A smaller band in the frame of a larger one: what the next clean is expected to leave of the log.
function paintAfter(context, model, toX, end, width, colors) {
  if (!model.total) return;
  context.font = "12px system-ui, sans-serif";
  if (model.expectedBytes === null) {
    context.fillStyle = colors.soft;
    if (model.facts.dirty_bytes === 0) context.fillText("nothing to clean now", 0, AFTER.top + 17);
    if (model.facts.dirty_bytes) context.fillText("no estimate before the first clean ends", 0, AFTER.top + 17);
    return;
  }
  const text = `after the next clean: about ${bytes(model.expectedBytes)}`;
  const [left, right] = [Math.max(0, toX(0)), Math.min(width, toX(end))];
  const filled = Math.min(right, toX((end * model.expectedBytes) / model.total));
  context.fillStyle = "rgb(193 136 78)";
  if (filled > left) context.fillRect(left, AFTER.top, filled - left, AFTER.height);
  context.strokeStyle = colors.soft;
  context.setLineDash([3, 3]);
  context.strokeRect(left + 0.5, AFTER.top + 0.5, right - left - 1, AFTER.height - 1);
  context.setLineDash([]);
  const wide = context.measureText(text).width;
  const isInside = wide < filled - left - 16;
  context.fillStyle = isInside ? "#2b1a0c" : colors.ink;
  if (isInside) context.fillText(text, left + 8, AFTER.top + 17);
  else {
    const free = [filled, right].map((x) => Math.max(left, x) + 8).find((x, index) => wide < (index ? width : right) - x - 8);
    if (free !== undefined) context.fillText(text, free, AFTER.top + 17);
  }
}

// Offsets that matter, on the axis.
function paintMarks(context, model, shares, toX, width, colors) {
  const { offsets, facts } = model;
  const marks = [
    [offsets.log_start_offset, "log start"],
    [facts.first_dirty_offset, "first dirty"],
    [offsets.view_horizon, "view"],
    [offsets.high_watermark > offsets.last_stable_offset ? offsets.last_stable_offset : null, "last stable"],
  ];
  context.font = "11px system-ui, sans-serif";
  let free = -Infinity; // where the next label may begin
  for (const [offset, name] of marks.filter(([value]) => value !== null && value !== undefined).sort((a, b) => a[0] - b[0])) {
    const x = toX(shareOfOffset(model, shares, offset));
    if (x < -1 || x > width + 1) continue;
    const at = Math.min(width - 1, Math.max(1, x));
    const text = `${name} ${number(offset)}`;
    const begin = Math.min(at, width - context.measureText(text).width);
    if (begin < free) continue;
    context.strokeStyle = colors.soft;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at, BAND.top + BAND.height);
    context.lineTo(at, MARKS - 11);
    context.stroke();
    context.fillStyle = colors.soft;
    context.fillText(text, begin, MARKS);
    free = begin + context.measureText(text).width + 10;
  }
}

// Where the running clean is, in what it reads.
function paintJob(context, model, places, colors) {
  const { job } = model.facts;
  if (!job || !job.total_bytes) return;
  const cleaned = model.segments.map((s, index) => [s, places[index]]).filter(([s]) => s.kind === "clean" || s.kind === "dirty");
  if (!cleaned.length) return;
  const left = cleaned[0][1][0];
  const right = cleaned.at(-1)[1][1];
  const x = left + (right - left) * Math.min(1, job.done_bytes / job.total_bytes);
  context.fillStyle = colors.accent;
  context.globalAlpha = 0.22;
  context.fillRect(left, BAND.top, x - left, BAND.height);
  context.globalAlpha = 1;
  context.fillRect(x - 1.5, BAND.top - 6, 3, BAND.height + 12);
}

function paintDiamond(context, x, y, color) {
  context.fillStyle = color;
  context.beginPath();
  context.moveTo(x, y - 4);
  context.lineTo(x + 4, y);
  context.lineTo(x, y + 4);
  context.lineTo(x - 4, y);
  context.fill();
}
