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

  // Cancel the job and hide its status line.
  reset() {
    this.cancel();
    this.abort = null;
    this.node.hidden = true;
  }

  // Run the job, after cancelling the previous one; returns whether it finished.
  async run(path, body, onEvent) {
    this.cancel();
    const abort = (this.abort = new AbortController());
    const bar = el("progress", { max: 1, value: 0, ariaLabel: "progress" });
    const status = el("span", {}, "starting…");
    const stop = el("button", { type: "button", className: "quiet", title: "Stop this job on the server", onclick: () => abort.abort() }, "Cancel");
    this.node.hidden = false;
    this.node.classList.remove("failed");
    fill(this.node, bar, status, stop);
    const clock = new Clock();
    const tick = setInterval(() => { if (clock.fraction) status.textContent = clock.text; }, 1000);
    try {
      await stream(path, body, (event) => {
        if (this.abort !== abort) return;
        if (event.event === "queued") {
          if (event.position === 0) clock.start();
          status.textContent = event.position === 0 ? "running…" : `position ${event.position} in the queue`;
        } else if (event.event === "progress") {
          bar.value = event.fraction;
          clock.advance(event.fraction);
          status.textContent = clock.text;
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
      clearInterval(tick);
      if (this.abort === abort) this.abort = null;
    }
  }

  showMessage(message, isError = true) {
    this.node.hidden = false;
    this.node.classList.toggle("failed", isError);
    fill(this.node, el("span", { role: isError ? "alert" : "status" }, message));
  }
}

// The time left, from the time that the work itself took so far; waiting in the queue is not counted.
export class Clock {
  constructor(now = () => performance.now() / 1000) {
    Object.assign(this, { now, fraction: 0, started: now(), reported: 0 });
  }

  start() {
    this.started = this.now();
  }

  advance(fraction) {
    Object.assign(this, { fraction, reported: this.now() });
  }

  get text() {
    const done = `${Math.round(100 * this.fraction)} %`;
    const elapsed = this.reported - this.started;
    if (this.fraction < 0.05 || elapsed < 1) return done;
    const left = (elapsed * (1 - this.fraction)) / this.fraction - (this.now() - this.reported);
    return left > 0 ? `${done}, about ${Math.ceil(left)} s left` : `${done}, takes longer than expected`;
  }
}
