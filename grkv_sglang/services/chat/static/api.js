// The server's routes. Everything that goes wrong is an ApiError with words for people.

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const unreachable = () => new ApiError(0, "unreachable", "The chat server does not answer. Is it running, and are you online?");

async function open(method, path, body, signal) {
  let response;
  try {
    response = await fetch(`/api${path}`, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch {
    throw unreachable();
  }
  if (response.ok) return response;
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    error = { code: "error", message: `The chat server failed (status ${response.status}).` };
  }
  throw new ApiError(response.status, error.code, error.message);
}

/** The JSON of an answer; null where it has none. */
export async function call(method, path, body) {
  const response = await open(method, path, body);
  return response.status === 204 ? null : response.json();
}

/** Read a stream of events: `onEvent(name, data)` for each. False where there is no stream. */
export async function follow(method, path, body, onEvent, signal) {
  const response = await open(method, path, body, signal);
  if (response.status === 204) return false;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch {
      throw unreachable();
    }
    if (part.done) return true;
    const blocks = (pending + part.value).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const [first, second] = block.split("\n");
      if (first.startsWith("event: ")) onEvent(first.slice(7), JSON.parse(second.slice(6)));
    }
  }
}
