// A job as people see it: its place in the queue, how far it is, a button to cancel it, its error.

import { stream } from "./api.js";
import { el, fill } from "./dom.js";

export class Job {
  constructor(node) {
    this.node = node;
    this.abort = null;
  }

  get running() {
    return this.abort !== null;
  }

  cancel() {
    this.abort?.abort();
  }

  // Runs to its end, and says whether it got there.
  async run(path, body, hear) {
    this.cancel();
    const abort = (this.abort = new AbortController());
    const bar = el("progress", { max: 1, value: 0 });
    const words = el("span", {}, "asking…");
    const stop = el("button", { type: "button", className: "quiet", onclick: () => abort.abort() }, "Cancel");
    this.node.hidden = false;
    this.node.classList.remove("failed");
    fill(this.node, bar, words, stop);
    const began = performance.now();
    try {
      await stream(path, body, (event) => {
        if (this.abort !== abort) return;
        if (event.event === "place") {
          words.textContent = event.place === 0 ? "at work…" : `place ${event.place} in the queue`;
        } else if (event.event === "progress") {
          bar.value = event.share;
          words.textContent = `${Math.round(100 * event.share)} %${left(began, event.share)}`;
        } else {
          hear(event);
        }
      }, abort.signal);
      if (this.abort === abort) this.node.hidden = true;
      return this.abort === abort;
    } catch (error) {
      if (this.abort === abort) this.fail(error.name === "AbortError" ? "cancelled" : error.message, error.name !== "AbortError");
      return false;
    } finally {
      if (this.abort === abort) this.abort = null;
    }
  }

  fail(words, loud = true) {
    this.node.hidden = false;
    this.node.classList.toggle("failed", loud);
    fill(this.node, el("span", { role: loud ? "alert" : "status" }, words));
  }
}

function left(began, share) {
  const gone = (performance.now() - began) / 1000;
  if (share < 0.05 || gone < 1) return "";
  return `, ${Math.ceil((gone * (1 - share)) / share)} s left`;
}
