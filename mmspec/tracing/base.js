"use strict";
// What all views share: the data, the shown round, elements, the tip, the slider and its keys.
const data = JSON.parse(document.getElementById("data").textContent);
const rounds = data.rounds;
const state = { round: 0, row: 0, playing: false, updates: [] };
const $ = (id) => document.getElementById(id);

function append(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((one) => one !== null && one !== undefined));
  return element;
}
const make = (tag, attributes, ...children) => append(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  append(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A section of the page; `update(round)` is called whenever another round or row is shown.
function addView(id, title, hint, ...children) {
  const heading = make("h2", { id: id + "-title" }, title);
  const section = make("section", { class: "panel", id, "aria-labelledby": id + "-title" }, heading,
    make("p", { class: "hint" }, hint), ...children);
  $("views").append(section);
  return section;
}
const onRound = (update) => state.updates.push(update);

const number = (value, digits = 3) =>
  value === null || value === undefined ? "not known" : Number(value.toPrecision(digits)).toString();
const chance = (value) => (value === null ? "not known" : value > 0 && value < 0.001 ? "< 0.001" : number(value, 2));
const milliseconds = (seconds) => number(1e3 * seconds) + " ms";
const total = (list) => list.reduce((sum, one) => sum + (one || 0), 0);
const shown = (text) => (text === "" ? "\u2205" : text.replace(/\n/g, "\u21b5").trim() || "\u2423");
const RAMP = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
function roundColour(round, last) {
  const place = (RAMP.length - 1) * (last ? round / last : 0);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const mixed = RAMP[low].map((one, index) => Math.round(one + (place - low) * (RAMP[low + 1][index] - one)));
  return "rgb(" + mixed.join(",") + ")";
}

// Per row: every token with its round and kind, and the number of tokens before each round.
const KINDS = {
  a: "drafted and accepted", c: "the target's own, in place of a refused draft",
  o: "the target's own", f: "from the prompt's forward", u: "drafted, accepted without the target",
};
const tokens = [];
for (let row = 0; row < data.batch; row++) {
  const list = [], starts = [];
  rounds.forEach((round, index) => {
    starts.push(list.length);
    const own = round.rows[row];
    own.text.forEach((text, place) => list.push({ text, kind: own.kinds[place], round: index, place }));
  });
  tokens.push({ list, starts });
}
const clock = [];
rounds.reduce((sum, round) => (clock.push(sum + total(round.seconds)), clock[clock.length - 1]), 0);

const callsUntil = (round) => rounds.slice(0, round + 1).reduce((sum, one) => sum + one.calls, 0);

// What became of each node of a draft: accepted, refused (tested), or unread (below a refused one).
function nodesOf(row) {
  const accepted = new Set(row.path), depths = [];
  return row.draft.map((text, node) => {
    const parent = row.parents ? row.parents[node] : node - 1;
    depths.push(parent < 0 ? 0 : depths[parent] + 1);
    const isTested = parent < 0 || accepted.has(parent);
    const status = accepted.has(node) ? "accepted" : isTested ? "refused" : "unread";
    const value = (name) => (row[name] ? row[name][node] : null);
    return { node, parent, text, depth: depths[node], status, p: value("p"), q: value("q"), rank: value("rank") };
  });
}
const refusedOf = (row) => nodesOf(row).filter((one) => one.status === "refused");
const WORDS = { accepted: "accepted", refused: "refused", unread: "not reached" };
const odds = (one) => "p " + chance(one.p) + ", q " + chance(one.q) + ", rank " + (one.rank === null ? "not known" : one.rank);
const describe = (one) => shown(one.text) + ": " + WORDS[one.status] + ", " + odds(one);

// One tip for all views: shown on hover and on focus, and read aloud.
function addTip(element, content) {
  const show = (event) => {
    const tip = $("tip"), made = content();
    if (!made.length) return;
    tip.replaceChildren(...made.map((one) => (typeof one === "string" ? make("div", {}, one) : one)));
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const left = Math.min(event.clientX || box.left, innerWidth - tip.offsetWidth - 12);
    const below = box.bottom + 8;
    tip.style.left = Math.max(left, 4) + "px";
    tip.style.top = (below + tip.offsetHeight < innerHeight ? below : Math.max(box.top - tip.offsetHeight - 8, 4)) + "px";
    element.setAttribute("aria-describedby", "tip");
  };
  const hide = () => { $("tip").hidden = true; element.removeAttribute("aria-describedby"); };
  element.addEventListener("pointerenter", show);
  element.addEventListener("pointerleave", hide);
  element.addEventListener("focus", show);
  element.addEventListener("blur", hide);
  return element;
}

function describeRound(index) {
  const round = rounds[index], row = round.rows[state.row];
  const many = round.merged > 1 ? ` (${round.merged} rounds in one step)` : "";
  const drafted = row.drafted ? `${row.accepted} of ${row.drafted} drafted accepted` : "nothing drafted";
  const spent = data.parts > 1 ? `, part ${round.part + 1}` : "";
  return `Round ${round.round} of ${data.total}${many}${spent}: ${drafted}, ${row.text.length} new, ` +
    `${milliseconds(total(round.seconds))}; ${tokens[state.row].starts[index] + row.text.length} tokens after ` +
    `${number(clock[index])} s.`;
}

function showRound(index) {
  if (!rounds.length) return;
  state.round = Math.max(0, Math.min(index, rounds.length - 1));
  $("slider").value = state.round;
  $("slider").setAttribute("aria-valuetext", describeRound(state.round));
  $("now").setAttribute("aria-live", state.playing ? "off" : "polite");
  $("now").textContent = describeRound(state.round);
  $("tip").hidden = true;
  for (const update of state.updates) update(state.round);
}

function setPlaying(isPlaying) {
  state.playing = isPlaying && rounds.length > 1;
  $("play").textContent = state.playing ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", state.playing);
  if (!state.playing) return;
  if (state.round === rounds.length - 1) showRound(0);
  const speed = $("speed").value, start = performance.now(), from = state.round;
  const begun = from ? clock[from - 1] : 0;
  const place = (passed) => {
    if (!speed.startsWith("x")) return from + Math.floor(passed * Number(speed));
    const now = begun + passed * Number(speed.slice(1));
    let index = from;
    while (index < rounds.length - 1 && clock[index] < now) index++;
    return index;
  };
  const step = () => {
    if (!state.playing || $("speed").value !== speed) return setPlaying(state.playing);
    const index = place((performance.now() - start) / 1e3);
    if (index > state.round) showRound(index);
    if (state.round >= rounds.length - 1) return setPlaying(false);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

const KEYS = {
  ArrowLeft: () => showRound(state.round - 1), ArrowRight: () => showRound(state.round + 1),
  PageUp: () => showRound(state.round - 10), PageDown: () => showRound(state.round + 10),
  Home: () => showRound(0), End: () => showRound(rounds.length - 1), " ": () => setPlaying(!state.playing),
};
function onKey(event) {
  const inside = event.target.closest && event.target.closest("select, textarea, audio, summary, a, .scroll");
  const isButton = event.target.tagName === "BUTTON" || event.target.type === "checkbox";
  if (event.ctrlKey || event.metaKey || event.altKey || inside || (isButton && event.key === " ")) return;
  if (!(event.key in KEYS)) return;
  event.preventDefault();
  if (event.key !== " ") setPlaying(false);
  KEYS[event.key]();
}

function begin() {
  $("title").textContent = data.title;
  if (data.asked) $("asked").append(make("b", {}, "Prompt: "), data.asked);
  for (const [name, value] of data.figures) $("figures").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  for (const note of data.notes) $("notes").append(make("p", { class: "note" }, note));
  $("slider").max = Math.max(rounds.length - 1, 0);
  $("rows").hidden = data.batch < 2;
  for (let row = 0; row < data.batch; row++) $("row").append(make("option", { value: row }, String(row)));
  $("row").addEventListener("change", () => { state.row = Number($("row").value); showRound(state.round); });
  $("slider").addEventListener("input", () => { setPlaying(false); showRound(Number($("slider").value)); });
  const buttons = { first: "Home", back: "ArrowLeft", next: "ArrowRight", last: "End", play: " " };
  for (const [id, key] of Object.entries(buttons)) {
    $(id).addEventListener("click", () => { if (id !== "play") setPlaying(false); KEYS[key](); });
  }
  document.addEventListener("keydown", onKey);
  if (rounds.length) showRound(rounds.length - 1);
  if (rounds.length && location.hash === "#autoplay" && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
    document.body.classList.add("compact"); // an example within a page
    $("speed").value = "1";
    showRound(0);
    setPlaying(true);
  }
  if (!rounds.length) for (const one of document.querySelectorAll("#controls button, #controls input, #controls select")) one.disabled = true;
}
