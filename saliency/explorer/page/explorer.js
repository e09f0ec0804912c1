// The explorer: one photo or several inputs, one or two maps, and the questions about them. `mount` builds it over any transport.

const HELP = {
  "click or arrow keys": "read the value on the photo",
  h: "heat map on or off",
  "Ctrl V": "paste a photo",
  Esc: "close",
};
const CARD_SECONDS = 15;
const PATIENCE = 5000; // milliseconds without an answer, until the page says why
const AUTO = 100.5; // position of the slider of percentiles for the default of the method

/** Return the first answer of a request. */
async function first(answers) {
  for await (const answer of answers) return answer;
  throw new Error("The server gave no answer.");
}

const iconButton = (label, path) => make("button", { type: "button", class: "icon", "aria-label": label, title: label }, icon(path));
const CROSS = "m3.5 3.5 9 9m0-9-9 9";

/** Create a labelled slider. `text(value)` is its output. */
function createSlider(label, range, text, change) {
  const input = make("input", { type: "range", class: "opacity", min: 0, step: 1, ...range });
  const set = (value) => showSlider(input, value, text(Number(value)));
  const element = make("label", { class: "field" }, label, make("span", { class: "slide" }, input, make("output", {})));
  input.addEventListener("input", () => {
    set(input.value);
    change(Number(input.value));
  });
  return { element, set };
}

function createSelect(label, change) {
  const select = make("select", {});
  select.addEventListener("change", () => change(select.value));
  return { element: make("label", { class: "field" }, label, select), select };
}

const option = (value, label) => make("option", { value }, label);

/** Create options of layers, grouped by block: the first part of their names, with the number that follows it. */
function layerOptions(names) {
  const groups = Map.groupBy(names, (name) => name.match(/^[^.]+(\.\d+)?/)[0]);
  return [...groups].flatMap(([label, group]) => {
    const options = group.map((name) => option(name, name));
    return group.length > 1 ? make("optgroup", { label }, options) : options;
  });
}

/** Create a dialog with a title and a button that closes it. */
function createDialog() {
  const title = make("h2", {});
  const body = make("div", { class: "dialog-body" });
  const close = iconButton("Close", CROSS);
  const dialog = make("dialog", { class: "facts", "aria-label": "Details" }, make("div", { class: "top" }, title, close), body);
  close.addEventListener("click", () => dialog.close());
  closeOutside(dialog);
  const open = (text, ...children) => {
    title.textContent = text;
    dialog.setAttribute("aria-label", text);
    body.replaceChildren(...children);
    if (!dialog.open) dialog.showModal();
  };
  return { dialog, open, body };
}

/** Save a file under a name, as a click on a link does. */
function download(file, name) {
  const address = URL.createObjectURL(file);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/**
 * Build the explorer in `root`. `host` carries the theme.
 *
 * `transport.request(name, body, signal)` yields answers; maps hold arrays, and pictures are blobs. `transport.whyItWaits`
 * is said where none arrives.
 */
async function mount(root, host, transport) {
  const notice = make("p", { class: "notice", role: "alert", hidden: "" });
  root.replaceChildren(notice);
  const complain = (error) => {
    notice.textContent = error?.message ?? "";
    notice.hidden = !error;
  };
  let about;
  try {
    about = await first(transport.request("about"));
  } catch (error) {
    return complain(error);
  }

  const methods = new Map(about.methods.map((method) => [method.name, method]));
  const kept = JSON.parse(transport.state?.() ?? "{}"); // before a reload
  const state = { image: null, methods: kept.methods ?? [about.method], target: null, layer: kept.layer ?? null };
  function keep() {
    const { image, methods, target, layer } = state;
    if (image) transport.state?.(JSON.stringify({ image: image.image, methods, target, layer, heat, style }));
  }
  const style = {};
  let heat = 0; // percent
  let running = new AbortController(); // the latest question; all others are cancelled

  // The elements.

  const status = make("p", { class: "status", role: "status" });
  const isCase = about.inputs.length > 0; // of several inputs
  const picker = make("input", { type: "file", accept: isCase ? "image/*,.npy" : "image/*", class: "hidden", "aria-label": "Photo", tabindex: "-1" });
  const chooseFile = () => picker.click();
  const openButton = make("button", { type: "button", class: "primary" }, "Open a photo");
  openButton.addEventListener("click", chooseFile);
  openButton.hidden = isCase;
  const themeButton = iconButton("Dark colours", "M8 2.5a5.5 5.5 0 1 0 .01 0");
  themeButton.firstChild.append(svg("path", { class: "full", d: "M8 2.5a5.5 5.5 0 0 1 0 11z" }));
  const helpButton = iconButton("About, and keys", "M8 2.5a5.5 5.5 0 1 0 .01 0M8 7.3v3.4M8 5.1v.2");
  const name = make("div", { class: "title" }, make("h1", {}, about.model), status);
  const header = make("header", {}, make("div", { class: "bar" }, name, openButton, themeButton, helpButton));
  const dialog = createDialog();

  const choices = createChoices(about, (target) => ask({ target }));
  const text = make("input", { type: "text", placeholder: "a photo of a cat", autocomplete: "off" });
  const otherText = make("input", { type: "text", placeholder: "a photo of a dog", autocomplete: "off" });
  const textForm = make(
    "form", { class: "group text" },
    make("h2", {}, "Explain a text"),
    make("label", { class: "field" }, "Text", text),
    make("label", { class: "field" }, "Rather than (optional)", otherText),
    make("button", { type: "submit" }, "Explain the text"),
  );
  textForm.hidden = !about.asks.includes("text");
  text.value = kept.target?.text ?? "";
  otherText.value = kept.target?.against?.[0] ?? "";
  textForm.addEventListener("submit", (event) => {
    event.preventDefault();
    const [wanted, other] = [text.value.trim(), otherText.value.trim()];
    if (wanted) ask({ target: { text: wanted, ...(other ? { against: [other] } : {}) } });
  });

  const where = createSelect("Part of the region", (value) => ask({ target: { ...state.target, where: value === "point" ? regionPoint() : value } }));
  where.select.append(option("predicted", "all of it"), option("border", "its border"), option("point", "the pixel at the marker"));

  const others = (name) => state.methods.slice(1).filter((other) => other !== name);
  const method = createSelect("Method", (name) => ask({ methods: [name, ...others(name)] }));
  const second = createSelect("Compare with", (value) => ask({ methods: [state.methods[0], value].filter(Boolean) }));
  const layer = createSelect("Layer", (value) => ask({ layer: value || null }));
  const summary = make("p", { class: "legend" });
  const group = (label, many) => make("optgroup", { label }, about.methods.filter((one) => !one.inapplicable && one.many_passes === many).map((one) => option(one.name, one.title)));
  const inapplicable = () => {
    const rows = about.methods.filter((one) => one.inapplicable);
    const choices = rows.map((one) => make("option", { value: one.name, title: one.inapplicable }, one.title));
    return rows.length ? [make("optgroup", { label: "Does not apply to this model" }, choices)] : [];
  };
  const grouped = () => [group("One or a few passes", false), group("Many passes: a first map, then refined", true), ...inapplicable()];
  method.select.append(...grouped());
  second.select.append(option("", "nothing"), ...grouped());
  layer.select.append(option("", `the default${about.layer ? ` (${about.layer})` : ""}`), ...layerOptions(about.layers));

  const percentText = (value) => `${value}%`;
  const percentileText = (value) => (value > 100 ? "auto" : value === 100 ? "maximum" : percentText(value));
  const sliders = {
    heat: createSlider("Heat map", { max: 100 }, percentText, setHeat),
    threshold: createSlider("Hide values below", { max: 95 }, percentText, (value) => restyle({ threshold: value / 100 })),
    percentile: createSlider("Full colour at", { min: 80, max: AUTO, step: 0.5 }, percentileText, (value) => restyle({ percentile: value > 100 ? "auto" : value })),
  };
  const reset = make("button", { type: "button", class: "link" }, "Reset");
  function setLooks(opacity, { threshold, percentile }) {
    setHeat(opacity);
    sliders.threshold.set(100 * threshold);
    sliders.percentile.set(percentile === "auto" ? AUTO : percentile);
    restyle({ threshold, percentile });
  }
  const DEFAULTS = [Math.round(100 * about.opacity), { threshold: 0, percentile: "auto" }];
  reset.addEventListener("click", () => setLooks(...DEFAULTS));
  const looks = make("div", { class: "looks", role: "group", "aria-label": "Appearance" }, Object.values(sliders).map((slider) => slider.element), reset);

  const panels = [0, 1].map((at) => (isCase ? about.inputs : [null]).map((name, input) => createPanel(about, name, {
    pick: (position, isChosen) => pick(input, position, isChosen), act: (kind) => act(at, input, kind), chooseBox: (index) => ask({ target: { box: { index } } }),
  })));
  const maps = make("div", { class: "maps" });
  if (isCase) maps.style.gridTemplateColumns = `repeat(${about.inputs.length}, minmax(0, 1fr))`;
  const stage = make("section", { class: "stage", "aria-label": "Photo and map" }, looks, maps);
  const side = make("aside", { class: "side", "aria-label": "Question" },
    choices.element, textForm, where.element,
    make("section", { class: "group", "aria-label": "How" }, make("h2", {}, "How"), method.element, summary, second.element, layer.element));
  const work = make("main", { class: "work", hidden: "" }, stage, side);

  const chooser = make("button", { type: "button", class: "primary" }, "Choose a photo");
  chooser.addEventListener("click", chooseFile);
  const drop = make("main", { class: "drop" }, icon("M8 10.5v-8M4.8 5.7 8 2.5l3.2 3.2M2.5 10v2.5a1 1 0 0 0 1 1h9a1 1 0 0 0 1-1V10"),
    make("h2", {}, "Which pixels drive the prediction?"), make("p", {}, "Drop a photo here, paste one, or"), chooser);
  const strip = make("ul", { class: "strip", role: "list", "aria-label": about.sample ? "Sample photo" : "Photos" });
  const hint = make("p", { class: "legend" }, about.sample ? "No photo at hand? Try this one:" : "More photos");
  const offered = make("nav", { class: "offered", "aria-label": "Photos" }, hint, strip);
  offered.hidden = !about.images.length;
  const areas = about.inputs.map((name, input) => {
    const area = make("button", { type: "button", class: "thumb area", "data-input": input }, make("img", { alt: "" }), make("span", { dir: "auto" }, name));
    area.addEventListener("click", () => {
      picker.dataset.input = input;
      chooseFile();
    });
    for (const ofMethod of panels) ofMethod[input].element.dataset.input = input;
    return area;
  });
  const areasHint = make("p", { class: "legend" }, "Drop a file on an input, or choose one, to replace it");
  const replaced = make("nav", { class: "offered inputs", "aria-label": "Inputs" }, areasHint, make("ul", { class: "strip", role: "list" }, areas.map((area) => make("li", {}, area))));
  replaced.hidden = !isCase;
  drop.hidden = isCase;
  root.replaceChildren(header, notice, drop, replaced, work, offered, picker, dialog.dialog);

  // Photos.

  const seen = new IntersectionObserver((entries) => {
    for (const { target: button, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(button);
      first(transport.request("thumbnail", { index: Number(button.dataset.index) }))
        .then(({ file }) => button.prepend(make("img", { src: URL.createObjectURL(file), alt: "" })))
        .catch(() => {}); // the name is shown instead
    }
  }, { rootMargin: "200px" });
  for (const { index, name } of about.images) {
    const button = make("button", { type: "button", class: "thumb", "data-index": index, title: name }, make("span", { dir: "auto" }, name));
    button.addEventListener("click", () => open({ index }, button));
    strip.append(make("li", {}, button));
    seen.observe(button);
  }

  /** Start a question; earlier ones are cancelled, and their answers are not shown. */
  function begin(text) {
    running.abort();
    running = new AbortController();
    complain(null);
    status.textContent = text;
    const { signal } = running;
    setTimeout(() => {
      if (!signal.aborted && status.textContent === text) status.textContent = `${text} ${transport.whyItWaits}`;
    }, PATIENCE);
    return signal;
  }

  async function open(source, button = null) {
    const signal = begin(source.file ? `Opening ${source.file.name}…` : "Opening the photo…");
    root.classList.add("opening");
    for (const other of strip.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    button?.setAttribute("aria-current", "true");
    try {
      const image = await first(transport.request("image", source, signal));
      const pictures = await Promise.all(image.images.map((_, input) => first(transport.request("picture", { image: image.image, input }, signal))));
      if (signal.aborted) return;
      state.addresses?.forEach((address) => URL.revokeObjectURL(address));
      Object.assign(state, { image, addresses: pictures.map(({ file }) => URL.createObjectURL(file)), target: source.image ? kept.target : defaultTarget(image) });
      state.addresses.forEach((address, input) => {
        const shown = input ? image.images[input] : image; // boxes and regions are of the first photo
        for (const ofMethod of panels) ofMethod[input].open(shown, address);
        if (isCase) areas[input].firstChild.src = address;
      });
      drop.hidden = true;
      offered.hidden = about.sample || (isCase && about.images.length === 1);
      work.hidden = false;
      root.classList.remove("opening");
      ask({});
    } catch (error) {
      if (signal.aborted) return;
      root.classList.remove("opening");
      status.textContent = "";
      if (error.kind !== "gone") ask({}); // the new photo had stopped the question about the old one
      complain(error);
    }
  }

  const defaultTarget = (image) => (state.target?.text ? state.target : (choicesOf(image)[0]?.target ?? null));

  // Questions.

  /** Change the question, and explain. */
  function ask(changes) {
    Object.assign(state, changes);
    if (!state.image || root.classList.contains("opening")) return; // the photo is explained once it is open
    showControls();
    explain();
  }

  function showControls() {
    const [name, other] = state.methods;
    method.select.value = name;
    second.select.value = other ?? "";
    for (const choice of second.select.querySelectorAll("option")) choice.disabled = choice.value === name;
    layer.select.value = state.layer ?? "";
    layer.element.hidden = !state.methods.some((one) => methods.get(one).reads_layer) || !about.layers.length;
    summary.textContent = methods.get(name).summary;
    choices.show(state.image, state.target);
    where.element.hidden = state.target?.region == null;
    where.select.value = Array.isArray(state.target?.where) ? "point" : (state.target?.where ?? "predicted");
    maps.replaceChildren(...state.methods.flatMap((_, at) => panels[at].map((panel) => panel.element)));
    maps.classList.toggle("two", !isCase && state.methods.length === 2);
    keep();
  }

  async function explain() {
    const titles = state.methods.map((name) => methods.get(name).title);
    const signal = begin(`Explaining by ${titles.join(" and ")}…`);
    const each = (name) => panels[state.methods.indexOf(name)];
    titles.forEach((title, at) => panels[at].forEach((panel) => panel.begin(title, state.target)));
    if (!state.target && about.asks.includes("text")) {
      for (const panel of state.methods.flatMap(each)) panel.fail("Write a text to explain, such as “a photo of a cat”.", false);
      status.textContent = "";
      return text.focus();
    }
    const question = { image: state.image.image, methods: state.methods, target: state.target, layer: state.layer, options: {} };
    const missing = new Set(state.methods);
    try {
      for await (const answer of transport.request("explain", question, signal)) {
        if (signal.aborted) return;
        if (answer.error) throw new Error(answer.error); // of the whole question
        for (const panel of answer.input == null ? each(answer.method) : [each(answer.method)[answer.input]]) panel.show(answer);
        restyleAll(each(answer.method));
        if (answer.done) missing.delete(answer.method);
        const { title } = methods.get(answer.method);
        const shown = answer.done ? `${answer.row?.name}, explained by ${title}` : `First map of ${title}, refining…`;
        if (answer.row) status.textContent = answer.row.error ?? shown;
      }
      if (!signal.aborted && missing.size) throw new Error("The connection ended before the map was complete. Try again.");
    } catch (error) {
      if (signal.aborted) return;
      status.textContent = "Not explained";
      for (const panel of [...missing].flatMap(each)) panel.fail(error.message);
      if (error.kind === "gone") complain(error);
    }
  }

  /** Read the values at a position. If it is chosen, explain the region there. */
  function pick(input, position, isChosen) {
    const texts = state.methods.map((name, at) => [panels[at][input].mark(position), methods.get(name).title]);
    status.textContent = texts.map(([text, title]) => (texts.length > 1 ? `${title}: ${text}` : text)).join("; ");
    if (input) return;
    state.position = position;
    const region = isChosen && state.image.labels ? state.image.regions[valueAt(state.image.labels, state.image, position)] : null;
    if (!region) return;
    const { where = "predicted" } = state.target ?? {};
    const target = { region: region.target, where: Array.isArray(where) ? regionPoint() : where };
    if (!sameTarget(target, state.target)) ask({ target });
  }

  const regionPoint = () => (state.position ?? [state.image.width / 2, state.image.height / 2]).map(Math.round);

  // Appearance.

  function setHeat(value) {
    heat = value;
    sliders.heat.set(value);
    maps.style.setProperty("--heat", value / 100);
    keep();
  }

  function restyle(changes) {
    Object.assign(style, changes);
    state.methods.forEach((_, at) => restyleAll(panels[at]));
    keep();
  }

  /** Colour the maps of one method on one scale. */
  function restyleAll(ofMethod) {
    const limit = Math.max(...ofMethod.map((panel) => panel.limit(style.percentile)));
    for (const panel of ofMethod) panel.restyle(style, limit);
  }

  // Trust cards, and files.

  async function act(at, input, kind) {
    const name = state.methods[at];
    const { title } = methods.get(name);
    const question = { image: state.image.image, input, methods: [name], target: state.target, layer: state.layer, options: {} };
    const stop = new AbortController();
    dialog.dialog.addEventListener("close", () => stop.abort(), { once: true });
    const [heading, wait] = kind === "trust"
      ? [`Can I trust the map of ${title}?`, `Measuring for about ${CARD_SECONDS} seconds…`]
      : [`Save: ${title}`, "Preparing the file…"];
    dialog.open(heading, make("p", { role: "status" }, wait), make("progress", { "aria-label": "Progress" }));
    try {
      if (kind === "trust") {
        const { trust, summary, notes } = await first(transport.request("trust", { ...question, seconds: CARD_SECONDS }, stop.signal));
        const lines = notes.map((note) => make("p", { class: "legend" }, note));
        return dialog.body.replaceChildren(make("p", {}, summary), ...lines, trustCard(trust));
      }
      const saved = { ...question, as: kind, style: { opacity: heat / 100, ...style } };
      const { file } = await first(transport.request("save", saved, stop.signal));
      const stem = `${isCase ? about.inputs[input] : state.image.name.replace(/\.[^.]*$/, "")}.${name}`;
      if (kind !== "code") {
        download(file, `${stem}.${kind}.png`);
        status.textContent = `Saved ${stem}.${kind}.png`;
        return dialog.dialog.close();
      }
      const code = await file.text();
      const copy = make("button", { type: "button" }, "Copy");
      copy.addEventListener("click", async () => {
        const isCopied = await navigator.clipboard?.writeText(code).then(() => true, () => false); // none without https
        copy.textContent = isCopied ? "Copied" : "Select the text to copy it";
      });
      const save = make("button", { type: "button" }, "Save as a file");
      save.addEventListener("click", () => download(file, `${stem}.py`));
      dialog.body.replaceChildren(make("pre", { tabindex: "0" }, code), make("div", { class: "actions" }, copy, save));
    } catch (error) {
      if (!stop.signal.aborted) dialog.body.replaceChildren(make("p", { class: "notice", role: "alert" }, error.message));
    }
  }

  // Drop, paste, pick, keys.

  const imageOf = (data) => [...(data?.files ?? [])][0];
  const isFile = (event) => [...event.dataTransfer.types].includes("Files");
  const areaAt = (event) => (isCase ? event.target.closest("[data-input]") : root);
  let hovered = null;
  function hover(area) {
    hovered?.classList.remove("dropping");
    area?.classList.add("dropping");
    hovered = area;
  }
  function receive(file, area) {
    if (!file) return;
    if (!area) return complain(new Error(`Drop the file on one of the inputs: ${about.inputs.join(", ")}.`));
    open(isCase ? { file, input: area.dataset.input, replaced: state.image?.image } : { file });
  }
  root.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    hover(areaAt(event));
  });
  root.addEventListener("dragleave", (event) => {
    if (!root.contains(event.relatedTarget)) hover(null);
  });
  root.addEventListener("drop", (event) => {
    hover(null);
    if (!isFile(event)) return;
    event.preventDefault();
    receive(imageOf(event.dataTransfer), areaAt(event));
  });
  picker.addEventListener("change", () => {
    receive(picker.files[0], picker);
    picker.value = "";
  });
  // A notebook pastes into its own cells, so a widget listens only where it has the focus.
  (host === document.documentElement ? document : root).addEventListener("paste", (event) => {
    receive(imageOf(event.clipboardData), areaAt(event));
  });
  let heatBefore = heat;
  root.addEventListener("keydown", (event) => {
    if (event.key !== "h" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=range]), select, pre")) return;
    if (heat) heatBefore = heat;
    setHeat(heat ? 0 : heatBefore);
  });
  helpButton.addEventListener("click", () => {
    const keys = Object.entries(HELP).map(([key, what]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, what)));
    const classes = about.classes && integer.format(about.classes.length);
    const own = facts({ model: about.model, saliency: about.version, classes, methods: about.methods.length });
    const text = make("p", {}, "The colours show which pixels drive the score of the model. Photos are sent only to the computer that runs the model.");
    dialog.open("About", text, own, make("h3", {}, "Keys"), make("dl", {}, keys));
  });

  connectTheme(host, themeButton);
  setLooks(kept.heat ?? DEFAULTS[0], kept.style ?? DEFAULTS[1]);
  host.dataset.ready = "";
  if (kept.image) open({ image: kept.image });
  else if (about.images.length && !about.sample) open({ index: about.images[0].index }, strip.querySelector("button"));
}
