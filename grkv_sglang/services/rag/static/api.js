// The service's API: requests with the key, uploads with progress, streams of events.

const KEY = "grkv-rag-key";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

const headers = () => ({ Authorization: `Bearer ${key.get()}` });
const UNREACHED = "The service is not reached. Is it running?";

function errorOf(status, text) {
  try {
    const { code, message } = JSON.parse(text).error;
    return new ApiError(status, code, message);
  } catch {
    return new ApiError(status, "error", `The service answered with status ${status}.`);
  }
}

async function send(method, path, { body, signal } = {}) {
  const options = { method, headers: headers(), signal };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(`/api/v1${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreached", UNREACHED);
  }
  if (!response.ok) throw errorOf(response.status, await response.text());
  return response;
}

const json = async (method, path) => (await send(method, path)).json();

export const me = () => json("GET", "/me");
export const listDocuments = async () => (await json("GET", "/documents")).documents;
export const deleteDocument = (id) => json("DELETE", `/documents/${id}`);
export const warmDocument = (id) => json("POST", `/documents/${id}/warm`);

// XMLHttpRequest, because fetch does not tell how much of an upload is done.
export function upload(file, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const form = new FormData();
    form.append("file", file);
    request.open("POST", "/api/v1/documents");
    request.setRequestHeader("Authorization", headers().Authorization);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onerror = () => reject(new ApiError(0, "unreached", UNREACHED));
    request.onload = () => {
      if (request.status >= 200 && request.status < 300) {
        resolve({ isNew: request.status === 201, document: JSON.parse(request.responseText) });
      } else {
        reject(errorOf(request.status, request.responseText));
      }
    };
    request.send(form);
  });
}

// Events of an answer, as [name, data].
export async function* ask(question, signal) {
  const response = await send("POST", "/questions", { body: question, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (pending + value).split("\n\n");
      pending = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
        const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
        if (name && data) yield [name, JSON.parse(data)];
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreached", "The connection to the service broke off.");
  }
}
