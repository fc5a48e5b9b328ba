"""People's questions as windows, which selectors learn from; and planted facts as questions about
texts, which reading adapters learn from.
"""

from collections.abc import Callable, Sequence
from random import Random

from memstore.model.adapter import TextTokenizer
from memstore.training.reading_questions import AskedContext, AskedQuestion, Cut, Example, Examples
from memstore.training.selectors.questions import Fact, Facts, capital
from memstore.training.selectors.windows import Question, Window, WindowWriter

Turn = Callable[[str], tuple[list[int], range]]
"""Token ids of a question as the first turn, and which of them are the question's own words."""

_ASKED = 4  # questions of a text that a selector learns from


def asked_windows(
    contexts: Sequence[AskedContext],
    cut: Cut,
    decode: Callable[[Sequence[int]], str],
    turn: Turn,
    seed: int,
) -> list[Window]:
    """Texts as windows, each with at most four of the questions whose answer a passage holds."""
    examples, rng, windows = Examples(contexts, cut, decode), Random(seed), []

    def question(example: Example, first: int) -> Question:
        ids, words = turn(example.asked.question)
        lead, own = tuple(ids[: words.start]), tuple(ids[words.start : words.stop])
        right = min(example.right, key=lambda at: at not in example.holding) - first
        touched = tuple(sorted(at - first for at in example.holding | set(example.right)))
        return Question("asked", lead, own, example.asked.question, "", right, touched)

    for number, context in enumerate(contexts):
        answered = [one for one in examples.of(number) if one.right]
        chosen = rng.sample(answered, min(_ASKED, len(answered)))
        first = examples.own(number).start
        windows.append(
            Window(
                context.context,
                tuple(tuple(ids) for ids in examples.passages(number)),
                tuple(question(one, first) for one in chosen),
                context.collection,
            )
        )
    return windows


def planted_questions(
    texts: Sequence[str], tokenizer: TextTokenizer, windows: int, seed: int
) -> list[AskedContext]:
    """Questions about facts that are planted in prose or stand in small tables and lists: facts
    asked for in their own words and in others, keys whose answer is begun, changed facts, facts
    about "it", and facts for which two sentences are needed. Raises InvalidInput for texts that
    are too short.
    """
    writer = WindowWriter(texts, tokenizer, lambda text: [], "train", seed)
    rng, facts, found = writer.rng, writer.facts, []
    for number in range(windows):
        plain = [facts.literal(), facts.literal(), facts.reworded(), facts.reworded(), facts.key()]
        asked = [AskedQuestion(_begun(fact, rng), [fact.value]) for fact in plain]
        about, person = facts.subject("t"), facts.person()
        weight, length, after = (str(rng.randrange(11, 9900)) for _ in range(3))
        named, owned = capital(about.name), about.name.removeprefix("the ")
        other, before = facts.subject("t"), str(rng.randrange(11, 9900))
        sentences = [fact.sentence for fact in plain] + [
            f"{named} was found in the yard. It weighs {weight} pounds.",
            f"{person} is the owner of {about.name}. It is {length} inches long.",
        ]
        rng.shuffle(sentences)
        code = rng.choice(("code", "number", "price", "size"))
        sentences.insert(1, f"The {code} of {other.name} is {before}.")
        sentences.append(f"The {code} of {other.name} has changed: it is {after} now.")
        asked += [
            AskedQuestion(f"How heavy is {about.name}?", [f"{weight} pounds"]),
            AskedQuestion(f"How long is the {owned} of {person}?", [f"{length} inches"]),
            AskedQuestion(f"What does the thing that {person} owns weigh?", [f"{weight} pounds"]),
            AskedQuestion(f"What is the {code} of {other.name} now?", [after]),
        ]
        text = writer.prose_with(sentences, 1200)
        found.append(AskedContext(text, asked, f"window {number}", "planted"))
        found.append(_listed(facts, rng, number))
    return found


def _begun(fact: Fact, rng: Random) -> str:
    """The question of a fact, sometimes with the words that begin its answer."""
    return f"{fact.question} {fact.begun}" if rng.random() < 0.3 else fact.question


def _listed(facts: Facts, rng: Random, number: int) -> AskedContext:
    """A table, or lists under headings, of three things with two attributes each."""
    named = [facts.subject("tp").name.removeprefix("the ") for _ in range(3)]
    kinds = rng.sample(("price", "weight", "number", "age", "size", "length", "stock", "code"), 2)
    rows = [[str(rng.randrange(11, 9900)) for _ in kinds] for _ in named]
    if rng.random() < 0.5:
        lines = [f"| name | {' | '.join(kinds)} |", "|---|---|---|"]
        lines += [f"| {name} | {' | '.join(row)} |" for name, row in zip(named, rows)]
    else:
        lines = []
        for name, row in zip(named, rows):
            listed = (f"- {capital(kind)}: {value}" for kind, value in zip(kinds, row))
            lines += [f"## {capital(name)}", "", *listed, ""]
    asked = [
        AskedQuestion(f"What is the {kind} of the {name}?", [value])
        for name, row in zip(named, rows)
        for kind, value in zip(kinds, row)
    ]
    return AskedContext("\n".join(lines), asked, f"window {number}", "listed")
