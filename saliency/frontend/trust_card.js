// The trust card of a map: each property on its own axis, with maps that ignore the prediction.

const MARKS = { constant: "■", centre: "●", random: "×", edges: "▲" };

/** Return the card of a map. `properties` has the titles of all properties by name. */
function trustCard(trust, properties) {
  const rows = Object.values(trust);
  const groups = Map.groupBy(rows, (row) => row.group);
  const missing = Object.keys(properties).filter((name) => !(name in trust)).map((name) => properties[name]);
  const controls = [...new Set(rows.flatMap((row) => Object.keys(row.controls)))];
  return make(
    "section", { class: "trust" },
    make("h4", {}, "Trust card"),
    make("p", { class: "legend" }, "The map (◆) next to maps that ignore the prediction: ",
      controls.map((name) => `${MARKS[name]} ${name}`).join(", "), ". Better values lie to the right; bars are two standard errors, or the range of the draws."),
    [...groups].flatMap(([group, own]) => [
      make("h5", {}, `${group}: ${own.filter((row) => row.is_clear).length} of ${own.length} clear`),
      make("ul", { role: "list" }, own.map(propertyOf)),
    ]),
    missing.length ? make("p", { class: "legend" }, `Not measured: ${missing.join(", ")}.`) : null,
  );
}

function propertyOf(row) {
  return make(
    "li", { class: row.is_clear ? "clear" : row.is_worse ? "worse" : null },
    make("div", { class: "name" }, make("span", {}, row.is_clear ? "✓" : row.is_worse ? "✗" : "?", ` ${row.title}`), make("span", {}, plusMinus(row.value, row.error))),
    axis(row),
    make("div", { class: "verdict" }, row.verdict),
  );
}

/** Return the axis of a property, on which better values lie to the right. */
function axis(row) {
  const controls = Object.entries(row.controls).map(([name, value]) => ({ name, value, range: row.control_ranges[name] }));
  const own = { name: "map", value: row.value, range: [row.value - 2 * (row.error ?? 0), row.value + 2 * (row.error ?? 0)] };
  const points = [...controls, own].filter((point) => point.value != null);
  const ends = points.flatMap((point) => point.range);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
  const place = (value) => `${100 * (row.higher_is_better ? share(value) : 1 - share(value))}%`;
  const between = ([low, high]) => (low < high ? ` (${shortNumber(low)} to ${shortNumber(high)})` : "");
  const text = points.map(({ name, value, range }) => `${name} ${shortNumber(value)}${between(range)}`);
  const line = make("div", { class: "axis", role: "img", "aria-label": text.join(", ") });
  points.forEach(({ name, value, range }, at) => {
    const bar = make("span", { class: `spread ${name}` });
    const edges = range.map((edge) => parseFloat(place(edge))).sort((a, b) => a - b);
    Object.assign(bar.style, { left: `${edges[0]}%`, width: `${edges[1] - edges[0]}%` });
    const mark = make("span", { class: `mark ${name}`, title: text[at] }, MARKS[name] ?? "◆");
    mark.style.left = place(value);
    line.append(bar, mark);
  });
  return line;
}
