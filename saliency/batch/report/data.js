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
    if (new Set(same.map((photo) => photo.source)).size > 1) nameFiles(same, depth + 1); // detections share a file
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
/** Return the name of a row without the place of its box, for lists of classes. */
const plainName = (row) => (row?.target_box ? className(row)?.replace(/ at \(.*/s, "") : className(row)) ?? null;

const byId = (id) => document.getElementById(id);
