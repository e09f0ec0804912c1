// The header, the keyboard shortcuts, and the initialisation of the page.

const controls = { method: byId("method"), class: byId("class"), show: byId("show"), sort: byId("sort") };
const query = byId("query");
const sliders = [...document.querySelectorAll(".opacity")];
let heat = Math.round(100 * head.opacity); // percent; as in the overlays
let heatBefore = heat || 50;
let typing = 0; // the timer of a search

const option = (value, label) => make("option", { value }, label);

function fillControls() {
  controls.method.replaceChildren(...head.methods.map((name, at) => option(at, name)));
  const failed = photos.filter((photo) => photo.failed).length;
  controls.show.replaceChildren(
    ...Object.entries(FILTERS).map(([key, label]) => option(key, key === "failed" ? `${label} (${integer.format(failed)})` : label)),
  );
  controls.sort.replaceChildren(...Object.entries(SORTS).map(([key, label]) => option(key, label)));
  fillClasses();
}

function fillClasses() {
  const found = classes();
  controls.class.replaceChildren(
    option("", `All classes (${integer.format(found.length)})`),
    ...found.map(({ key, name, count }) => option(key, `${name} (${integer.format(count)})`)),
  );
  if (!found.some(({ key }) => key === state.class)) state.class = "";
}

/** Update the controls and the grid from the state. */
function refresh() {
  controls.method.value = state.method;
  controls.show.value = state.show;
  controls.sort.value = state.sort;
  controls.class.value = state.class;
  if (document.activeElement !== query) query.value = state.query;
  for (const select of Object.values(controls)) select.classList.toggle("active", select.selectedIndex > 0 && select !== controls.method);
  byId("more").classList.toggle("active", Boolean(state.class || state.show !== "all" || state.sort !== "order"));
  applyFilters();
  showCount();
}

function showCount() {
  const all = integer.format(head.images);
  const filtered = list.length < photos.length;
  const failures = head.failed ? `, ${integer.format(head.failed)} with errors` : "";
  const noun = head.images === 1 ? head.counted.slice(0, -1) : head.counted;
  byId("count").textContent = filtered ? `${integer.format(list.length)} of ${all} ${noun}` : `${all} ${noun}${failures}`;
  byId("empty").hidden = list.length > 0;
  byId("reset").hidden = !photos.length;
  byId("why").textContent = photos.length ? "No image matches these filters." : "No image has been explained yet.";
}

/** Change the state, scroll to the top of the grid unless the method changes, and update the address. */
function change(changes) {
  const method = state.method;
  clearTimeout(typing); // use the text typed so far
  Object.assign(state, { query: query.value.trim() }, changes);
  if (state.method !== method) fillClasses();
  if (!("method" in changes) && window.scrollY > 0) window.scrollTo({ top: 0, behavior: "instant" });
  refresh();
  writeAddress();
}

function setHeat(percentage) {
  heat = Math.min(100, Math.max(0, percentage));
  document.documentElement.style.setProperty("--heat", heat / 100);
  for (const slider of sliders) showSlider(slider, heat, `${heat}%`);
}

/** Read the state from the address, and show it. */
function loadAddress() {
  readAddress();
  fillClasses();
  refresh();
  showTab();
  const photo = state.photo === null ? null : photos.find((photo) => photo.index === state.photo);
  if (photo) open(photo);
  else {
    state.photo = null;
    if (view.open) view.close();
  }
}

for (const [key, select] of Object.entries(controls)) {
  select.addEventListener("change", () => change({ [key]: key === "method" ? Number(select.value) : select.value }));
}
query.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => change({}), photos.length > 3000 ? 120 : 0);
});
query.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    query.value = "";
    change({ query: "" });
    query.blur();
  } else if ((event.key === "ArrowDown" || event.key === "Enter") && list.length) {
    event.preventDefault();
    change({});
    select(current);
  }
});
for (const slider of sliders) slider.addEventListener("input", () => setHeat(Number(slider.value)));

byId("reset").addEventListener("click", () => {
  query.value = "";
  change({ query: "", class: "", show: "all" });
});
byId("more").addEventListener("click", () => {
  const shown = document.querySelector("header").toggleAttribute("data-open");
  byId("more").setAttribute("aria-expanded", shown);
});

// The dialog with facts about the run and the keyboard shortcuts.

const KEYS = {
  "/": "search",
  "← → ↑ ↓": "move between images",
  Enter: "open the large view",
  "← →": "in the large view: previous and next image",
  Esc: "close",
  m: "next method (M: previous)",
  h: "heat map on or off",
  "?": "this help",
};

function fillFacts() {
  const run = {
    model: head.model, weights: head.weights, methods: head.methods.join(", "),
    [head.counted]: `${integer.format(head.images)}, of which ${integer.format(head.failed)} with errors`,
    versions: Object.entries(head.versions ?? {}).map(([name, value]) => `${name} ${value}`).join(", "),
    command: Array.isArray(head.command) ? head.command.join(" ") : head.command,
  };
  byId("run").replaceChildren(...facts(run).children);
  byId("keys").replaceChildren(
    ...Object.entries(KEYS).map(([key, what]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, what))),
  );
}

const about = byId("facts");
byId("about").addEventListener("click", () => about.showModal());
for (const dialog of [about, view, cellView]) closeOutside(dialog);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=range]), select")) return;
  if (event.key === "h") {
    if (heat) heatBefore = heat;
    setHeat(heat ? 0 : heatBefore);
    return;
  }
  if (view.open || about.open || state.tab !== "images") return;
  if (event.key === "/") {
    event.preventDefault();
    query.focus();
    query.select();
  } else if (event.key === "?") about.showModal();
  else if (event.key === "m" || event.key === "M") {
    const count = head.methods.length;
    if (count) change({ method: (state.method + (event.key === "m" ? 1 : count - 1)) % count });
  }
});

// Scrolling and resizing.

let due = 0;
window.addEventListener("scroll", () => {
  due ||= requestAnimationFrame(() => {
    due = 0;
    draw();
  });
}, { passive: true });

let width = 0;
new ResizeObserver(() => {
  if (grid.clientWidth === width) return draw();
  width = grid.clientWidth;
  const anchor = layout.rows.length ? list[layout.rows[rowAt(layout.rows, window.scrollY - grid.offsetTop + 1)].from] : null;
  const moved = window.scrollY > grid.offsetTop;
  relayout();
  if (anchor && moved) reveal(list.indexOf(anchor));
}).observe(document.documentElement);

window.addEventListener("popstate", loadAddress);

byId("model").textContent = head.title ?? head.model ?? "";
fillControls();
fillFacts();
connectTheme(document.documentElement, byId("theme"));
setHeat(heat);
width = grid.clientWidth;
loadAddress();
document.documentElement.dataset.ready = "";
