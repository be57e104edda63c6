// Talking with the server: plain answers, and streams of events, one a line of JSON.

export class Refusal extends Error {
  constructor(error) {
    super(error?.message ?? "the server did not answer; is it still running?");
    this.kind = error?.kind ?? "NoAnswer";
  }
}

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal();
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Refusal(body.error ?? { message: `the server answered ${response.status}` });
}

export const get = async (path) => (await answer(path)).json();

export const remove = async (path) => (await answer(path, { method: "DELETE" })).json();

// Each event is given to `hear`. Where the signal aborts, the server stops the work.
export async function stream(path, body, hear, signal) {
  const headers = { "content-type": "application/json" };
  const response = await answer(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new Refusal(event.error);
      hear(event);
    }
  }
}
