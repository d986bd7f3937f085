"use strict";
// Draws curves by step as SVG, and lists completions. Foreign text is only ever set as text.
const byId = (name) => document.getElementById(name);
const page = JSON.parse(byId("data").textContent);
const several = page.runs.length > 1;

function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value, digits = 5) {
  if (value === null || value === undefined) return "none";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

const colour = (name) => "var(--" + name + ")";
const runColour = (place) => colour("run-" + (place % 8));

function key(symbol, tint, words) {
  const sign = element("span", "key", symbol);
  sign.style.color = tint;
  return element("span", "", sign, words);
}

// ---- axes and paths

const MARKS = {  // drawn around the point where a path stands
  dot: "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0", diamond: "m0-6l6 6-6 6-6-6z", bar: "m-1-5.5h2v11h-2z",
  square: "m-4-4h8v8h-8z", right: "m-3.5-5l9 5-9 5z", up: "m0-5l5 9h-10z",
  cross: "m-4.5-2.5l2-2 2.5 2.5 2.5-2.5 2 2-2.5 2.5 2.5 2.5-2 2-2.5-2.5-2.5 2.5-2-2 2.5-2.5z",
  star: "m0-6l1.8 4 4.2.4-3.2 2.8 1 4.3-3.8-2.3-3.8 2.3 1-4.3-3.2-2.8 4.2-.4z",
};
const BELOW = 38, ABOVE = 20, BESIDE = 12;

// Round numbers between two others: 1, 2 or 5 times a power of ten apart.
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const first = Math.ceil(low / apart - 1e-9), out = [];
  for (let more = 0; more <= 2 * most && (first + more) * apart <= high + apart * 1e-9; more += 1) out.push(Number(((first + more) * apart).toPrecision(12)));
  return out;
}

function powers(low, high, most) {
  if (high - low < 1) return ticks(10 ** low, 10 ** high, most).filter((value) => value > 0);
  const apart = Math.ceil((high - low) / most), out = [];
  for (let power = Math.ceil(low); power <= high; power += apart) out.push(10 ** power);
  return out;
}

// Differences of values near the largest number are infinite; such values lie on the edge.
const clamped = (value) => Math.min(4e307, Math.max(-4e307, value));

// The lowest and highest value within the steps that are shown, with room around them, as they lie on the axis.
function bounds(series, logarithmic, range) {
  let low = Infinity, high = -Infinity;
  for (const { x, y, base } of series) {
    y.forEach((value, place) => {
      if (value === null || x[place] < range[0] || x[place] > range[1] || (logarithmic && value <= 0)) return;
      low = Math.min(low, base ? 0 : value);
      high = Math.max(high, value);
    });
  }
  [low, high] = [clamped(low), clamped(high)];
  if (low > high) return logarithmic ? [-1, 1] : [0, 1];
  if (logarithmic) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [series.some((each) => each.base) ? 0 : low - room, high + room];
}

const scaleOf = (from, to, start, end) => (value) => start + ((value - from) / (to - from)) * (end - start);

function drawnSeries(series, put, range, clip) {
  const group = shape("g", { "data-kind": series.kind, "data-metric": series.metric || "" });
  group.style.setProperty("--series", series.colour);
  const places = [...series.x.keys()];
  if (series.base && places.length) {
    const along = (values, order) => order.map((place) => put(series.x[place], values[place])).join("L");
    group.append(shape("path", { class: "area", "clip-path": clip, d: "M" + along(series.y, places) + "L" + along(series.base, places.toReversed()) + "z" }));
  }
  if (series.line) {
    let path = "", pen = false;
    for (const place of places) {
      const at = put(series.x[place], series.y[place]);
      if (at) path += (pen ? "L" : "M") + at + (pen ? "" : "h0");  // h0: a point alone is a dot
      pen = Boolean(at);
    }
    group.append(shape("path", { class: series.kind === "lost" ? "line dotted" : "line", "clip-path": clip, d: path }));
  }
  if (series.mark) {
    const points = series.x.map((step, place) => (step >= range[0] && step <= range[1] ? put(step, series.y[place]) : ""));
    group.append(shape("path", { class: "mark", d: points.filter(Boolean).map((at) => "M" + at + MARKS[series.mark]).join("") }));
  }
  return group;
}

// ---- a chart

let longest = 1;
for (const run of page.runs) {
  for (const steps of run.steps) longest = Math.max(longest, steps.at(-1) || 0);
  for (const marks of Object.values(run.marks)) longest = Math.max(longest, marks.at(-1)?.[0] || 0);
}
const side = longest * 0.015 + 0.5;
let range = [-side, longest + side];

// All charts show the same steps: a range that is dragged over in one is shown in each.
function setRange(chosen) {
  range = chosen || [-side, longest + side];
  byId("all-steps").hidden = !chosen;
  drawAll();
}

// Draws series into an element of a known height. A series: { kind, metric, label, legend, colour, x, y, and of: line, base
// of an area, mark (a name of MARKS), texts }. form: unit, and of: rows (names in place of numbers), logarithmic, spans and
// moments to mark.
function plot(element, series, form) {
  const width = element.clientWidth, height = element.clientHeight;
  const between = form.rows ? [-0.6, Math.max(1, form.rows.length) - 0.4] : bounds(series, form.logarithmic, range);
  const most = Math.max(2, Math.round((height - ABOVE - BELOW) / 38));
  const values = form.rows ? [...form.rows.keys()] : (form.logarithmic ? powers : ticks)(...between, most);
  const names = values.map((value) => (form.rows ? form.rows[value] : number(value)));
  const left = 16 + 6.6 * Math.max(3, ...names.map((name) => name.length)), right = width - BESIDE;
  const top = form.rows ? 4 : ABOVE, bottom = height - BELOW;
  const across = scaleOf(...range, left, right), up = scaleOf(...between, bottom, top);
  const place = (value) => up(form.logarithmic ? Math.log10(value) : clamped(value));
  const put = (step, value) => (value === null || (form.logarithmic && value <= 0) ? "" : across(step).toFixed(2) + " " + place(value).toFixed(2));
  const clip = "clip-" + element.id;
  const box = (from, to, name) => shape("rect", { class: name, x: from, y: top, width: Math.max(0, to - from), height: bottom - top });
  const write = (x, y, anchor, words) => shape("text", { x, y, "text-anchor": anchor }, words);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", "data-steps": range.join(), "data-values": between.join(), "data-box": [left, right, bottom, top].join() },
    shape("clipPath", { id: clip }, box(left, right, "")));
  names.forEach((name, index) => {
    const y = place(values[index]);
    svg.append(shape("path", { class: "grid", d: `M${left} ${y}H${right}` }), write(left - 8, y + 4, "end", name));
  });
  for (const step of ticks(...range, Math.max(2, Math.round(width / 90))).filter((each) => each >= 0 && Number.isInteger(each))) {
    svg.append(shape("path", { class: "tick", d: `M${across(step)} ${bottom}v5` }), write(across(step), bottom + 18, "middle", number(step, 12)));
  }
  svg.append(shape("path", { class: "tick", d: `M${left} ${bottom}H${right}` }), write(right, height - 4, "end", "step"), write(4, 12, "start", form.unit || ""));
  const within = (step) => Math.min(right, Math.max(left, across(step)));
  for (const [from, to] of form.spans || []) svg.append(box(within(from), within(to), "span"));
  for (const step of form.moments || []) if (step >= range[0] && step <= range[1]) svg.append(shape("path", { class: "moment", d: `M${across(step)} ${top}V${bottom}` }));
  svg.append(...series.map((each) => drawnSeries(each, put, range, `url(#${clip})`)));
  element.replaceChildren(svg);
  const legends = new Map(series.filter((each) => each.legend).map((each) => [each.legend, key(each.sign, several ? colour("quiet") : each.colour, each.legend)]));
  if (form.moments?.length) legends.set("", key("┆", colour("failed"), "killed or failed"));
  element.parentElement.querySelector(".legend")?.replaceChildren(...legends.values());
  listen(element, svg, { series, form, across, place, left, right, top, bottom, box });
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

// What lies under the pointer, the nearest first: of rows one mark, of numbers each series at its nearest step.
function under({ series, form, across, place, left, right }, x, y) {
  const step = scaleOf(left, right, ...range)(x), found = [];
  for (const each of series.filter((any) => any.x.length)) {
    const index = nearest(each.x, step), value = each.y[index];
    if (value === null || (form.logarithmic && value <= 0)) continue;
    const away = Math.hypot(across(each.x[index]) - x, form.rows ? place(value) - y : 0);
    if (away <= 14) found.push({ each, index, away });
  }
  return found.sort((one, other) => one.away - other.away).slice(0, form.rows ? 1 : 16);
}

function tipLines(found) {
  const { each, index } = found[0];
  if (each.texts) return [each.texts[index]];
  return ["step " + number(each.x[index], 12), ...found.map(({ each: one, index: at }) =>
    key("■", one.colour, number(one.y[at] - (one.base ? one.base[at] : 0)) + "  " + one.label))];
}

function listen(chart, svg, drawn) {
  const { left, right } = drawn, tip = element("div", "tip");
  tip.hidden = true;
  chart.append(tip);
  let start = null, mark = null;
  const at = (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [(event.clientX - box.left) * view.width / box.width, (event.clientY - box.top) * view.height / box.height];
  };
  const clear = () => { mark?.remove(); mark = null; tip.hidden = true; };
  svg.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    clear();
    if (start !== null) {
      svg.append(mark = drawn.box(Math.min(start, x), Math.max(start, x), "chosen"));
      return;
    }
    const found = under(drawn, x, y);
    if (!found.length) return;
    const across = drawn.across(found[0].each.x[found[0].index]);
    svg.append(mark = shape("path", { class: "pointer", d: `M${across} ${drawn.top}V${drawn.bottom}` }));
    tip.replaceChildren(...tipLines(found));
    tip.hidden = false;
    tip.style.left = Math.max(0, across + 14 + tip.offsetWidth > chart.clientWidth ? across - 14 - tip.offsetWidth : across + 14) + "px";
    tip.style.top = Math.max(0, Math.min(y, chart.clientHeight - tip.offsetHeight)) + "px";
  });
  svg.addEventListener("pointerleave", () => { start = null; clear(); });
  svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) start = at(event)[0]; });
  svg.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const ends = [start, at(event)[0]].sort((one, other) => one - other);
    start = null;
    clear();
    const chosen = ends.map((end) => scaleOf(left, right, ...range)(Math.min(right, Math.max(left, end))));
    if (ends[1] - ends[0] >= 6 && chosen[1] - chosen[0] >= 0.01) setRange(chosen);
  });
  svg.addEventListener("dblclick", () => setRange(null));
}

// ---- what the charts show

const FEW = 60;  // points that are drawn as points too

// Evaluations are points: no line stands for what nobody measured.
function measuredSeries(run, place, name, set) {
  if (!Object.hasOwn(run.curves, name)) return [];
  const [axis, y] = run.curves[name], x = run.steps[axis], evaluated = name.startsWith("eval/");
  return [{
    x, y, kind: evaluated ? "evaluation" : "curve", metric: name, label: several ? run.name + ", " + name : name,
    legend: evaluated ? "evaluation on " + (set || name) : "training", sign: evaluated ? "◆" : "—",
    colour: evaluated && !several ? colour("evaluated") : runColour(place), line: !evaluated,
    mark: evaluated ? "diamond" : x.length <= FEW ? "dot" : null,
  }];
}

// What a resume went back behind stays visible in grey: those steps were made, and made again.
function lostSeries(run, name) {
  return (Object.hasOwn(run.lost, name) ? run.lost[name] : []).map(([axis, y]) => ({
    x: run.steps[axis], y, kind: "lost", metric: name, label: "made again after the resume", legend: "made again", sign: "┈",
    colour: colour("lost"), line: true, mark: "dot",
  }));
}

function drawMetric(element, name, unit, evaluations) {
  const series = page.runs.flatMap((run, place) => [
    ...(several ? [] : lostSeries(run, name)),
    ...measuredSeries(run, place, name),
    ...evaluations.flatMap(([set, metric]) => measuredSeries(run, place, metric, set)),
  ]);
  const { rewinds, marks } = page.runs[0];
  plot(element, series, {
    unit, logarithmic: byId("logarithmic").checked,
    spans: several ? [] : rewinds.slice(-100).filter(([to, last]) => last > to),
    moments: several ? [] : marks.failed.slice(-100).map(([step]) => step),
  });
}

const ROWS = [
  ["failed", "killed, failed", "cross"], ["stopped", "stopped", "square"], ["resumed", "resumed", "right"],
  ["saved", "saved", "bar"], ["evaluated", "evaluated", "diamond"], ["alarm", "alarm", "up"], ["exported", "exported", "star"],
];

function drawTimeline(element) {
  const rows = ROWS.filter(([kind]) => page.runs.some((run) => run.marks[kind].length)).reverse();
  const series = rows.flatMap(([kind, , mark], row) => page.runs.map((run, place) => ({
    x: run.marks[kind].map(([step]) => step), y: run.marks[kind].map(() => row), kind, mark,
    colour: several ? runColour(place) : colour(kind === "exported" ? "quiet" : kind),
    texts: run.marks[kind].map(([step, words]) => (several ? run.name + ": " : "") + "step " + step + ": " + words),
  })));
  element.style.height = 50 + 25 * Math.max(1, rows.length) + "px";
  plot(element, series, { rows: rows.map(([, label]) => label) });
}

// Seconds of the largest phases, each above those before it.
function drawPhases(element) {
  const { steps, parts } = page.runs[0].phases;
  let below = steps.map(() => 0);
  const series = parts.slice(0, 6).map(([name, values], place) => {
    const base = below;
    below = base.map((value, index) => value + values[index]);
    return { x: steps, y: below, base, kind: "phase", metric: name, label: "s " + name, legend: name, sign: "■", colour: runColour(place), line: true };
  });
  plot(element, series, { unit: "seconds per step" });
}

function drawAll() {
  if (!byId("timeline")) return;
  page.charts.forEach(({ name, unit, evaluations }, place) => drawMetric(byId("chart-" + place), name, unit, evaluations));
  drawTimeline(byId("timeline"));
  drawOther();
  if (byId("phases")) drawPhases(byId("phases"));
}

function drawOther() {
  const name = byId("metric").value;
  drawMetric(byId("other"), name, page.others[name], []);
}

// ---- completions

const PART = 25;
let shownParts = 1;
const [STEP, ID, PROMPT, TEXT, REWARD, ADVANTAGE, FINISH, TRAINED, PARTS] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

function tokensOf(whole) {
  const by = byId("colour").value, column = by === "advantage" ? 2 : 1;
  const largest = by === "advantage" ? Math.max(...whole.tokens.map((token) => Math.abs(token[2] || 0)), 1e-9) : 4;
  return whole.tokens.map((token) => {
    const span = element("span", token[1] === null ? "token observed" : "token", token[0]), value = token[column];
    // Light enough that the text stays readable in either theme.
    const strength = Math.min(1, Math.abs(value) / largest) * 35;
    if (by !== "none" && value !== null) span.style.backgroundColor = `color-mix(in srgb, ${colour(value < 0 ? "failed" : "run-0")} ${strength.toFixed(1)}%, transparent)`;
    span.title = "log-probability " + number(token[1], 4) + ", advantage " + number(token[2], 4);
    return span;
  });
}

// An episode as a conversation: what the policy said, the calls among it, and what came of them.
function conversation(turns) {
  return element("div", "turns", ...turns.map(([role, name, text], place) => {
    const calls = role === "assistant" && (turns[place + 1] || [])[0] === "tool";
    const kind = calls ? "calls" : role === "assistant" || role === "tool" ? role : "other";
    const words = calls ? "assistant calls" : role + (name ? " " + name : "");
    return element("div", "turn " + kind, element("span", "role", words), element("pre", "", text || "(nothing)"));
  }));
}

function imagesOf(samples, prompt) {
  return element("div", "images", ...(samples.images[prompt] || []).map((name) => {
    const image = element("img");
    image.src = "data:image/jpeg;base64," + samples.files[name];
    image.alt = "image of the prompt";
    return image;
  }));
}

function article(samples, place, withPrompt) {
  const row = samples.rows[place], whole = samples.whole[place];
  const facts = ["reward " + number(row[REWARD], 4), row[TRAINED] ? "advantage " + number(row[ADVANTAGE], 4) : "left out of the step"];
  if (row[PARTS]) row[PARTS].forEach((value, index) => facts.push(samples.parts[index] + " " + number(value, 4)));
  facts.push(samples.finishes[row[FINISH]] === "length" ? "cut at its longest" : samples.finishes[row[FINISH]], "sample " + row[ID]);
  if (withPrompt) facts.unshift("step " + row[STEP]);
  const prompt = element("pre", "prompt", samples.prompts[row[PROMPT]]), text = element("pre", "completion", row[TEXT] || "(nothing)");
  const show = (words) => text.replaceChildren(...(whole.tokens.length ? tokensOf(whole) : [words]));
  if (whole && whole.tokens.map((token) => token[0]).join("").length <= 300) show(row[TEXT] || "(nothing)");
  const box = element("article", "", element("div", "numbers", ...facts.filter(Boolean).map((fact) => element("span", "", fact))));
  if (withPrompt) box.append(imagesOf(samples, row[PROMPT]), prompt);
  box.append(text);
  if (whole && whole.turns) box.append(conversation(whole.turns));
  if (whole && (whole.completion.length > 300 || whole.prompt.length > 300)) {
    const button = element("button", "", "Show all of it");
    button.type = "button";
    button.addEventListener("click", () => {
      prompt.textContent = whole.prompt;
      text.before(prompt);
      show(whole.completion);
      button.remove();
    });
    box.append(button);
  }
  return box;
}

function groupBox(samples, places) {
  const first = samples.rows[places[0]], prompt = samples.prompts[first[PROMPT]];
  const rewards = places.map((place) => samples.rows[place][REWARD]).filter((value) => value !== null);
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const box = element("details", "group", element("summary", "",
    element("span", "step", "step " + first[STEP]), element("span", "prompt", prompt || "(no prompt)"),
    element("span", "mean", places.length + " × reward " + number(mean, 4)),
  ));
  box.addEventListener("toggle", () => {
    if (!box.open || box.childElementCount > 1) return;
    box.append(imagesOf(samples, first[PROMPT]));
    if (prompt.length > 60 || prompt.includes("\n")) box.append(element("article", "", element("pre", "prompt", prompt)));
    box.append(...places.map((place) => article(samples, place, false)));
  });
  return box;
}

function sorted(samples, places, order) {
  const column = order === "advantage" ? ADVANTAGE : REWARD, sign = order === "low" ? 1 : -1;
  const value = (place) => samples.rows[place][column] ?? -sign * Infinity;
  return places.toSorted((one, other) => (value(one) === value(other) ? 0 : sign * (value(one) - value(other))));
}

function showSamples() {
  const { samples } = page.runs[byId("run") ? Number(byId("run").value) : 0], order = byId("order").value;
  const words = byId("search").value.trim().toLowerCase();
  samples.lower ||= samples.rows.map((row) => (samples.prompts[row[PROMPT]] + "\n" + row[TEXT]).toLowerCase());
  const places = [...samples.rows.keys()].filter((place) => samples.lower[place].includes(words));
  const grouped = order === "group" || order === "oldest";
  const groups = Map.groupBy(places, (place) => samples.rows[place][STEP] + "/" + samples.rows[place][PROMPT]);
  const items = grouped ? [...groups.values()] : sorted(samples, places, order);
  if (order === "group") items.reverse();
  const visible = items.slice(0, PART * shownParts);
  byId("list").replaceChildren(...visible.map((item) => (grouped ? groupBox(samples, item) : article(samples, item, true))));
  byId("count").textContent = number(places.length, 12) + " of " + number(samples.rows.length, 12) + " completions" + (grouped ? " in " + number(items.length, 12) + " groups" : "");
  byId("more").hidden = visible.length >= items.length;
}

function startSamples() {
  let waiting;
  const anew = () => { shownParts = 1; showSamples(); };
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(anew, 120); });
  for (const name of ["order", "colour", "run"]) byId(name)?.addEventListener("change", anew);
  byId("more").addEventListener("click", () => { shownParts += 1; showSamples(); });
  showSamples();
}

// ---- the whole page

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("logarithmic")?.addEventListener("change", drawAll);
byId("all-steps")?.addEventListener("click", () => setRange(null));
byId("metric")?.addEventListener("change", drawOther);
addEventListener("resize", drawAll);
let before;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme("light"); });
addEventListener("afterprint", () => setTheme(before));
if (byId("list")) startSamples();
drawAll();
