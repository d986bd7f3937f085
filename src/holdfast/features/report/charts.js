"use strict";
// What the charts show: curves and marks by step. Foreign text is only ever set as text.
const page = JSON.parse(document.getElementById("data").textContent);
const several = page.runs.length > 1;

function colour(name) {
  return "var(--" + name + ")";
}

function runColour(place) {
  return colour("run-" + (place % 8));
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

// Evaluations, and whatever has few points, are drawn as points: no line stands for what nobody measured.
const FEW = 60;

function measuredSeries(run, place, name) {
  if (!Object.hasOwn(run.curves, name)) return [];
  const points = pointsOf(run, run.curves[name]);
  const evaluated = name.startsWith("eval/");
  return [{
    ...points, kind: evaluated ? "evaluation" : "curve", metric: name, label: several ? run.name + ", " + name : name,
    colour: evaluated && !several ? colour("evaluated") : runColour(place), line: !evaluated,
    mark: evaluated ? "diamond" : points.x.length <= FEW ? "dot" : null,
  }];
}

// What a resume went back behind stays visible in grey: those steps were made, and made again.
function lostSeries(run, name) {
  return (Object.hasOwn(run.lost, name) ? run.lost[name] : []).map((column) => ({
    ...pointsOf(run, column), kind: "lost", metric: name, label: "made again after the resume",
    colour: colour("lost"), line: true, dotted: true, mark: "dot",
  }));
}

let longest = 1;
for (const run of page.runs) {
  run.steps.forEach((_, number) => { longest = Math.max(longest, stepsOf(run, number).at(-1) || 0); });
  for (const kind of Object.keys(run.marks)) for (const mark of run.marks[kind]) longest = Math.max(longest, mark[0]);
}
const side = longest * 0.015 + 0.5;
let range = [-side, longest + side];

// All charts show the same steps: a range that is dragged over in one is shown in each.
function setRange(chosen) {
  range = chosen || [-side, longest + side];
  document.getElementById("all-steps").hidden = !chosen;
  for (const element of drawings.keys()) draw(element);
}

const drawings = new Map();  // the element of a chart -> what draws it, once it was near the screen
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.clientWidth !== Number(target.dataset.width)) draw(target);
});

function draw(element, drawing) {
  if (!element) return;
  if (drawing) drawings.set(element, drawing);
  element.dataset.width = element.clientWidth;
  drawings.get(element)();
  resized.observe(element);
}

function drawMetric(element, name, unit, evaluations) {
  const series = page.runs.flatMap((run, place) => [
    ...(several ? [] : lostSeries(run, name)),
    ...measuredSeries(run, place, name),
    ...evaluations.flatMap((each) => measuredSeries(run, place, each.name)),
  ]);
  const { rewinds, marks } = page.runs[0];
  const logarithmic = document.getElementById("logarithmic").checked;
  plot(element, series, {
    unit, range, logarithmic, onRange: setRange,
    spans: several ? [] : rewinds.slice(-100).filter(([to, last]) => last > to),
    moments: several ? [] : marks.failed.slice(-100).map(([step]) => step),
  });
  return series;
}

function drawLegend(element, chart, series) {
  const kinds = new Set(series.map((each) => each.kind));
  const keys = [];
  if (kinds.has("curve")) keys.push(key("—", several ? colour("quiet") : runColour(0), "training"));
  for (const each of chart.evaluations) keys.push(key("◆", several ? colour("quiet") : colour("evaluated"), "evaluation on " + each.set));
  if (kinds.has("lost")) keys.push(key("┈", colour("lost"), "made again"));
  if (!several && page.runs[0].marks.failed.length) keys.push(key("┆", colour("failed"), "killed or failed"));
  element.replaceChildren(...keys);
}

function drawChart(element, place) {
  const chart = page.charts[place];
  drawLegend(document.getElementById("legend-" + place), chart, drawMetric(element, chart.name, chart.unit, chart.evaluations));
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
  plot(element, series, { rows: rows.map(([, label]) => label), range, onRange: setRange });
}

// Seconds of the largest phases, each above those before it.
function drawPhases(element) {
  const { steps, parts } = page.runs[0].phases;
  const largest = parts.slice(0, 6);
  let below = steps.map(() => 0);
  const series = largest.map(([name, values], place) => {
    const base = below;
    below = base.map((value, index) => value + values[index]);
    return { x: steps, y: below, base, kind: "phase", metric: name, label: "s " + name, colour: runColour(place), line: true };
  });
  plot(element, series, { unit: "seconds per step", range, fromZero: true, onRange: setRange });
  document.getElementById("phases-legend").replaceChildren(...largest.map(([name], place) => key("■", runColour(place), name)));
}

function drawOther(element) {
  const name = document.getElementById("metric").value;
  drawMetric(element, name, page.others.find((each) => each.name === name)?.unit || "value", []);
}

function drawingsOf() {
  const jobs = page.charts.map((_, place) => ["chart-" + place, (element) => drawChart(element, place)]);
  jobs.push(["timeline", drawTimeline], ["other", drawOther]);
  if (page.runs[0].phases.parts) jobs.push(["phases", drawPhases]);
  return jobs.map(([name, job]) => [document.getElementById(name), job]).filter(([element]) => element)
    .map(([element, job]) => [element, () => job(element)]);
}

function drawAll() {
  for (const [element, job] of drawingsOf()) draw(element, job);
}

// Charts below the fold wait until they are near the screen, so that a page of many curves opens at once.
function drawLater() {
  const jobs = new Map(drawingsOf());
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      draw(target, jobs.get(target));
    }
  }, { rootMargin: "300px" });
  for (const element of jobs.keys()) observer.observe(element);
}
