"use strict";
/* The report's page: draws the data of rkmate/show/page_data.py, and lets the reader look into them. */
(async () => {
const $ = id => document.getElementById(id);
const bytes = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const data = JSON.parse(await new Response(stream).text());

/* ---- amounts, as rkmate/show/amounts.py writes them ---- */
function size(n) {
  let value = n, unit = 0;
  while (Math.abs(value) >= 1023.5 && unit < 4) { value /= 1024; unit++; }
  const digits = unit && Math.abs(value) < 99.5 ? 1 : 0;
  return `${value.toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
function duration(ns) {
  for (const [factor, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]) {
    const value = ns / factor, large = Math.abs(value);
    if (large >= 0.9995 || unit === "us")
      return `${value.toFixed(large >= 99.5 ? 0 : large >= 9.95 ? 1 : 2)} ${unit}`;
  }
}
const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)}%` : "-";
const percent = x => `${x < 0 ? "" : "+"}${(100 * x).toFixed(1)}%`;
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/* ---- pieces of the page ---- */
function html(tag, attributes = {}, ...inside) {
  const e = Object.assign(document.createElement(tag), attributes);
  e.append(...inside);
  return e;
}
function svg(tag, attributes, ...inside) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...inside);
  return e;
}
/* A table that sorts by the column that is clicked. A cell is a text, or [text, number to sort by]. */
function table(head, rows, sorted, act) {
  const numbers = head.map((_, k) => rows.some(r => Array.isArray(r[k])));
  const body = html("tbody");
  const value = (r, k) => Array.isArray(r[k]) ? r[k][1] : r[k];
  const fill = (k, down) => {
    const order = k === null ? rows : [...rows].sort((a, b) => (down ? -1 : 1) *
      (value(a, k) < value(b, k) ? -1 : value(a, k) > value(b, k) ? 1 : 0));
    body.replaceChildren(...order.map(r => {
      const tr = html("tr", {}, ...head.map((h, c) => {
        const td = html("td", {className: numbers[c] ? "n" : ""}, Array.isArray(r[c]) ? r[c][0] : r[c]);
        td.dataset.of = h;
        return td;
      }));
      if (act) { tr.className = "link"; tr.onclick = () => act(r[head.length]); }
      return tr;
    }));
    ths.forEach((th, c) => c === k ? th.setAttribute("aria-sort", down ? "descending" : "ascending")
      : th.removeAttribute("aria-sort"));
  };
  const ths = head.map((h, k) => {
    const th = html("th", {className: numbers[k] ? "n" : ""});
    const onclick = () => {
      const sorted = th.getAttribute("aria-sort");
      fill(k, sorted ? sorted !== "descending" : numbers[k]);
    };
    th.append(html("button", {type: "button", onclick}, h));
    return th;
  });
  fill(sorted, true);
  return html("table", {}, html("thead", {}, html("tr", {}, ...ths)), body);
}

/* ---- views: a plan each ---- */
const sums = list => { let s = 0; return list.map(d => s += d); };
const outside = "the model itself", LOSS = -1, WAIT = -2;
const label = (path, operation) => path && operation ? `${path}: ${operation}` : path || operation;
for (const g of data.graphs) {
  g.plain = g.plain.map(sums);
  g.labels = g.names.map((_, i) => label(g.paths[i], g.operations[i]));
  g.tensorLabels = g.makers.map(i => i < 0 ? "gradient of an output" : g.labels[i]);
  /* What a search looks through: for each tensor and each computation, its module, operation and name. */
  g.tensorText = g.tensors.map((name, j) => `${g.tensorLabels[j]} ${name} ${g.shapes[j]}`.toLowerCase());
  g.text = g.names.map((name, i) => `${g.labels[i]} ${name}`.toLowerCase());
}
function view(n) {
  const v = data.views[n];
  if (v.start) return v;
  v.step = sums(v.step);
  v.levels = v.levels.map(sums);
  v.start = []; v.end = [];
  let t = 0;
  v.gap.forEach((g, k) => { v.start.push(t + g); v.end.push(t += g + v.length[k]); });
  v.total = v.start.map((_, k) => v.levels.reduce((s, level) => s + level[k], 0));
  v.of = data.graphs[v.graph];
  const [storage = [], first = [], last = [], kind = []] = v.spans;
  v.spans = storage.map((j, k) => ({j, first: first[k], last: last[k], kind: kind[k]}));
  v.whole = Math.max(t, ...v.of.plain[0].slice(-1));
  v.lossAt = v.end[v.what.indexOf(LOSS)];
  return v;
}
/* Bytes at each row of the spans that are chosen. */
function levelOf(v, chosen) {
  const change = new Array(v.start.length + 1).fill(0);
  for (const s of v.spans) if (chosen(s)) {
    change[s.first] += v.of.sizes[s.j];
    change[s.last] -= v.of.sizes[s.j];
  }
  return sums(change).slice(0, -1);
}
const alive = (v, row) => v.spans.filter(s => s.first <= row && row < s.last && v.of.sizes[s.j]);
function rowAt(v, t) {                        /* the last row that begins before t and takes time */
  let low = 0, high = v.start.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (v.start[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
}
function rowLabel(v, row) {
  const i = v.what[row];
  if (i === LOSS) return "the loss";
  if (i === WAIT) return "waits for a copy";
  return i < 0 ? "a copy comes back" : label(v.of.paths[i] || outside, v.of.operations[i]);
}
function phase(v, row) {
  const i = v.what[row];
  return i < 0 ? "" : v.again[row] ? "computed again" : i < v.of.loss ? "forward" : "backward";
}

/* ---- state ---- */
let now = data.here, v = view(now), from = 0, to = v.whole, chosen = v.peakRow, words = [], mode = "modules";
let joined = v.modules.length > 60;            /* modules that differ in numbers alone are one row */
const star = path => joined ? path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") : path;
const found = {tensors: new Set(), runs: new Set()};
const matches = text => words.every(w => text.includes(w));

/* ---- the memory chart ---- */
const LEFT = 64, RIGHT = 10, TOP = 22, TALL = 280, LANE = 18, BLOCK = 16;      /* pixels */
const chart = $("chart"), tip = html("div", {className: "tip", hidden: true});
const round = n => n.toFixed(1);
const text = (x, y, words, anchor = "start", ...inside) =>
  svg("text", {x, y, "text-anchor": anchor}, words, ...inside);
let place = null;                              /* the scales of what is drawn */
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
  const result = [];
  for (let t = Math.ceil(low / step) * step; t <= high * (1 + 1e-12); t += step) result.push(t);
  return result;
}
function byteTicks(high, most) {
  const unit = 1024 ** Math.floor(Math.log2(high) / 10);
  return ticks(0, high / unit, most).map(t => [t * unit, t ? size(t * unit).replace(".0 ", " ") : "0"]);
}
/* Where things are, in pixels; and the rows to draw: one for each pixel at most. Of several, the one with most
   in memory stands for all. */
function layout() {
  const width = Math.max(280, chart.clientWidth), every = Math.ceil(v.blocks.length / 40);
  const blocks = v.blocks.map((_, b) => b).filter(b => b % every === 0), lanes = v.copies.length ? 3 : 0;
  const lanesAt = TOP + TALL + 36, blocksAt = lanesAt + lanes * LANE + (lanes ? 40 : 18);
  const outline = v.plain <= 5 * Math.max(v.budget, v.peak);
  const high = Math.max(v.budget, v.peak, outline ? v.plain : 0, ...v.measured.map(m => m[1])) * 1.06;
  const x = t => LEFT + (t - from) / (to - from) * (width - LEFT - RIGHT);
  const y = b => TOP + (1 - b / high) * TALL;
  const back = p => from + (p - LEFT) / (width - LEFT - RIGHT) * (to - from);
  const rows = [];
  for (let r = rowAt(v, from); r < v.start.length && v.start[r] <= to; r++) {
    const before = rows[rows.length - 1];
    if (before && x(v.end[r]) - x(v.start[before.a]) < 0.7) {
      before.b = r;
      if (v.total[r] > v.total[before.r]) before.r = r;
    } else rows.push({a: r, b: r, r});
  }
  const height = blocksAt + blocks.length * BLOCK + 6;
  return {width, height, every, blocks, lanes, lanesAt, blocksAt, outline, high, x, y, back, rows};
}
/* The path between two heights, which are functions of a row. */
function area({rows, x}, low, high) {
  const up = rows.map(({a, b, r}) => `${round(x(v.start[a]))} ${round(high(r))}H${round(x(v.end[b]))}`);
  const down = [...rows].reverse().map(({a, b, r}) =>
    `${round(x(v.end[b]))} ${round(low(r))}H${round(x(v.start[a]))}`);
  return `M${up.join("L")}L${down.join("L")}Z`;
}
/* The path of levels, of which each lasts until its end. */
function staircase({x, y, width}, ends, levels) {
  let d = "", last = 0, drawn = -Infinity;
  ends.forEach((end, k) => {
    const left = x(last), right = x(end);
    last = end;
    if (right < LEFT || left > width || (right - drawn < 0.3 && k % 4)) return;
    d += `${d ? "L" : "M"}${round(left)} ${round(y(levels[k]))}H${round(right)}`;
    drawn = right;
  });
  return d;
}
function levels(at) {
  const {x, y} = at, parts = [], low = v.total.map(() => 0);
  data.kinds.forEach(([kind], k) => {
    const level = v.levels[k];
    if (!level.some(n => n)) return;
    const d = area(at, r => y(low[r]), r => y(low[r] + level[r]));
    level.forEach((n, r) => { low[r] += n; });
    parts.push(svg("path", {d, fill: `var(--${kind})`}));
  });
  if (at.outline) parts.push(svg("path", {class: "plain", d: staircase(at, ...v.of.plain)}));
  if (v.measured.length) {
    const ends = v.measured.map((_, k) => (v.measured[k + 1] || [v.whole])[0]);
    parts.push(svg("path", {class: "measured", d: staircase(at, ends, v.measured.map(m => m[1]))}));
  }
  if (words.length) {
    const level = levelOf(v, s => found.tensors.has(s.j));
    const runs = v.what.flatMap((i, r) => found.runs.has(i) ? [[x(v.start[r]), x(v.end[r])]] : []);
    const marks = runs.map(([a, b]) => `M${round(a)} ${TOP - 5}H${round(Math.max(b, a + 1))}v4H${round(a)}Z`);
    parts.push(svg("path", {class: "found", d: area(at, () => y(0), r => y(level[r]))}),
      svg("path", {class: "mark", d: marks.join("")}));
  }
  parts.push(svg("path", {class: "budget", d: `M${LEFT} ${round(y(v.budget))}H${at.width}`}));
  return parts;
}
/* Rows of bars: the clocks of a plan with copies, and the blocks. Bars of one colour are one path. */
function clocks({x, width, lanes, lanesAt, blocks, blocksAt}) {
  const drawn = {}, place = new Map(blocks.map((b, k) => [b, k]));
  const bar = (colour, a, b, at, tall) => {
    const own = drawn[colour] ||= [], before = own[own.length - 1];
    if (x(b) < LEFT || x(a) > width) return;
    if (before && before.at === at && x(a) - x(before.b) < 0.2) before.b = b;
    else own.push({a, b, at, tall});
  };
  const colours = {"forward": "forward", "backward": "backward", "computed again": "recomputed", "": "wait"};
  v.what.forEach((i, r) => {
    const k = i < 0 ? undefined : place.get(v.of.blocks[i]), colour = colours[phase(v, r)];
    if (lanes && (i >= 0 || i === WAIT)) bar(colour, v.start[r], v.end[r], lanesAt, 12);
    if (k !== undefined) bar(colour, v.start[r], v.end[r], blocksAt + k * BLOCK + 9, 4);
  });
  v.copies.forEach((copies, k) => copies.forEach(([, a, b]) =>
    bar("back", a, b, lanesAt + LANE * (k + 1), 12)));
  return Object.entries(drawn).map(([colour, own]) => svg("path", {fill: `var(--${colour})`,
    d: own.map(({a, b, at, tall}) => `M${round(x(a))} ${at}H${round(Math.max(x(b), x(a) + 0.3))}v${tall}` +
      `H${round(x(a))}Z`).join("")}));
}
function blockLevels(at) {
  return at.blocks.map((b, k) => {
    const forward = i => i >= 0 && i < v.of.loss && v.of.blocks[i] === b;
    const level = levelOf(v, s => forward(v.of.makers[s.j])), base = at.blocksAt + k * BLOCK + 13;
    const most = level.reduce((a, n) => Math.max(a, n), 1);
    return svg("path", {fill: "var(--kept)", "fill-opacity": 0.5,
      d: area(at, () => base, r => base - 12 * level[r] / most)});
  });
}
function axes({width, high, every, blocks, lanes, lanesAt, blocksAt, x, y}) {
  const parts = byteTicks(high, 6).flatMap(([b, words]) => [
    svg("path", {class: "tick", d: `M${LEFT} ${round(y(b))}H${width - RIGHT}`}),
    text(LEFT - 6, y(b) + 4, words, "end")]);
  const [factor, unit] = to - from >= 1e9 ? [1e9, "s"] : to - from >= 1e6 ? [1e6, "ms"] : [1e3, "us"];
  const digits = Math.max(0, Math.ceil(-Math.log10((to - from) / factor / 5)));
  for (const t of ticks(from / factor, to / factor, width / 110))
    if (x(t * factor) < width - 30)
      parts.push(text(x(t * factor), TOP + TALL + 16, `${t.toFixed(digits)} ${unit}`, "middle"));
  parts.push(svg("path", {class: "axis", d: `M${LEFT} ${TOP}V${TOP + TALL}H${width - RIGHT}`}));
  const loss = x(v.lossAt);
  if (loss > LEFT + 60 && loss < width - 80)
    parts.push(text(loss - 5, TOP - 9, "forward", "end"), text(loss + 5, TOP - 9, "backward"));
  if (lanes) ["computes", "out", "back"].forEach((words, k) =>
    parts.push(text(LEFT - 6, lanesAt + LANE * k + 10, words, "end")));
  const some = every > 1 ? ` (${blocks.length} of ${v.blocks.length})` : "";
  const what = width < 480 ? "" : ", and what of them is in memory";
  parts.push(text(LEFT, blocksAt - 8, `blocks: when they run${what}${some}`));
  blocks.forEach((b, k) => parts.push(text(LEFT - 6, blocksAt + k * BLOCK + 12, `${v.blocks[b][0]}${b}`, "end",
    svg("title", {}, v.blocks[b][1]))));
  return parts;
}
function drawChart() {
  place = layout();
  const {x, y, width, height} = place, middle = r => round(x((v.start[r] + v.end[r]) / 2));
  const lines = [
    svg("path", {class: "loss", d: `M${round(x(v.lossAt))} ${TOP}V${height}`}),
    svg("path", {class: "chosen", d: `M${middle(chosen)} ${TOP}V${TOP + TALL}`}),
    svg("path", {class: "mark", d: `M${middle(v.peakRow)} ${round(y(v.total[v.peakRow]) - 2)}l-5 -8h10Z`})];
  const clip = svg("clipPath", {id: "clip"}, svg("rect", {x: LEFT, y: 0, width: width - LEFT - RIGHT, height}));
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0,
    "aria-label": "Memory over the time of a step. Arrow keys go from step to step."},
    svg("defs", {}, clip), ...axes(place),
    svg("g", {"clip-path": "url(#clip)"}, ...levels(place), ...blockLevels(place), ...clocks(place), ...lines),
    svg("path", {class: "cursor", d: ""}), svg("rect", {class: "drag", width: 0, height: TALL, y: TOP}));
  const old = chart.querySelector("svg"), focused = old && document.activeElement === old;
  if (old) old.replaceWith(picture); else chart.append(picture, tip);
  if (focused) picture.focus();
  listen(picture);
  const used = data.kinds.filter((_, k) => v.levels[k].some(n => n > v.peak / 1000));
  $("legend").replaceChildren(...used.map(([kind, words]) => swatch(kind, words)), swatch("forward", "forward"),
    swatch("backward", "backward"), ...(v.what.includes(WAIT) ? [swatch("wait", "waits")] : []),
    ...(place.outline ? [swatch("outline", `without rematerialization: ${size(v.plain)}`)] : []),
    swatch("budget", `budget: ${size(v.budget)}`), ...(v.measured.length
      ? [swatch("ink", `measured: ${size(Math.max(...v.measured.map(m => m[1])))}`)] : []));
}
function swatch(colour, words) {
  const box = html("span", {className: "swatch"});
  box.style.background = `var(--${colour})`;
  return html("span", {}, box, words);
}
function tipAt(row, at = place.x((v.start[row] + v.end[row]) / 2), under = true) {
  const g = v.of, i = v.what[row], ran = phase(v, row);
  const there = alive(v, row).sort((a, b) => g.sizes[b.j] - g.sizes[a.j]).slice(0, 2);
  const made = (i < 0 ? [] : g.outputs[i].slice(0, 3))
    .map(j => `${g.tensors[j]} ${g.shapes[j]}, ${size(g.sizes[j])}`);
  const kinds = data.kinds.map(([, words], k) => [v.levels[k][row], words]).filter(([n]) => n);
  const lines = [
    `step ${v.step[row] + 1} of ${v.steps}, ${duration(v.start[row])}${ran ? `, ${ran}` : ""}` +
      `${v.kernel[row] ? ", in larger parts" : ""}: ${duration(v.end[row] - v.start[row])}`,
    html("b", {}, `${size(v.total[row])} in memory`),
    kinds.map(([n, words]) => `${size(n)} ${words}`).join(", "),
    made.length ? `makes ${made.join("; ")}` : "",
    there.length ? `largest: ${there.map(({j}) => `${g.tensorLabels[j]} (${size(g.sizes[j])})`).join(", ")}` : ""];
  tip.replaceChildren(html("b", {}, rowLabel(v, row)),
    ...lines.map(line => line instanceof Node ? line : html("div", {}, line)));
  tip.hidden = false;
  const middle = place.x((v.start[row] + v.end[row]) / 2);
  chart.querySelector(".cursor").setAttribute("d", `M${middle} ${TOP}V${TOP + TALL}`);
  const left = at + 16 + tip.offsetWidth > place.width ? at - tip.offsetWidth - 16 : at + 16;
  tip.style.left = `${Math.max(0, Math.min(left, place.width - tip.offsetWidth))}px`;
  tip.style.top = `${under ? TOP + TALL + 26 : TOP + 8}px`;       /* not over what it is about */
}
function noTip() {
  tip.hidden = true;
  chart.querySelector(".cursor")?.setAttribute("d", "");
}
function zoomTo(a, b) {
  const least = Math.max(v.whole / 1e5, 10);
  if (b - a < least) { const m = (a + b) / 2; a = m - least / 2; b = m + least / 2; }
  from = Math.max(0, Math.min(a, v.whole - (b - a)));
  to = Math.min(v.whole, from + (b - a));
  noTip();
  drawChart();
}
function zoom(factor, t = (from + to) / 2) { zoomTo(t - (t - from) * factor, t + (to - t) * factor); }
function choose(row) {
  chosen = row;
  drawChart();
  drawMoment();
}
function listen(picture) {
  const at = e => e.clientX - picture.getBoundingClientRect().left;
  const high = e => e.clientY - picture.getBoundingClientRect().top;
  const inside = t => Math.min(to, Math.max(from, t));
  let begin = null;
  picture.addEventListener("pointerdown", e => { if (!e.button) begin = at(e); });
  picture.addEventListener("pointermove", e => {
    const p = at(e), t = place.back(p), drag = picture.querySelector(".drag");
    if (begin !== null && Math.abs(p - begin) > 6) {
      drag.setAttribute("x", Math.min(p, begin));
      drag.setAttribute("width", Math.abs(p - begin));
    }
    if (t >= from && t <= to) tipAt(rowAt(v, t), p, high(e) < TOP + TALL); else noTip();
  });
  picture.addEventListener("pointerup", e => {
    const p = at(e);
    if (begin === null) return;
    if (Math.abs(p - begin) > 6)
      zoomTo(inside(place.back(Math.min(p, begin))), inside(place.back(Math.max(p, begin))));
    else if (place.back(p) >= from) choose(rowAt(v, place.back(p)));
    begin = null;
  });
  picture.addEventListener("pointerleave", () => {
    begin = null;
    noTip();
    picture.querySelector(".drag").setAttribute("width", 0);
  });
  picture.addEventListener("dblclick", () => zoomTo(0, v.whole));
  picture.addEventListener("wheel", e => {
    if (e.ctrlKey || e.metaKey) zoom(e.deltaY > 0 ? 1.25 : 0.8, place.back(at(e)));
    else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) && to - from < v.whole) {
      const moved = e.deltaX / place.width * (to - from);
      zoomTo(from + moved, to + moved);
    } else return;
    e.preventDefault();
  }, {passive: false});
  picture.addEventListener("keydown", e => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (move) {
      choose(Math.max(0, Math.min(v.start.length - 1, chosen + move)));
      const half = (to - from) / 2, t = v.start[chosen];
      if (t < from || v.end[chosen] > to) zoomTo(t - half, t + half);
      tipAt(chosen);
    } else if (e.key === "+" || e.key === "-") zoom(e.key === "+" ? 0.6 : 1.6, v.start[chosen]);
    else if (e.key === "Escape") zoomTo(0, v.whole);
    else return;
    e.preventDefault();
  });
}
$("nearer").onclick = () => zoom(0.5);
$("further").onclick = () => zoom(2);
$("whole").onclick = () => zoomTo(0, v.whole);
$("to-peak").onclick = () => choose(v.peakRow);

/* ---- what is in memory at a moment ---- */
function drawMoment() {
  const g = v.of, total = v.total[chosen];
  const there = alive(v, chosen).map(({j, kind}) => ({
    module: g.makers[j] < 0 ? "" : g.paths[g.makers[j]] || outside, text: g.tensorLabels[j],
    name: g.tensors[j], shape: g.shapes[j], bytes: g.sizes[j], kind, find: g.tensorText[j]}));
  data.kinds.forEach(([kind, words], k) => {                 /* what is no tensor of the graph */
    const named = there.reduce((n, s) => n + (s.kind === k ? s.bytes : 0), 0), i = v.what[chosen];
    const bytes = v.levels[k][chosen] - named;
    if (bytes) there.push({shape: "", bytes, kind: k, ...(kind === "temporaries" && i >= 0
      ? {module: g.paths[i] || outside, text: g.labels[i], name: `inside ${g.names[i]}`, find: g.text[i]}
      : {module: "", text: words, name: words, find: words})});
  });
  there.sort((a, b) => b.bytes - a.bytes);
  const shown = words.length ? there.filter(s => matches(s.find)) : there;
  const peak = chosen === v.peakRow, ran = phase(v, chosen);
  const bytes = shown.reduce((n, s) => n + s.bytes, 0);
  const searched = `${count(shown.length, "tensor")} of the search: ${size(bytes)}. `;
  $("moment-title").textContent = `What is in memory at ${peak ? "the peak" : `step ${v.step[chosen] + 1}`}`;
  $("moment-words").textContent = `${count(there.length, "tensor")}, ${size(total)}, while ` +
    `${rowLabel(v, chosen)}${ran ? ` (${ran})` : ""}. ${words.length ? searched : ""}` +
    "A click on the curve shows another moment.";
  const modules = new Map();
  for (const s of shown) {
    const path = star(s.module), m = modules.get(path) || {bytes: 0, tensors: []};
    m.bytes += s.bytes; m.tensors.push(s);
    modules.set(path, m);
  }
  $("moment").replaceChildren(mode === "modules"
    ? table(["module", "bytes", "share", "tensors", "the largest"], [...modules].map(([path, m]) => [
      path || "no module", [size(m.bytes), m.bytes], [share(m.bytes, total), m.bytes],
      [String(m.tensors.length), m.tensors.length],
      m.tensors.slice(0, 2).map(s => `${s.name} ${s.shape}`.trim()).join(", ")]), 1)
    : table(["tensor (module: operation)", "bytes", "share", "kind", "shape", "name"], shown.map(s => [
      s.text, [size(s.bytes), s.bytes], [share(s.bytes, total), s.bytes], data.kinds[s.kind][1], s.shape,
      s.name]), 1));
  $("by-module").setAttribute("aria-pressed", mode === "modules");
  $("by-tensor").setAttribute("aria-pressed", mode === "tensors");
  $("to-peak").hidden = peak;
}
for (const b of [$("join"), $("join-modules")]) b.onclick = () => {
  joined = !joined;
  drawMoment(); drawModules();
};
$("by-module").onclick = () => { mode = "modules"; drawMoment(); };
$("by-tensor").onclick = () => { mode = "tensors"; drawMoment(); };

/* ---- what is recomputed, by module ---- */
function drawModules() {
  const paths = new Map(), rows = [];
  const shown = v.modules.filter(m => !words.length || matches(`${m[0]} ${m[5]}`.toLowerCase()));
  for (const m of shown) {
    const path = star(m[0]), row = paths.get(path);
    if (!row) {
      rows.push([path, ...m.slice(1)]);
      paths.set(path, rows[rows.length - 1]);
      continue;
    }
    for (const k of [1, 2, 3, 4]) row[k] += m[k];
    row[5] = [...new Set([...row[5].split(", "), ...m[5].split(", ")])].filter(o => o).join(", ");
    row[6] = row[3] && row[4]
      ? `frees ${size(row[3])} for ${duration(row[4])}: ${size(row[3] / row[4] * 1e6)} a ms` : row[6] || m[6];
  }
  for (const b of [$("join"), $("join-modules")]) b.setAttribute("aria-pressed", joined);
  rows.sort((a, b) => b[3] - a[3]);
  const sends = v.copies.length > 0;
  const sum = k => rows.reduce((n, m) => n + m[k], 0);
  const away = sends ? `, ${size(sum(2))} are away` : "";
  $("modules-words").textContent = `${count(shown.length, "module")}: between forward and backward ` +
    `${size(sum(1))} stay${away}${sum(4) ? ` and ${size(sum(3))} are forgotten, for ${duration(sum(4))} of ` +
      "computing again." : ". Nothing is computed again."}`;
  const head = ["module", "keeps", ...(sends ? ["sends"] : []), "forgets", "time again", "what runs again", "why"];
  const number = n => [size(n), n];
  $("module-rows").replaceChildren(table(head, rows.map(m => [
    m[0], number(m[1]), ...(sends ? [number(m[2])] : []), number(m[3]),
      [m[4] ? duration(m[4]) : "-", m[4]], m[5], m[6]]), null));
}

/* ---- search ---- */
function search() {
  words = $("search").value.toLowerCase().split(/\s+/).filter(w => w);
  found.tensors = new Set(words.length ? v.of.tensorText.flatMap((text, j) => matches(text) ? [j] : []) : []);
  found.runs = new Set(words.length ? v.of.text.flatMap((text, i) => matches(text) ? [i] : []) : []);
  const lives = new Map();
  for (const s of v.spans)
    if (found.tensors.has(s.j) && v.of.sizes[s.j]) lives.set(s.j, [...(lives.get(s.j) || []), s]);
  const order = [...lives].sort((a, b) => v.of.sizes[b[0]] - v.of.sizes[a[0]]);
  $("found").hidden = !words.length;
  if (words.length) {
    const ends = s => v.end[Math.max(s.first, s.last - 1)];
    $("found-words").textContent = `${count(order.length, "tensor")} and ` +
      `${count(found.runs.size, "computation")} match${order.length > 50 ? "; the 50 largest:" : "."} ` +
      "A click zooms to a tensor's time in memory.";
    const rows = order.slice(0, 50).map(([j, spans]) => [
      v.of.tensorLabels[j], [size(v.of.sizes[j]), v.of.sizes[j]],
      spans.map(s => `${duration(v.start[s.first])} to ${duration(ends(s))}`).join(", again "),
      v.of.tensors[j], spans]);
    $("found-rows").replaceChildren(table(["tensor (module: operation)", "bytes", "in memory", "name"], rows, null,
      spans => {
        const a = v.start[spans[0].first], b = ends(spans[spans.length - 1]), room = (b - a) * 0.1;
        zoomTo(a - room, b + room);
        chart.scrollIntoView({block: "center"});
      }));
  }
  noTip(); drawChart(); drawMoment(); drawModules();
}
$("search").addEventListener("input", search);

/* ---- other budgets ---- */
function show(n) {
  const whole = to - from === v.whole;
  const [a, b] = [from / v.whole, to / v.whole];
  now = n; v = view(n); chosen = v.peakRow;
  [from, to] = whole ? [0, v.whole] : [a * v.whole, b * v.whole];
  $("cards").replaceChildren(...v.cards.map(([name, value, note]) => html("div", {className: "card"}, name,
    html("b", {}, value), html("span", {className: "faint"}, note))));
  $("words").replaceChildren(...v.words.flatMap(([heading, words]) => [html("h3", {}, heading),
    html("p", {}, words)]));
  $("other").hidden = now === data.here;
  $("slider").value = n;
  $("slider-words").textContent = `${size(v.budget)}: time ${percent(v.overhead)}`;
  $("slider").setAttribute("aria-valuetext", $("slider-words").textContent);
  search();
  drawCurve();
}
$("slider").max = data.views.length - 1;
$("slider").addEventListener("input", () => show(Number($("slider").value)));
$("to-own").onclick = () => show(data.here);
$("slider-label").hidden = data.views.length < 2;
function drawCurve() {
  const box = $("curve-chart");
  if (data.views.length < 2) return;
  const width = Math.max(280, box.clientWidth), height = 300, left = 54, bottom = 42;
  const points = data.views.map((p, k) => ({k, x: p.peak, y: p.overhead,
    words: `budget ${size(p.budget)}: peak ${size(p.peak)}, time ${percent(p.overhead)}, by ${p.planner}`}));
  const others = data.points.map(p => ({x: p.peak, y: p.overhead, name: p.name,
    words: `${p.name}: peak ${size(p.peak)}, time ${percent(p.overhead)}`}));
  const times = [...points, ...others].map(p => p.y);
  const high = Math.max(0.01, ...times) * 1.1, low = Math.min(0, ...times);
  const most = 1.05 * Math.max(...data.views.map(p => p.plain), ...others.map(p => p.x));
  /* The last megabytes cost many times more than the others: both ends stay readable. */
  const half = points.map(p => p.y).sort((a, b) => a - b)[points.length >> 1], steep = high > 7 * (half + 0.01);
  const scale = q => steep ? Math.asinh(q / 0.05) : q;
  const x = b => left + b / most * (width - left - 12);
  const y = q => 14 + (scale(high) - scale(q)) / (scale(high) - scale(low)) * (height - 14 - bottom);
  const marks = steep
    ? [0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20].filter(t => t <= high) : ticks(low, high, 5);
  const order = [...points].sort((a, b) => a.x - b.x || b.y - a.y);
  const line = order.map((p, k) => `${k ? `H${x(p.x)}V` : `M${x(p.x)} `}${y(p.y)}`);
  const picture = svg("svg",
    {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Time against memory"},
    svg("rect", {class: "least", x: left, y: 14, width: x(data.least) - left, height: height - 14 - bottom}),
    ...marks.flatMap(t => [svg("path", {class: "tick", d: `M${left} ${y(t)}H${width - 12}`}),
      text(left - 6, y(t) + 4, `${+(100 * t).toFixed(1)}%`, "end")]),
    ...byteTicks(most, width / 130).map(([b, words]) => text(x(b), height - bottom + 16, words, "middle")),
    text((left + width) / 2, height - 6, "peak of a step", "middle"),
    svg("path", {class: "axis", d: `M${left} 14V${height - bottom}H${width - 12}`}),
    svg("path", {class: "line", d: line.join("")}));
  for (const p of [...points.filter(p => p.k !== data.here), points[data.here]]) {
    const dot = svg("circle", {class: p.k === data.here ? "dot here" : "dot", cx: x(p.x), cy: y(p.y), r: 6},
      svg("title", {}, p.words));
    dot.addEventListener("click", () => show(p.k));
    picture.append(dot);
    if (p.k === now) picture.append(svg("circle", {class: "ring", cx: x(p.x), cy: y(p.y), r: 9}));
  }
  for (const p of others) {
    const end = x(p.x) > width * 0.7;
    picture.append(
      svg("path", {class: "mark", d: `M${x(p.x)} ${y(p.y) - 6}l6 6l-6 6l-6 -6Z`}, svg("title", {}, p.words)),
      text(x(p.x) + (end ? -10 : 10), y(p.y) + 4, p.name, end ? "end" : "start"));
  }
  box.replaceChildren(picture);
}

/* ---- graphs ---- */
function zoomable(pane) {
  const picture = pane.querySelector("svg");
  if (!picture || pane.dataset.ready) return;
  pane.dataset.ready = "1";
  picture.removeAttribute("width"); picture.removeAttribute("height");
  const base = picture.viewBox.baseVal, full = [base.x, base.y, base.width, base.height];
  let box = full.slice(), last = null;
  const redraw = () => picture.setAttribute("viewBox", box.join(" "));
  const nearer = (factor, cx = box[0] + box[2] / 2, cy = box[1] + box[3] / 2) => {
    box = [cx - (cx - box[0]) * factor, cy - (cy - box[1]) * factor, box[2] * factor, box[3] * factor];
    redraw();
  };
  const readable = () => {
    const r = pane.getBoundingClientRect(), unit = 10 / 12;   /* letters of 10 points are 12 pixels high */
    box = [full[0] + full[2] / 2 - r.width * unit / 2, full[1], r.width * unit, r.height * unit];
    redraw();
  };
  const whole = () => { box = full.slice(); redraw(); };
  pane.append(html("div", {className: "tools"}, ...[["+", "zoom in", () => nearer(0.7)],
    ["\u2212", "zoom out", () => nearer(1.4)], ["top", "readable, from the top", readable],
    ["all", "show the whole graph", whole]].map(([words, title, onclick]) =>
    html("button", {type: "button", title, onclick}, words))));
  pane.addEventListener("wheel", e => {
    if (!(e.ctrlKey || e.metaKey)) return;
    e.preventDefault();
    const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(picture.getScreenCTM().inverse());
    nearer(e.deltaY > 0 ? 1.15 : 0.87, p.x, p.y);
  }, {passive: false});
  picture.addEventListener("pointerdown", e => { last = [e.clientX, e.clientY]; });
  picture.addEventListener("pointermove", e => {
    if (!last || !(e.buttons & 1)) { last = null; return; }
    const m = picture.getScreenCTM();
    box[0] -= (e.clientX - last[0]) / m.a; box[1] -= (e.clientY - last[1]) / m.d;
    last = [e.clientX, e.clientY];
    redraw();
  });
  readable();
}
function fill(details) {
  const pane = details.querySelector(".pane");
  if (!pane) return;
  if (!pane.firstElementChild) pane.innerHTML = data.pictures[pane.dataset.graph];
  zoomable(pane);
}
function openTarget() {
  const target = location.hash.length > 1 && $(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) { target.open = true; fill(target); target.scrollIntoView(); }
}
document.querySelectorAll("details").forEach(d => d.addEventListener("toggle", () => d.open && fill(d)));
document.querySelectorAll("details[open]").forEach(fill);
window.addEventListener("hashchange", openTarget);
$("listing").innerHTML = data.source;

show(now);
openTarget();
let width = chart.clientWidth;
new ResizeObserver(() => {
  if (chart.clientWidth === width) return;
  width = chart.clientWidth;
  noTip(); drawChart(); drawCurve();
}).observe(chart);
document.body.dataset.ready = "1";
})();
