// One turn of the thread: the question, the answer or the refusal, its sources; and under Details the
// words of the answer, each with what was read for it.

import { reason } from "./api.js";
import { bytes, count, el, plural, roving, seconds } from "./dom.js";
import { showMarks } from "./document.js";
import { candidates, citations, different, passages } from "./sources.js";

const SOURCES = 3; // under an answer; Details has all of them

export function newTurn(question) {
  const answer = el("div", { class: "answer", "aria-live": "polite" });
  const rest = el("div", {});
  const node = el("article", { class: "turn", "aria-busy": "true" }, el("h2", {}, question), answer, rest);
  return { node, answer, rest, question };
}

export function failed(turn, error) {
  turn.node.setAttribute("aria-busy", "false");
  turn.answer.hidden = !turn.answer.textContent;
  turn.rest.append(error.name === "AbortError"
    ? el("p", { class: "quiet stopped" }, "Stopped.")
    : el("p", { class: "failed", role: "alert" }, `No answer: ${reason(error) || "an API key is needed"}.`));
}

// report: the field `memstore` of the reply; refused: does the memory hold no answer? before: the sources
// listed for the question before, if this one goes on from it. Returns those listed now.
export function finished(turn, report, { text, usage, refused, before }) {
  const { node, answer, rest } = turn;
  node.setAttribute("aria-busy", "false");
  const doubt = report.doubt === null ? "" : ` (probability ${report.doubt.toFixed(2)})`;
  if (refused)
    answer.replaceChildren(el("strong", {}, "Not sure"),
      el("p", {}, `The memory does not seem to hold an answer${doubt}.`));
  else if (!text.trim()) answer.replaceChildren(el("em", {}, "The model gave no answer."));
  const listed = refused ? different(report.sources) : different(report.sources, before).slice(0, SOURCES);
  if (listed.length)
    rest.append(el("section", { "aria-label": refused ? "Closest passages" : "Sources" },
      el("h3", {}, refused ? "Closest passages" : "Sources"), citations(report, listed, { scores: refused })));
  const details = el("details", { class: "details" }, el("summary", {}, "Details"));
  details.addEventListener("toggle", () => fill(details, turn, report, usage, refused), { once: true });
  rest.append(details);
  return listed;
}

function fill(details, turn, report, usage, refused) {
  details.append(el("p", { class: "quiet cost" }, costs(report, usage)));
  if (!refused && report.tokens.length) details.append(...reading(report));
  if (report.choice !== null)
    details.append(el("section", { class: "choice", "aria-label": "Candidates" },
      el("h3", {}, "Candidates"), ...candidates(report.choice)));
}

function costs(report, usage) {
  const parts = [`${seconds(report.seconds)}, first word after ${seconds(report.first_token_seconds)}`];
  if (usage !== null) parts.push(`${plural(usage.prompt_tokens, "token", "tokens")} of question`);
  if (report.doubt !== null) parts.push(`doubt ${report.doubt.toFixed(2)}`);
  const { done, skipped } = report.lookups;
  const landmarks = report.reader === "landmarks", unit = landmarks ? "block" : "passage";
  if (landmarks)
    parts.push(`${plural(done, "lookup", "lookups")}, ${count(skipped)} skipped by the gate`);
  for (const [tier, counts] of Object.entries(report.tiers))
    if (counts.hits) parts.push(`${plural(counts.hits, unit, `${unit}s`)} from ${tier}, ${bytes(counts.bytes)}`);
  return parts.join(" · ");
}

// What was read: for the whole answer, or for one of its words.

function reading(report) {
  const words = wordsOf(report), shown = el("p", { class: "quiet shown" });
  const read = el("div", {});
  const select = (number) => {
    words.forEach((word, at) => word.node.setAttribute("aria-pressed", String(at === number)));
    const tokens = number === null ? report.tokens : words[number].tokens.map((at) => report.tokens[at]);
    const weights = number === null ? report.sources.map((source) => source.weight) : weightsOf(report, tokens);
    const what = number === null ? "for the whole answer" : `for “${words[number].text.trim()}”`;
    shown.replaceChildren(number === null
      ? "The stronger its colour, the more was read for a word. Select one to see what."
      : `Read ${what} `, ...(number === null ? [] : [
        el("button", { type: "button", class: "plain", onclick: () => select(null) }, "All")]));
    read.replaceChildren(passages(report, weights));
    showMarks(report.sources, weights);
  };
  const answer = el("p", { class: "words", "aria-label": "Words of the answer",
    onkeydown: (event) => event.key === "Escape" && select(null) }, ...spaced(words));
  words.forEach((word, number) => word.node.addEventListener("click", () =>
    select(word.node.getAttribute("aria-pressed") === "true" ? null : number)));
  select(null);
  return [el("h3", {}, "Words"), answer, shown, el("h3", {}, "Read"), read];
}

// Words: tokens up to the next one that begins with space.
function wordsOf(report) {
  const words = [];
  report.tokens.forEach((token, number) => {
    if (!words.length || /^\s/u.test(token.text)) words.push({ text: "", tokens: [] });
    words.at(-1).text += token.text;
    words.at(-1).tokens.push(number);
  });
  const masses = words.map((word) => mass(report, word)), most = Math.max(...masses, 1e-9);
  words.forEach((word, at) => (word.node = el("button", {
    type: "button", class: "word", "aria-pressed": "false", style: { "--shade": (masses[at] / most).toFixed(3) },
  }, word.text.trim() || "␣")));
  roving(words.map((word) => word.node), (at, key) =>
    ({ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: words.length - 1 })[key] ?? null);
  return words;
}

function spaced(words) {
  return words.flatMap(({ text, node }, at) => (at && /^\s/u.test(text)
    ? [text.includes("\n") ? el("br") : " ", node] : [node]));
}

function mass(report, word) {
  let sum = 0;
  for (const number of word.tokens)
    for (const [, part] of report.tokens[number].sources) sum += part;
  return sum / word.tokens.length;
}

function weightsOf(report, tokens) {
  const weights = report.sources.map(() => 0);
  for (const token of tokens) for (const [source, part] of token.sources) weights[source] += part;
  return weights;
}
