// Boxes of text and of controls that lie over each other or beyond the edge; charts count as one box each.
const HIDDEN = ".chart, script, style, noscript, caption, .skip";
const boxes = [];
for (const element of document.body.querySelectorAll("*")) {
  if (element.closest(HIDDEN) || element.closest("details:not([open]) > :not(summary)")) continue;
  if (["OPTION", "PRE"].includes(element.tagName)) continue;
  const texts = [...element.childNodes].filter((node) => node.nodeType === 3 && node.textContent.trim());
  const isControl = ["BUTTON", "SELECT", "INPUT"].includes(element.tagName);
  const rectangles = isControl ? [element.getBoundingClientRect()] : texts.flatMap((node) => {
    const range = document.createRange();
    range.selectNode(node);
    return [...range.getClientRects()];
  });
  const scroll = element.closest(".scroll, #list summary .prompt");
  const edge = scroll ? scroll.getBoundingClientRect().right : Infinity;
  for (const { left, right, top, bottom } of rectangles) {
    if (left >= edge || right - left < 1 || bottom - top < 1) continue;
    const text = (element.textContent || element.tagName).trim().slice(0, 40);
    boxes.push({ left, right: Math.min(right, edge), top, bottom, element, text });
  }
}
for (const chart of document.querySelectorAll(".chart")) {
  const { left, right, top, bottom } = chart.getBoundingClientRect();
  boxes.push({ left, right, top, bottom, element: chart, text: "#" + chart.id });
}
const out = [];
const { clientWidth, scrollWidth } = document.documentElement;
if (scrollWidth > clientWidth) out.push("the page is wider than the screen: " + scrollWidth);
for (const box of boxes) {
  if (box.right > clientWidth + 1 && !box.element.closest(".scroll")) out.push("beyond the edge: " + box.text);
}
boxes.sort((one, other) => one.top - other.top);
for (let i = 0; i < boxes.length; i += 1) {
  for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom - 2; j += 1) {
    const [one, other] = [boxes[i], boxes[j]];
    if (one.element.contains(other.element) || other.element.contains(one.element)) continue;
    if (one.left < other.right - 2 && other.left < one.right - 2) out.push(one.text + " / " + other.text);
  }
}
return out;
