// A question, its answer as it streams, and the words of the answer, each with what was read for it.

import { events, get, problem } from "./api.js";
import { $, bytes, count, el, plural, roving, seconds } from "./dom.js";
import { closeDocument, showMarks } from "./document.js";
import { showHeads } from "./heads.js";
import { showChoice, showSources } from "./sources.js";

let served = null, running = null, said = [], report = null, words = [];

export function startAsking(server) {
  if (served === null) {
    $("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      ask();
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("ask-form").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => running?.abort());
    $("scope").addEventListener("toggle", () => $("scope").open && listScope());
    document.addEventListener("keydown", (event) => event.key === "Escape" && select(null));
  }
  served = server;
}

function scope() {
  const boxes = [...$("scope-list").querySelectorAll("input")];
  const names = boxes.filter((box) => box.checked).map((box) => box.value);
  return names.length && names.length < boxes.length ? names : null;
}

async function listScope() {
  const chosen = scope();
  try {
    const ready = (await get("/v1/memstore/documents")).data.filter((one) => one.state === "ready");
    $("scope-list").replaceChildren(
      ...ready.map(({ name }) =>
        el("label", { class: "check" },
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
    names === null ? "All documents" : names.length === 1 ? names[0] : `${names.length} documents`;
}

async function ask() {
  if (running !== null) return;
  const question = $("question").value.trim();
  if (!question) return;
  if (!$("follow").checked) said = [];
  begin(question);
  const messages = [...said, { role: "user", content: question }];
  const body = {
    model: served.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    memstore: { trace: true, max_sources: 12, from_memory: !$("freely").checked, ...(scope() && { documents: scope() }) },
    ...($("most").value && { max_tokens: Number($("most").value) }),
  };
  running = new AbortController();
  let text = "", usage = null;
  try {
    for await (const chunk of events("/v1/chat/completions", body, running.signal)) {
      const delta = chunk.choices[0]?.delta?.content;
      if (delta) $("answer").textContent = text += delta;
      usage = chunk.usage ?? usage;
      report = chunk.memstore ?? report;
    }
    said = [...messages, { role: "assistant", content: text }];
    finish(text, usage);
  } catch (error) {
    problem(error);
    $("cost").textContent = error.name === "AbortError" ? "stopped" : "";
  } finally {
    running = null;
    $("asked").setAttribute("aria-busy", "false");
    $("stop").hidden = true;
    $("send").hidden = false;
  }
}

function begin(question) {
  problem(null);
  report = null;
  words = [];
  closeDocument();
  $("hint").hidden = true;
  $("asked").hidden = false;
  $("asked").setAttribute("aria-busy", "true");
  $("asked-question").textContent = question;
  $("answer").replaceChildren();
  $("cost").textContent = "reading …";
  for (const panel of ["sources-panel", "choice-panel", "heads-panel", "shown"]) $(panel).hidden = true;
  $("stop").hidden = false;
  $("send").hidden = true;
}

function finish(text, usage) {
  $("cost").textContent = "";
  if (report === null) return;
  if (!text) $("answer").append(el("em", {}, report.answered
    ? "The model said nothing."
    : "Nothing in the memory answers this."));
  else if (report.tokens.length) showWords();
  $("cost").textContent = cost(usage);
  select(null);
  showChoice(report.choice, served);
}

function cost(usage) {
  const parts = [`${seconds(report.seconds)}, first word after ${seconds(report.first_token_seconds)}`];
  if (usage !== null) parts.push(`${plural(usage.prompt_tokens, "token", "tokens")} of question`);
  const { done, skipped } = report.lookups;
  if (report.reader === "landmarks")
    parts.push(`${plural(done, "lookup", "lookups")}, ${count(skipped)} skipped by the gate`);
  for (const [tier, counts] of Object.entries(report.tiers))
    if (counts.hits) parts.push(`${tier} ${plural(counts.hits, "unit", "units")}, ${bytes(counts.hits * report.unit_bytes)}`);
  return parts.join(" · ");
}

// Words: tokens up to the next one that begins with space.

function showWords() {
  words = [];
  report.tokens.forEach((token, number) => {
    if (!words.length || /^\s/u.test(token.text)) words.push({ text: "", tokens: [] });
    const word = words.at(-1);
    word.text += token.text;
    word.tokens.push(number);
  });
  const most = Math.max(...words.map(mass), 1e-9);
  const nodes = words.map((word, number) =>
    el("button", {
      type: "button", class: "word", "aria-pressed": "false",
      style: { "--shade": (mass(word) / most).toFixed(3) },
      onclick: () => select(words[number].node.getAttribute("aria-pressed") === "true" ? null : number),
    }, word.text.trim() || "␣"));
  words.forEach((word, number) => (word.node = nodes[number]));
  roving(nodes, (at, key) =>
    ({ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: nodes.length - 1 })[key] ?? null);
  $("answer").replaceChildren(
    ...nodes.flatMap((node, at) => (at && /^\s/u.test(words[at].text)
      ? [words[at].text.includes("\n") ? el("br") : " ", node] : [node])));
}

function mass(word) {
  let sum = 0;
  for (const number of word.tokens)
    for (const [, part] of report.tokens[number].sources) sum += part;
  return sum / word.tokens.length;
}

// What is shown: of the whole answer, or of one of its words.

function select(number) {
  if (report === null) return;
  words.forEach((word, at) => word.node.setAttribute("aria-pressed", String(at === number)));
  const tokens = number === null ? report.tokens : words[number].tokens.map((at) => report.tokens[at]);
  const weights = number === null ? report.sources.map((source) => source.weight) : weightsOf(tokens);
  const of = number === null ? "" : `“${words[number].text.trim()}”`;
  $("shown").hidden = number === null;
  $("shown").replaceChildren(`What was read for ${of} `,
    el("button", { type: "button", class: "plain", onclick: () => select(null) }, "whole answer"));
  const heads = () => showHeads(report.attention, sumOf(tokens), of ? `for ${of}` : "of the whole answer");
  showSources(report, weights, {
    picked: (source) => (source?.heads === undefined ? heads() : showHeads(report.attention,
      { mass: source.heads, skipped: null, tokens: report.tokens.length },
      `to ${source.document} [${source.span.join("–")}] alone`)),
  });
  heads();
  showMarks(report.sources, weights);
}

function weightsOf(tokens) {
  const weights = report.sources.map(() => 0);
  for (const token of tokens) for (const [source, part] of token.sources) weights[source] += part;
  return weights;
}

function sumOf(tokens) {
  const { layers, heads } = report.attention;
  const mass = layers.map(() => Array(heads).fill(0)), skipped = layers.map(() => Array(heads).fill(0));
  for (const token of tokens)
    token.heads.forEach((row, layer) => row.forEach((part, head) => {
      if (part === null) skipped[layer][head] += 1;
      else mass[layer][head] += part;
    }));
  return { mass, skipped: report.reader === "choosing" ? null : skipped, tokens: tokens.length };
}
