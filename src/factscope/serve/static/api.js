// Requests to the server: JSON responses, and streams of events with one JSON object per line.

export class ServerError extends Error {
  constructor(error) {
    super(error?.message ?? "the server did not respond; is it still running?");
    this.kind = error?.kind ?? "NoResponse";
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError();
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(body.error ?? { message: `the server responded with status ${response.status}` });
}

export const get = async (path) => (await request(path)).json();

const jsonBody = (body) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const post = async (path, body, signal) => (await request(path, { ...jsonBody(body), signal })).json();

export const remove = async (path) => (await request(path, { method: "DELETE" })).json();

// Call `onEvent` for each event. Aborting the signal cancels the job on the server.
export async function stream(path, body, onEvent, signal) {
  const response = await request(path, { ...jsonBody(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new ServerError(event.error);
      onEvent(event);
    }
  }
}
