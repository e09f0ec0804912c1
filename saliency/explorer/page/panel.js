// One map over the photo: the frame that can be clicked, the colour bar, the facts, and the actions.

const READING = "Click the photo to read the value there.";
const STEP = 0.02; // of the photo; what an arrow key moves the marker

/**
 * Create the panel of one method, and of an input if the model has several. `pick(position, isChosen)` is called when the
 * marker moves; `act(name)` by the actions.
 */
function createPanel(about, input, { pick, act, chooseBox }) {
  const tables = Object.fromEntries(Object.entries(about.colors).map(([name, colors]) => [name, asNumbers(colors)]));
  const picture = make("img", { class: "photo", alt: "", draggable: "false" });
  const heat = make("canvas", { class: "heat", "aria-hidden": "true" });
  const crop = make("span", { class: "edge", "aria-hidden": "true" });
  const regions = make("canvas", { class: "regions", "aria-hidden": "true" });
  const marks = make("div", { class: "marks" });
  const marker = make("span", { class: "marker", "aria-hidden": "true", hidden: "" });
  const target = make("button", { type: "button", class: "pick" });
  const why = make("p", { class: "why", dir: "auto", hidden: "" });
  const progress = make("progress", { max: 1, "aria-label": "Progress of the map" });
  const frame = make("div", { class: "frame" }, picture, heat, crop, regions, target, marks, marker, why, progress);
  const title = make("h3", {});
  const scale = make("div", {});
  const reading = make("p", { class: "reading" }, READING);
  const notes = make("div", {});
  const details = make("div", {});
  const trustButton = make("button", { type: "button" }, "Can I trust this map?");
  trustButton.addEventListener("click", () => act("trust"));
  const saves = Object.entries({ overlay: "Overlay", figure: "Figure", code: "Python" }).map(([kind, label]) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", () => act(kind));
    return button;
  });
  const save = make("div", { class: "saves", role: "group", "aria-label": "Save" }, make("span", { class: "legend" }, "Save"), saves);
  const actions = make("div", { class: "actions" }, trustButton, save);
  const more = make("details", {}, make("summary", {}, "Details"), details);
  const element = make("figure", { class: "panel" }, frame, make("figcaption", {}, title, scale, reading, notes, actions, more));
  let image = null;
  let answer = null;
  let method = "";
  let position = null; // of the marker, in pixels of the image

  const place = (node, [left, top, right, bottom]) => {
    const share = (value, most) => `${(100 * value) / most}%`;
    const { width, height } = image;
    Object.assign(node.style, { left: share(left, width), top: share(top, height), width: share(right - left, width), height: share(bottom - top, height) });
  };

  target.addEventListener("click", (event) => {
    if (event.detail === 0) return pick(position ?? [image.width / 2, image.height / 2], true); // by the keyboard
    const { left, top, width, height } = target.getBoundingClientRect();
    pick([((event.clientX - left) / width) * image.width, ((event.clientY - top) / height) * image.height], true);
  });
  target.addEventListener("keydown", (event) => {
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if (!x && !y) return;
    event.preventDefault();
    const [at, along] = position ?? [image.width / 2, image.height / 2];
    const inside = (value, most) => Math.min(most - 1, Math.max(0, value));
    pick([inside(at + x * STEP * image.width, image.width), inside(along + y * STEP * image.height, image.height)], false);
  });

  /** Draw the borders of the regions; the explained one is green. */
  function showRegions(chosen) {
    const { labels } = image;
    regions.hidden = !labels;
    if (!labels) return;
    place(regions, image.box);
    [regions.width, regions.height] = [labels.width, labels.height];
    const pixels = new ImageData(labels.width, labels.height);
    const packed = new Uint32Array(pixels.data.buffer);
    const wanted = image.regions.findIndex((region) => region.target === chosen?.region);
    labels.values.forEach((label, at) => {
      const right = (at + 1) % labels.width ? labels.values[at + 1] : label;
      const below = labels.values[at + labels.width] ?? label;
      if (label === right && label === below) return;
      packed[at] = [label, right, below].includes(wanted) ? 0xff40e600 : 0xb0ffffff;
    });
    regions.getContext("2d").putImageData(pixels, 0, 0);
  }

  function showBoxes(chosen) {
    const spots = (image.boxes ?? []).map((box) => {
      const name = `${box.name} ${probabilityText(box.probability)}`;
      const pressed = chosen?.box?.index === box.index;
      const spot = make("button", { type: "button", class: "spot", "aria-pressed": pressed, "aria-label": `Explain ${name}` }, make("span", {}, name));
      place(spot, box.box);
      spot.addEventListener("click", () => chooseBox(box.index));
      return spot;
    });
    marks.replaceChildren(...spots);
  }

  return {
    element,
    /** Show an image without a map. */
    open(opened, address) {
      image = opened;
      answer = position = null;
      picture.src = address;
      element.style.setProperty("--ratio", image.width / image.height);
      marker.hidden = heat.hidden = true;
      const isWhole = image.box.every((edge, at) => Math.abs(edge - [0, 0, image.width, image.height][at]) < 0.5);
      crop.hidden = isWhole;
      place(crop, image.box);
      const area = areaOf(image);
      place(heat, [area.x, area.y, area.x + area.width, area.y + area.height]);
      for (const part of [scale, notes, details]) part.replaceChildren();
      reading.textContent = READING;
    },
    /** Show that a map is being computed. */
    begin(name, chosen) {
      method = name;
      answer = null;
      title.textContent = name;
      picture.alt = `${input ?? "Photo"}, explained by ${name}`;
      target.setAttribute("aria-label", `${input ?? "Photo"} with the map of ${name}. Click to read a value; arrow keys move the marker.`);
      why.hidden = true;
      notes.replaceChildren();
      element.classList.add("stale");
      element.classList.remove("failed", "idle");
      frame.setAttribute("aria-busy", "true");
      progress.removeAttribute("value");
      showRegions(chosen);
      showBoxes(chosen);
    },
    /** Show an answer, which may be refined later. */
    show(received) {
      const { row, done } = received;
      progress.value = received.progress;
      frame.setAttribute("aria-busy", String(!done));
      if (!row) return; // the progress only
      if (row.error != null) return this.fail(row.error);
      answer = received;
      element.classList.remove("stale");
      frame.querySelector(".box")?.remove();
      marks.before(...boxOf(image, row.target_box));
      const [head, by] = input == null ? [row.name, `by ${method}`] : [`${input}: ${shortNumber(Math.round(100 * row.shares[input]))} %`, `${row.name}, by ${method}`];
      title.replaceChildren(head, make("small", {}, by));
      notes.replaceChildren(...(row.notes ?? []).map((note) => make("p", { class: "note" }, note)));
      details.replaceChildren(facts({
        class: row.name, probability: probabilityText(row.probability), score: shortNumber(row.score), layer: row.layer,
        shares: sharesText(row),
        ...settingsOf(row),
        coverage: row.coverage, residual: shortNumber(row.residual),
        ledger: Object.entries(row.ledger ?? {}).map(([name, share]) => `${name} ${shortNumber(share)}`).join(", "),
      }));
    },
    /** Return the value at full colour; 0 without a map. */
    limit(percentile) {
      if (!answer?.map) return 0;
      const { row, map } = answer;
      return percentile === "auto" ? row.limit : limitOf(map.values, row.floor ?? 0, percentile);
    },
    /** Colour the map, up to a limit. */
    restyle({ threshold }, limit) {
      if (!answer?.map) return;
      const { row, map } = answer;
      const floor = row.floor ?? 0;
      const isSigned = row.sign === "signed";
      const colors = about.colors[row.colormap];
      paintMap(heat, image, map, { floor, limit, threshold, isSigned, table: tables[row.colormap] });
      heat.hidden = false;
      const bar = colors.filter((_, at) => at % 15 === 0 && (at || !isSigned));
      scale.replaceChildren(colourBar({ ...row, bar, limit }));
      this.mark(position);
    },
    /** Show the marker and the value under it; null hides it. Return the value as text. */
    mark(marked) {
      position = marked;
      marker.hidden = !marked;
      reading.textContent = READING;
      if (!marked || !answer?.map) return "";
      Object.assign(marker.style, { left: `${(100 * marked[0]) / image.width}%`, top: `${(100 * marked[1]) / image.height}%` });
      const value = valueAt(answer.map, image, marked);
      const { units } = answer.row;
      const text = value === null ? "Outside the part that the network saw" : `${shortNumber(value)} at the marker${units ? ` (${units})` : ""}`;
      reading.textContent = text;
      return text;
    },
    /** Show a message in place of a map. */
    fail(message, isError = true) {
      frame.setAttribute("aria-busy", "false");
      element.classList.add(isError ? "failed" : "idle");
      element.classList.remove("stale");
      answer = null;
      heat.hidden = true;
      scale.replaceChildren();
      why.textContent = message;
      why.hidden = false;
    },
  };
}
