// The comparison of methods by metrics: a table that can be sorted, and a dialog with the curves and images of a cell.

const table = byId("comparison");
const cellView = byId("cell");
const MOST_IMAGES = 20; // images that a cell lists; a link leads to all
const rowsBy = new Map(comparison?.rows.map((row) => [cellKey(row.metric, row.name), row]));

function cellKey(metric, name) {
  return JSON.stringify([metric, name]);
}

/** Show the images or the comparison, and the cell of the address. */
function showTab() {
  document.documentElement.dataset.tab = state.tab;
  table.hidden = state.tab !== "comparison";
  byId("tabs").hidden = !comparison && !head.groups;
  const link = (tab, text) => make("a", { href: addressOf({ tab, cell: "", photo: null }), "aria-current": tab === state.tab ? "page" : null }, text);
  byId("tabs").replaceChildren(
    link("images", "Images"),
    ...(comparison ? [link("comparison", "Comparison")] : []),
    ...(head.groups ? [make("a", { href: head.groups }, "Groups")] : []),
  );
  const row = state.tab === "comparison" ? rowsBy.get(state.cell) : null;
  if (row) openCell(row);
  else if (cellView.open) cellView.close();
}

// The table.

function fillComparison() {
  if (!comparison) return;
  const heads = [
    heading("Method", "", (a, b) => collator.compare(a, b)),
    ...metrics.map((metric) => heading(metric, directionOf(metric), byNumber((name) => rowsBy.get(cellKey(metric, name))?.mean, isHigherBetter(metric)))),
    heading("Seconds", "per image", byNumber(secondsOf, false)),
  ];
  const names = [...new Set(comparison.rows.map((row) => row.name))];
  const body = make("tbody", {}, names.map(methodRow));
  table.replaceChildren(
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), body)),
    ...[
      "Mean and standard error over the images; rank among the methods, with the range of 95 % if the images are drawn again.",
      "Select a cell for its curves and its images. Grey rows, and random: maps that ignore the prediction; random is the method's own map at random places, or noise.",
      ...comparison.notes,
    ].map((note) => make("p", {}, note)),
  );
}

const isControl = (name) => secondsOf(name) == null;
const secondsOf = (name) => comparison.rows.find((row) => row.name === name).seconds;

function directionOf(metric) {
  const { better, images } = comparison.rows.find((row) => row.metric === metric);
  return [better && `${better} is better`, `${images} ${images === 1 ? "image" : "images"}`].filter(Boolean).join(", ");
}

/** Return a comparison of names by a number, best first. Names without a number come last. */
function byNumber(numberOf, higher) {
  const key = (name) => (numberOf(name) == null ? Infinity : (higher ? -1 : 1) * numberOf(name));
  return (a, b) => key(a) - key(b) || 0;
}

/** Return the head of a column, which sorts the table, best first; a second click reverses the order. */
function heading(title, hint, order) {
  const button = make("button", { type: "button" }, make("span", {}, title), make("small", {}, hint));
  const head = make("th", { scope: "col" }, button);
  button.addEventListener("click", () => {
    const reversed = head.ariaSort === "ascending";
    const body = table.querySelector("tbody");
    for (const other of head.parentNode.cells) other.ariaSort = null;
    head.ariaSort = reversed ? "descending" : "ascending";
    body.append(...[...body.rows].sort((a, b) => (reversed ? -1 : 1) * order(a.dataset.name, b.dataset.name)));
  });
  return head;
}

function methodRow(name) {
  const seconds = isControl(name) ? "" : shortNumber(secondsOf(name));
  return make(
    "tr", { class: isControl(name) ? "control" : null, "data-name": name },
    make("th", { scope: "row", dir: "auto" }, name),
    metrics.map((metric) => make("td", {}, cell(rowsBy.get(cellKey(metric, name))))),
    make("td", {}, seconds),
  );
}

/** Return the content of a cell: mean, standard error and rank of a method, with a link to its curves. */
function cell(row) {
  if (!row) return null;
  const text = make("span", {}, make("b", {}, shortNumber(row.mean)), row.error == null ? null : ` ± ${shortNumber(row.error)}`);
  if (isControl(row.name)) return text;
  const href = addressOf({ tab: "comparison", cell: cellKey(row.metric, row.name), photo: null });
  return make("a", { href, class: row.rank === 1 ? "best" : null }, text, make("small", {}, [rankText(row), `random ${shortNumber(row.random)}`].filter(Boolean).join(", ")));
}

const rankText = (row) => (row.rank == null ? "" : `rank ${row.rank}${row.rank_low < row.rank_high ? ` (${row.rank_low} to ${row.rank_high})` : ""}`);

// The dialog of a cell.

function openCell(row) {
  byId("cell-title").textContent = `${row.name} by ${row.metric}`;
  byId("cell-body").replaceChildren(
    facts({
      mean: `${plusMinus(row.mean, row.error)}, ${directionOf(row.metric)}`,
      rank: rankText(row).replace("rank ", ""),
      random: shortNumber(row.random),
      "better than": row.better_than.join(", ") || (row.rank == null ? null : "nothing, significantly"),
    }),
    ...chart(row),
    ...differences(row),
    ...images(row),
  );
  if (!cellView.open) cellView.showModal();
  cellView.scrollTop = 0;
}

/** Return a chart of the mean curves, or of the values of all images if the metric has no curve. */
function chart(row) {
  const lines = linesOf(row);
  const [left, right, low, high] = [...extent(lines.flatMap((line) => line.at)), ...extent(lines.flatMap((line) => line.values))];
  const x = (value) => 2 + (336 * (value - left)) / (right - left || 1);
  const y = (value) => 148 - (144 * (value - low)) / (high - low || 1);
  const path = (line) => line.at.map((at, index) => `${x(at).toFixed(1)},${y(line.values[index]).toFixed(1)}`).join(" ");
  const about = { viewBox: "0 0 340 150", preserveAspectRatio: "none", role: "img", "aria-label": `Curves of ${lines.map((line) => line.name).join(", ")}` };
  const drawing = svg("svg", about, ...lines.map((line) => svg("polyline", { points: path(line), class: line.kind })));
  const key = (line) => make("li", {}, svg("svg", { viewBox: "0 0 22 4", "aria-hidden": "true" }, svg("polyline", { points: "0,2 22,2", class: line.kind })), line.name);
  const ends = (...values) => values.map((value) => make("span", {}, shortNumber(value)));
  const what = curvesOf(row.name, row.metric).map ? "Mean curve over the images, along the steps of the metric" : "Values of all images, from low to high";
  return [
    make("h3", {}, what),
    make("div", { class: "chart" }, make("div", { class: "high" }, ends(high, low)), drawing, make("div", { class: "wide" }, ends(left, right))),
    make("ul", { class: "keys", role: "list" }, lines.map(key)),
  ];
}

const curvesOf = (method, metric) => comparison.curves.find((each) => each.method === method && each.metric === metric)?.curves ?? {};

/** Return the lines of a chart: other methods, the controls of this method, and this method. */
function linesOf({ name, metric }) {
  const methods = [...new Set(comparison.results.map((result) => result.method))].filter((method) => method !== name);
  const own = curvesOf(name, metric);
  const results = comparison.results.filter((result) => result.metric === metric);
  const ranked = (list) => list.filter((value) => value != null).sort((a, b) => a - b);
  const line = (method, kind) => {
    const curves = curvesOf(method, metric);
    const values = curves.map ?? ranked(results.filter((result) => result.method === method).map((result) => result.value));
    return { name: method, kind, at: curves.at ?? values.map((_, index) => index + 1), values };
  };
  const controls = Object.keys(results.find((result) => result.method === name)?.controls ?? {}).map((control) => {
    const values = own[control] ?? ranked(results.filter((result) => result.method === name).map((result) => result.controls[control]));
    return { name: control, kind: `control ${control}`, at: own.at ?? values.map((_, index) => index + 1), values };
  });
  return [...methods.map((method) => line(method, "other")), ...controls, line(name, "own")].filter((each) => each.values.every(Number.isFinite));
}

const extent = (values) => [Math.min(...values), Math.max(...values)];

/** Return the paired differences of a method from the others and from its controls. */
function differences({ name, metric }) {
  const own = comparison.differences.filter((row) => row.metric === metric && (row.name === name || row.other === name));
  if (!own.length) return [];
  const rows = own.map((row) => {
    const [other, sign] = row.name === name ? [row.other, 1] : [row.name, -1];
    const cells = [other, plusMinus(sign * row.mean, row.error), shortNumber(row.p), row.is_significant ? "significant" : ""];
    return make("tr", {}, cells.map((text) => make("td", {}, text)));
  });
  const heads = ["compared with", "difference", "corrected p", ""].map((text) => make("th", { scope: "col" }, text));
  return [make("h3", {}, "Differences over the same images"), make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows))];
}

/** Return the images with the worst values, with links to them on this page. */
function images({ name, metric }) {
  const sign = isHigherBetter(metric) ? 1 : -1;
  const results = comparison.results.filter((each) => each.method === name && each.metric === metric && each.value != null);
  const worst = results.sort((a, b) => sign * (a.value - b.value)).slice(0, MOST_IMAGES);
  const method = head.methods.indexOf(name);
  const all = addressOf({ tab: "images", cell: "", photo: null, query: "", class: "", method, show: "measured", sort: `worst:${metric}` });
  const link = ({ image, value }) => {
    const photo = method < 0 ? null : photos.find((each) => each.id === image);
    const address = photo && addressOf({ tab: "images", cell: "", method, photo: photo.index });
    return make("li", {}, photo ? make("a", { href: address }, photo.file) : image, make("span", {}, shortNumber(value)));
  };
  return [
    make("h3", {}, `Images, ${orderOf(metric)}`),
    method < 0 ? make("p", {}, `saliency batch -m ${name} with the same --out adds its images to this page.`) : make("p", {}, make("a", { href: all, class: "all" }, "Show all on the page")),
    make("ol", { class: "worst" }, worst.map(link)),
  ];
}

cellView.addEventListener("close", () => {
  if (!state.cell) return; // closed by a link or a step back in the history
  state.cell = "";
  writeAddress();
});

fillComparison();
