// The blocks that were read, best first; and the candidates of a reader that chooses once.

import { $, bytes, el, plural } from "./dom.js";
import { openDocument } from "./document.js";

let open = null;

const figure = (weight) => weight.toFixed(weight < 100 ? 2 : 0);

// weights: of every source, for what is shown; picked: called with the source that is shown, or null.
export function showSources(report, weights, { picked }) {
  open = null;
  const order = report.sources.map((source, number) => number).filter((number) => weights[number] > 0);
  order.sort((a, b) => weights[b] - weights[a]);
  const most = Math.max(...weights, 1e-9);
  $("sources-panel").hidden = false;
  $("sources").replaceChildren(...order.map((number) => {
    const source = report.sources[number];
    const button = el("button", {
      type: "button", class: "source", "aria-expanded": "false",
      "aria-label": `${source.document}, characters ${source.span.join(" to ")}: open it there`,
      onclick: () => pick(button, source, report, weights, picked),
    },
      el("span", { class: "source-head" },
        el("b", {}, source.document),
        el("span", { class: "quiet" }, source.place ?? "", ` [${source.span.join("–")}]`),
        el("span", { class: "grow" }),
        ...Object.entries(source.tiers).map(([tier, cost]) =>
          el("span", { class: `tier tier-${tier}`, title: `${plural(cost.units, "unit", "units")} from ${tier}, ${bytes(cost.bytes)}` },
            `${tier} ${bytes(cost.bytes)}`)),
        el("span", { class: "weight" }, figure(weights[number]))),
      el("span", { class: "meter", style: { "--part": (weights[number] / most).toFixed(3) } }),
      el("span", { class: "text" }, source.text.trim()));
    return el("li", {}, button);
  }));
  if (!order.length) $("sources").replaceChildren(el("li", { class: "quiet" },
    report.sources.length ? "Nothing of the memory." : "Nothing was read."));
}

function pick(button, source, report, weights, picked) {
  const same = open === button;
  open?.setAttribute("aria-expanded", "false");
  open = same ? null : button;
  button.setAttribute("aria-expanded", String(!same));
  picked(same ? null : source);
  if (!same) openDocument(source, report.sources, weights);
}

// served: what the server said of its reader.
export function showChoice(choice, { layers }) {
  $("choice-panel").hidden = choice === null;
  if (choice === null) return;
  const { confidence, threshold, blocks } = choice;
  $("choice-gate").textContent = `${plural(blocks, "block", "blocks")} scored`
    + (confidence === null ? "" : `; the best ${confidence.toFixed(2)}`)
    + (threshold === null ? "" : `, the gate wants ${threshold.toFixed(2)}`)
    + "; shaded, what each layer took of those that were read";
  const scores = choice.candidates.map((row) => row.score);
  const best = Math.max(...scores), least = Math.min(0, ...scores);
  const most = Math.max(1e-9, ...choice.candidates.flatMap((row) => row.layers ?? []));
  $("choice").replaceChildren(...choice.candidates.map((row) => {
    const taken = row.layers === null ? null : el("span", {
      class: "strip", role: "img",
      "aria-label": `attention that each layer gave it: ${row.layers.map((part, at) => `layer ${layers[at]} ${part.toFixed(2)}`).join(", ")}`,
    }, ...row.layers.map((part, at) => el("i", {
      title: `layer ${layers[at]}: ${part.toFixed(2)}`, style: { "--shade": (part / most).toFixed(3) } })));
    return el("li", { class: row.chosen ? "chosen" : "" },
      el("button", { type: "button", class: "source",
        "aria-label": `${row.document}, characters ${row.span.join(" to ")}: open it there`,
        onclick: () => openDocument(row, [row], [1]) },
        el("span", { class: "source-head" },
          el("b", {}, row.document), el("span", { class: "quiet" }, ` [${row.span.join("–")}]`),
          el("span", { class: "grow" }),
          row.chosen ? el("span", { class: "tier" }, "read") : null,
          el("span", { class: "weight" }, row.score.toFixed(2))),
        el("span", { class: "meter", style: { "--part": ((row.score - least) / Math.max(best - least, 1e-9)).toFixed(3) } }),
        taken,
        el("span", { class: "text" }, row.text.trim())));
  }));
}
