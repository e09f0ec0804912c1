// The data of the page: photos with their rows, unpacked from the chunks that packing.py wrote.

const data = JSON.parse(document.getElementById("data").textContent);
const head = data.head;
const photos = [];

const PHOTO = ["index", "source", "id", "width", "height", "inputWidth", "inputHeight", "box", "stem", "photo"];
const ROW = [
  "method", "target", "name", "probability", "score", "layer", "settings", "sign", "units", "limit",
  "colormap", "bar", "heat", "overlay", "error", "kind",
];
const SHARED = ["name", "layer", "settings", "sign", "units", "colormap", "bar", "kind"];

function unpacked(chunk) {
  const shared = (at) => (at == null ? null : chunk.shared[at]);
  const path = (at, stem) => shared(at)?.join(stem) ?? null;
  return chunk.photos.map((cells) => {
    const photo = Object.fromEntries(PHOTO.map((key, at) => [key, cells[at]]));
    photo.box = shared(photo.box);
    photo.photo = path(photo.photo, photo.stem);
    photo.file = String(photo.source ?? "").replace(/^.*\/(?=.)/s, "");
    photo.rows = []; // by the number of the method
    photo.whole = null; // the row of a photo that failed before any method
    photo.failed = false;
    for (const cell of cells[PHOTO.length]) {
      const row = {};
      for (let at = 0; at < ROW.length; at += 1) row[ROW[at]] = cell[at] ?? null;
      for (const key of SHARED) row[key] = shared(row[key]);
      row.heat = path(row.heat, photo.stem);
      row.overlay = path(row.overlay, photo.stem);
      if (row.method < 0) photo.whole = row;
      else photo.rows[row.method] = row;
      photo.failed ||= row.error != null;
    }
    return photo;
  });
}

for (const chunk of data.chunks) for (const photo of unpacked(chunk)) photos.push(photo);

/** What a method says of a photo; null where there is nothing yet. */
const rowOf = (photo, method) => photo.rows[method] ?? photo.whole;

/** A file name, a class or a search as it is compared: without case and accents. */
const folded = (text) => String(text).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** All that a search looks through, made when the first search asks for it. */
function wordsOf(photo) {
  const rows = photo.whole ? [photo.whole] : photo.rows;
  photo.words ??= folded(
    [photo.source, photo.id, ...new Set(rows.flatMap((row) => [className(row), row.error, row.kind]))]
      .filter((each) => each != null).join("\n"),
  );
  return photo.words;
}

const className = (row) => row?.name ?? (row?.target != null ? `class ${row.target}` : null);

const percent = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en");

function probabilityText(value) {
  if (typeof value !== "number") return "";
  if (value > 0 && value < 0.001) return "< 0.1%";
  if (value < 1 && value > 0.999) return "> 99.9%";
  return percent.format(value);
}

/** A number in three digits, as it is written beside a colour bar. */
function short(value) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("-", "−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** An element; children that are strings become text, never HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const byId = (id) => document.getElementById(id);
