// The draft of the shown round as a tree, and the same as a table.
function addTree() {
  if (!rounds.some((round) => round.rows.some((row) => row.draft.length))) return;
  const place = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Tree of the draft" });
  const body = make("tbody");
  const heads = ["token", "depth", "after", "outcome", "p (target)", "q (drafter)", "rank in p"];
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((one) => make("th", { scope: "col" }, one)))), body);
  const summary = make("summary", {}, "The draft as a table");
  addView("tree", "Draft of the round",
    "\u2713 thick: accepted. \u2717 dashed, struck through: refused. Dotted: not reached, behind a refused one. " +
    "+ : the target's own token. p and q are the probabilities that target and drafter gave it.",
    place, make("details", {}, summary, make("div", { class: "scroll" }, table)));
  const WIDE = 160, HIGH = 44, BOX = 136, TALL = 36, MARKS = { accepted: "\u2713 ", refused: "\u2717 ", unread: "\u00b7 ", target: "+ " };
  const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

  function layout(nodes) {
    const children = new Map();
    for (const one of nodes) children.set(one.parent, [...(children.get(one.parent) || []), one]);
    let leaves = 0;
    const visit = (one) => {
      const below = children.get(one.node) || [];
      below.forEach(visit);
      one.y = below.length ? (below[0].y + below[below.length - 1].y) / 2 : leaves++;
    };
    (children.get(-1) || []).forEach(visit);
    return Math.max(leaves, 1);
  }
  function box(one, x, y) {
    const made = draw("g", { class: "node " + one.status, tabindex: 0, role: "img", transform: `translate(${x},${y})`,
      "aria-label": one.status === "target" ? `the target's own token: ${shown(one.text)}` : describe(one) },
      draw("rect", { width: BOX, height: TALL, rx: 6 }),
      draw("text", { class: "name", x: 8, y: 15 }, MARKS[one.status] + cut(shown(one.text), 12)),
      draw("text", { class: "faint", x: 8, y: 30, "font-size": 10 }, one.status === "target" ? "target" : one.p === null && one.q === null ? WORDS[one.status] : "p " + chance(one.p) + (one.q === null ? "" : "  q " + chance(one.q))));
    return addTip(made, () => [one.status === "target" ? "the target's own token" : describe(one)]);
  }
  function update(round) {
    const row = rounds[round].rows[state.row], nodes = nodesOf(row), drawn = [...nodes];
    const own = row.kinds[row.path.length];
    if (row.draft.length && rounds[round].merged === 1 && own !== undefined) {
      const parent = row.path.length ? row.path[row.path.length - 1] : -1;
      drawn.push({ node: nodes.length, parent, depth: row.path.length, text: row.text[row.path.length], status: "target" });
    }
    const leaves = layout(drawn), depth = Math.max(0, ...drawn.map((one) => one.depth));
    const x = (one) => 96 + one.depth * WIDE, y = (one) => 4 + one.y * HIGH, middle = 4 + ((leaves - 1) * HIGH) / 2;
    const root = tokens[state.row].starts[round] ? tokens[state.row].list[tokens[state.row].starts[round] - 1].text : "prompt";
    const width = 96 + (depth + 1) * WIDE, height = leaves * HIGH + 6;
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, style: "max-width:none" },
      draw("text", { x: 0, y: middle + 22 }, cut("\u2026" + shown(root), 11)));
    for (const one of drawn) {
      const from = one.parent < 0 ? [78, middle + TALL / 2] : [x(drawn[one.parent]) + BOX, y(drawn[one.parent]) + TALL / 2];
      const to = [x(one), y(one) + TALL / 2], half = (from[0] + to[0]) / 2;
      svg.append(draw("path", { class: "edge " + (one.status === "accepted" ? "accepted" : ""), d: `M${from} C${half},${from[1]} ${half},${to[1]} ${to}` }));
    }
    for (const one of drawn) svg.append(box(one, x(one), y(one)));
    place.replaceChildren(row.draft.length ? svg : make("p", {}, "Nothing was drafted in this round."));
    body.replaceChildren(...nodes.map((one) => make("tr", {}, ...[
      shown(one.text), one.depth + 1, one.parent < 0 ? "the text" : shown(nodes[one.parent].text), WORDS[one.status],
      number(one.p), number(one.q), one.rank === null ? "not known" : one.rank,
    ].map((cell) => make("td", {}, String(cell))))));
  }
  onRound(update);
}
