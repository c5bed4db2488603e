// The text as it came: words by round, and what was refused where the target wrote its own.
function addText() {
  if (!rounds.length || data.tokens === "states") return;
  const words = make("p", { class: data.words ? "words" : "words ids" });
  const earlier = make("p", { class: "hint", hidden: "" });
  const legend = make("ul", { class: "legend" },
    ...["a", "c", "o", ...(data.kinds.includes("u") ? ["u"] : [])].map((kind) =>
      make("li", {}, make("span", { class: "word " + kind }, "word"), " " + KINDS[kind])),
    make("li", {}, make("del", {}, "word"), " refused; on hover or focus"));
  const box = make("input", { type: "checkbox", id: "inline" });
  const toggle = make("label", { for: "inline" }, box, " show refused words in the text");
  addView("text", data.words ? "Text" : "Tokens", data.words
    ? "Every word by how it came; the highlighted ones came in this round. A click goes to a word's round."
    : "Tokens by their ids (frames by their codes), by how they came; the highlighted ones came in this round.",
    legend, toggle, earlier, words);
  const WINDOW = 600;
  let key = "", spans = [];

  // Drafted for the same position after the same text, and refused.
  function refusedFor(row, token) {
    const round = rounds[token.round], own = round.rows[row];
    if (round.merged > 1 || token.place > own.path.length) return [];
    const parent = token.place ? own.path[token.place - 1] : -1;
    return refusedOf(own).filter((one) => one.parent === parent);
  }
  const struck = (row, token) => refusedFor(row, token).map((one) =>
    make("div", {}, make("del", {}, shown(one.text)), " refused, " + odds(one)));
  function span(token, row) {
    const label = shown(token.text) + ", " + KINDS[token.kind];
    const made = make("span", { class: "word " + token.kind, "aria-label": label, tabindex: -1 }, token.text);
    made.addEventListener("click", () => showRound(token.round));
    addTip(made, () => [`round ${rounds[token.round].round}: ${KINDS[token.kind]}`,
      ...own(row, token), ...struck(row, token)]);
    return made;
  }
  function own(row, token) {
    const data_ = rounds[token.round].rows[row];
    const found = token.kind === "a" && rounds[token.round].merged === 1 ? nodesOf(data_)[data_.path[token.place]] : null;
    return found ? [odds(found)] : [];
  }
  function build(row, first, isInline) {
    const { list } = tokens[row];
    spans = [];
    const parts = [];
    for (const token of list.slice(first, first + WINDOW)) {
      if (isInline) {
        for (const one of refusedFor(row, token)) parts.push(make("del", { "data-round": token.round }, shown(one.text)));
      }
      const made = span(token, row);
      spans.push([token.round, made]);
      parts.push(made);
    }
    words.replaceChildren(...parts);
    words.classList.toggle("shows-refused", isInline);
    earlier.hidden = list.length <= WINDOW;
    earlier.textContent = `Tokens ${first + 1} to ${Math.min(first + WINDOW, list.length)} of ${list.length}.`;
  }
  function update(round) {
    const { starts, list } = tokens[state.row];
    const first = Math.floor(Math.min(starts[round], Math.max(list.length - 1, 0)) / WINDOW) * WINDOW;
    const wanted = [state.row, first, box.checked].join();
    if (wanted !== key) build(state.row, first, box.checked);
    key = wanted;
    let latest = null;
    for (const [own, element] of spans) {
      element.classList.toggle("later", own > round);
      element.classList.toggle("now", own === round);
      element.tabIndex = own === round ? 0 : -1;
      if (own === round) latest = element;
    }
    for (const one of words.querySelectorAll("del")) one.hidden = Number(one.dataset.round) > round;
    if (latest) {
      const low = latest.offsetTop - words.offsetTop;
      if (low < words.scrollTop || low > words.scrollTop + words.clientHeight - 40) words.scrollTop = low - words.clientHeight / 2;
    }
  }
  box.addEventListener("change", () => update(state.round));
  onRound(update);
}
