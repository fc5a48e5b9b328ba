// The documents of the memory: what is there, files that are added, and what is forgotten.

import { forget, get, problem, upload } from "./api.js";
import { $, bytes, count, el, percent, when } from "./dom.js";
import { onlyThese } from "./ask.js";
import { openDocument } from "./document.js";
import { show } from "./page.js";

const EVERY = 400; // milliseconds between two looks at a file that is being read

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
    const { data } = await get("/v1/memstore/documents");
    if (JSON.stringify(data) === drawn) return; // a row that was asked about stays so
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
    el("td", {}, one.state),
    el("td", { class: "number" }, count(one.tokens)),
    el("td", { class: "number wide" }, count(one.blocks)),
    el("td", { class: "number" }, bytes(one.bytes)),
    el("td", { class: "wide" }, when(one.created)),
    el("td", { class: "for-writers" }, forgetting(one.name)));
}

async function look(name) {
  show("ask");
  $("asked").hidden = false;
  $("hint").hidden = true;
  await openDocument({ document: name });
  $("document").focus();
}

// Asked twice, since it cannot be taken back.
function forgetting(name) {
  const button = el("button", { type: "button", class: "plain", "aria-label": `Forget ${name}` }, "Forget");
  const again = () => {
    button.textContent = "Forget";
    button.classList.remove("danger");
  };
  button.addEventListener("blur", again);
  button.addEventListener("click", async () => {
    if (!button.classList.contains("danger")) {
      button.textContent = "Forget it for good?";
      button.classList.add("danger");
      return;
    }
    button.disabled = true;
    try {
      await forget(`/v1/memstore/documents/${name.split("/").map(encodeURIComponent).join("/")}`);
    } catch (error) {
      problem(error);
    }
    documentsShown();
  });
  return button;
}

async function add(file) {
  const bar = el("progress", { max: "1", value: "0", "aria-label": `reading ${file.name}` });
  const state = el("span", { class: "quiet" }, "sending");
  const item = el("li", {}, el("b", {}, file.name), bar, state);
  $("uploads").append(item);
  try {
    let told = await upload(file, (part) => (bar.value = part / 10));
    while (["queued", "reading"].includes(told.memstore.state)) {
      bar.value = 0.1 + 0.9 * told.memstore.progress;
      state.textContent = `${told.memstore.state} ${percent(told.memstore.progress)}`;
      await new Promise((resolve) => setTimeout(resolve, EVERY));
      told = await get(`/v1/files/${encodeURIComponent(told.id)}`);
    }
    bar.value = 1;
    item.dataset.state = told.memstore.state;
    if (told.memstore.state === "ready") {
      state.textContent = `read, ${count(told.memstore.tokens)} tokens`;
      setTimeout(() => item.remove(), 8000);
    } else state.textContent = told.status_details ?? told.memstore.state;
  } catch (error) {
    item.dataset.state = "failed";
    state.textContent = error.message;
  }
  documentsShown();
}
