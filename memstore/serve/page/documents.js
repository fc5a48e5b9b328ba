// The documents of the memory: the list, files that are uploaded, and deletion.

import { DOCUMENTS, get, problem, remove, upload } from "./api.js";
import { $, bytes, count, el, percent, when } from "./dom.js";
import { onlyThese } from "./ask.js";
import { openDocument } from "./document.js";
import { show } from "./page.js";

const EVERY = 400; // milliseconds between two looks at a file that is being ingested

let started = false, drawn = "";

export function startDocuments(served) {
  $("drop").hidden = !served.write;
  if (started) return;
  started = true;
  const drop = $("drop");
  for (const name of ["dragenter", "dragover"])
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (drop.hidden) return;
    show("documents");
    for (const file of event.dataTransfer.files) add(file);
  });
  $("files").addEventListener("change", () => {
    for (const file of $("files").files) add(file);
    $("files").value = "";
  });
}

export async function documentsShown() {
  try {
    const { data } = await get(DOCUMENTS);
    if (JSON.stringify(data) === drawn) return; // a button that asks for confirmation stays
    drawn = JSON.stringify(data);
    $("no-documents").hidden = data.length > 0;
    $("documents").hidden = !data.length;
    $("documents").tBodies[0].replaceChildren(...data.map(row));
    onlyThese(data.map((one) => one.name));
  } catch (error) {
    problem(error);
  }
}

function row(one) {
  return el("tr", { "data-name": one.name },
    el("th", { scope: "row" }, el("button", { type: "button", class: "plain link",
      onclick: () => look(one.name) }, one.name)),
    el("td", one.error ? { title: one.error } : {}, stateOf(one)),
    el("td", { class: "number" }, count(one.tokens)),
    el("td", { class: "number wide" }, count(one.blocks)),
    el("td", { class: "number" }, bytes(one.bytes)),
    el("td", { class: "wide" }, one.created === null ? "" : when(one.created)),
    el("td", { class: "for-writers" }, deletion(one.name)));
}

async function look(name) {
  show("ask");
  $("asked").hidden = false;
  $("hint").hidden = true;
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
      button.textContent = "Delete it for good?";
      button.classList.add("danger");
      return;
    }
    button.disabled = true;
    try {
      await remove(`${DOCUMENTS}/${name.split("/").map(encodeURIComponent).join("/")}`);
    } catch (error) {
      problem(error);
    }
    documentsShown();
  });
  return button;
}

async function add(file) {
  const bar = el("progress", { max: "1", value: "0", "aria-label": `uploading ${file.name}` });
  const state = el("span", { class: "quiet" }, "sending");
  const item = el("li", {}, el("b", {}, file.name), bar, state);
  $("uploads").append(item);
  try {
    let row = await upload(file, (part) => (bar.value = part / 10));
    while (row && ["waiting", "ingesting"].includes(row.state)) {
      bar.value = 0.1 + 0.9 * row.progress;
      state.textContent = stateOf(row);
      await new Promise((resolve) => setTimeout(resolve, EVERY));
      const { data } = await get(DOCUMENTS);
      row = data.find((one) => one.name === row.name);
    }
    bar.value = 1;
    if (row?.state === "ready" && !row.error) {
      state.textContent = `ingested, ${count(row.tokens)} tokens`;
      setTimeout(() => item.remove(), 8000);
    } else {
      item.dataset.state = "failed";
      state.textContent = row?.error ?? "deleted";
    }
  } catch (error) {
    item.dataset.state = "failed";
    state.textContent = error.message;
  }
  documentsShown();
}
