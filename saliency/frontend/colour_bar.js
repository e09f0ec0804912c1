// The colours of a map and their values.

/** Return the colour bar, from the lowest value to the limit, in the units of the values; null without a limit. */
function colourBar(row) {
  if (typeof row.limit !== "number") return null;
  const signed = row.sign === "signed";
  const bar = make("div", { class: "bar-colours", role: "img" });
  const low = signed ? shortNumber(-row.limit) : shortNumber(row.floor ?? 0);
  bar.setAttribute("aria-label", `Colours from ${low} to ${shortNumber(row.limit)} ${row.units ?? ""}, ${row.colormap ?? ""}`);
  if (row.bar) bar.style.backgroundImage = `linear-gradient(to right, ${row.bar.join(", ")})`;
  const ticks = make("div", { class: "ticks", "aria-hidden": "true" }, make("span", {}, low), signed ? make("span", {}, "0") : null, make("span", {}, shortNumber(row.limit)));
  const unit = [row.sign === "absolute" ? "absolute values" : null, row.units].filter(Boolean).join(" · ");
  return make("div", { class: "scale" }, row.bar ? bar : null, ticks, unit ? make("div", { class: "unit" }, unit) : null);
}
