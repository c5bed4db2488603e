// The steps of a denoising chain: which were computed, proposed and refused, and some states.
function addDenoising() {
  const view = data.views.denoising;
  if (!view) return;
  const steps = view.steps, n = rounds.length;
  const W = Math.max(7, Math.min(24, 860 / n)), H = Math.max(4, Math.min(18, 560 / steps)), L = 92;
  const signs = { accepted: "\u2713", refused: "\u2717", unread: "\u00b7", own: "\u25cf" };
  const place = make("div", { class: "scroll", style: "max-height:640px", tabindex: 0, role: "group", "aria-label": "Steps by round" }), strip = make("div", { class: "strip" }), facts = make("p", {});
  const names = view.checks
    ? [["accepted", "forecast and used"], ["refused", "forecast, found wrong and computed"], ["own", "computed"]]
    : [["accepted", "proposed and accepted"], ["refused", "proposed and refused"], ["unread", "proposed behind a refused one"], ["own", "the network's own"]];
  const words = Object.fromEntries(names), legend = make("ul", { class: "legend" }, ...names.map(([status, text]) => make("li", {}, swatch("bar " + status), signs[status] + " " + text)));
  const errorOf = (step) => {
    const found = view.checks && view.checks[state.row][step];
    return found ? `, error ${number(found[0])}` + (found[1] === null ? "" : `, allowed ${number(found[1])}`) : "";
  };
  addView("denoising", "Denoising steps", "A row per timestep from noise (top) to the image, a column per round. " +
    (view.note ? " " + view.note : ""), strip, legend, place, facts);
  let columns = [], shownRow = -1;
  const label = (step) => `step ${step}` + (view.timesteps ? `, t = ${number(view.timesteps[step - 1])}` : "");
  function marksOf(round, row) {
    const own = rounds[round].rows[row], made = nodesOf(own).map((one) => [Number(one.text), one.status]);
    own.text.forEach((text, place) => { if (own.kinds[place] !== "a" && own.kinds[place] !== "u") made.push([Number(text), "own"]); });
    return made;
  }
  function build(row) {
    const width = L + n * W + 8, height = 26 + steps * H + 20;
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, style: "max-width:none" });
    const every = Math.max(1, Math.ceil(13 / H)), across = Math.max(1, Math.ceil(30 / W));
    for (let step = 1; step <= steps; step += every) svg.append(draw("text", { x: L - 8, y: 26 + step * H - H / 2 + 4, "text-anchor": "end", class: "faint" }, view.timesteps ? "t " + number(view.timesteps[step - 1]) : "step " + step));
    for (let round = 0; round < n; round += across) svg.append(draw("text", { x: L + round * W, y: 14, class: "faint" }, String(rounds[round].round)));
    columns = rounds.map((_, round) => {
      const group = draw("g", {}, draw("rect", { class: "column", x: L + round * W, y: 20, width: W, height: steps * H + 6 }));
      const slots = new Map();
      for (const [step, status] of marksOf(round, row)) slots.set(step, [...(slots.get(step) || []), status]);
      for (const [step, list] of slots) list.forEach((status, index) => {
        const wide = (W - 2) / list.length, x = L + round * W + 1 + index * wide, y = 25 + (step - 1) * H;
        group.append(draw("rect", { class: "bar " + status, x, y, width: Math.max(wide - 1, 1), height: Math.max(H - 2, 1) }, draw("title", {}, `round ${rounds[round].round}, ${label(step)}: ${words[status]}${status === "own" ? "" : errorOf(step)}`)));
        if (H >= 11 && wide >= 9) group.append(draw("text", { class: "sign", x: x + wide / 2, y: y + H / 2 + 3, "text-anchor": "middle", "aria-hidden": "true" }, signs[status]));
      });
      group.addEventListener("click", () => showRound(round));
      svg.append(group);
      return group;
    });
    place.replaceChildren(svg);
    const list = view.latents[row] || [];
    strip.replaceChildren(...list.map((one) => make("figure", { "data-step": one.step }, make("img", { src: one.image, alt: "the state after " + label(one.step) }), make("figcaption", {}, label(one.step)))));
    shownRow = row;
  }
  onRound((round) => {
    if (shownRow !== state.row) build(state.row);
    columns.forEach((group, index) => group.setAttribute("class", index > round ? "later" : index === round ? "now" : ""));
    const { starts } = tokens[state.row], done = starts[round] + rounds[round].rows[state.row].text.length;
    for (const one of strip.children) one.classList.toggle("later", Number(one.dataset.step) > done);
    const marks = marksOf(round, state.row), name = (status) => marks.filter((one) => one[1] === status).map((one) => one[0]).join(", ") || "none";
    const list = names.filter(([status]) => status !== "unread").map(([status, text]) => `${text} ${name(status)}`).join("; ");
    const checked = marks.filter((one) => one[1] !== "own").map(([step]) => errorOf(step)).join("");
    facts.textContent = `Round ${rounds[round].round}: steps ${list}${checked}. ${done} of ${steps} steps done after ${callsUntil(round)} calls.`;
  });
}
