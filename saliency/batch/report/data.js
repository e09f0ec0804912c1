// Unpack the data of the page: images with their rows, as written by `_entry`.

const data = JSON.parse(document.getElementById("data").textContent);
const head = data.head;
const unpacked = (text) => {
  const compressed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
};
const photos = await unpacked(data.images);
const comparison = await unpacked(data.comparison); // null without a comparison of methods

for (const photo of photos) {
  const rows = photo.rows;
  photo.failed = rows.some((row) => row.error != null);
  photo.rows = []; // by the index of the method
  photo.failure = null; // the only row of an image that failed before any method
  for (const row of rows) {
    row.bar = head.bars[row.bar];
    // A row with an overlay and an error lacks only its trust card.
    if (row.overlay) [row.cardError, row.error, row.error_kind] = [row.error, null, null];
    if (row.method < 0) photo.failure = row;
    else photo.rows[row.method] = row;
  }
}

/** Name images by the shortest ends of their paths that differ: by their files, else with folders above them. */
function nameFiles(images, depth = 1) {
  const end = (photo, length) => String(photo.source ?? "").split(/\/(?=.)/s).slice(-length).join("/");
  for (const [file, same] of Map.groupBy(images, (photo) => end(photo, depth))) {
    for (const photo of same) photo.file = file;
    if (same.length > 1 && same.some((photo) => end(photo, depth + 1) !== file)) nameFiles(same, depth + 1);
  }
}
nameFiles(photos);

/** Return the row of an image and method; null if there is none yet. */
const rowOf = (photo, method) => photo.rows[method] ?? photo.failure;

/** Normalise a text for comparison: lower case, without accents. */
const folded = (text) => String(text).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** Return the text in which a search looks for its words. It is created by the first search. */
function searchTextOf(photo) {
  const rows = photo.failure ? [photo.failure] : photo.rows;
  photo.searchText ??= folded(
    [photo.source, photo.id, ...new Set(rows.flatMap((row) => [className(row), row.error, row.error_kind, row.cardError]))]
      .filter((part) => part != null).join("\n"),
  );
  return photo.searchText;
}

/** Return the value of an image by a method and metric; undefined if it was not measured. */
const valueOf = (method, metric, image) => values.get(JSON.stringify([method, metric, image]));
const values = new Map(comparison?.results.map(({ method, metric, image, value }) => [JSON.stringify([method, metric, image]), value]));
const metrics = [...new Set(comparison?.rows.map((row) => row.metric))];
const measured = new Set(comparison?.results.map((result) => result.image));
const betterOf = (metric) => comparison.rows.find((row) => row.metric === metric).better; // empty if neither is better
const isHigherBetter = (metric) => betterOf(metric) !== "lower";
const orderOf = (metric) => (betterOf(metric) ? "worst first" : "lowest first");
const metricsOf = (photo, method) => Object.fromEntries(metrics.map((metric) => [metric, shortNumber(valueOf(method, metric, photo.id))]));

const className = (row) => row?.name ?? (row?.target != null ? `class ${row.target}` : null);

const percent = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });
const integer = new Intl.NumberFormat("en");

function probabilityText(value) {
  if (typeof value !== "number") return "";
  if (value > 0 && value < 0.001) return "< 0.1%";
  if (value < 1 && value > 0.999) return "> 99.9%";
  return percent.format(value);
}

/** Format a number with three digits, for colour bars and scores. */
function shortNumber(value) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replaceAll("-", "−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** Format a number with its standard error, if it has one. */
const plusMinus = (value, error) => [value, error].map(shortNumber).filter(Boolean).join(" ± ");

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Create an element; children that are strings become text, never HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const byId = (id) => document.getElementById(id);
