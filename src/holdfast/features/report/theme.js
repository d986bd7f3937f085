"use strict";
// Before anything is drawn: the system's choice of light or dark.
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
