// The documents of the memory: the list, files that are uploaded, and deletion.

import { ABOUT, DOCUMENTS, get, passes, problem, reason, remove, upload } from "./api.js";
import { $, bytes, count, el, figure, percent, when } from "./dom.js";
import { onlyThese } from "./ask.js";
import { openDocument } from "./document.js";
import { show } from "./page.js";
import { welcome } from "./welcome.js";

const EVERY = 400; // milliseconds between two looks at a file that is being ingested

let started = false, drawn = "", timer = null, latest = 0;
let soon = null, list = null; // what all uploads wait for: a look at the page, and at the list

export function startDocuments(served) {
  $("drop").hidden = !served.write;
  if (started) return;
  started = true;
  const drop = document.body;
  for (const name of ["dragenter", "dragover"])
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (!$("drop").hidden) for (const file of event.dataTransfer.files) add(file);
  });
  uploadsFrom($("files"));
}

// Upload the files that are chosen in an input.
export function uploadsFrom(input) {
  input.addEventListener("change", () => {
    for (const file of input.files) add(file);
    input.value = "";
  });
}

// Show the list, and its changes while a document is being ingested.
export async function documentsShown() {
  const mine = ++latest;
  clearTimeout(timer);
  const again = () => !$("view-documents").hidden && (timer = setTimeout(documentsShown, 5 * EVERY));
  try {
    const [{ data }, { stored }] = await Promise.all([get(DOCUMENTS), get(ABOUT)]);
    if (mine !== latest) return; // a later request is on its way
    $("totals").replaceChildren(...(stored === null ? [] : [
      figure(count(stored.documents), stored.documents === 1 ? "document" : "documents"),
      figure(count(stored.tokens), "tokens"), figure(bytes(stored.file_bytes), "on disk")]));
    if (data.some(reading)) again();
    const body = $("documents").tBodies[0], known = drawn;
    drawn = JSON.stringify(data.map(({ name, state, error, created }) => [name, state, error, created]));
    if (drawn === known) { // a button that asks for confirmation stays
      data.forEach((one, at) => figures(one).forEach((text, n) => (body.rows[at].cells[n + 1].textContent = text)));
      return;
    }
    $("no-documents").hidden = data.length > 0;
    $("documents").hidden = !data.length;
    body.replaceChildren(...data.map(row));
    onlyThese(data.map((one) => one.name));
  } catch (error) {
    problem(error);
    if (mine === latest && passes(error)) again();
  }
}

export const reading = (one) => ["waiting", "ingesting"].includes(one.state);
const sizeOf = (one) => (one.bytes || one.state !== "ready" ? bytes(one.bytes) : "as text");
const figures = (one) => [stateOf(one), count(one.tokens), count(one.blocks), sizeOf(one)];

function row(one) {
  const [state, tokens, blocks, size] = figures(one);
  return el("tr", { "data-name": one.name },
    el("th", { scope: "row" },
      el("button", { type: "button", class: "plain link", onclick: () => look(one.name) }, one.name),
      one.error ? el("div", { class: "quiet failed" }, one.error) : null),
    el("td", {}, state),
    el("td", { class: "number wide" }, tokens),
    el("td", { class: "number wide" }, blocks),
    el("td", { class: "number" }, size),
    el("td", { class: "wide" }, one.created === null ? "" : when(one.created)),
    el("td", { class: "for-writers" }, deletion(one.name)));
}

async function look(name) {
  show("ask");
  await openDocument({ document: name });
  $("document").focus();
}

function stateOf(one) {
  return one.state === "ingesting" ? `ingesting ${percent(one.progress)}` : one.state;
}

// A second click confirms: a deletion cannot be undone.
function deletion(name) {
  const button = el("button", { type: "button", class: "plain", "aria-label": `Delete ${name}` }, "Delete");
  const again = () => {
    button.textContent = "Delete";
    button.classList.remove("danger");
  };
  button.addEventListener("blur", again);
  button.addEventListener("click", async () => {
    if (!button.classList.contains("danger")) {
      button.textContent = "Delete for good?";
      button.classList.add("danger");
      return;
    }
    button.disabled = true;
    try {
      const parts = name.split("/").map((part) => `/${encodeURIComponent(part)}`).join("");
      // a browser would resolve "..", and delete another document
      await remove(DOCUMENTS + parts.replace(/\/(?=\.\.?(\/|$))/g, "%2F"));
    } catch (error) {
      problem(error);
    }
    documentsShown();
    welcome();
  });
  return button;
}

// Show the list and the invitation, once for many files.
function shownSoon() {
  soon ??= setTimeout(() => {
    soon = null;
    documentsShown();
    welcome();
  }, EVERY);
}

// The list, a little later.
function later() {
  const look = () => get(DOCUMENTS).finally(() => (list = null));
  return (list ??= new Promise((resolve) => setTimeout(resolve, EVERY)).then(look));
}

// Upload a file, and show its progress until the model has read it.
export async function add(file) {
  const bar = el("progress", { max: "1", value: "0", "aria-label": `uploading ${file.name}` });
  const state = el("span", { class: "quiet", role: "status" }, "uploading");
  const item = el("li", {}, el("b", {}, file.name), bar, state,
    el("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: () => item.remove() }, "✕"));
  $("uploads").append(item);
  const fail = (why) => {
    bar.remove();
    item.dataset.state = "failed";
    state.textContent = why.startsWith(`${file.name} `) ? why.slice(file.name.length + 1) : why;
  };
  try {
    let row = await upload(file, (part) => (bar.value = part / 10)), missed = null;
    shownSoon(); // it can be deleted while it waits
    while (row && reading(row)) {
      bar.value = 0.1 + 0.9 * row.progress;
      state.textContent = missed === null ? stateOf(row) : reason(missed);
      try {
        const { data } = await later();
        row = data.find((one) => one.name === row.name);
        missed = null;
      } catch (error) {
        if (!passes(error)) throw error;
        missed = error;
      }
    }
    bar.value = 1;
    if (row?.state === "ready" && !row.error) {
      state.textContent = `ingested, ${count(row.tokens)} tokens`;
      setTimeout(() => item.remove(), 8000);
    } else {
      fail(row?.error ?? "deleted");
    }
  } catch (error) {
    fail(reason(error));
  }
  shownSoon();
}
