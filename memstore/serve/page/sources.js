// Lists of passages: the sources of an answer, all that was read for it, and the candidates of a model
// that chooses once for a question.

import { el, plural } from "./dom.js";
import { openDocument } from "./document.js";

const weightText = (weight) => weight.toFixed(weight < 100 ? 2 : 0);

// A passage as a button that opens its document there.
function passage(one, { press, ...parts }) {
  const button = el("button", {
    type: "button", class: "source", "aria-expanded": "false",
    "aria-label": `${one.document}, ${one.place ?? `characters ${one.span.join(" to ")}`}: open the document there`,
    onclick: () => press(button),
  },
    el("span", { class: "source-head" },
      el("b", {}, one.document),
      el("span", { class: "quiet" }, parts.where ?? one.place ?? ""),
      el("span", { class: "grow" }),
      ...(parts.chips ?? []),
      parts.number === undefined ? null : el("span", { class: "weight" }, parts.number)),
    parts.part === undefined ? null : el("span", { class: "meter", style: { "--part": parts.part.toFixed(3) } }),
    el("span", { class: "text" }, parts.text ?? one.text.trim()));
  return button;
}

// Sources of different sentences, without those before, but for the best source.
export function different(sources, before = []) {
  const same = (a, b) => a.document === b.document && a.sentence === b.sentence;
  return sources.filter((one, at) => sources.findIndex((other) => same(one, other)) === at
    && (at === 0 || !before.some((other) => same(one, other))));
}

// Some sources of a report, each with the sentence that holds the answer; scores: show them.
export function citations(report, listed, { scores }) {
  const weights = report.sources.map((source) => source.weight);
  return el("ol", { class: "sources" }, ...listed.map((source) =>
    el("li", {}, passage(source, {
      text: source.sentence,
      number: scores ? weightText(source.weight) : undefined,
      press: () => openDocument(source, report.sources, weights),
    }))));
}

// Everything that was read, by these weights of the sources.
export function passages(report, weights) {
  const order = report.sources.map((source, number) => number).filter((number) => weights[number] > 0);
  order.sort((a, b) => weights[b] - weights[a]);
  const most = Math.max(...weights, 1e-9);
  let open = null;
  const press = (source) => (button) => {
    const same = open === button;
    open?.setAttribute("aria-expanded", "false");
    open = same ? null : button;
    button.setAttribute("aria-expanded", String(!same));
    if (!same) openDocument(source, report.sources, weights);
  };
  if (!order.length) return el("p", { class: "quiet" }, "Nothing of the memory.");
  return el("ol", { class: "read" }, ...order.map((number) => {
    const source = report.sources[number];
    return el("li", {}, passage(source, {
      press: press(source),
      where: `${source.place ?? ""} [${source.span.join("–")}]`,
      chips: source.tiers.map((tier) => el("span", { class: `tier tier-${tier}` }, tier)),
      number: weightText(weights[number]),
      part: weights[number] / most,
    }));
  }));
}

// choice: of the report.
export function candidates(choice) {
  const { confidence, threshold, blocks } = choice;
  const gate = el("p", { class: "quiet" }, `${plural(blocks, "passage", "passages")} scored`
    + (confidence === null ? "" : `; the best ${confidence.toFixed(2)}`)
    + (threshold === null ? "" : `, an answer needs ${threshold.toFixed(2)}`));
  const scores = choice.candidates.map((row) => row.score);
  const best = Math.max(...scores), least = Math.min(0, ...scores);
  return [gate, el("ol", { class: "candidates" }, ...choice.candidates.map((row) =>
    el("li", { class: row.chosen ? "chosen" : "" }, passage(row, {
      press: () => openDocument(row, [row], [1]),
      where: `[${row.span.join("–")}]`,
      chips: row.chosen ? [el("span", { class: "tier" }, "read")] : [],
      number: row.score.toFixed(2),
      part: (row.score - least) / Math.max(best - least, 1e-9),
    }))))];
}
