// Elements of the page: created from data, so that text never becomes HTML.

/** Create an element; children that are strings become text, never HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Create an element of SVG. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Create an icon of one path, 16 x 16. */
const icon = (path) => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: path }));

/** Show a value in a slider and its output. */
function showSlider(slider, value, text) {
  slider.value = value;
  slider.style.setProperty("--part", `${(100 * (value - slider.min)) / (slider.max - slider.min)}%`);
  slider.nextElementSibling.value = text;
}

/** Return a list of names and values, without empty values. */
function facts(entries) {
  const filled = Object.entries(entries).filter(([, value]) => value != null && value !== "");
  return make("dl", {}, filled.map(([name, value]) => make("div", {}, make("dt", {}, name.trim()), make("dd", { dir: "auto" }, String(value)))));
}

/** Close a dialog by a click beside it. */
function closeOutside(dialog) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
