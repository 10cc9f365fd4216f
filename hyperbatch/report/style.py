"""The style sheet and script of the report. They use no fonts, libraries or addresses from outside."""

from __future__ import annotations

# The part of the style that separate pictures need too.
CHART_CSS = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #14171f; --soft: #5c6573; --line: #e3e6eb; --grid: #eceef2;
  --good: #0b7f56; --good-bg: #e2f5ed; --warn: #9a5b00; --warn-bg: #fdf1dc; --bad: #b3261e; --bad-bg: #fce8e6;
  --mark: #fff6d6; --mark-ink: #6b5000;
  --c0: #2f66d0; --c1: #d9660d; --c2: #0f9468; --c3: #8250d6; --c4: #cf3f55; --c5: #0b8aa6; --c6: #b58900;
  --c7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #161a21; --ink: #e8ebf0; --soft: #98a2b3; --line: #272d37; --grid: #222833;
    --good: #4fd39e; --good-bg: #11301f; --warn: #f0b455; --warn-bg: #33260d; --bad: #ff8a80; --bad-bg: #3a1715;
    --mark: #37300f; --mark-ink: #f0d774;
    --c0: #6f9dff; --c1: #ff9a4d; --c2: #43cf9a; --c3: #b48cff; --c4: #ff7a8c; --c5: #45c4e0; --c6: #e0b93a;
    --c7: #a3acba;
  }
}
svg {
  display: block; width: 100%; height: auto; overflow: visible;
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
}
svg text { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.ink { fill: var(--ink); }
.grid { stroke: var(--grid); }
.base { stroke: var(--line); }
line.target { stroke: var(--good); stroke-dasharray: 5 4; stroke-width: 1.4; }
text.target { fill: var(--good); font-weight: 600; }
.curve { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.reached { fill: none; stroke: var(--good); stroke-width: 2; }
.curve.faint { stroke-width: 1; opacity: .28; }
.band { opacity: .16; stroke: none; }
"""

CSS = (
    CHART_CSS
    + """
:root {
  --h0: #440154; --h1: #482173; --h2: #433e85; --h3: #38598c; --h4: #2d708e; --h5: #25858e; --h6: #1e9b8a;
  --h7: #2ab07f; --h8: #52c569; --h9: #86d549; --h10: #c2df23; --h11: #fde725;
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 56px; }
h1 { font-size: 15px; font-weight: 600; margin: 0; }
h2 { font-size: 18px; font-weight: 650; letter-spacing: -.01em; margin: 0 0 4px; }
h3 { font-size: 14px; font-weight: 600; margin: 18px 0 6px; }
p { margin: 0 0 10px; }
.lead, .note, .empty { color: var(--soft); }
.note { font-size: 13px; margin: 4px 0 0; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 22px 24px;
  margin: 0 0 16px;
}
.top { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 12px; margin: 0 2px 14px; }
.top .where { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.hero { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.1fr); gap: 12px 32px; align-items: center; }
.big {
  font-size: clamp(34px, 5vw, 50px); line-height: 1.05; font-weight: 700; letter-spacing: -.03em;
  margin: 12px 0 4px;
}
.pill { display: inline-block; padding: 2px 11px; border-radius: 99px; font-size: 13px; font-weight: 600; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.warn { color: var(--warn); background: var(--warn-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.plain { color: var(--soft); background: var(--grid); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 16px 20px; margin: 20px 0 0;
}
.tile .label { color: var(--soft); font-size: 12.5px; }
.tile .value {
  font-size: 19px; font-weight: 650; letter-spacing: -.01em; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere;
}
.tile .more { color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
.alert { border-radius: 10px; padding: 10px 14px; margin: 0 0 10px; font-size: 14px; overflow-wrap: anywhere; }
.alert.warn { color: var(--warn); background: var(--warn-bg); }
.alert.bad { color: var(--bad); background: var(--bad-bg); }
.head { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between; gap: 8px 16px; }
.switch { display: none; border: 1px solid var(--line); border-radius: 9px; overflow: hidden; }
.script .switch { display: inline-flex; }
.switch button {
  border: 0; background: none; color: var(--soft); font: inherit; font-size: 13px; padding: 4px 13px;
  cursor: pointer;
}
.switch button[aria-pressed=true] { background: var(--grid); color: var(--ink); font-weight: 600; }
button:focus-visible, summary:focus-visible { outline: 2px solid var(--c0); outline-offset: -2px; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 22px 28px;
  margin-top: 14px;
}
.split {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px 36px;
  align-items: start;
}
.split > * { min-width: 0; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; font-weight: 600; margin: 0 0 4px; display: flex; gap: 12px; }
.read {
  flex: 1; min-width: 0; overflow: hidden; white-space: nowrap; text-align: right; font-weight: 500;
  color: var(--soft); font-variant-numeric: tabular-nums;
}
.read i { display: inline-block; width: 8px; height: 8px; border-radius: 3px; margin: 0 5px 0 10px; }
.for-narrow { display: none; }
.heat { display: grid; grid-template-columns: minmax(0, max-content) minmax(90px, 1fr) auto; gap: 0 10px; }
.heat .names, .heat .values { display: grid; grid-auto-rows: 15px; font-size: 11.5px; line-height: 15px; }
.heat .names span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; direction: rtl; text-align: left; }
.heat .values span { text-align: right; color: var(--soft); font-variant-numeric: tabular-nums; }
.cells { position: relative; }
.cells svg { height: calc(15px * var(--rows)); shape-rendering: crispEdges; touch-action: pan-y; }
.cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1.5px dashed #fff; mix-blend-mode: difference; }
.ends { grid-column: 2; font-size: 11.5px; color: var(--soft); line-height: 20px; }
.ends .axis > span:last-child { float: right; }
.scale { grid-column: 1 / -1; display: flex; flex-wrap: wrap; align-items: center; gap: 2px 8px; font-size: 12px; }
.scale .note { margin: 0; }
.ramp { display: inline-flex; width: 132px; height: 11px; border-radius: 4px; overflow: hidden; }
.ramp i { flex: 1; }
.axis { display: none; }
[data-axis=time] .axis.time, [data-axis=epoch] .axis.epoch, [data-axis=step] .axis.step { display: inline; }
.hover line { stroke: var(--soft); stroke-dasharray: 2 3; }
.hover circle { stroke: var(--card); stroke-width: 2; }
.tip {
  position: fixed; pointer-events: none; z-index: 9; background: var(--ink); color: var(--page);
  border-radius: 8px; padding: 6px 10px;
  font-size: 12.5px; line-height: 1.45; font-variant-numeric: tabular-nums; white-space: nowrap;
  box-shadow: 0 4px 16px #0004;
}
.tip i, .key i { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 7px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 8px 0 0; color: var(--soft); }
.key .stroke { height: 0; width: 18px; border-radius: 0; border-top: 2.5px solid var(--c0); vertical-align: 3px; }
.key .stroke.faint { border-top-width: 1px; opacity: .5; }
.key .ring { background: none; border: 2px solid var(--good); border-radius: 50%; }
.key b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 22px; border-radius: 7px; overflow: hidden; background: var(--grid); gap: 1px; }
.bar span { min-width: 1px; }
.mini {
  display: inline-block; width: 88px; height: 8px; border-radius: 4px; background: var(--grid); overflow: hidden;
  vertical-align: 1px; margin-right: 10px;
}
.mini span { display: block; height: 100%; background: var(--c0); }
.scroll { overflow-x: auto; margin: 6px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12.5px; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 0 48px; }
.tight { width: auto; }
.tight th, .tight td { padding-right: 40px; }
.compare td { white-space: nowrap; }
.compare th, .compare td { padding-right: 14px; }
.compare td:last-child:not(.num) { white-space: normal; overflow-wrap: normal; }
.compare td .note { display: block; white-space: normal; margin: 0; }
.figure { white-space: nowrap; }
.best { font-weight: 700; color: var(--good); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.config { columns: 3 270px; column-gap: 36px; margin-top: 10px; }
.config section { break-inside: avoid; margin: 0 0 16px; }
.config h3 { margin: 0 0 2px; }
.config div {
  display: flex; justify-content: space-between; gap: 12px; font-size: 13px; padding: 2px 6px; margin: 0 -6px;
  border-radius: 5px;
}
.config span { color: var(--soft); white-space: nowrap; }
.config b { font-weight: 500; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.config .changed { background: var(--mark); }
.config .changed span, .config .changed b { color: var(--mark-ink); }
.config small { font-size: 11.5px; opacity: .8; }
pre {
  background: var(--page); border: 1px solid var(--line); border-radius: 9px; padding: 11px 14px; margin: 8px 0 0;
  white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
summary { cursor: pointer; color: var(--soft); font-size: 13.5px; margin-top: 10px; }
details[open] > summary { margin-bottom: 6px; }
details.card > summary { margin: 0; color: var(--ink); font-weight: 600; font-size: 15px; }
footer { color: var(--soft); font-size: 12.5px; margin: 22px 2px 0; }
@media (max-width: 600px) {
  .for-wide { display: none; }
  .for-narrow { display: block; }
  .charts svg text, .hero svg text { font-size: 16px; }
  table.stack, .stack tbody, .stack tr, .stack td { display: block; width: auto; white-space: normal; }
  .stack thead { display: none; }
  .stack tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  .stack tr:last-child { border-bottom: 0; }
  .stack th, .stack td { padding: 2px 0; }
  .stack td { display: flow-root; border-bottom: 0; text-align: right; }
  .stack td::before { content: attr(data-label); color: var(--soft); float: left; margin-right: 16px; }
  th, td { padding-right: 10px; }
  .mini { width: 48px; }
  .config { columns: 1; }
  .config span { white-space: normal; }
}
@media (max-width: 860px) {
  .hero { grid-template-columns: minmax(0, 1fr); }
  main { padding: 18px 12px 40px; }
  .card { padding: 18px 16px; border-radius: 12px; }
}
@media print {
  :root { --page: #fff; }
  body { font-size: 12.5px; }
  main { max-width: none; padding: 0; }
  .card { break-inside: avoid; padding: 12px 14px; }
  .card.long { break-inside: auto; }
  .script .switch { display: none; }
  .hero { grid-template-columns: minmax(0, 1fr) minmax(0, 1.1fr); }
  .charts, .split { grid-template-columns: 1fr 1fr; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
)

# One cross-hair for all charts: they share the x axis, so that values at the same time can be compared.
SCRIPT = """
(() => {
  const root = document.documentElement, AXES = ["time", "epoch", "step"];
  const data = JSON.parse(document.getElementById("points").textContent);
  const [H, L, R, T, B] = data.box;
  const svgs = [...document.querySelectorAll("svg[data-key]")];
  root.classList.add("script");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const short = v => v === null ? "–"
    : Math.abs(v) >= 1e6 ? (v / 1e6).toPrecision(3) + " M"
    : Math.abs(v) >= 100 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  const form = { percent: v => v === null ? "–" : +(v * 100).toFixed(2) + " %", number: short, count: short };
  const place = {
    time: v => v < 100 ? v.toFixed(1) + " s" : v < 3600 ? (v / 60).toFixed(1) + " min" : (v / 3600).toFixed(2) + " h",
    epoch: v => "epoch " + v.toFixed(2),
    step: v => "step " + Math.round(v).toLocaleString("en"),
  };
  function node(name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return made;
  }
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = low + high >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }
  const heats = [...document.querySelectorAll("svg[data-heat]")].filter(svg => data.heat[svg.dataset.heat]);
  const read = svg => svg.closest("figure").querySelector(".read");
  function clear() {
    tip.hidden = true;
    for (const svg of svgs) {
      svg.querySelector(".hover").replaceChildren();
      read(svg).replaceChildren();
    }
    for (const svg of heats) svg.nextElementSibling.hidden = true;
  }
  function dot(fill) {
    const made = document.createElement("i");
    made.style.background = fill;
    return made;
  }
  function mark(svg, axis, x) {
    const layer = svg.querySelector(".hover"), chart = data.charts[svg.dataset.key], rows = [];
    const right = +svg.dataset.right.split(",")[axis], [low, high] = svg.dataset.y.split(",").map(Number);
    const left = v => L + v / right * (svg.viewBox.baseVal.width - L - R);
    layer.replaceChildren();
    read(svg).replaceChildren();
    if (x > right * 1.001) return rows;
    layer.append(node("line", { x1: left(x), x2: left(x), y1: T, y2: H - B }));
    for (const line of chart.lines) {
      if (!line.y.length) continue;
      const i = nearest(line.x[axis], x), y = line.y[i];
      rows.push([line.color, (chart.lines.length > 1 ? line.label + "  " : "") + form[chart.form](y)]);
      if (y === null || y < low || y > high) continue;
      const cy = H - B - (y - low) / (high - low) * (H - T - B);
      layer.append(node("circle", { r: 4.5, fill: line.color, cx: left(line.x[axis][i]), cy }));
      read(svg).append(dot(line.color), form[chart.form](y));
    }
    return rows;
  }
  // Every chart and heat map at the same moment.
  function markAll(axis, x) {
    for (const svg of heats) {
      const xs = data.heat[svg.dataset.heat].x[axis], cursor = svg.nextElementSibling;
      cursor.style.left = (nearest(xs, x) + .5) / xs.length * 100 + "%";
      cursor.hidden = false;
    }
    return new Map(svgs.map(svg => [svg, mark(svg, axis, x)]));
  }
  function show(svg, event) {
    const box = svg.getBoundingClientRect(), axis = AXES.indexOf(root.dataset.axis);
    const width = svg.viewBox.baseVal.width, at = (event.clientX - box.left) / box.width * width;
    const x = Math.max(0, Math.min(1, (at - L) / (width - L - R))) * svg.dataset.right.split(",")[axis];
    say(event, place[AXES[axis]](x), markAll(axis, x).get(svg));
  }
  function showHeat(svg, event) {
    const box = svg.getBoundingClientRect(), axis = AXES.indexOf(root.dataset.axis);
    const heat = data.heat[svg.dataset.heat], xs = heat.x[axis], names = Object.keys(heat.rows);
    const [, , columns, rows] = svg.getAttribute("viewBox").split(" ").map(Number);
    const inside = (part, count) => Math.max(0, Math.min(count - 1, Math.floor(part * count)));
    const column = inside((event.clientX - box.left) / box.width, columns);
    const name = names[inside((event.clientY - box.top) / box.height, rows)];
    markAll(axis, xs[column]);
    say(event, place[AXES[axis]](xs[column]), [["transparent", name + "  " + short(heat.rows[name][column])]]);
  }
  function say(event, title, rows) {
    tip.replaceChildren(title);
    for (const [fill, text] of rows) {
      const row = document.createElement("div");
      row.append(dot(fill), text);
      tip.append(row);
    }
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = Math.min(event.clientX + 16, innerWidth - room.width - 8) + "px";
    tip.style.top = Math.max(8, event.clientY - room.height - 14) + "px";
  }
  for (const svg of svgs) {
    svg.addEventListener("pointermove", event => show(svg, event));
    svg.addEventListener("pointerleave", clear);
  }
  for (const svg of heats) {
    svg.addEventListener("pointermove", event => showHeat(svg, event));
    svg.addEventListener("pointerleave", clear);
  }
  const buttons = document.querySelectorAll("[data-set-axis]");
  for (const button of buttons) button.addEventListener("click", () => {
    root.dataset.axis = button.dataset.setAxis;
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    clear();
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => part.open = true));
})();
"""
