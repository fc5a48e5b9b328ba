// The thread: questions are sent with the turns before them, and answers stream in.

import { DOCUMENTS, events, get, problem } from "./api.js";
import { $, el } from "./dom.js";
import { closeDocument } from "./document.js";
import { failed, finished, newTurn } from "./turn.js";
import { welcome } from "./welcome.js";

const TURNS = 3; // earlier ones that are read again

let served = null, running = null, said = [], listed = []; // listed: the sources of the last answer

export function startAsking(server) {
  if (served === null) {
    $("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      ask($("question").value);
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("ask-form").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => running?.abort());
    $("clear").addEventListener("click", clear);
    $("scope").addEventListener("toggle", () => $("scope").open && listScope());
    document.addEventListener("click", (event) => closeMenus(event.target));
    document.addEventListener("keydown", (event) => event.key === "Escape" && closeMenus(null));
  }
  served = server;
}

// Close the menus, except one that holds this node.
function closeMenus(node) {
  for (const menu of [$("scope"), $("options")]) if (!menu.contains(node)) menu.open = false;
}

function scope() {
  const boxes = [...$("scope-list").querySelectorAll("input")];
  const names = boxes.filter((box) => box.checked).map((box) => box.value);
  return names.length && names.length < boxes.length ? names : null;
}

async function listScope() {
  const chosen = scope();
  try {
    const ready = (await get(DOCUMENTS)).data.filter((one) => one.state === "ready");
    $("scope-list").replaceChildren(
      ...ready.map(({ name }) =>
        el("label", {},
          el("input", { type: "checkbox", value: name, onchange: showScope,
            checked: chosen === null || chosen.includes(name) }),
          ` ${name}`)));
  } catch (error) {
    problem(error);
  }
  showScope();
}

// Documents that were deleted leave the list.
export function onlyThese(names) {
  for (const box of $("scope-list").querySelectorAll("input"))
    if (!names.includes(box.value)) box.parentElement.remove();
  showScope();
}

function showScope() {
  const names = scope();
  $("scope").querySelector("summary").textContent =
    names === null ? "Scope" : names.length === 1 ? names[0] : `${names.length} documents`;
}

export async function ask(text) {
  const question = text.trim();
  if (running !== null || !question) return;
  problem(null);
  closeDocument();
  const turn = newTurn(question);
  $("welcome").hidden = true;
  $("thread").append(turn.node);
  turn.node.scrollIntoView({ block: "start" });
  $("question").value = "";
  busy(true);
  const fromMemory = !$("freely").checked;
  const messages = [...($("follow").checked ? said : []), { role: "user", content: question }];
  const body = {
    model: served.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    memstore: { trace: true, max_sources: 12, from_memory: fromMemory, ...(scope() && { documents: scope() }) },
    ...($("most").value && { max_tokens: Number($("most").value) }),
  };
  running = new AbortController();
  let answer = "", usage = null, report = null;
  try {
    for await (const chunk of events("/v1/chat/completions", body, running.signal)) {
      const delta = chunk.choices[0]?.delta?.content;
      if (delta) turn.answer.textContent = answer += delta;
      usage = chunk.usage ?? usage;
      report = chunk.memstore ?? report;
    }
    const refused = !report.answered && fromMemory;
    said = [...said, messages.at(-1), { role: "assistant", content: answer }].slice(-2 * TURNS);
    listed = finished(turn, report, { text: answer, usage, refused, before: messages.length > 1 ? listed : [] });
  } catch (error) {
    failed(turn, error);
    if (error.name !== "AbortError") $("question").value ||= question; // to ask again
  } finally {
    running = null;
    busy(false);
  }
}

function busy(asking) {
  $("stop").hidden = !asking;
  $("send").hidden = asking;
  $("clear").hidden = asking;
}

function clear() {
  said = listed = [];
  closeDocument();
  $("thread").replaceChildren();
  $("clear").hidden = true;
  welcome();
  $("question").focus();
}
