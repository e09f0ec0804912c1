// The grid. Only images near the visible area have elements in the page.

const grid = byId("grid");
let list = []; // the images that pass the filters
let layout = computeLayout([], 1);
let current = null; // the image that the Tab key focuses
const cards = new Map(); // image -> its element

/** Filter and lay out the images again. */
function applyFilters() {
  list = chosenPhotos();
  if (!list.includes(current)) current = list[0] ?? null;
  relayout();
}

function relayout() {
  layout = computeLayout(list, grid.clientWidth);
  grid.style.height = `${layout.height}px`;
  for (const card of cards.values()) card.dataset.stale = "";
  draw();
}

/** Create the cards near the visible area, and remove all others. */
function draw() {
  const { rows } = layout;
  const wanted = [];
  let firstVisible = 0;
  if (rows.length) {
    const top = window.scrollY - grid.offsetTop;
    const spare = window.innerHeight * 0.75;
    const first = rows[rowAt(rows, top - spare - rows[0].height)];
    const last = rows[rowAt(rows, top + window.innerHeight + spare)];
    firstVisible = rows[rowAt(rows, top + rows[0].height)].from;
    for (let at = first.from; at < last.to; at += 1) wanted.push(at);
    // Keep the focused image, so that the keyboard continues from it.
    const focused = list.indexOf(current);
    if (grid.contains(document.activeElement) && focused >= 0) {
      if (focused < first.from) wanted.unshift(focused);
      if (focused >= last.to) wanted.push(focused);
    }
  }
  const keep = new Set(wanted.map((at) => list[at]));
  for (const [photo, card] of cards) {
    if (keep.has(photo)) continue;
    card.remove();
    cards.delete(photo);
  }
  let place = grid.firstChild;
  for (const at of wanted) {
    const card = cardOf(list[at]);
    if ("stale" in card.dataset) fill(card, at);
    if (card === place) place = place.nextSibling;
    else grid.insertBefore(card, place);
  }
  // The Tab key focuses the current image, or the first visible one if the current image has no card.
  const stop = keep.has(current) ? current : list[firstVisible];
  for (const [photo, card] of cards) card.firstChild.tabIndex = photo === stop ? 0 : -1;
}

function cardOf(photo) {
  let card = cards.get(photo);
  if (!card) {
    card = make("li", { class: "card", "data-stale": "" }, make("a", {}, make("span", { class: "frame" }), make("span", { class: "caption" })));
    card.photo = photo;
    cards.set(photo, card);
  }
  return card;
}

/** Set the position, images and texts of a card. */
function fill(card, at) {
  const photo = list[at];
  const row = rowOf(photo, state.method);
  const { top, height } = layout.rows[rowOfPhoto(layout.rows, at)];
  delete card.dataset.stale;
  card.setAttribute("aria-setsize", list.length);
  card.setAttribute("aria-posinset", at + 1);
  Object.assign(card.style, { left: `${layout.left[at]}px`, top: `${top}px`, width: `${layout.wide[at]}px` });
  const [frame, caption] = card.firstChild.children;
  frame.style.height = `${height}px`;
  card.firstChild.href = addressOf({ photo: photo.index });
  card.firstChild.title = photo.source ?? "";
  card.classList.toggle("failed", row?.error != null);
  showPicture(frame, photo, row, "lazy");
  const others = photo.failed && row?.error == null;
  caption.replaceChildren(
    make("span", { class: "class", dir: "auto" }, headline(row)),
    make("span", { class: "probability" }, sortedMetric() ? shortNumber(metricOf(photo)) : probabilityText(row?.probability)),
    make("span", { class: "name", dir: "auto" }, [photo.file, sharesText(row)].filter(Boolean).join(": ")),
    make("span", { class: "badge", title: others ? "Another method, or a trust card, failed on this image" : null }, others ? "partly failed" : ""),
  );
}

/** Return the first line below an image: its class, or the kind of failure. */
function headline(row) {
  if (!row) return "Not explained yet";
  return row.error == null ? (plainName(row) ?? "") : (row.error_kind ?? "Failed");
}

/** Show an image with its heatmap in a frame. If there is no image, show the overlay or the reason of the failure. */
function showPicture(frame, photo, row, loading) {
  const base = photo.thumbnail ?? row?.overlay ?? null;
  const heat = photo.thumbnail ? (row?.heat ?? null) : null;
  const message = row?.error ?? (base ? null : "There is no picture of this image.");
  const seen = `${base}\n${heat}\n${message}\n${row?.target_box}`;
  if (frame.seen === seen) return;
  const old = frame.querySelector(".photo");
  // Keep the image element if only the heat map changes; a new element would flicker.
  const kept = old && old.getAttribute("src") === base ? old : null;
  if (old && !kept) old.remove();
  frame.classList.remove("lost-heat", ...(kept ? [] : ["lost-photo"]));
  while (frame.lastChild && frame.lastChild !== kept) frame.lastChild.remove();
  if (base && !kept) frame.append(image(base, "photo", loading));
  if (base) frame.firstChild.alt = describe(photo, row);
  if (heat) frame.append(image(heat, "heat", loading));
  frame.append(...boxOf(photo, row?.target_box));
  if (message !== null) frame.append(make("span", { class: "why", dir: "auto" }, message));
  frame.seen = seen;
}

function describe(photo, row) {
  const name = className(row);
  return [photo.file, name, probabilityText(row?.probability)].filter(Boolean).join(", ");
}

/** Make an image the current one, and focus it. */
function select(photo, { focus = true } = {}) {
  const at = list.indexOf(photo);
  if (at < 0) return;
  current = photo;
  reveal(at);
  draw();
  if (focus) cards.get(photo)?.firstChild.focus({ preventScroll: true });
}

/** Scroll only as far as needed to show a whole image between the header and the dock. */
function reveal(at) {
  const { top, height } = layout.rows[rowOfPhoto(layout.rows, at)];
  const header = document.querySelector("header").getBoundingClientRect().bottom + 12;
  const dock = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--dock")) || 0;
  const above = grid.offsetTop + top - header;
  const below = grid.offsetTop + top + height + CAPTION + 16 - window.innerHeight + dock;
  if (window.scrollY > above) window.scrollTo({ top: above, behavior: "instant" });
  else if (window.scrollY < below) window.scrollTo({ top: Math.min(below, above), behavior: "instant" });
}

grid.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !list.length) return;
  const at = list.indexOf(current);
  const page = Math.max(1, Math.floor(window.innerHeight / (layout.rows[0].height + CAPTION)) - 1);
  const jump = (step) => {
    let to = at;
    for (let left = page; left; left -= 1) to = nearestInRow(layout, to, step);
    return to;
  };
  const to = {
    ArrowLeft: () => at - 1,
    ArrowRight: () => at + 1,
    ArrowUp: () => nearestInRow(layout, at, -1),
    ArrowDown: () => nearestInRow(layout, at, 1),
    PageUp: () => jump(-1),
    PageDown: () => jump(1),
    Home: () => 0,
    End: () => list.length - 1,
  }[event.key]?.();
  if (to === undefined) return;
  event.preventDefault();
  select(list[Math.min(list.length - 1, Math.max(0, to))]);
});

grid.addEventListener("focusin", (event) => {
  const photo = event.target.closest(".card")?.photo;
  if (photo && photo !== current) select(photo, { focus: false });
});

grid.addEventListener("click", (event) => {
  const card = event.target.closest(".card");
  if (!card || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  open(card.photo, true);
});
