"""The sentences of recall: forms that state and update facts, and that ask for them.

Each list has a part that training never sees, for the "held_out" split.
"""

from typing import Literal

Split = Literal["train", "held_out"]

PASS_KEY_QUESTION = "What is the pass key? The pass key is"

# In a form: {E} "the red fox" or "Dorvel", {C} the same with a capital, {e} without the article,
# {a} the attribute, {v} the value. The first four of each list are the plain ones that training may
# begin with.
STATEMENTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "The {a} of {E} is {v}.",
        "The {e} {a} is {v}.",
        "Remember: the {a} for {E} is {v}.",
        "{e} {a}: {v}.",
        "{v} is the {a} of {E}.",
        "{C} has the {a} {v}.",
        "{C}'s {a} is {v}.",
        "Note that the {a} of {E} is {v}.",
        "For {E}, the {a} is {v}.",
        "The {a} given to {E} was {v}.",
        "{C}, whose {a} is {v}, was there.",
        "Do not forget that {v} is the {a} of {E}.",
        "{C}: {a} {v}.",
        "I wrote down {v} as the {a} of {E}.",
        "The {a} of {E}: {v}\n",
    ),
    "held_out": (
        "They said that {E} had {v} as its {a}.",
        "As far as I know, the {a} belonging to {E} is {v}.",
    ),
}
UPDATES: dict[Split, tuple[str, ...]] = {
    "train": (
        "The {a} of {E} is now {v}.",
        "The {a} of {E} has been changed to {v}.",
        "{C}'s {a} was changed to {v}.",
        "From now on the {a} of {E} is {v}.",
        "Correction: the {a} of {E} is {v}.",
        "The new {a} of {E} is {v}.",
        "The {e} {a} has changed. It is now {v}.",
        "Update: {e} {a}: {v}.",
    ),
    "held_out": (
        "Later the {a} of {E} was replaced by {v}.",
        "These days {E} has the {a} {v} instead.",
    ),
}
# A question form says everything up to the answer.
QUESTIONS: dict[Split, tuple[str, ...]] = {
    "train": (
        "What is the {a} of {E}? The {a} of {E} is",
        "What is the {e} {a}? The {e} {a} is",
        "Question: what is the {a} of {E}? Answer:",
        "The {e} {a} is",
        "The {a} of {E} is",
        "Tell me the {a} of {E}. It is",
        "What is {E}'s {a}? It is",
        "Which {a} does {E} have? The {a} is",
        "{C}'s {a} is",
        "What is the {a} of {E}?",
        "Question: What is the {a} of {E}?\nAnswer:",
        "Q: What is the {e} {a}? A:",
        "what is the {a} of {E}? it is",
        "What was the {a} given to {E}? The {a} was",
        "Do you remember the {a} of {E}? Yes, it is",
        "{e} {a}:",
    ),
    "held_out": (
        "Can you say what the {a} for {E} is? It is",
        "I need the {a} belonging to {E}. The answer is",
    ),
}
PASS_KEY_STATEMENTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "The pass key is {v}. Remember it. {v} is the pass key.",
        "The pass key is {v}. Remember it.",
        "Remember: the pass key is {v}. {v} is the pass key.",
        "The pass key is {v}.",
        "{v} is the pass key. Remember it.",
    ),
    "held_out": (
        "Keep this in mind: the pass key is {v}.",
        "Someone told me {v} was the pass key.",
    ),
}
PASS_KEY_QUESTIONS: dict[Split, tuple[str, ...]] = {
    "train": (
        PASS_KEY_QUESTION,
        "What is the pass key?",
        "The pass key is",
        "Question: What is the pass key? Answer:",
        "Question: What is the pass key?\nAnswer:",
        "Tell me the pass key. It is",
        "what is the pass key? it is",
        "What was the pass key? The pass key was",
        "Q: What is the pass key? A:",
    ),
    "held_out": ("Can you say what the pass key is? It is", "I need the pass key. The answer is"),
}
