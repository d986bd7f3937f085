"use strict";
// Starts everything, and draws anew when the theme changes or the page is printed.
const root = document.documentElement;

function setTheme(name, again) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  if (again) { drawAll(); showSamples(); }
}

setTheme(root.dataset.theme, false);
document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark", true));
document.getElementById("logarithmic")?.addEventListener("change", drawAll);
document.getElementById("metric")?.addEventListener("change", drawOther);
let before = root.dataset.theme;
addEventListener("beforeprint", () => { before = root.dataset.theme; setTheme("light", true); });
addEventListener("afterprint", () => setTheme(before, true));
startSamples();
drawLater();
