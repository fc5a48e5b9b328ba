"""Sentences that facts for selectors are stated and asked in.

Fields of a form: {e} the subject ("the old ship", "Nora Quill"), {a} an attribute, {v} the value.
After `|` of a question stand the words that begin its answer.
"""

# Facts asked in the words that state them.
STATEMENTS = (
    "The {a} of {e} is {v}.",
    "{e} has the {a} {v}.",
    "{v} is the {a} of {e}.",
    "Note that the {a} of {e} is {v}.",
    "For {e}, the {a} is {v}.",
    "Remember: the {a} of {e} is {v}.",
    "They wrote down {v} as the {a} of {e}.",
    "The {a} of {e} was {v}.",
    "I was told that the {a} of {e} is {v}.",
    "As for {e}, its {a} turned out to be {v}.",
    "Everyone agreed on {v} for the {a} of {e}.",
    "It is said that {e} has {v} as its {a}.",
    "By the way, the {a} for {e} is {v}.",
    "On the label of {e} one could read: {a} {v}.",
    "The {a} belonging to {e}, as far as anyone knows, is {v}.",
    "Do not forget that {v} is the {a} of {e}.",
    "In the list stood {e}, with the {a} {v}.",
    "He noted the {a} of {e}, which is {v}, and closed the book.",
)
QUESTIONS = (
    "What is the {a} of {e}?|The {a} of {e} is",
    "What {a} does {e} have?|The {a} is",
    "Which {a} does {e} have?|It is",
    "Tell me the {a} of {e}.|The {a} is",
    "Do you remember the {a} of {e}?|Yes, the {a} of {e} is",
    "The {a} of {e}?|It is",
    "What was written about {e} and its {a}?|The {a} of {e} is",
    "I need to know the {a} of {e}, please.|{e} has the {a}",
    "About {e}: what {a} did we note?|We noted",
    "Can you look up the {a} for {e}?|The {a} is",
    "what's the {a} of {e} again|It is",
    "I forgot the {a} of {e}. What was it?|It was",
    "According to the text, what is the {a} of {e}?|The {a} is",
    "Somebody asked me for the {a} of {e}.|It is",
    "Find the {a} of {e} in the text.|The {a} is",
)
KEY_STATEMENTS = (
    "The {a} is {v}. Remember it. {v} is the {a}.",
    "The {a} is {v}.",
    "Keep this in mind: the {a} is {v}.",
    "{v} is the {a}. Do not forget it.",
    "Here is the {a}: {v}. You will be asked for it later.",
    "For later use: {a} {v}.",
    "He whispered that the {a} was {v}.",
    "The {a} you were looking for is {v}.",
    "On the slip of paper was written: {a} {v}.",
    "{v}, so they say, is the {a}.",
    "Attention please, the {a} is {v}!",
)
KEY_QUESTIONS = (
    "What is the {a}?|The {a} is",
    "Tell me the {a}.|It is",
    "What was the {a} again?|The {a} is",
    "Do you remember the {a}?|The {a} is",
    "Which {a} was mentioned in the text?|The {a} is",
    "I need the {a}.|The {a} is",
)
# Passages asked for with some of their own words.
PASSAGE_QUESTIONS = (
    "{x}",
    "What happened when {x}?",
    "Where is it said that {x}?",
    "Find the passage: {x}",
    "In the text, {x}",
    "Tell me about the part where {x}",
    "Who is it that {x}?",
    "why {x}",
)
