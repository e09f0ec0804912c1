// An image, and the marks on it: the crop that the model received, and the explained box.

/** Create an image; a class of its frame says if the file is missing. */
function image(address, kind, loading, alt = "") {
  const element = make("img", { class: kind, loading, decoding: "async", draggable: "false", alt });
  element.addEventListener("error", () => element.parentElement?.classList.add(`lost-${kind}`), { once: true });
  element.src = address;
  return element;
}

/** Return the outline of a box, black and green, in a list; an empty list without a box. */
function boxOf({ width, height }, box) {
  if (!box || !(width > 0) || !(height > 0)) return [];
  const [left, top, right, bottom] = box;
  const place = { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top) };
  const sides = [svg("rect", { ...place, class: "rim" }), svg("rect", place)];
  return [svg("svg", { class: "box", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...sides)];
}

/** Return a frame around the crop that the model received; null if the crop is the whole image. */
function cropOf({ width, height, box }) {
  if (!Array.isArray(box) || !box.every(Number.isFinite) || !(width > 0) || !(height > 0)) return null;
  const [left, top, right, bottom] = box.map((edge, at) => edge / (at % 2 ? height : width));
  if (left <= 0.002 && top <= 0.002 && right >= 0.998 && bottom >= 0.998) return null;
  const crop = make("span", { class: "crop", title: "What the network saw" });
  const share = (part) => `${100 * Math.min(1, Math.max(0, part))}%`;
  Object.assign(crop.style, { left: share(left), top: share(top), right: share(1 - right), bottom: share(1 - bottom) });
  return crop;
}
