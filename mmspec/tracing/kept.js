// What a compressor left of the picture or clip for the draft model, patch by patch.
function addKept() {
  const view = data.views.kept;
  if (!view || !view.images.length) return;
  const strip = make("div", { class: "strip large" });
  addView("kept", "What the drafter saw", `The compressor ${view.compressor} left these patches; dark, crossed ones were dropped. A number is how many patches one feature stands for; light, crossed ones were merged into such a one. ` + (view.note || ""), strip);
  view.images.forEach((one, index) => {
    if (one.row !== undefined && data.batch > 1) one.name = `row ${one.row}, ` + (one.name || "image");
    const [rows, columns] = one.grid, kept = one.sizes.filter((size) => size > 0).length;
    const isMerged = total(one.sizes) >= one.sizes.length, without = isMerged ? "merged into another" : "dropped";
    const svg = draw("svg", { viewBox: `0 0 ${columns} ${rows}`, role: "img", "aria-label": `${kept} of ${one.sizes.length} patches kept` });
    one.sizes.forEach((size, cell) => {
      const x = cell % columns, y = Math.floor(cell / columns);
      svg.append(draw("rect", { class: size ? "cell kept" : isMerged ? "cell dropped merged" : "cell dropped", x, y, width: 1, height: 1, "vector-effect": "non-scaling-stroke" }, draw("title", {}, `row ${y + 1}, column ${x + 1}: ${size ? (size > 1 ? size + " merged" : "kept") : without}`)));
      if (!size) svg.append(draw("path", { class: "cross", d: `M${x + .3},${y + .3}l.4,.4m0,-.4l-.4,.4`, "vector-effect": "non-scaling-stroke" }));
      if (size > 1) svg.append(draw("text", { class: "mark", x: x + .5, y: y + .64, "text-anchor": "middle", "aria-hidden": "true" }, String(size)));
    });
    strip.append(make("figure", {}, make("div", { class: "picture" }, make("img", { src: one.image, alt: "", style: `aspect-ratio:${columns}/${rows}` }), svg), make("figcaption", {}, `${one.name || "image " + (index + 1)}: ${kept} of ${one.sizes.length} patches, ${one.kept} features`)));
  });
}
