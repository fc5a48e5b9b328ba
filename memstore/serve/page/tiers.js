// The tiers since this page was opened: the hit rate of each, and how full it is.

import { get, problem } from "./api.js";
import { $, bytes, count, el, figure, percent, seconds, svg } from "./dom.js";

const EVERY = 3000, WIDTH = 480, HEIGHT = 72, KEPT = 1200; // an hour

let timer = null, samples = [];

// Take a sample, and go on while the view is shown.
export async function sampleTiers() {
  clearTimeout(timer);
  try {
    samples = [...samples, await get("/v1/memstore/tiers")].slice(-KEPT);
    draw();
  } catch (error) {
    problem(error);
  }
  if (!$("view-tiers").hidden) timer = setTimeout(sampleTiers, EVERY);
}

function draw() {
  const latest = samples.at(-1)?.tiers ?? {}, names = Object.keys(latest).filter(
    (name) => latest[name].budget || latest[name].hits + latest[name].misses);
  $("no-tiers").hidden = names.length > 0;
  $("tiers").replaceChildren(...names.map((name) => {
    const now = latest[name], looked = now.hits + now.misses;
    return el("section", { class: "tier-panel", "data-tier": name },
      el("h3", {}, name),
      el("p", { class: "figures" },
        figure(looked ? percent(now.hits / looked) : "–", "hits"),
        figure(count(looked), "lookups"),
        figure(bytes(now.bytes), "delivered"),
        figure(seconds(now.seconds), now.budget ? "waiting" : "reading"),
        now.prefetched ? figure(count(now.prefetched), "prefetched") : null,
        now.evictions ? figure(count(now.evictions), "evicted") : null),
      now.budget ? el("p", {},
        el("meter", { min: "0", max: String(now.budget), value: String(now.held),
          "aria-label": `${name}: ${bytes(now.held)} of ${bytes(now.budget)}` }),
        ` ${bytes(now.held)} of ${bytes(now.budget)}`) : null,
      chart(name));
  }));
}

// The share found in each interval with lookups, and how full the tier was.
function chart(name) {
  if (samples.length < 2) return null;
  const start = samples[0].time, length = Math.max(samples.at(-1).time - start, 1);
  const x = (time) => ((time - start) / length) * WIDTH, y = (part) => HEIGHT - part * HEIGHT;
  const rates = [], fill = [];
  samples.forEach((sample, at) => {
    const now = sample.tiers[name], before = samples[at - 1]?.tiers[name];
    if (now?.budget) fill.push(`${x(sample.time).toFixed(1)},${y(now.held / now.budget).toFixed(1)}`);
    if (!now || !at) return;
    const hits = now.hits - (before?.hits ?? 0), misses = now.misses - (before?.misses ?? 0);
    if (hits + misses > 0) rates.push([x(sample.time), y(hits / (hits + misses)), hits + misses]);
  });
  const minutes = Math.round(length / 60), last = minutes > 1 ? `last ${minutes} minutes` : "last minute";
  return el("figure", {},
    svg("svg", { viewBox: `-48 -12 ${WIDTH + 54} ${HEIGHT + 24}`, role: "img",
      "aria-label": `${name}: hit rate of the ${last}` },
      svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: 0, y2: 0 }),
      svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
      svg("text", { x: -4, y: 4 }, "100%"), svg("text", { x: -4, y: HEIGHT + 4 }, "0%"),
      ...(fill.length > 1 ? [svg("polyline", { class: "fill", points: fill.join(" ") })] : []),
      ...(rates.length > 1 ? [svg("polyline", { class: "rate", points: rates.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ") })] : []),
      ...rates.map(([a, b, n]) => svg("circle", { class: "rate", cx: a.toFixed(1), cy: b.toFixed(1), r: 3 },
        svg("title", {}, `${count(n)} units`)))),
    el("figcaption", { class: "quiet" },
      `hit rate of the ${last}` + (fill.length ? "; dashed: share of its budget in use" : "")));
}
