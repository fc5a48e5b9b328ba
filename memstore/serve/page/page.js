// The page as a whole: its views, its colours, the key, and which server this is.

import { ABOUT, get, problem, useKey } from "./api.js";
import { $ } from "./dom.js";
import { startAsking } from "./ask.js";
import { documentsShown, startDocuments } from "./documents.js";
import { sampleTiers } from "./tiers.js";
import { startWelcome, welcome } from "./welcome.js";

const VIEWS = ["ask", "documents", "tiers"];
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

export function show(view) {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    const button = document.querySelector(`[data-view=${name}]`);
    if (name === view) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  if (view === "documents") documentsShown();
  if (view === "tiers") sampleTiers();
}

function colour(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
  localStorage.setItem("memstore-theme", theme);
}

async function begin() {
  try {
    const served = await get(ABOUT);
    $("model").textContent = served.model;
    document.body.classList.toggle("may-write", served.write);
    document.querySelector("[data-view=tiers]").hidden = !served.tiers;
    problem(null);
    startAsking(served);
    startDocuments(served);
    await welcome();
    if (served.tiers) sampleTiers(); // the first of the chart
  } catch (error) {
    problem(error);
  }
}

for (const button of document.querySelectorAll("[data-view]"))
  button.addEventListener("click", () => show(button.dataset.view));
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme ?? "auto";
  colour(names[(names.indexOf(now) + 1) % names.length]);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  begin();
});
startWelcome();
const kept = localStorage.getItem("memstore-theme");
colour(kept in THEMES ? kept : "auto");
begin();
