// Search on a site that is opened as files: browsers refuse workers there, so a hidden frame runs the worker's script.
// Zensical would load such a script from unpkg.com, unless a polyfill has "iframe-worker" in its path.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe")
    #ready

    constructor(url) {
      super()
      this.#ready = new Promise((resolve, reject) => {
        this.#frame.onload = () => {
          const scope = this.#frame.contentWindow
          scope.postMessage = (data) => {
            const event = new MessageEvent("message", { data })
            this.onmessage?.(event)
            this.dispatchEvent(event)
          }
          const script = scope.document.createElement("script")
          Object.assign(script, { src: url, onload: resolve, onerror: reject })
          scope.document.body.append(script)
        }
      })
      this.#ready.catch((event) => this.onerror?.(event))
      this.#frame.hidden = true
      this.#frame.srcdoc = "<body></body>"
      document.body.append(this.#frame)
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) })
      this.#ready.then(() => this.#frame.contentWindow?.dispatchEvent(event))
    }

    terminate() {
      this.#frame.remove()
    }
  }
}
