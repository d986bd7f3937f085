// What the charts of a page show, by chart, read from the paths that are drawn and their axes.
const out = {};
for (const svg of document.querySelectorAll(".chart svg")) {
  const [first, last] = svg.dataset.steps.split(",").map(Number);
  const [low, high] = svg.dataset.values.split(",").map(Number);
  const [left, right, bottom, top] = svg.dataset.box.split(",").map(Number);
  for (const group of svg.querySelectorAll("[data-kind]")) {
    const marks = group.querySelector(".mark")?.getAttribute("d");
    const line = group.querySelector(".line")?.getAttribute("d");
    const points = [...(line ?? marks).matchAll(/([ML])(-?[\d.]+) (-?[\d.]+)/g)].map(([, command, x, y]) => ({
      step: Math.round(first + ((x - left) / (right - left)) * (last - first)),
      value: low + ((y - bottom) / (top - bottom)) * (high - low), starts: command === "M",
    }));
    (out[svg.parentElement.id] ||= []).push({
      kind: group.dataset.kind, metric: group.dataset.metric, joined: line !== undefined, resolution: (high - low) / (bottom - top) / 50,
      x: points.map((point) => point.step), y: points.map((point) => point.value),
      starts: points.filter((point) => point.starts).map((point) => point.step),
      color: getComputedStyle(group.querySelector("path")).stroke,
    });
  }
}
return out;
