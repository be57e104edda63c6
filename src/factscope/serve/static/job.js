// A job on the server and its status line: position in the queue, progress, Cancel button, error.

import { stream } from "./api.js";
import { el, fill } from "./dom.js";

export class Job {
  constructor(node) {
    this.node = node;
    this.abort = null;
  }

  cancel() {
    this.abort?.abort();
  }

  // Run the job, after cancelling the previous one; returns whether it finished.
  async run(path, body, onEvent) {
    this.cancel();
    const abort = (this.abort = new AbortController());
    const bar = el("progress", { max: 1, value: 0 });
    const status = el("span", {}, "starting…");
    const stop = el("button", { type: "button", className: "quiet", onclick: () => abort.abort() }, "Cancel");
    this.node.hidden = false;
    this.node.classList.remove("failed");
    fill(this.node, bar, status, stop);
    const started = performance.now();
    try {
      await stream(path, body, (event) => {
        if (this.abort !== abort) return;
        if (event.event === "queued") {
          status.textContent = event.position === 0 ? "running…" : `position ${event.position} in the queue`;
        } else if (event.event === "progress") {
          bar.value = event.fraction;
          status.textContent = `${Math.round(100 * event.fraction)} %${timeLeft(started, event.fraction)}`;
        } else {
          onEvent(event);
        }
      }, abort.signal);
      if (this.abort === abort) this.node.hidden = true;
      return this.abort === abort;
    } catch (error) {
      if (this.abort === abort) this.showMessage(error.name === "AbortError" ? "cancelled" : error.message, error.name !== "AbortError");
      return false;
    } finally {
      if (this.abort === abort) this.abort = null;
    }
  }

  showMessage(message, isError = true) {
    this.node.hidden = false;
    this.node.classList.toggle("failed", isError);
    fill(this.node, el("span", { role: isError ? "alert" : "status" }, message));
  }
}

function timeLeft(started, fraction) {
  const elapsed = (performance.now() - started) / 1000;
  if (fraction < 0.05 || elapsed < 1) return "";
  return `, ${Math.ceil((elapsed * (1 - fraction)) / fraction)} s left`;
}
