// Requests to the server of `saliency serve`.

const decoded = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

class RequestError extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

/** Return a transport: `request(name, body, signal)` yields the answers, with maps as arrays and pictures as blobs. */
function serverTransport() {
  const page = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16)).join("");
  const ADDRESSES = {
    image: ({ file, index, image, input, replaced }) => [`image${file ? "" : `/${image ?? index}`}${input == null ? "" : `?input=${input}&case=${replaced}`}`, { method: "POST", body: file ?? "", headers: { "X-Name": encodeURIComponent(file?.name ?? "") } }],
    picture: ({ image, input }) => [`image/${image}?input=${input}`, {}],
    thumbnail: ({ index }) => [`thumbnail/${index}`, {}],
    about: () => ["about", {}],
  };
  const posted = (name) => (body) => [name, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } }];

  async function* request(name, body, signal) {
    const [address, options] = (ADDRESSES[name] ?? posted(name))(body);
    const headers = { ...options.headers, "X-Page": page };
    const unreachable = (error) => {
      if (signal?.aborted) throw error;
      throw new RequestError("The server does not answer. Start saliency serve again, and open the address that it prints.", "gone");
    };
    const response = await fetch(address, { ...options, headers, signal }).catch(unreachable);
    if (!response.ok) {
      const { error, error_kind } = await response.json().catch(() => ({}));
      throw new RequestError(error ?? `The server answered ${response.status}.`, error_kind);
    }
    const type = response.headers.get("Content-Type") ?? "";
    if (type.startsWith("application/x-ndjson")) {
      for await (const line of linesOf(response.body, unreachable)) yield withArrays(JSON.parse(line));
    } else if (type.startsWith("application/json")) yield withArrays(await response.json());
    else yield { file: await response.blob() };
  }
  const state = (value) => storedSetting(`saliency-explorer ${location.pathname}`, value, "sessionStorage"); // over a reload
  return { request, state, whyItWaits: "The model is slow, or another page uses it." };
}

/** Yield the lines of a body as they arrive. */
async function* linesOf(body, unreachable) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(unreachable);
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter(Boolean);
  }
  if (rest) yield rest;
}

/** Return an answer with its base64 values as arrays. */
function withArrays(answer) {
  if (answer.map) answer.map.values = new Float32Array(decoded(answer.map.values).buffer);
  if (answer.labels) answer.labels.values = decoded(answer.labels.values);
  return answer;
}

const root = document.getElementById("explorer");
mount(root, document.documentElement, serverTransport());
