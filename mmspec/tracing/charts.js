// Acceptance by position in the draft and by round, and the time of every round as a band.
const PARTS = ["prefill", "draft", "verify", "host"];

function addPatterns() {
  const line = (id, colour, d) => draw("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    draw("rect", { width: 6, height: 6, style: "fill:var(--paper)" }), draw("path", { d, style: `stroke:var(--${colour});stroke-width:2.4;fill:none` }));
  const dots = draw("pattern", { id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse" },
    draw("rect", { width: 5, height: 5, style: "fill:var(--paper)" }), draw("circle", { cx: 2.5, cy: 2.5, r: 1.5, style: "fill:var(--host)" }));
  document.body.append(draw("svg", { width: 0, height: 0, "aria-hidden": "true", style: "position:absolute" }, draw("defs", {},
    line("hatch", "draft", "M-1,7 L7,-1 M-1,1 L1,-1 M5,7 L7,5"), line("refusedhatch", "refused", "M-1,-1 L7,7 M5,-1 L7,1 M-1,5 L1,7"),
    line("dropped", "faint", "M-1,7 L7,-1 M-1,1 L1,-1 M5,7 L7,5"), dots)));
}
const swatch = (name) => draw("svg", { width: 16, height: 14, "aria-hidden": "true" }, draw("rect", { width: 16, height: 14, class: name, stroke: "currentColor" }));

// Stacked bars over all rounds: one path per series, a click or a drag shows a round.
function bandChart(series, highest, label, format) {
  const W = 960, H = 150, L = 64, B = 126, n = rounds.length, step = (W - L - 8) / n;
  const gap = step > 4 ? 1 : 0, tops = new Array(n).fill(0);
  const svg = draw("svg", { class: "wide", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  const y = (value) => B - (value / (highest || 1)) * (B - 14);
  for (const [name, values] of series) {
    const d = values.map((value, index) => {
      if (!value) return "";
      const low = y(tops[index]), high = y((tops[index] += value));
      return `M${(L + index * step).toFixed(2)},${low.toFixed(2)}h${(step - gap).toFixed(2)}V${high.toFixed(2)}h-${(step - gap).toFixed(2)}z`;
    }).join("");
    svg.append(draw("path", { class: name, d }));
  }
  const cursor = draw("rect", { class: "cursor", y: 8, width: Math.max(step, 3), height: B - 6 });
  svg.append(draw("path", { class: "axis", d: `M${L},10V${B}H${W - 8}`, fill: "none" }),
    draw("text", { x: L - 6, y: 18, "text-anchor": "end" }, format(highest)), draw("text", { x: L - 6, y: B, "text-anchor": "end" }, "0"),
    draw("text", { x: L, y: H - 6, class: "faint" }, "round " + rounds[0].round),
    draw("text", { x: W - 8, y: H - 6, "text-anchor": "end", class: "faint" }, "round " + rounds[n - 1].round), cursor);
  const seek = (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * W;
    showRound(Math.floor((x - L) / step));
  };
  svg.addEventListener("pointerdown", seek);
  svg.addEventListener("pointermove", (event) => { if (event.buttons) seek(event); });
  onRound((round) => cursor.setAttribute("x", (L + round * step - Math.max(0, 3 - step) / 2).toFixed(2)));
  return make("div", { style: "overflow-x:auto" }, svg);
}

function addAcceptance() {
  if (!rounds.some((round) => round.rows.some((row) => row.lengths.length))) return;
  const place = make("div"), sum = make("p", {}), charts = [];
  const section = addView("acceptance", "Acceptance",
    "Above: how often the draft was still accepted at each of its positions, up to this round, among the rounds that drafted " +
    "that far. Below: drafted tokens of every round along its longest path, accepted solid, the rest hatched.", place, make("div", { id: "by-round" }), sum);
  for (let row = 0; row < data.batch; row++) {
    const accepted = rounds.map((round) => round.rows[row].accepted / round.merged);
    const depths = rounds.map((round) => total(round.rows[row].depths) / round.merged);
    const rest = depths.map((depth, index) => Math.max(depth - accepted[index], 0));
    const highest = Math.max(1, ...depths, ...accepted);
    charts.push(bandChart([["bar accepted", accepted], ["bar refused", rest]], highest, "Accepted and refused tokens of every round", (value) => number(value, 2)));
  }
  // Per row, step and position: how often a draft reached it, and was accepted there, so far.
  const counted = [];
  for (let row = 0; row < data.batch; row++) {
    const deepest = rounds.reduce((most, round) => round.rows[row].depths.reduce((one, two) => Math.max(one, two), most), 0);
    const tried = new Array(deepest).fill(0), kept = new Array(deepest).fill(0);
    let drafts = 0, accepted = 0;
    counted.push(rounds.map((round) => {
      const own = round.rows[row];
      own.depths.forEach((depth, index) => { for (let at = 0; at < depth; at++) { tried[at]++; if (own.lengths[index] > at) kept[at]++; } });
      drafts += own.lengths.length;
      accepted += total(own.lengths);
      return { tried: [...tried], kept: [...kept], drafts, accepted };
    }));
  }
  let shownRow = -1;
  onRound((last) => {
    if (shownRow !== state.row) section.querySelector("#by-round").replaceChildren(charts[(shownRow = state.row)]);
    const { tried, kept, drafts, accepted } = counted[state.row][last];
    const deepest = tried.filter((one) => one).length, step = Math.min(84, 880 / Math.max(deepest, 1));
    const W = Math.max(70 + deepest * step, 200), svg = draw("svg", { viewBox: `0 0 ${W} 158`, width: W, role: "img" });
    const shares = [];
    for (let at = 0; at < deepest; at++) {
      const high = (100 * kept[at]) / tried[at];
      shares.push(`position ${at + 1}: ${Math.round(high)} %`);
      svg.append(draw("rect", { class: "bar accepted", x: 52 + at * step, y: 120 - high, width: Math.max(step - 6, 1), height: Math.max(high, .5) }));
      if (step > 26) svg.append(draw("text", { x: 52 + at * step, y: 115 - high }, Math.round(high) + " %"));
      if (step > 14 || at % 5 === 4) svg.append(draw("text", { x: 52 + at * step, y: 136, class: "faint" }, String(at + 1)));
    }
    svg.append(draw("path", { class: "axis", d: `M48,10V120H${W}`, fill: "none" }), draw("text", { x: 44, y: 24, "text-anchor": "end" }, "100 %"),
      draw("text", { x: 44, y: 120, "text-anchor": "end" }, "0"), draw("text", { x: 48, y: 153, class: "faint" }, "position in the draft"));
    svg.setAttribute("aria-label", "Accepted at " + (shares.join(", ") || "no position yet"));
    place.replaceChildren(make("div", { style: "overflow-x:auto" }, svg));
    const mean = drafts ? 1 + accepted / drafts : 1;
    const length = data.views.denoising && data.views.denoising.checks ? "" : `, mean acceptance length ${number(mean)} (with the target's own token)`;
    sum.textContent = `Up to this round: ${drafts} rounds with a draft, ${accepted} drafted tokens accepted${length}.`;
  });
}

function addTimes() {
  if (!rounds.length) return;
  const seconds = PARTS.map((_, part) => rounds.map((round) => round.seconds[part] || 0));
  const later = rounds.map((round, index) => total(round.seconds) * (index || rounds.length < 3 ? 1 : 0)).sort((a, b) => a - b);
  const high = Math.max(later[later.length - 1], 1e-9), cutAt = Math.min(high, 3 * (later[Math.floor(later.length * .9)] || high));
  const cut = seconds.map((values) => [...values]);
  rounds.forEach((round, index) => {
    const scale = Math.min(1, cutAt / (total(round.seconds) || 1));
    if (scale < 1) cut.forEach((values) => { values[index] *= scale; });
  });
  const list = make("ul", { class: "legend" });
  const isCut = rounds.some((round) => total(round.seconds) > cutAt * 1.0001);
  addView("times", "Time of every round", "Draft model, target (verify), and everything else (host), stacked; a click shows a round." +
    (isCut ? ` Taller rounds are cut at ${milliseconds(cutAt)}, their parts to scale.` : ""),
    bandChart(PARTS.map((name, part) => [name, cut[part]]), cutAt, "Time of every round by part", milliseconds), list);
  const sums = seconds.map((values) => { let sum = 0; return values.map((one) => (sum += one)); });
  onRound((round) => list.replaceChildren(...PARTS.map((name, part) => make("li", {}, swatch(name),
    `${name}: ${milliseconds(seconds[part][round])} in this round, ${number(sums[part][round])} s so far`))));
}
