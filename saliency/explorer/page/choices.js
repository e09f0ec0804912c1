// The list of classes, boxes or regions that can be explained, with a search over all classes.

const MOST_FOUND = 12; // rows of a search

/** Return the questions about an image: rows with a name, a share of 0 to 1, its text, and the target. */
function choicesOf(image) {
  const row = (name, share, target, other) => ({ name, share, text: probabilityText(share), target, other });
  return [
    ...(image.boxes ?? []).map((box) => row(box.name, box.probability, { box: { index: box.index } })),
    ...(image.regions ?? []).map((region) => ({ ...row(region.name, region.share, { region: region.target, where: "predicted" }), isRegion: true })),
    ...(image.top ?? []).map((top) => row(top.name, top.probability, { class: top.target }, top.target)),
  ];
}

const sameTarget = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Normalise a text for comparison: lower case, without accents. */
const plainText = (text) => String(text).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** Create the list. `choose(target)` is called with the chosen target. */
function createChoices(about, choose) {
  const isSearchable = about.classes && about.asks.includes("class");
  const list = make("ul", { class: "choices", role: "list" });
  const placeholder = `Search ${integer.format(about.classes?.length ?? 0)} classes`;
  const query = make("input", { type: "search", placeholder, autocomplete: "off", spellcheck: "false" });
  const search = make("label", { class: "search" }, make("span", { class: "hidden" }, "Search all classes"), icon("M7 2.5a4.5 4.5 0 1 0 .01 0m3.5 8 3 3"), query);
  const against = make("p", { class: "against" });
  const title = make("h2", {});
  const element = make("section", { class: "group", "aria-label": "Explained" }, title, isSearchable ? search : null, list, against);
  let image = null;
  let target = null;

  const nameOf = (index) => about.classes?.[index] ?? `class ${index}`;
  function rowOfClass(index) {
    const share = image?.probabilities?.[index] ?? null;
    return { name: nameOf(index), share, text: probabilityText(share), target: { class: index }, other: index };
  }

  function found() {
    const words = plainText(query.value).split(/\s+/).filter(Boolean);
    const indices = [...about.classes.keys()].filter((index) => words.every((word) => plainText(nameOf(index)).includes(word)));
    return indices.slice(0, MOST_FOUND).map(rowOfClass);
  }

  function choiceRow(choice) {
    const isChosen = target?.class != null ? target.class === choice.other : sameTarget({ ...target, where: choice.target.where }, choice.target);
    const texts = [make("span", { dir: "auto" }, choice.name), make("span", { class: "share" }, choice.text)];
    const button = make("button", { type: "button", class: "choice", "aria-pressed": isChosen }, texts);
    if (choice.share != null) button.style.setProperty("--share", `${100 * choice.share}%`);
    button.addEventListener("click", () => select(choice.target));
    const isClass = choice.other != null && target?.class != null && !isChosen;
    if (!isClass) return make("li", {}, button);
    const isAgainst = target.against === choice.other;
    const about = { "aria-pressed": isAgainst, "aria-label": `Rather than ${choice.name}`, title: `Why ${nameOf(target.class)} rather than ${choice.name}?` };
    const versus = make("button", { type: "button", class: "versus", ...about }, "vs");
    versus.addEventListener("click", () => select({ class: target.class, ...(isAgainst ? {} : { against: choice.other }) }));
    return make("li", {}, button, versus);
  }

  function select(chosen) {
    query.value = "";
    choose(chosen);
  }

  function show() {
    const isSearch = query.value.trim() !== "";
    const choices = isSearch ? found() : image ? choicesOf(image) : [];
    const missing = [target?.class, target?.against].filter((index) => index != null && !choices.some((choice) => choice.other === index));
    if (!isSearch) choices.push(...missing.map(rowOfClass));
    const focused = [...list.querySelectorAll("button")].indexOf(list.getRootNode().activeElement);
    const none = make("li", { class: "legend" }, isSearch ? "No class has this name." : "Nothing was found in this photo.");
    list.replaceChildren(...(choices.length ? choices.map(choiceRow) : [none]));
    if (focused >= 0) list.querySelectorAll("button")[focused]?.focus();
    title.textContent = `Explain a ${about.asks.includes("class") ? "class" : about.asks.includes("box") ? "detection" : "region"}`;
    const clear = make("button", { type: "button", class: "link" }, "explain it alone");
    clear.addEventListener("click", () => select({ class: target.class }));
    const contrast = () => [`Why ${nameOf(target.class)} rather than ${nameOf(target.against)}? · `, clear];
    against.replaceChildren(...(target?.against != null ? contrast() : ["vs: why the chosen class rather than this one?"]));
    against.hidden = target?.class == null;
  }
  query.addEventListener("input", show);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter") list.querySelector("button")?.click();
    else if (event.key === "Escape" && query.value) query.value = "";
    else return;
    event.preventDefault();
    show();
  });
  return {
    element,
    show(shownImage, shownTarget) {
      if (shownImage !== image) query.value = "";
      image = shownImage;
      target = shownTarget;
      element.hidden = about.asks.includes("text");
      show();
    },
  };
}
