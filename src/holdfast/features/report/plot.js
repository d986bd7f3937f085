"use strict";
// Draws series by step as SVG: axes, lines, areas and marks, and the values under the pointer.
// A series: { kind, metric, label, colour, x, y, and of: line, dotted, area (with base), mark (a name of MARKS), texts }.
const MARKS = {  // drawn around the point where a path stands
  dot: "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0", diamond: "m0-6l6 6-6 6-6-6z", bar: "m-1-5.5h2v11h-2z",
  square: "m-4-4h8v8h-8z", right: "m-3.5-5l9 5-9 5z", up: "m0-5l5 9h-10z",
  cross: "m-4.5-2.5l2-2 2.5 2.5 2.5-2.5 2 2-2.5 2.5 2.5 2.5-2 2-2.5-2.5-2.5 2.5-2-2 2.5-2.5z",
  star: "m0-6l1.8 4 4.2.4-3.2 2.8 1 4.3-3.8-2.3-3.8 2.3 1-4.3-3.2-2.8 4.2-.4z",
};
const BELOW = 38, ABOVE = 20, BESIDE = 12;

function shape(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value, digits = 5) {
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

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
function clamped(value) {
  return Math.min(4e307, Math.max(-4e307, value));
}

// The lowest and highest value within the steps that are shown, with room around them, as they lie on the axis.
function bounds(series, form, range) {
  let low = Infinity, high = -Infinity;
  for (const { x, y, base } of series) {
    y.forEach((value, place) => {
      if (value === null || x[place] < range[0] || x[place] > range[1] || (form.logarithmic && value <= 0)) return;
      low = Math.min(low, base ? base[place] : value);
      high = Math.max(high, value);
    });
  }
  [low, high] = [clamped(low), clamped(high)];
  if (low > high) return form.logarithmic ? [-1, 1] : [0, 1];
  if (form.logarithmic) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [form.fromZero ? 0 : low - room, high + room];
}

function scaleOf(from, to, start, end) {
  return (value) => start + ((value - from) / (to - from)) * (end - start);
}

function pathOf(series, put, joined) {
  let text = "", pen = false;
  series.x.forEach((step, place) => {
    const at = put(step, series.y[place]);
    if (at) text += (pen && joined ? "L" : "M") + at + (joined ? (pen ? "" : "h0") : MARKS[series.mark]);  // h0: a point alone is a dot
    pen = Boolean(at);
  });
  return text;
}

function areaOf(series, put) {
  const along = (values, places) => places.map((place) => put(series.x[place], values[place])).join("L");
  const places = [...series.x.keys()];
  return places.length ? "M" + along(series.y, places) + "L" + along(series.base, places.reverse()) + "z" : "";
}

function drawnSeries(series, put, range, clip) {
  const group = shape("g", { "data-kind": series.kind, "data-metric": series.metric || "" });
  group.style.setProperty("--series", series.colour);
  const shown = (step, value) => (step >= range[0] && step <= range[1] ? put(step, value) : "");
  if (series.base) group.append(shape("path", { class: "area", "clip-path": clip, d: areaOf(series, put) }));
  if (series.line) group.append(shape("path", { class: series.dotted ? "line dotted" : "line", "clip-path": clip, d: pathOf(series, put, true) }));
  if (series.mark) group.append(shape("path", { class: "mark", d: pathOf(series, shown, false) }));
  return group;
}

// Draws into an element of a known height. form: unit, range of steps, and of: rows (names in place of numbers),
// logarithmic, fromZero, spans and moments to mark, onRange (called with the steps that were dragged over).
function plot(element, series, form) {
  const width = element.clientWidth, height = element.clientHeight, range = form.range;
  const between = form.rows ? [-0.6, Math.max(1, form.rows.length) - 0.4] : bounds(series, form, range);
  const most = Math.max(2, Math.round((height - ABOVE - BELOW) / 38));
  const values = form.rows ? [...form.rows.keys()] : form.logarithmic ? powers(...between, most) : ticks(...between, most);
  const names = values.map((value) => (form.rows ? form.rows[value] : number(value)));
  const left = 16 + 6.6 * Math.max(3, ...names.map((name) => name.length)), right = width - BESIDE;
  const top = form.rows ? 4 : ABOVE, bottom = height - BELOW;
  const across = scaleOf(...range, left, right), up = scaleOf(...between, bottom, top);
  const place = (value) => up(form.logarithmic ? Math.log10(value) : clamped(value));
  const put = (step, value) => (value === null || (form.logarithmic && value <= 0) ? "" : across(step).toFixed(2) + " " + place(value).toFixed(2));
  const clip = "clip-" + element.id;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", "data-steps": range.join(), "data-values": between.join(), "data-box": [left, right, bottom, top].join() },
    shape("clipPath", { id: clip }, shape("rect", { x: left, y: top, width: Math.max(0, right - left), height: bottom - top })));
  const write = (x, y, anchor, words) => shape("text", { x, y, "text-anchor": anchor }, words);
  names.forEach((name, index) => {
    const y = place(values[index]);
    svg.append(shape("path", { class: "grid", d: `M${left} ${y}H${right}` }), write(left - 8, y + 4, "end", name));
  });
  for (const step of ticks(...range, Math.max(2, Math.round(width / 90))).filter((each) => each >= 0 && Number.isInteger(each))) {
    svg.append(shape("path", { class: "tick", d: `M${across(step)} ${bottom}v5` }), write(across(step), bottom + 18, "middle", number(step, 12)));
  }
  svg.append(shape("path", { class: "tick", d: `M${left} ${bottom}H${right}` }), write(right, height - 4, "end", "step"), write(4, 12, "start", form.unit || ""));
  const box = (from, to, name) => shape("rect", { class: name, x: from, y: top, width: Math.max(0, to - from), height: bottom - top });
  const within = (step) => Math.min(right, Math.max(left, across(step)));
  for (const [from, to] of form.spans || []) svg.append(box(within(from), within(to), "span"));
  for (const step of form.moments || []) if (step >= range[0] && step <= range[1]) svg.append(shape("path", { class: "moment", d: `M${across(step)} ${top}V${bottom}` }));
  svg.append(...series.map((each) => drawnSeries(each, put, range, `url(#${clip})`)));
  element.replaceChildren(svg);
  listen(element, svg, { series, form, across, place, left, right, top, bottom, range, box });
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
function under({ series, form, across, place, range }, x, y) {
  const step = range[0] + (x - across(range[0])) / (across(range[1]) - across(range[0])) * (range[1] - range[0]);
  const found = [];
  for (const each of series.filter((any) => any.x.length)) {
    const index = nearest(each.x, step), value = each.y[index];
    if (value === null || (form.logarithmic && value <= 0)) continue;
    const away = Math.hypot(across(each.x[index]) - x, form.rows ? place(value) - y : 0);
    if (away <= 14) found.push({ each, index, away });
  }
  return found.sort((one, other) => one.away - other.away).slice(0, form.rows ? 1 : 16);
}

function listen(element, svg, drawn) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  element.append(tip);
  let start = null, mark = null;
  const at = (event) => {
    const { left, top, width, height } = svg.getBoundingClientRect();
    return [(event.clientX - left) * svg.viewBox.baseVal.width / width, (event.clientY - top) * svg.viewBox.baseVal.height / height];
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
    const { each, index } = found[0], across = drawn.across(each.x[index]);
    svg.append(mark = shape("path", { class: "pointer", d: `M${across} ${drawn.top}V${drawn.bottom}` }));
    tip.replaceChildren(...tipLines(found));
    tip.hidden = false;
    tip.style.left = Math.max(0, across + 14 + tip.offsetWidth > element.clientWidth ? across - 14 - tip.offsetWidth : across + 14) + "px";
    tip.style.top = Math.max(0, Math.min(y, element.clientHeight - tip.offsetHeight)) + "px";
  });
  svg.addEventListener("pointerleave", () => { start = null; clear(); });
  svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) start = at(event)[0]; });
  svg.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const ends = [start, at(event)[0]].sort((one, other) => one - other), { left, right, range } = drawn;
    start = null;
    clear();
    if (ends[1] - ends[0] < 6) return;
    const chosen = ends.map((end) => range[0] + Math.min(1, Math.max(0, (end - left) / (right - left))) * (range[1] - range[0]));
    if (chosen[1] - chosen[0] >= 0.01) drawn.form.onRange(chosen);
  });
  svg.addEventListener("dblclick", () => drawn.form.onRange(null));
}

function tipLines(found) {
  const { each, index } = found[0];
  if (each.texts) return [each.texts[index]];
  const lines = found.map((one) => {
    const value = one.each.y[one.index] - (one.each.base ? one.each.base[one.index] : 0);
    return key("■", one.each.colour, number(value) + "  " + one.each.label);
  });
  return [document.createTextNode("step " + number(each.x[index], 12)), ...lines];
}

function key(symbol, tint, words) {
  const item = document.createElement("span"), sign = document.createElement("span");
  sign.className = "key";
  sign.textContent = symbol;
  sign.style.color = tint;
  item.append(sign, words);
  return item;
}
