// The state of the page: method, filters, order and open image. The address contains it, so that links restore it.

const FILTERS = { all: "All images", fine: "Explained", failed: "With errors" };
const SORTS = {
  order: "Order of the run",
  name: "Name",
  likely: "Probability, high first",
  unlikely: "Probability, low first",
  class: "Class",
};
if (comparison) FILTERS.measured = "In the comparison";
for (const metric of metrics) SORTS[`worst:${metric}`] = `${metric}, ${orderOf(metric)}`;
const DEFAULTS = { method: 0, query: "", class: "", show: "all", sort: "order", photo: null, tab: "images", cell: "" };
const state = { ...DEFAULTS };
const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/** Return the images that match the filters, in the chosen order. */
function chosenPhotos() {
  const words = folded(state.query).split(/\s+/).filter(Boolean);
  const passing = photos.filter((photo) => {
    const row = rowOf(photo, state.method);
    if (state.show === "failed" && !photo.failed) return false;
    if (state.show === "measured" && !measured.has(photo.id)) return false;
    if (state.show === "fine" && (!row || row.error != null)) return false;
    if (state.class !== "" && classKey(row) !== state.class) return false;
    return words.every((word) => searchTextOf(photo).includes(word));
  });
  return sorted(passing);
}

/** Return the key of a class: its index, because several classes may have the same name. */
const classKey = (row) => (row?.target ?? row?.name ?? null) === null ? null : String(row.target ?? plainName(row));

/** Return the metric by which the images are sorted; undefined without one. */
const sortedMetric = () => metrics.find((metric) => state.sort === `worst:${metric}`);

/** Return the value of an image by this metric and the current method. */
const metricOf = (photo) => valueOf(head.methods[state.method], sortedMetric(), photo.id);

function sorted(list) {
  if (sortedMetric()) {
    const sign = isHigherBetter(sortedMetric()) ? 1 : -1;
    const known = (photo) => metricOf(photo) != null;
    return list.sort((a, b) => known(b) - known(a) || sign * (metricOf(a) - metricOf(b)) || 0);
  }
  const probability = (photo) => rowOf(photo, state.method)?.probability;
  const known = (photo) => typeof probability(photo) === "number";
  if (state.sort === "likely" || state.sort === "unlikely") {
    const sign = state.sort === "likely" ? -1 : 1;
    return list.sort((a, b) => known(b) - known(a) || sign * (probability(a) - probability(b)) || 0);
  }
  if (state.sort === "name") return list.sort((a, b) => collator.compare(a.file, b.file));
  if (state.sort === "class") {
    const name = (photo) => className(rowOf(photo, state.method));
    // An image without a class comes last.
    return list.sort((a, b) => (name(a) === null) - (name(b) === null) || collator.compare(name(a) ?? "", name(b) ?? ""));
  }
  return list;
}

/** Return the classes that the current method explains, with key, name and number of images, sorted by name. */
function classes() {
  const found = new Map();
  for (const photo of photos) {
    const row = rowOf(photo, state.method);
    const key = classKey(row);
    if (key === null) continue;
    const entry = found.get(key) ?? { key, name: plainName(row), count: 0 };
    entry.count += 1;
    found.set(key, entry);
  }
  const names = new Map();
  for (const { name } of found.values()) names.set(name, (names.get(name) ?? 0) + 1);
  return [...found.values()]
    .map((entry) => (names.get(entry.name) > 1 ? { ...entry, name: `${entry.name} ${entry.key}` } : entry))
    .sort((a, b) => collator.compare(a.name, b.name));
}

/** Return the address of a state. Values equal to the defaults are omitted. */
function addressOf(other = {}) {
  const wanted = { ...state, ...other };
  const words = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) {
    if (wanted[key] === DEFAULTS[key]) continue;
    words.set(key, key === "method" ? head.methods[wanted.method] : wanted[key]);
  }
  return `#${words}`;
}

/** Read the state from the address. Missing and invalid values get their defaults. */
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const method = head.methods.indexOf(words.get("method"));
  Object.assign(state, DEFAULTS, {
    method: Math.max(0, method),
    query: words.get("query") ?? "",
    class: words.get("class") ?? "",
    show: Object.hasOwn(FILTERS, words.get("show") ?? "") ? words.get("show") : DEFAULTS.show,
    sort: Object.hasOwn(SORTS, words.get("sort") ?? "") ? words.get("sort") : DEFAULTS.sort,
    tab: comparison && words.get("tab") === "comparison" ? "comparison" : DEFAULTS.tab,
    cell: words.get("cell") ?? "",
    photo: /^\d+$/.test(words.get("photo") ?? "") ? Number(words.get("photo")) : null,
  });
}

/** Write the state to the address, as a new history entry if `step`, else replacing the current entry. */
function writeAddress(step = false) {
  if (step) history.pushState({ opened: true }, "", addressOf());
  else history.replaceState(history.state, "", addressOf());
}
