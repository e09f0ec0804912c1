// Colour a map in the browser, as `saliency.overlay` does: opacity, threshold and percentile need no request.

const MOST_PIXELS = 1e6; // of a heat canvas; larger ones are slow to slide and look the same

/** Return the value at full colour: the magnitude above `floor` that `percentile` % of the cells do not exceed. */
function limitOf(values, floor, percentile) {
  const magnitudes = Float32Array.from(values, (value) => Math.abs(value - floor)).sort();
  const rank = Math.max(1, Math.ceil((magnitudes.length * percentile) / 100 - 1e-9));
  return floor + (magnitudes[rank - 1] || magnitudes.at(-1));
}

/** Return the pixels of an image whose centres lie in the crop. */
function areaOf({ width, height, box: [left, top, right, bottom] }) {
  const pixel = (edge, most) => Math.min(most, Math.max(0, Math.ceil(edge - 0.5)));
  const [x, y] = [pixel(left, width - 1), pixel(top, height - 1)];
  return { x, y, width: Math.max(1, pixel(right, width) - x), height: Math.max(1, pixel(bottom, height) - y) };
}

/** Return the first cell and the weights of the cells for each pixel of a line, by the bilinear filter of Pillow. */
function lineWeights(start, end, cells, pixels) {
  const scale = (end - start) / pixels;
  const reach = Math.max(1, scale); // all cells under a pixel count
  return Array.from({ length: pixels }, (_, pixel) => {
    const centre = start + (pixel + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const last = Math.max(first + 1, Math.min(cells, Math.trunc(centre + reach + 0.5)));
    const weights = [];
    for (let cell = first; cell < last; cell += 1) weights.push(Math.max(0, 1 - Math.abs(cell + 0.5 - centre) / reach));
    const sum = weights.reduce((a, b) => a + b, 0);
    return { first, weights: weights.map((weight) => weight / sum) };
  });
}

/** Return a plane of cells in the resolution of `width` x `height` pixels over the area of an image. */
function resizePlane({ values, width: across, height: down }, { box }, area, width, height) {
  const [left, top, right, bottom] = box;
  const cells = (edge, low, high, count) => ((edge - low) * count) / (high - low);
  const columns = lineWeights(cells(area.x, left, right, across), cells(area.x + area.width, left, right, across), across, width);
  const rows = lineWeights(cells(area.y, top, bottom, down), cells(area.y + area.height, top, bottom, down), down, height);
  const lines = new Float32Array(down * width);
  for (let row = 0; row < down; row += 1) {
    for (let column = 0; column < width; column += 1) {
      const { first, weights } = columns[column];
      let sum = 0;
      for (let at = 0; at < weights.length; at += 1) sum += weights[at] * values[row * across + first + at];
      lines[row * width + column] = sum;
    }
  }
  const plane = new Float32Array(height * width);
  for (let row = 0; row < height; row += 1) {
    const { first, weights } = rows[row];
    for (let at = 0; at < weights.length; at += 1) {
      const [weight, from, to] = [weights[at], (first + at) * width, row * width];
      for (let column = 0; column < width; column += 1) plane[to + column] += weight * lines[from + column];
    }
  }
  return plane;
}

/** Return colours "#rrggbb" as numbers whose bytes in memory are red, green, blue, 0. */
const asNumbers = (colors) => Uint32Array.from(colors, (color) => parseInt(color.slice(5) + color.slice(3, 5) + color.slice(1, 3), 16));

/**
 * Draw a map into a canvas that covers the crop of an image.
 *
 * Pixels are as opaque as the map is strong, and transparent below `threshold`, a share of the limit.
 */
function paintMap(canvas, image, map, { floor, limit, threshold, isSigned, table }) {
  const area = areaOf(image);
  const factor = Math.min(1, Math.sqrt(MOST_PIXELS / (area.width * area.height)));
  canvas.width = Math.max(1, Math.round(area.width * factor));
  canvas.height = Math.max(1, Math.round(area.height * factor));
  const scaled = Float32Array.from(map.values, (value) => (limit > floor ? Math.max(-1, Math.min(1, (value - floor) / (limit - floor))) : Math.sign(value - floor)));
  const plane = resizePlane({ ...map, values: scaled }, image, area, canvas.width, canvas.height);
  const pixels = new ImageData(canvas.width, canvas.height);
  const packed = new Uint32Array(pixels.data.buffer);
  const [zero, gain] = isSigned ? [128.5, 127] : [0.5, 255]; // a centred table has zero at entry 128
  for (let at = 0; at < plane.length; at += 1) {
    const strength = Math.abs(plane[at]);
    const alpha = strength < threshold ? 0 : Math.round(255 * strength);
    packed[at] = table[(plane[at] * gain + zero) | 0] | (alpha << 24);
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return pixels;
}

/** Return the value of the cell at a position in pixels of the image; null outside the crop. */
function valueAt(map, { box: [left, top, right, bottom] }, [x, y]) {
  const column = Math.floor(((x - left) * map.width) / (right - left));
  const row = Math.floor(((y - top) * map.height) / (bottom - top));
  return column < 0 || row < 0 || column >= map.width || row >= map.height ? null : map.values[row * map.width + column];
}
