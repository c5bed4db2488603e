// A picture of image tokens as it came: patches by the round that accepted them, and refused codes.
function addPictures() {
  const view = data.views.picture;
  if (!view) return;
  const frame = make("div", { class: "picture" }), facts = make("p", {}), refused = make("div", { class: "strip" });
  const box = make("input", { type: "checkbox", id: "by-colour", checked: "" });
  addView("picture", "Picture", "Patches as they came, each with the round that accepted it; open ones are blank. The patches of this round are " +
    "framed. Hover or focus shows the codes that were refused there, as the patch each would have been. " + (view.note || ""),
    make("label", { for: "by-colour" }, box, " colour and number patches by round (dark: early)"),
    make("div", { class: "figure" }, frame, make("div", { style: "flex:1 1 220px" }, facts, make("h3", {}, "Refused in this round"), refused)));
  let cells = [], drawnRow = -1;

  function collect(row) {
    const { grid, cells: offsets } = view.rows[row], { list, starts } = tokens[row];
    const found = offsets.map((offset, cell) => ({ cell, x: cell % grid[1], y: Math.floor(cell / grid[1]), token: list[offset], refused: [] }));
    const at = new Map();
    offsets.forEach((offset, cell) => at.set(offset, [...(at.get(offset) || []), cell]));
    rounds.forEach((round, index) => {
      if (round.merged > 1) return;
      for (const one of refusedOf(round.rows[row])) {
        for (const cell of at.get(starts[index] + one.depth) || []) {
          found[cell].refused.push({ ...one, round: index, code: one.text, uri: view.rows[row].patches[cell + ":" + one.text] });
        }
      }
    });
    return found;
  }
  const patch = (one) => make("div", {}, one.uri ? make("img", { src: one.uri, width: 40, height: 40, alt: "the patch of this code" }) : null,
    make("del", {}, "code " + one.code), ` refused in round ${rounds[one.round].round}, ${odds(one)}` + (one.uri ? "" : ", not drawn"));
  function build(row) {
    const { grid, image } = view.rows[row], last = rounds.length - 1;
    cells = collect(row);
    const numbered = grid[1] <= 24;
    const svg = draw("svg", { viewBox: `0 0 ${grid[1]} ${grid[0]}`, role: "group", "aria-label": "Patches of the picture" });
    for (const one of cells) {
      one.rect = draw("rect", { class: "cell", x: one.x, y: one.y, width: 1, height: 1, role: "img", "vector-effect": "non-scaling-stroke" });
      one.number = numbered ? draw("text", { class: "mark", x: one.x + .5, y: one.y + .64, "text-anchor": "middle", "aria-hidden": "true" }, String(one.token ? rounds[one.token.round].round : "")) : null;
      if (one.token) one.rect.style.setProperty("--round", roundColour(one.token.round, last));
      addTip(one.rect, () => one.token && one.token.round <= state.round
        ? [`row ${one.y + 1}, column ${one.x + 1}: code ${one.token.text}, round ${rounds[one.token.round].round}, ${KINDS[one.token.kind]}`, ...one.refused.filter((r) => r.round <= state.round).map(patch)]
        : [`row ${one.y + 1}, column ${one.x + 1}: open`, ...one.refused.filter((r) => r.round <= state.round).map(patch)]);
      one.rect.addEventListener("click", () => one.token && showRound(one.token.round));
      svg.append(one.rect, one.number || "");
    }
    frame.replaceChildren(make("img", { src: image, alt: "The picture after the last round", style: `aspect-ratio:${grid[1]}/${grid[0]}` }), svg);
    drawnRow = row;
  }
  function update(round) {
    if (drawnRow !== state.row) build(state.row);
    const byRound = box.checked;
    for (const one of cells) {
      const come = one.token && one.token.round <= round, isNow = come && one.token.round === round;
      one.rect.setAttribute("class", "cell" + (come ? (byRound ? " coloured" : "") : " open") + (isNow ? " now" : ""));
      if (isNow) one.rect.setAttribute("tabindex", 0); else one.rect.removeAttribute("tabindex");
      one.rect.setAttribute("aria-label", `row ${one.y + 1}, column ${one.x + 1}, ` + (come ? `round ${rounds[one.token.round].round}` : "open"));
      if (one.number) one.number.style.display = come && byRound ? "" : "none";
    }
    const done = cells.filter((one) => one.token && one.token.round <= round).length;
    facts.textContent = `${done} of ${cells.length} patches after ${callsUntil(round)} target calls; ${rounds[round].rows[state.row].accepted} drafted codes accepted in this round.`;
    const now = cells.flatMap((one) => one.refused.filter((r) => r.round === round).map((r) => [one, r]));
    refused.replaceChildren(...(now.length ? now.slice(0, 48).map(([one, r]) => {
      const figure = make("figure", { tabindex: 0, "aria-label": `row ${one.y + 1}, column ${one.x + 1}: code ${r.code} refused, ${odds(r)}` },
        r.uri ? make("img", { src: r.uri, alt: "", style: "width:48px" }) : make("div", { class: "blank" }, "\u2717"), make("figcaption", {}, make("del", {}, r.code)));
      return addTip(figure, () => [`row ${one.y + 1}, column ${one.x + 1}`, patch(r)]);
    }) : ["none"]));
  }
  box.addEventListener("change", () => update(state.round));
  onRound(update);
}
