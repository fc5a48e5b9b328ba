// A document, open at a place: what was read of it is marked, the more strongly the more was read.

import { get, problem } from "./api.js";
import { $, count, el } from "./dom.js";

const AROUND = 10, MORE = 20; // blocks

let name = null, first = 0, end = 0, total = 0, opened = null, marks = new Map();
let latest = 0; // the latest click of opening, closing or more: the reply to an earlier one is dropped

$("document-close").addEventListener("click", closeDocument);

export function closeDocument() {
  latest++;
  name = opened = null;
  $("document-panel").hidden = true;
}

// at: { document, block }; sources with their weights say what is marked.
export async function openDocument(at, sources = [], weights = []) {
  const mine = ++latest, place = at.block ?? 0;
  const start = Math.max(0, place - AROUND), wanted = `${at.document}`;
  try {
    const answer = await load(wanted, start, place + AROUND + 1);
    if (mine !== latest) return;
    opened = at.block ?? null;
    name = wanted;
    total = answer.document.blocks;
    first = start;
    end = start + answer.data.length;
    marks = marksOf(sources, weights);
    $("document-title").textContent = name;
    $("document-panel").hidden = false;
    $("document").replaceChildren(
      el("button", { type: "button", class: "plain more", id: "earlier", onclick: earlier }, "Earlier"),
      el("div", { class: "text", id: "document-text" }, ...answer.data.map(block)),
      el("button", { type: "button", class: "plain more", id: "later", onclick: later }, "Later"));
    edges();
    toPlace();
  } catch (error) {
    problem(error);
  }
}

export function showMarks(sources, weights) {
  if (name === null) return;
  marks = marksOf(sources, weights);
  for (const node of $("document-text").children) mark(node, Number(node.dataset.block));
}

function load(document, from, to) {
  const query = new URLSearchParams({ document, first: from, end: to });
  return get(`/v1/memstore/text?${query}`);
}

function marksOf(sources, weights) {
  const most = Math.max(...weights, 1e-9);
  const found = new Map();
  sources.forEach((source, number) => {
    if (source.document === name && weights[number] > 0)
      found.set(source.block, { part: weights[number] / most, weight: weights[number] });
  });
  return found;
}

function block({ block: number, span, text }) {
  const node = el("span", { "data-block": number, title: `block ${number}, characters ${span[0]}–${span[1]}` }, text);
  mark(node, number);
  return node;
}

function mark(node, number) {
  const found = marks.get(number);
  node.classList.toggle("marked", found !== undefined);
  node.classList.toggle("place", number === opened);
  node.style.setProperty("--shade", (found?.part ?? 0).toFixed(3));
}

function edges() {
  $("earlier").hidden = first === 0;
  $("later").hidden = end >= total;
  $("document").setAttribute("aria-description", `blocks ${count(first)} to ${count(end - 1)} of ${count(total)}`);
}

function toPlace() {
  const box = $("document"), place = box.querySelector(".place");
  if (place === null) return void (box.scrollTop = 0);
  const from = place.getBoundingClientRect().top - box.getBoundingClientRect().top;
  box.scrollTop += from - box.clientHeight / 3;
}

async function earlier() {
  const mine = ++latest, box = $("document"), start = Math.max(0, first - MORE);
  try {
    const answer = await load(name, start, first), height = box.scrollHeight;
    if (mine !== latest) return;
    $("document-text").prepend(...answer.data.map(block));
    first = start;
    edges();
    box.scrollTop += box.scrollHeight - height; // the visible text does not move
  } catch (error) {
    problem(error);
  }
}

async function later() {
  const mine = ++latest;
  try {
    const answer = await load(name, end, end + MORE);
    if (mine !== latest) return;
    $("document-text").append(...answer.data.map(block));
    end += answer.data.length;
    edges();
  } catch (error) {
    problem(error);
  }
}
