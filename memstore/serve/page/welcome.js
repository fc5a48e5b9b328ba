// What is shown before the first question: an invitation to upload, and questions to begin with.

import { DOCUMENTS, get, problem } from "./api.js";
import { $, el, plural } from "./dom.js";
import { add, uploadsFrom } from "./documents.js";
import { ask } from "./ask.js";

const EXAMPLE = "example-diary.txt";
const DIARY = `We reached the valley late in the evening, and the old man at the gate let us in without a word.
There was soup on the table and a fire in the hearth, and nobody asked us where we had come from.
The combination of the lime barn is 4467.
In the morning the wind had turned. We walked along the river until noon, and saw no one but a shepherd.
The price of the brown mare is 310.
At the inn they told us that the bridge had been gone since the spring.
`;
const QUESTIONS = [
  "What is the combination of the lime barn?",
  "What is the price of the brown mare?",
  "Who was the first president of France?", // which the diary does not answer
];

export function startWelcome() {
  uploadsFrom($("first-files"));
  $("example").addEventListener("click", () => add(new File([DIARY], EXAMPLE, { type: "text/plain" })));
}

// Show the invitation if nothing was asked yet; write: may this page upload?
export async function welcome(write) {
  $("welcome").hidden = $("thread").childElementCount > 0;
  if ($("welcome").hidden) return;
  try {
    const names = (await get(DOCUMENTS)).data.filter((one) => one.state === "ready").map((one) => one.name);
    const empty = names.length === 0, example = names.includes(EXAMPLE);
    $("welcome").dataset.state = empty ? "empty" : "ready";
    $("welcome-title").textContent = empty ? "This memory is empty" : `Ask about ${plural(names.length, "document", "documents")}`;
    $("welcome-text").textContent = empty && !write
      ? "This server may only read it: documents are added elsewhere."
      : empty
        ? "Upload documents, which the model reads once, or start with an example: a page of a diary."
        : "An answer comes with its sources. If the memory holds none, the closest passages are shown.";
    $("invitation").hidden = !write;
    $("example").hidden = !empty;
    $("examples-title").hidden = !empty && !example;
    $("examples").hidden = !empty && !example;
    $("examples").replaceChildren(...QUESTIONS.slice(0, example ? 3 : 2).map((question) =>
      el("li", {}, example
        ? el("button", { type: "button", onclick: () => ask(question) }, question)
        : el("q", {}, question))));
  } catch (error) {
    problem(error);
  }
}
