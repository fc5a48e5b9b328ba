// What is shown before the first question: an invitation to upload, and questions to begin with.

import { DOCUMENTS, get, problem } from "./api.js";
import { $, el, plural } from "./dom.js";
import { add, reading, uploadsFrom } from "./documents.js";
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

// Show the invitation if the thread is empty.
export async function welcome() {
  $("welcome").hidden = $("thread").childElementCount > 0;
  if ($("welcome").hidden) return;
  try {
    const { data } = await get(DOCUMENTS);
    const names = data.filter((one) => one.state === "ready").map((one) => one.name);
    const state = names.length ? "ready" : data.some(reading) ? "reading" : "empty";
    const example = names.includes(EXAMPLE), write = document.body.classList.contains("may-write");
    $("welcome").dataset.state = state;
    $("welcome-title").textContent = {
      ready: `Ask about ${plural(names.length, "document", "documents")}`,
      reading: "The model is reading",
      empty: "This memory is empty",
    }[state];
    $("welcome-text").textContent = {
      ready: "Answers come with their sources. If no passage answers, you see the closest ones.",
      reading: "Ask as soon as a document is ready.",
      empty: write
        ? "Upload documents, or try an example: a page of a diary."
        : "It is read-only here: documents are added elsewhere.",
    }[state];
    $("invitation").hidden = !write;
    $("example").hidden = state !== "empty";
    $("examples-title").hidden = $("examples").hidden = !example;
    $("examples").replaceChildren(...(example ? QUESTIONS : []).map((question) =>
      el("li", {}, el("button", { type: "button", onclick: () => ask(question) }, question))));
  } catch (error) {
    problem(error);
  }
}
