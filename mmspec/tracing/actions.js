// A robot's actions: time of every action beside plain decoding, and the bins of its components.
function addActions() {
  const view = data.views.actions;
  if (!view) return;
  const names = view.components, D = names.length, W = 960, L = 96, R = W - 40, HIGH = 74;
  const ranges = names.map(() => [0, Math.max(view.bins - 1, 1)]);
  const place = make("div", { style: "overflow-x:auto" }), facts = make("p", {}), camera = make("div", { class: "strip" });
  addView("actions", "Actions", `Above: when each action was ready, in real time (the robot waits for it), beside plain decoding. Below: the bin of every component ` +
    `(of ${view.bins}; each strip shows the bins that occur): \u25cf accepted draft, \u25c6 the target's own, \u2717 refused draft; ` +
    (view.tolerance ? `the band is the tolerance around each, at most ${Math.max(...view.tolerance)} bins.` : "this recipe has no tolerance in bins.") + (view.note ? " " + view.note : ""), camera, place, facts);
  const end = Math.max(clock[clock.length - 1], data.plain ? data.plain.clock[data.plain.clock.length - 1][0] : 0);
  const x = (seconds) => L + (seconds / (end || 1)) * (R - L), y = (component, bin) => 112 + component * HIGH + (1 - (bin - ranges[component][0]) / (ranges[component][1] - ranges[component][0])) * (HIGH - 22);
  let shownRow = -1, groups = [], cursor = null, ends = [], plainEnds = [];
  const bin = (text) => (text in view.bin ? view.bin[text] : null);
  function build(row) {
    const svg = draw("svg", { class: "wide", viewBox: `0 0 ${W} ${126 + D * HIGH + 24}`, role: "img", "aria-label": `Actions of ${D} components: ${names.join(", ")}` });
    const { starts } = tokens[row], parts = [];
    rounds.forEach((round, index) => { if (!parts.length || parts[parts.length - 1].part !== round.part) parts.push({ part: round.part, start: starts[index] }); parts[parts.length - 1].end = clock[index]; });
    const spans = names.map(() => [Infinity, -Infinity]);
    let latest = 0;
    const begins = rounds.map((round) => { while (parts[latest].part !== round.part) latest++; return parts[latest].start; });
    rounds.forEach((round, index) => {
      const own = round.rows[row], start = starts[index] - begins[index];
      const seen = [...own.text.map((text, place) => [(start + place) % D, bin(text)]), ...(round.merged === 1 ? refusedOf(own) : []).map((one) => [(start + one.depth) % D, bin(one.text)])];
      for (const [component, value] of seen.filter((one) => one[1] !== null)) {
        const reach = view.tolerance ? view.tolerance[component] : 0, range = spans[component];
        range[0] = Math.min(range[0], value - reach);
        range[1] = Math.max(range[1], value + reach);
      }
    });
    spans.forEach(([low, high], component) => {
      const middle = (low + high) / 2 || 0, half = Math.max((high - low) / 2 || 0, 12) + 1;
      ranges[component] = low > high ? [0, view.bins - 1] : [Math.max(Math.floor(middle - half), 0), Math.min(Math.ceil(middle + half), view.bins - 1)];
    });
    const box = (top, from, to, name, index) => draw("rect", { class: name, x: x(from), y: top, width: Math.max(x(to) - x(from) - 1, .8), height: 24 }, draw("title", {}, `action ${index + 1}: ${number(from)} to ${number(to)} s`));
    ends = parts.map((one) => one.end);
    plainEnds = (data.plain && data.plain.parts) || [];
    ends.forEach((to, index) => svg.append(box(8, index ? ends[index - 1] : 0, to, "bar accepted", index)));
    plainEnds.forEach((to, index) => svg.append(box(40, index ? plainEnds[index - 1] : 0, to, "bar plainly", index)));
    svg.append(draw("text", { x: L - 6, y: 25, "text-anchor": "end" }, "with drafts"), draw("text", { x: L - 6, y: 57, "text-anchor": "end" }, plainEnds.length ? "plain" : ""));
    const tick = [.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60].find((one) => end / one <= 12) || 120;
    for (let at = 0; at <= end + 1e-9; at += tick) svg.append(draw("path", { class: "axis", d: `M${x(at)},72v6` }), draw("text", { x: x(at), y: 92, "text-anchor": "middle", class: "faint" }, number(at) + (at ? "" : " s")));
    names.forEach((name, component) => svg.append(draw("text", { x: L - 6, y: y(component, (ranges[component][0] + ranges[component][1]) / 2) + 4, "text-anchor": "end" }, name),
      ...[0, 1].map((end_) => draw("text", { x: R + 4, y: y(component, ranges[component][end_]) + 4, class: "faint", "font-size": 9 }, String(ranges[component][end_]))),
      draw("path", { class: "axis", d: `M${L},${y(component, ranges[component][0]) + 8}H${R}`, fill: "none" })));
    groups = rounds.map((round, index) => {
      const group = draw("g"), own = round.rows[row], start = tokens[row].starts[index], at = x(clock[index]);
      const mark = (component, value, sign, kind, title) => group.append(draw("text", { class: "act " + kind, x: at, y: y(component, value) + 4, "text-anchor": "middle" }, sign, draw("title", {}, title)));
      own.text.forEach((text, place) => {
        const component = (start - begins[index] + place) % D, value = bin(text);
        if (value === null) return;
        const drafted = "au".includes(own.kinds[place]);
        const reach = view.tolerance ? view.tolerance[component] : 0, top = y(component, value + reach);
        if (reach) group.append(draw("rect", { class: "band", x: at - 5, width: 10, y: top, height: y(component, value - reach) - top }));
        mark(component, value, drafted ? "\u25cf" : "\u25c6", drafted ? "accepted" : "own", `round ${round.round}, ${names[component]}: bin ${value}, ${KINDS[own.kinds[place]]}`);
      });
      for (const one of round.merged === 1 ? refusedOf(own) : []) {
        const value = bin(one.text), component = (start - begins[index] + one.depth) % D;
        if (value !== null) mark(component, value, "\u2717", "refused", `round ${round.round}, ${names[component]}: bin ${value} refused, ${odds(one)}`);
      }
      svg.append(group);
      return group;
    });
    cursor = draw("path", { class: "playhead", d: `M0,2V${112 + D * HIGH}`, fill: "none" });
    svg.append(cursor);
    place.replaceChildren(svg);
    shownRow = row;
  }
  onRound((round) => {
    if (shownRow !== state.row) build(state.row);
    const now = clock[round], done = ends.filter((one) => one <= now + 1e-9).length, plain = plainEnds.filter((one) => one <= now + 1e-9).length;
    cursor.setAttribute("transform", `translate(${x(now)},0)`);
    groups.forEach((group, index) => group.setAttribute("class", index > round ? "later" : index === round ? "now" : ""));
    const picture = (title, frames, index, all) => {
      const shot = frames.length ? frames[Math.round((index / Math.max(all, 1)) * (frames.length - 1))] : null;
      return shot ? make("figure", {}, make("img", { src: shot, alt: `${title}: what the robot saw after action ${index}` }), make("figcaption", {}, `${title}: ${index} of ${all}`)) : null;
    };
    const shots = [picture("with drafts", view.frames, done, ends.length), plainEnds.length ? picture("plain", data.plain.frames, plain, plainEnds.length) : null];
    camera.replaceChildren(...shots.filter(Boolean));
    facts.textContent = `At ${number(now)} s: ${done} of ${ends.length} actions` + (plainEnds.length ? `, plain decoding ${plain} of ${plainEnds.length} (measured).` : ".");
  });
}
