// The large view: one image, all methods side by side.

const view = byId("view");
const panels = byId("panels");

/** Show an image in the large view. `step` adds a history entry, for an image that the user opened. */
function open(photo, step = false) {
  state.photo = photo.index;
  fillView(photo);
  if (!view.open) view.showModal();
  panels.scrollTop = 0;
  writeAddress(step);
}

/** Show the image that is `step` positions later in the list, if there is one. */
function move(step) {
  const at = place();
  const photo = list[Math.min(list.length - 1, Math.max(0, at + step))];
  if (photo && photo.index !== state.photo) open(photo);
}

const place = () => list.findIndex((photo) => photo.index === state.photo);

function fillView(photo) {
  const at = list.indexOf(photo);
  byId("view-name").textContent = photo.file;
  byId("view-place").textContent = at < 0 ? "outside the filters" : `${integer.format(at + 1)} of ${integer.format(list.length)}`;
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at < 0 || at === list.length - 1;
  view.style.setProperty("--ratio", photo.width > 0 && photo.height > 0 ? photo.width / photo.height : 4 / 3);
  const rows = photo.failure ? [photo.failure] : photo.rows.filter(Boolean);
  const shown = rows.map((row) => methodPanel(photo, row));
  panels.replaceChildren(...(photo.thumbnail ? [photoPanel(photo, rows[0])] : []), ...shown);
  for (const near of [list[at + 1], at > 0 ? list[at - 1] : null]) if (near) preload(near);
}

/** Return the panel of the image without a heat map, with the facts that all methods share. */
function photoPanel(photo, row) {
  const frame = make("div", { class: "frame" }, image(photo.thumbnail, "photo", "eager", photo.file));
  const crop = cropOf(photo);
  if (crop) frame.append(crop);
  frame.append(...boxOf(photo, row?.target_box));
  const size = (width, height) => (width && height ? `${width} × ${height}` : null);
  const input = size(photo.input_width, photo.input_height);
  return make(
    "figure", { class: "panel" },
    frame,
    make("figcaption", {}, make("h3", {}, "Image"), facts({
      file: photo.source,
      size: size(photo.width, photo.height),
      "network input": input && crop ? `${input}, from the region in the frame` : input,
      class: row && row.error == null ? classText(row) : null,
    })),
  );
}

/** Return the panel of a method: heat map over the image, colour bar and facts. */
function methodPanel(photo, row) {
  const frame = make("div", { class: "frame" });
  showPicture(frame, photo, row, "eager");
  const failed = row.error != null;
  return make(
    "figure", { class: failed ? "panel failed" : "panel" },
    frame,
    make(
      "figcaption", {},
      make("h3", {}, row.method < 0 ? "All methods" : head.methods[row.method]),
      failed ? null : colourBar(row),
      facts({
        class: failed ? null : classText(row),
        probability: failed ? null : probabilityText(row.probability),
        score: failed ? null : shortNumber(row.score),
        error: row.error_kind ?? row.cardError,
        shares: sharesText(row),
        layer: row.layer,
        ...settingsOf(row),
        coverage: row.coverage,
        residual: shortNumber(row.residual),
        ...metricsOf(photo, head.methods[row.method]),
        ledger: Object.entries(row.ledger ?? {}).map(([name, share]) => `${name} ${shortNumber(share)}`).join(", "),
      }),
      row.trust ? trustCard(row.trust) : null,
      row.overlay ? make("a", { href: row.overlay, target: "_blank", rel: "noopener" }, "Overlay in full size") : null,
      row.card ? make("a", { href: row.card, target: "_blank", rel: "noopener" }, "Trust card in full size") : null,
    ),
  );
}

const classText = (row) => (row.name != null && row.target != null ? `${row.name} (${row.target})` : className(row));

function preload(photo) {
  const addresses = [photo.thumbnail, ...photo.rows.filter(Boolean).map((row) => row.heat)];
  for (const address of addresses.filter(Boolean)) new Image().src = address;
}

view.addEventListener("close", () => {
  if (state.photo === null) return; // closed by a step back in the history
  const photo = photos.find((photo) => photo.index === state.photo);
  state.photo = null;
  if (history.state?.opened) history.back();
  else writeAddress();
  select(photo);
});

view.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!(event.key in steps)) return;
  event.preventDefault();
  move(steps[event.key]);
});

byId("previous").addEventListener("click", () => move(-1));
byId("next").addEventListener("click", () => move(1));
byId("close").addEventListener("click", () => view.close());

let touched = null;
panels.addEventListener("touchstart", (event) => {
  touched = event.touches.length === 1 ? { x: event.touches[0].clientX, y: event.touches[0].clientY } : null;
}, { passive: true });
panels.addEventListener("touchend", (event) => {
  if (!touched) return;
  const { clientX, clientY } = event.changedTouches[0];
  const [across, along] = [clientX - touched.x, Math.abs(clientY - touched.y)];
  if (Math.abs(across) > 60 && along < 40) move(across < 0 ? 1 : -1);
  touched = null;
}, { passive: true });
