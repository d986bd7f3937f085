// What the charts of a page show, by chart.
const out = {};
for (const chart of document.querySelectorAll(".chart")) {
  for (const trace of chart.data || []) {
    const kind = trace.meta.kind === "mark" ? trace.meta.mark : trace.meta.kind;
    const points = { x: Array.from(trace.x), y: Array.from(trace.y) };
    (out[chart.id] ||= []).push({ kind, metric: trace.meta.metric, mode: trace.mode, ...points });
  }
}
return out;
