// This request beside plain decoding of it, in one clock.
function addRace() {
  const plain = data.plain;
  if (!plain || !rounds.length) return;
  const kind = plain.measured ? "measured" : "estimated";
  const lane = (name, title) => {
    const bar = make("div", { class: "bar" }), tail = make("bdi"), facts = make("span");
    const track = make("div", { class: "track", role: "progressbar", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
    return { bar, tail, facts, track, whole: make("div", { class: "lane " + name }, make("div", {}, make("b", {}, title + ": "), facts), track, make("p", { class: "tail" }, tail)) };
  };
  const ours = lane("ours", "with drafts"), other = lane("plain", "plain decoding, " + kind), verdict = make("p", {});
  addView("race", "Race with plain decoding", plain.note, ours.whole, other.whole, verdict);
  const fill = (one, count, all, calls, words) => {
    const share = all ? Math.round((100 * count) / all) : 0;
    one.bar.style.width = share + "%";
    one.track.setAttribute("aria-valuenow", share);
    one.facts.textContent = `${count} of ${all} tokens, ${calls} target calls`;
    one.tail.textContent = words.map((token) => token.text).join(data.words ? "" : " ").replace(/\n/g, " ") || "\u00a0";
  };
  let calls = 0;
  const callsUpTo = rounds.map((round) => (calls += round.calls));
  onRound((round) => {
    const { list, starts } = tokens[state.row], now = clock[round];
    const count = starts[round] + rounds[round].rows[state.row].text.length;
    let low = 0, high = plain.clock.length;
    while (low < high) { const middle = (low + high) >> 1; if (plain.clock[middle][0] <= now) low = middle + 1; else high = middle; }
    const done = low ? plain.clock[low - 1][1 + state.row] : 0, all = plain.clock.length ? plain.clock[plain.clock.length - 1][1 + state.row] : 0;
    const plainCalls = low ? Math.round(plain.calls * (low - 1) / Math.max(plain.clock.length - 1, 1)) : 0;
    fill(ours, count, list.length, callsUpTo[round], list.slice(Math.max(count - 60, 0), count));
    fill(other, done, all, plainCalls, plain.same ? list.slice(Math.max(done - 60, 0), done) : []);
    const end = plain.clock.length ? plain.clock[plain.clock.length - 1][0] : 0, own = clock[clock.length - 1];
    verdict.textContent = `Clock: ${number(now)} s. All: ${number(own)} s with drafts, ${number(end)} s plain (${kind}): ${number(end / own)} times as long.` +
      (plain.measured ? (plain.same ? " Both wrote the same tokens." : " They wrote different tokens" + (data.exact ? ": two draws from one distribution." : ".")) : "");
  });
}
