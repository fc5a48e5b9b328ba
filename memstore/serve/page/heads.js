// A picture of where attention to memory went: a row a layer, a cell a head; hatched as far as the
// gate skipped its lookups.

import { count, el, percent, roving } from "./dom.js";

// Fill a place with it. attention: { layers, heads }; read: { mass, skipped, tokens } of what is shown,
// skipped null where it is unknown; what: shown below the title.
export function showHeads(place, { layers, heads }, { mass, skipped, tokens }, what) {
  const summary = el("p", { class: "quiet heads-summary", role: "status" });
  const means = mass.map((row) => row.map((part) => (part ?? 0) / Math.max(tokens, 1)));
  const most = Math.max(...means.flat(), 1e-9), numbers = heads <= 12 && layers.length <= 12;
  const cells = [];
  const grid = el("div", {
    class: numbers ? "heads" : "heads small-cells", role: "grid", "aria-label": "attention to memory by layer and head",
    style: { "--heads": String(heads) },
  },
    el("div", { role: "row", class: "heads-row" },
      el("span", { role: "columnheader", class: "quiet" }, "head"),
      ...Array.from({ length: heads }, (_, head) =>
        el("span", { role: "columnheader", class: "quiet" }, heads <= 12 || head % 4 === 0 ? String(head) : ""))),
    ...layers.map((layer, row) =>
      el("div", { role: "row", class: "heads-row" },
        el("span", { role: "rowheader", class: "quiet" }, `layer ${layer}`),
        ...means[row].map((part, head) => {
          const gone = skipped === null ? 0 : skipped[row][head] / Math.max(tokens, 1);
          const text = `layer ${layer}, head ${head}: ${percent(part)} of its attention`
            + (skipped === null ? "" : `; ${count(skipped[row][head])} of ${count(tokens)} lookups skipped`);
          const cell = el("span", {
            role: "gridcell", class: "cell", "aria-label": text,
            style: { "--shade": (part / most).toFixed(3), "--gone": gone.toFixed(3) },
            onmouseenter: () => (summary.textContent = text),
            onfocus: () => (summary.textContent = text),
          }, numbers && part >= 0.005 ? part.toFixed(2) : "");
          cells.push(cell);
          return cell;
        }))));
  roving(cells, (at, key) =>
    ({ ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + heads, ArrowUp: at - heads })[key] ?? null);
  const all = means.flat(), middle = all.reduce((sum, part) => sum + part, 0) / Math.max(all.length, 1);
  summary.textContent = `${percent(middle)} of all heads' attention, on average`
    + (skipped === null ? "" : "; hatched: lookups that the gate skipped");
  place.replaceChildren(el("p", { class: "quiet heads-of" }, `Attention to the memory ${what}, by layer and head`),
    el("div", { class: "heads-scroll" }, grid), summary);
}
