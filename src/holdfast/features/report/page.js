"use strict";
// Starts everything, and draws the charts that were never near the screen when the page is printed.
const root = document.documentElement;

function setTheme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
}

setTheme(root.dataset.theme);
document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
document.getElementById("logarithmic")?.addEventListener("change", drawAll);
document.getElementById("all-steps")?.addEventListener("click", () => setRange(null));
document.getElementById("metric")?.addEventListener("change", () => draw(document.getElementById("other")));
let before = root.dataset.theme;
addEventListener("beforeprint", () => { before = root.dataset.theme; setTheme("light"); drawAll(); });
addEventListener("afterprint", () => setTheme(before));
startSamples();
drawLater();
