// The trust card of a map: two tests, then numbers next to those of maps that ignore the prediction.

const MARKS = { chance: "|", centre: "●", edges: "▲", "smoothed edges": "△", "colour contrast": "■" };

/** Return the card of a map. */
function trustCard(trust) {
  const rows = Object.values(trust);
  const [tests, numbers] = [rows.filter((row) => "p" in row), rows.filter((row) => !("p" in row))];
  const controls = [...new Set(rows.flatMap((row) => Object.keys(row.controls)))];
  return make(
    "section", { class: "trust" },
    make("h4", {}, "Trust card"),
    make("h5", {}, `Tests: ${tests.filter((row) => row.is_clear).length} of ${tests.length} clear`),
    make("ul", { role: "list" }, tests.map(propertyOf)),
    make("p", { class: "legend" }, "p is for this map alone. For several methods on one image, Holm's correction requires " +
      "p of at most 0.05 divided by their number, which 1 of 24 or 20 ranks never is: compare methods over many images."),
    numbers.length ? make("h5", {}, "Numbers") : null,
    make("ul", { role: "list" }, numbers.map(propertyOf)),
    make("p", { class: "legend" }, "The map (◆) next to the maps among which it is ranked (×), or to: ",
      controls.map((name) => `${MARKS[name]} ${name}`).join(", "), ". Better values lie to the right."),
  );
}

function propertyOf(row) {
  const mark = "p" in row ? (row.is_clear ? "✓ " : row.is_worse ? "✗ " : "? ") : "";
  const number = row.p == null ? plusMinus(row.value, row.error) : `p = ${shortNumber(row.p)}`;
  return make(
    "li", { class: row.is_clear ? "clear" : row.is_worse ? "worse" : null },
    make("div", { class: "name" }, make("span", {}, `${mark}${row.title}`), make("span", {}, row.value == null ? "" : number)),
    row.strip.length || Object.keys(row.controls).length ? axis(row) : null,
    make("div", { class: "verdict" }, row.verdict),
  );
}

/** Return the axis of a property, on which better values lie to the right. */
function axis(row) {
  const [own = row.value, ...ranked] = row.strip;
  const others = [...Object.entries(row.controls), ...ranked.map((value) => ["random", value])];
  const points = [...others, ["map", own]].filter(([, value]) => value != null);
  const values = points.map(([, value]) => value);
  const [low, high] = "chance" in row.controls ? [0, 1] : [Math.min(...values), Math.max(...values)];
  const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
  const text = points.map(([name, value]) => `${name} ${shortNumber(value)}`);
  const line = make("div", { class: "axis", role: "img", "aria-label": text.join(", ") });
  points.forEach(([name, value], at) => {
    const mark = make("span", { class: `mark ${name}`, title: text[at] }, name === "map" ? "◆" : MARKS[name] ?? "×");
    mark.style.left = `${100 * (row.strip.length || row.higher_is_better ? share(value) : 1 - share(value))}%`;
    line.append(mark);
  });
  return line;
}
