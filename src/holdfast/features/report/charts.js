"use strict";
// Curves and marks. Everything foreign reaches Plotly escaped, since Plotly reads a few HTML tags in its texts.
const page = JSON.parse(document.getElementById("data").textContent);
const several = page.runs.length > 1;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Breaks a sentence into lines for a hover box; only the box is narrow.
function lines(text, width = 64) {
  const out = [""];
  for (const word of String(text).split(" ")) {
    if ((out[out.length - 1] + word).length > width && out[out.length - 1]) out.push("");
    out[out.length - 1] += word.slice(0, 200) + " ";
  }
  return out.slice(0, 8).map((line) => plain(line.trim())).join("<br>");
}

function stepsOf(run, number) {
  const { from, added, count } = run.steps[number];
  if (!added) return Array.from({ length: count }, (_, place) => from + place);
  let step = from;
  return count ? [step, ...added.map((more) => (step += more))] : [];
}

function pointsOf(run, column) {
  return { x: stepsOf(run, column[0]), y: column[1] };
}

function runColour(place) {
  return colour("run-" + (place % 8));
}

// Evaluations, and whatever has few points, are drawn as points: no line stands for what nobody measured.
const FEW = 60;

function measuredTraces(run, place, name) {
  const column = run.curves[name];
  if (!column) return [];
  const points = pointsOf(run, column);
  const evaluated = name.startsWith("eval/");
  const label = several ? run.name + ", " + name : name;
  return [{
    ...points, type: "scatter", name: plain(label), meta: { kind: evaluated ? "evaluation" : "curve", metric: name },
    mode: evaluated ? "markers" : points.x.length <= FEW ? "lines+markers" : "lines", connectgaps: false,
    line: { color: runColour(place), width: 1.6 },
    marker: evaluated
      ? { color: several ? runColour(place) : colour("evaluated"), size: 9, symbol: "diamond" }
      : { color: runColour(place), size: 5 },
    hovertemplate: "%{y:.5g}<extra>" + plain(label) + "</extra>",
  }];
}

// What a resume went back behind stays visible in grey: those steps were made, and made again.
function lostTraces(run, name) {
  return (run.lost[name] || []).map((column) => ({
    ...pointsOf(run, column), type: "scatter", mode: "lines+markers", name: "lost", meta: { kind: "lost", metric: name },
    line: { color: colour("lost"), width: 1.2, dash: "dot" }, marker: { color: colour("lost"), size: 4 },
    hovertemplate: "%{y:.5g}<extra>made again after the resume</extra>",
  }));
}

function rewindShapes() {
  const shapes = [];
  if (several) return shapes;
  for (const [to, last] of page.runs[0].rewinds.slice(-100)) {
    if (last > to) {
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0: to, x1: last, y0: 0, y1: 1, line: { width: 0 },
        fillcolor: colour("failed"), opacity: 0.09, layer: "below" });
    }
  }
  for (const [step] of page.runs[0].marks.failed.slice(-100)) {
    shapes.push({ type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1,
      line: { color: colour("failed"), width: 1, dash: "dash" } });
  }
  return shapes;
}

let longest = 1;
for (const run of page.runs) {
  run.steps.forEach((_, number) => { const steps = stepsOf(run, number); longest = Math.max(longest, steps[steps.length - 1] || 0); });
  for (const kind of Object.keys(run.marks)) for (const mark of run.marks[kind]) longest = Math.max(longest, mark[0]);
}

function axis(title, more) {
  return {
    title: { text: plain(title), font: { size: 12, color: colour("quiet") }, standoff: 8 }, gridcolor: colour("grid"),
    zeroline: false, linecolor: colour("line"), tickcolor: colour("line"), ticks: "outside", ticklen: 4,
    tickfont: { size: 11, color: colour("quiet") }, automargin: true, nticks: 7, separatethousands: true, ...more,
  };
}

function layout(unit, more) {
  const logarithmic = document.getElementById("logarithmic")?.checked;
  const side = longest * 0.015 + 0.5;
  return {
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x",
    margin: { l: 58, r: 10, t: 8, b: 44 }, shapes: rewindShapes(), dragmode: "zoom",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 }, align: "left" },
    xaxis: axis("step", { range: [-side, longest + side] }),
    yaxis: axis(unit, { type: logarithmic ? "log" : "linear", exponentformat: "power", ...(logarithmic ? {} : { tickformat: ",~g" }) }),
    ...more,
  };
}

const CONFIG = { displayModeBar: false, responsive: true, showTips: false };

function draw(element, traces, form) {
  return Plotly.react(element, traces, form, CONFIG);
}

function drawMetric(element, name, unit, evaluations) {
  const traces = page.runs.flatMap((run, place) => [
    ...(several ? [] : lostTraces(run, name)),
    ...measuredTraces(run, place, name),
    ...evaluations.flatMap((each) => measuredTraces(run, place, each.name)),
  ]);
  draw(element, traces, layout(unit));
  return traces;
}

function key(symbol, tint, words) {
  const item = document.createElement("span");
  const sign = document.createElement("span");
  sign.className = "key";
  sign.textContent = symbol;
  sign.style.color = tint;
  item.append(sign, words);
  return item;
}

function drawLegend(element, chart, traces) {
  const kinds = new Set(traces.map((trace) => trace.meta.kind));
  const keys = [];
  if (kinds.has("curve")) keys.push(key("—", several ? colour("quiet") : runColour(0), "training"));
  for (const each of chart.evaluations) keys.push(key("◆", several ? colour("quiet") : colour("evaluated"), "evaluation on " + each.set));
  if (kinds.has("lost")) keys.push(key("┈", colour("lost"), "made again"));
  if (!several && page.runs[0].marks.failed.length) keys.push(key("┆", colour("failed"), "killed or failed"));
  element.replaceChildren(...keys);
}

const ROWS = [
  ["failed", "killed, failed", "x"], ["stopped", "stopped", "square"], ["resumed", "resumed", "triangle-right"],
  ["saved", "saved", "line-ns-open"], ["evaluated", "evaluated", "diamond"], ["alarm", "alarm", "triangle-up"],
  ["exported", "exported", "star"],
];

function drawTimeline() {
  const rows = ROWS.filter(([kind]) => page.runs.some((run) => run.marks[kind].length)).reverse();
  const traces = rows.flatMap(([kind, label, symbol]) => page.runs.map((run, place) => ({
    x: run.marks[kind].map((mark) => mark[0]), y: run.marks[kind].map(() => label), type: "scatter", mode: "markers",
    meta: { kind: "mark", mark: kind }, name: plain(run.name),
    text: run.marks[kind].map((mark) => lines((several ? run.name + ": " : "") + "step " + mark[0] + ": " + mark[1])),
    hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    marker: { symbol, size: symbol === "line-ns-open" ? 11 : 9, color: several ? runColour(place) : colour(kind === "exported" ? "quiet" : kind),
      line: { width: symbol === "line-ns-open" ? 2 : 0, color: several ? runColour(place) : colour(kind === "exported" ? "quiet" : kind) } },
  })));
  const element = document.getElementById("timeline");
  if (!element) return;
  element.style.height = 56 + 25 * Math.max(1, rows.length) + "px";
  draw(element, traces, layout("", {
    hovermode: "closest", margin: { l: 100, r: 10, t: 4, b: 44 },
    yaxis: { type: "category", categoryarray: rows.map((row) => row[1]), range: [-0.6, Math.max(1, rows.length) - 0.4],
      gridcolor: colour("grid"), zeroline: false, tickfont: { size: 12, color: colour("text") }, fixedrange: true, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" },
  }));
}

function drawPhases() {
  const element = document.getElementById("phases");
  const phases = page.runs[0].phases;
  if (!element || !phases.parts) return;
  const largest = phases.parts.slice(0, 6);
  const traces = largest.map(([name, values], place) => ({
    x: phases.steps, y: values, type: "scatter", mode: "lines", stackgroup: "time", name: plain(name), meta: { kind: "phase" },
    line: { width: 0.5, color: runColour(place) }, fillcolor: runColour(place) + "99",
    hovertemplate: "%{y:.3g} s<extra>" + plain(name) + "</extra>",
  }));
  const legend = document.createElement("p");
  legend.className = "legend";
  legend.append(...largest.map(([name], place) => key("■", runColour(place), name)));
  if (element.previousElementSibling?.className === "legend") element.previousElementSibling.remove();
  element.before(legend);
  draw(element, traces, layout("seconds per step", { yaxis: axis("seconds per step", { rangemode: "tozero", tickformat: ",~g" }) }));
}

function drawOther() {
  const chosen = document.getElementById("metric");
  if (!chosen) return;
  const other = page.others.find((each) => each.name === chosen.value);
  drawMetric(document.getElementById("other"), chosen.value, other ? other.unit : "value", []);
}

const drawn = new Map();

function drawChart(place) {
  const chart = page.charts[place];
  const element = document.getElementById("chart-" + place);
  if (!element) return;
  const traces = drawMetric(element, chart.name, chart.unit, chart.evaluations);
  drawLegend(document.getElementById("legend-" + place), chart, traces);
  drawn.set(place, true);
}

function drawAll() {
  drawTimeline();
  page.charts.forEach((_, place) => drawChart(place));
  drawOther();
  drawPhases();
}

// Charts below the fold wait until they are near the screen, so that a page of many curves opens at once.
function drawLater() {
  const jobs = new Map(page.charts.map((_, place) => [document.getElementById("chart-" + place), () => drawChart(place)]));
  jobs.set(document.getElementById("timeline"), drawTimeline);
  jobs.set(document.getElementById("other"), drawOther);
  jobs.set(document.getElementById("phases"), drawPhases);
  jobs.delete(null);
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      jobs.get(entry.target)();
    }
  }, { rootMargin: "300px" });
  for (const element of jobs.keys()) observer.observe(element);
}
