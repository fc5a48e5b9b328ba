// The server: requests with the key, its errors, and the events of a stream.

import { $ } from "./dom.js";

const KEY = "memstore-key";
export const ABOUT = "/v1/memstore";
export const DOCUMENTS = "/v1/memstore/documents";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

export function refused(status, text) {
  let message = text || `the server answered ${status}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not OpenAI's shape: show the text itself
  }
  if (status === 401) {
    message = sessionStorage.getItem(KEY) ? "the server does not accept this API key" : "";
    $("key-form").hidden = false;
    $("key").focus();
  }
  return new Refused(status, message);
}

async function send(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (!answer.ok) throw refused(answer.status, await answer.text());
  return answer;
}

export async function get(path) {
  return (await send(path)).json();
}

export async function remove(path) {
  return (await send(path, { method: "DELETE" })).json();
}

// Events of a POST, as they come.
export async function* events(path, body, signal) {
  const answer = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts)
      for (const line of part.split("\n"))
        if (line.startsWith("data: ") && line !== "data: [DONE]") {
          const event = JSON.parse(line.slice(6));
          if (event.error) throw new Refused(500, event.error.message);
          yield event;
        }
  }
}

// Upload one file; progress is called with the part that was sent, which fetch cannot report.
export function upload(file, progress) {
  return new Promise((resolve, reject) => {
    const form = new FormData(), request = new XMLHttpRequest();
    form.append("file", file, file.name);
    request.open("POST", DOCUMENTS);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.total && progress(event.loaded / event.total);
    request.onload = () =>
      request.status < 300
        ? resolve(JSON.parse(request.responseText))
        : reject(refused(request.status, request.responseText));
    request.onerror = () => reject(new Refused(0, "the server cannot be reached"));
    request.send(form);
  });
}

// fetch and its streams report a lost connection as a TypeError.
export const reason = (error) => (error instanceof TypeError ? "the server cannot be reached" : error.message);

// May the same request succeed later? Not if the server refused it.
export const passes = (error) => !(error.status < 500);

export function problem(error) {
  if (error !== null && error.name === "AbortError") return;
  $("problem").textContent = error === null ? "" : reason(error);
  $("problem").hidden = !$("problem").textContent;
}
