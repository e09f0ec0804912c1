// The layout of the grid: rows that fill the width, with uncropped images.

const CAPTION = 46; // pixels under each image
const GAP = { wide: 18, narrow: 10 };

const ratioOf = (photo) =>
  photo.width > 0 && photo.height > 0 ? Math.min(2.4, Math.max(0.6, photo.width / photo.height)) : 4 / 3;

/**
 * Return the rows of the grid, and the position and width of each image, in pixels.
 *
 * Each row is stretched to the full width. It contains the number of images for which its height is closest to the
 * intended height. The last row is not stretched.
 */
function computeLayout(list, width) {
  const gap = width < 640 ? GAP.narrow : GAP.wide;
  const aim = Math.min(230, Math.max(136, width / 5.2));
  const left = new Float64Array(list.length);
  const wide = new Float64Array(list.length);
  const rows = [];
  let top = 0;
  for (let from = 0; from < list.length; ) {
    let to = from;
    let ratios = 0;
    while (to < list.length && ratios * aim + (to - from - 1) * gap < width) {
      ratios += ratioOf(list[to]);
      to += 1;
    }
    const heightOf = (sum, count) => (width - (count - 1) * gap) / sum;
    let height = Math.min(aim, heightOf(ratios, to - from));
    // Drop the last image if the height is closer to the intended height without it.
    const fewer = ratios - ratioOf(list[to - 1]);
    const higher = to - from > 1 && height < aim ? heightOf(fewer, to - from - 1) : Infinity;
    if (higher / aim < aim / height) {
      height = higher;
      to -= 1;
    }
    let x = 0;
    for (let at = from; at < to; at += 1) {
      left[at] = x;
      wide[at] = ratioOf(list[at]) * height;
      x += wide[at] + gap;
    }
    rows.push({ top, height, from, to });
    top += height + CAPTION + gap;
    from = to;
  }
  return { rows, left, wide, height: Math.max(0, top - gap) };
}

/** Return the index of the row at a vertical position, or of the nearest row. */
function rowAt(rows, y) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].top <= y) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return the index of the row that contains an image. */
function rowOfPhoto(rows, at) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].from <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return the image in the row above (step -1) or below (step 1) that is horizontally closest to an image. */
function nearestInRow({ rows, left, wide }, at, step) {
  const row = rows[rowOfPhoto(rows, at) + step];
  if (!row) return at;
  const middle = left[at] + wide[at] / 2;
  let best = row.from;
  for (let other = row.from; other < row.to; other += 1) {
    const distance = (index) => Math.abs(left[index] + wide[index] / 2 - middle);
    if (distance(other) < distance(best)) best = other;
  }
  return best;
}
