// The trust card of a map: each property on its own axis, with maps that know nothing about the prediction.

const MARKS = { constant: "■", centre: "●", random: "×", edges: "▲" };

function trustCard(trust) {
  const rows = Object.values(trust);
  const clear = rows.filter((row) => row.is_clear).length;
  const missing = Object.keys(head.properties).filter((name) => !(name in trust)).map((name) => head.properties[name]);
  const controls = [...new Set(rows.flatMap((row) => Object.keys(row.controls)))];
  return make(
    "section", { class: "trust" },
    make("h4", {}, `Trust card: ${clear} of ${rows.length} properties are clear`),
    make("p", { class: "legend" }, "The map (◆) beside maps that know nothing about the prediction: ",
      controls.map((name) => `${MARKS[name]} ${name}`).join(", "), ". Better values lie to the right; bars are two standard errors."),
    make("ul", { role: "list" }, rows.map(property)),
    missing.length ? make("p", { class: "legend" }, `Not measured: ${missing.join(", ")}.`) : null,
  );
}

function property(row) {
  return make(
    "li", { class: row.is_clear ? "clear" : null },
    make("div", { class: "name" }, make("span", {}, row.is_clear ? "✓" : "?", ` ${row.title}`), make("span", {}, plusMinus(row.value, row.error))),
    axis(row),
    make("div", { class: "verdict" }, row.verdict),
  );
}

/** Return the axis of a property, on which better values lie to the right. */
function axis(row) {
  const controls = Object.entries(row.controls).map(([name, value]) => ({ name, value, error: row.control_errors[name] }));
  const points = [...controls, { name: "map", value: row.value, error: row.error }].filter((point) => point.value != null);
  const ends = points.flatMap(({ value, error }) => [value - 2 * (error ?? 0), value + 2 * (error ?? 0)]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
  const place = (value) => `${100 * (row.higher_is_better ? share(value) : 1 - share(value))}%`;
  const text = points.map(({ name, value, error }) => `${name} ${plusMinus(value, error)}`);
  const line = make("div", { class: "axis", role: "img", "aria-label": text.join(", ") });
  points.forEach(({ name, value, error }, at) => {
    const bar = make("span", { class: `spread ${name}` });
    const edges = [value - 2 * (error ?? 0), value + 2 * (error ?? 0)].map((edge) => parseFloat(place(edge))).sort((a, b) => a - b);
    Object.assign(bar.style, { left: `${edges[0]}%`, width: `${edges[1] - edges[0]}%` });
    const mark = make("span", { class: `mark ${name}`, title: text[at] }, MARKS[name] ?? "◆");
    mark.style.left = place(value);
    line.append(bar, mark);
  });
  return line;
}
