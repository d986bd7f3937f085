"use strict";
// The browser of completions. What a model wrote is only ever set as text.
const PART = 25;
let shownParts = 1;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function decimal(value) {
  return value === null || value === undefined ? "none" : Number(value).toPrecision(4).replace(/\.?0+$/, "").replace(/^-0$/, "0");
}

const [STEP, ID, PROMPT, TEXT, REWARD, ADVANTAGE, FINISH, TRAINED, PARTS] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

function chosenSamples() {
  const run = document.getElementById("run");
  return page.runs[run ? Number(run.value) : 0].samples;
}

function matching(samples) {
  const words = document.getElementById("search").value.trim().toLowerCase();
  const places = samples.rows.map((_, place) => place);
  if (!words) return places;
  samples.lower ||= samples.rows.map((row) => (samples.prompts[row[PROMPT]] + "\n" + row[TEXT]).toLowerCase());
  return places.filter((place) => samples.lower[place].includes(words));
}

function groupsOf(samples, places) {
  const groups = new Map();
  for (const place of places) {
    const row = samples.rows[place];
    const name = row[STEP] + "/" + row[PROMPT];
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(place);
  }
  return [...groups.values()];
}

// Light enough that the text stays readable in either theme.
function tint(value, largest) {
  if (value === null || !largest) return "";
  const strength = Math.min(1, Math.abs(value) / largest) * 0.35;
  return "rgba(" + colour(value < 0 ? "low" : "high") + ", " + strength.toFixed(3) + ")";
}

function tokensOf(whole) {
  const by = document.getElementById("colour").value;
  const column = by === "advantage" ? 2 : 1;
  const largest = by === "advantage" ? Math.max(...whole.tokens.map((token) => Math.abs(token[2] || 0)), 1e-9) : 4;
  return whole.tokens.map((token) => {
    const span = element("span", token[1] === null ? "token observed" : "token", token[0]);
    if (by !== "none") span.style.backgroundColor = tint(token[column], largest);
    span.title = "log-probability " + decimal(token[1]) + ", advantage " + decimal(token[2]);
    return span;
  });
}

// An episode as a conversation: what the policy said, the calls among it, and what came of them.
function conversation(turns) {
  const box = element("div", "turns");
  turns.forEach(([role, name, text], place) => {
    const calls = role === "assistant" && (turns[place + 1] || [])[0] === "tool";
    const kind = calls ? "calls" : role === "assistant" || role === "tool" ? role : "other";
    const turn = element("div", "turn " + kind);
    turn.append(element("span", "role", calls ? "assistant calls" : role + (name ? " " + name : "")), element("pre", "", text || "(nothing)"));
    box.append(turn);
  });
  return box;
}

function imagesOf(samples, prompt) {
  const box = element("div", "images");
  for (const name of samples.images[prompt] || []) {
    const image = element("img");
    image.src = "data:image/jpeg;base64," + samples.files[name];
    image.alt = "image of the prompt";
    box.append(image);
  }
  return box;
}

function article(samples, place, withPrompt) {
  const row = samples.rows[place], whole = samples.whole[place];
  const box = element("article");
  const numbers = element("div", "numbers");
  const facts = ["reward " + decimal(row[REWARD]), row[TRAINED] ? "advantage " + decimal(row[ADVANTAGE]) : "left out of the step"];
  if (row[PARTS]) row[PARTS].forEach((value, number) => facts.push(samples.parts[number] + " " + decimal(value)));
  facts.push(samples.finishes[row[FINISH]] === "length" ? "cut at its longest" : samples.finishes[row[FINISH]], "sample " + row[ID]);
  if (withPrompt) facts.unshift("step " + row[STEP]);
  numbers.append(...facts.filter(Boolean).map((fact) => element("span", "", fact)));
  box.append(numbers);
  const prompt = element("pre", "prompt", samples.prompts[row[PROMPT]]);
  if (withPrompt) box.append(imagesOf(samples, row[PROMPT]), prompt);
  const text = element("pre", "completion", row[TEXT] || "(nothing)");
  const bare = !whole || !whole.tokens.length;
  if (!bare && whole.tokens.map((token) => token[0]).join("").length <= 300) text.replaceChildren(...tokensOf(whole));
  box.append(text);
  if (whole && whole.turns) box.append(conversation(whole.turns));
  const longer = whole && (whole.completion.length > 300 || whole.prompt.length > 300);
  if (longer) {
    const button = element("button", "", "Show all of it");
    button.type = "button";
    button.addEventListener("click", () => {
      prompt.textContent = whole.prompt;
      if (!withPrompt) text.before(prompt);
      if (bare) text.textContent = whole.completion;
      else text.replaceChildren(...tokensOf(whole));
      button.remove();
    });
    box.append(button);
  }
  return box;
}

function groupBox(samples, places) {
  const box = element("details", "group");
  const first = samples.rows[places[0]];
  const rewards = places.map((place) => samples.rows[place][REWARD]).filter((value) => value !== null);
  const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  const head = element("summary");
  head.append(
    element("span", "step", "step " + first[STEP]), element("span", "prompt", samples.prompts[first[PROMPT]] || "(no prompt)"),
    element("span", "mean", places.length + " × reward " + decimal(mean)),
  );
  box.append(head);
  box.addEventListener("toggle", () => {
    if (!box.open || box.dataset.filled) return;
    box.dataset.filled = "yes";
    const prompt = samples.prompts[first[PROMPT]];
    box.append(imagesOf(samples, first[PROMPT]));
    if (prompt.length > 60 || prompt.includes("\n")) {
      const outer = element("article");
      outer.append(element("pre", "prompt", prompt));
      box.append(outer);
    }
    box.append(...places.map((place) => article(samples, place, false)));
  });
  return box;
}

function sorted(samples, places, order) {
  const column = order === "advantage" ? ADVANTAGE : REWARD;
  const sign = order === "low" ? 1 : -1;
  const scored = places.filter((place) => samples.rows[place][column] !== null);
  scored.sort((one, other) => sign * (samples.rows[one][column] - samples.rows[other][column]));
  return [...scored, ...places.filter((place) => samples.rows[place][column] === null)];
}

function showSamples() {
  const list = document.getElementById("list");
  if (!list) return;
  const samples = chosenSamples(), order = document.getElementById("order").value;
  const places = matching(samples);
  const grouped = order === "group" || order === "oldest";
  let items = grouped ? groupsOf(samples, places) : sorted(samples, places, order);
  if (order === "group") items = items.reverse();
  const visible = items.slice(0, PART * shownParts);
  list.replaceChildren(...visible.map((item) => (grouped ? groupBox(samples, item) : article(samples, item, true))));
  const number = places.length.toLocaleString("en"), groups = items.length.toLocaleString("en");
  document.getElementById("count").textContent =
    number + " of " + samples.rows.length.toLocaleString("en") + " completions" + (grouped ? " in " + groups + " groups" : "");
  document.getElementById("more").hidden = visible.length >= items.length;
}

function startSamples() {
  if (!document.getElementById("list")) return;
  let waiting;
  const anew = () => { shownParts = 1; showSamples(); };
  document.getElementById("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(anew, 120); });
  for (const name of ["order", "colour", "run"]) document.getElementById(name)?.addEventListener("change", anew);
  document.getElementById("more").addEventListener("click", () => { shownParts += 1; showSamples(); });
  showSamples();
}
