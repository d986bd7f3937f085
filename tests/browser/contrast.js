// What axe-core has against the page, and how many texts it measured the contrast of.
const done = arguments[0];
axe.run(document, { runOnly: ["wcag2a", "wcag2aa"] }).then((result) => done({
  violations: result.violations.map((rule) => [
    rule.id, rule.nodes.slice(0, 3).map((node) => node.html + " " + node.failureSummary),
  ]),
  contrasts: result.passes.filter((rule) => rule.id === "color-contrast").flatMap((rule) => rule.nodes).length,
}));
