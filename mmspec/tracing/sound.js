// Generated speech: waveform and spectrogram over time, frames by round, and the sound itself.
function addSound() {
  const view = data.views.sound;
  if (!view) return;
  const W = 960, L = 56, R = W - 10, place = make("div", { style: "overflow-x:auto" }), player = make("div"), facts = make("p", {});
  addView("sound", "Sound", "Waveform, spectrogram and frames on one axis of time. Frames stand by the round that accepted them, numbered; " +
    "what had not come by this round is covered. A click goes to the round of a frame; the line follows the sound.", player, place, facts);
  const stepOf = (round) => Math.min(Math.floor(round / (rounds[0].merged || 1)), rounds.length - 1);
  let drawn = -1, cover = null, frames = [], runs = [];
  function build(row) {
    const own = view.rows[row], audio = make("audio", { controls: "", src: own.wav, preload: "auto", "aria-label": "The generated sound" });
    const x = (seconds) => L + (seconds / (own.seconds || 1)) * (R - L);
    const svg = draw("svg", { class: "wide", viewBox: `0 0 ${W} 330`, role: "img", "aria-label": `Sound of ${number(own.seconds)} seconds` });
    const mid = 50, wave = own.peaks.map((peak, index) => {
      const before = own.peaks[index - 1] || peak; // bars touch, also where each is one sample
      const low = Math.min(peak[0], before[1]), high = Math.max(peak[1], before[0]);
      const at = (L + (index / own.peaks.length) * (R - L)).toFixed(1);
      return `M${at},${(mid - 44 * high).toFixed(1)}V${(mid - 44 * low + .5).toFixed(1)}`;
    }).join("");
    svg.append(draw("path", { d: wave, style: "stroke:var(--accepted);stroke-width:1.2;fill:none" }), draw("text", { x: L - 6, y: 54, "text-anchor": "end", class: "faint" }, "wave"));
    svg.append(draw("image", { href: own.spectrogram, x: L, y: 104, width: R - L, height: 130, preserveAspectRatio: "none" }),
      draw("text", { x: L - 6, y: 114, "text-anchor": "end", class: "faint" }, (own.max_hz / 1e3).toFixed(1) + " kHz"), draw("text", { x: L - 6, y: 234, "text-anchor": "end", class: "faint" }, "0"));
    frames = own.frames.map(stepOf);
    runs = [];
    frames.forEach((round, at) => { const last = runs[runs.length - 1]; if (last && last.round === round) last.end = at + 1; else runs.push({ round, first: at, end: at + 1 }); });
    const second = (at) => (at / frames.length) * own.seconds;
    for (const run of runs) {
      const left = x(second(run.first)), wide = Math.max(x(second(run.end)) - left - 1, .6);
      run.rect = draw("rect", { class: "run", x: left, y: 242, width: wide, height: 26, fill: roundColour(run.round, rounds.length - 1) }, draw("title", {}, `round ${rounds[run.round].round}: frames ${run.first + 1} to ${run.end}`));
      run.rect.addEventListener("click", () => showRound(run.round));
      svg.append(run.rect);
      if (wide > 20) svg.append(draw("text", { class: "mark", x: left + wide / 2, y: 260, "text-anchor": "middle", "aria-hidden": "true" }, String(rounds[run.round].round)));
    }
    svg.append(draw("text", { x: L - 6, y: 260, "text-anchor": "end", class: "faint" }, "round"));
    const tick = [.05, .1, .2, .5, 1, 2, 5, 10, 30, 60].find((one) => own.seconds / one <= 12) || 120;
    svg.append(draw("path", { class: "axis", d: `M${L},280H${R}`, fill: "none" }));
    for (let at = 0; at <= own.seconds + 1e-9; at += tick) svg.append(draw("path", { class: "axis", d: `M${x(at)},280v6` }), draw("text", { x: x(at), y: 302, "text-anchor": "middle" }, number(at)));
    svg.append(draw("text", { x: R, y: 322, "text-anchor": "end", class: "faint" }, "seconds"));
    cover = draw("rect", { class: "later-part", y: 2, height: 236 });
    const head = draw("path", { class: "playhead", d: `M${L},2V276`, fill: "none" });
    svg.append(cover, head);
    const follow = () => { head.setAttribute("transform", `translate(${x(audio.currentTime) - L},0)`); if (!audio.paused) requestAnimationFrame(follow); };
    for (const event of ["play", "seeked", "timeupdate"]) audio.addEventListener(event, follow);
    cover.x_ = (at) => x(second(at));
    player.replaceChildren(audio);
    place.replaceChildren(svg);
    drawn = row;
  }
  onRound((round) => {
    if (drawn !== state.row) build(state.row);
    let done = 0;
    while (done < frames.length && frames[done] <= round) done++;
    const from = cover.x_(done);
    cover.setAttribute("x", from);
    cover.setAttribute("width", Math.max(R - from, 0));
    for (const run of runs) run.rect.classList.toggle("now", run.round === round);
    const own = view.rows[state.row], now = frames.filter((one) => one === round).length;
    facts.textContent = `${done} of ${frames.length} frames, ${number((done / (frames.length || 1)) * own.seconds)} of ${number(own.seconds)} s, after ${callsUntil(round)} target calls; ${now} frames came in this round.`;
  });
}
