// The explorer in a notebook: the same requests as messages of a widget, with buffers.

/** Return a transport over the model of a widget, as `serverTransport`. */
function widgetTransport(model) {
  let count = 0;

  async function* request(name, body, signal) {
    const id = `${Date.now()}-${(count += 1)}`;
    const { file, ...content } = body ?? {};
    const received = [];
    let wake = () => {};
    const receive = (message, buffers) => {
      if (message.id !== id) return;
      received.push({ ...message, buffers });
      wake();
    };
    const stop = () => {
      model.send({ id, name: "cancel" });
      wake();
    };
    model.on("msg:custom", receive);
    signal?.addEventListener("abort", stop, { once: true });
    try {
      model.send({ id, name, body: content, file: file?.name }, undefined, file ? [await file.arrayBuffer()] : []);
      for (;;) {
        while (!received.length && !signal?.aborted) await new Promise((resolve) => (wake = resolve));
        if (signal?.aborted) return;
        const { answer, type, error, error_kind: kind, end, buffers } = received.shift();
        if (error != null) throw Object.assign(new Error(error), { kind });
        if (end) return;
        yield withBuffer(answer, type, buffers[0]);
      }
    } finally {
      model.off("msg:custom", receive);
      signal?.removeEventListener("abort", stop);
    }
  }
  return { request, whyItWaits: "The kernel is busy, or has ended; then run the cell again." };
}

/** Return an answer with its binary part as an array or a blob. */
function withBuffer(answer, type, view) {
  if (!view) return answer;
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice();
  if (type) return { file: new Blob([bytes], { type }) };
  if (answer.map) answer.map.values = new Float32Array(bytes.buffer);
  if (answer.labels) answer.labels.values = bytes;
  return answer;
}

/** Return whether an element stands on a dark ground. */
function isOnDark(element) {
  for (let node = element; node instanceof Element; node = node.parentElement) {
    const [red, green, blue, alpha = 1] = getComputedStyle(node).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [];
    if (alpha > 0.5) return 0.3 * red + 0.6 * green + 0.1 * blue < 110;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export default {
  render({ model, el }) {
    const shadow = el.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(STYLE);
    shadow.adoptedStyleSheets = [sheet];
    const root = make("div", { class: "explorer" });
    shadow.append(root);
    root.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey) event.stopPropagation(); // "d d" would delete the cell
    });
    el.dataset.theme = isOnDark(el.parentElement ?? el) ? "dark" : "light";
    mount(root, el, widgetTransport(model));
  },
};
