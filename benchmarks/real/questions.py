"""The questions of recall: facts planted in books, of words, forms and relations that no selector
was trained with. Those that need context stand in documents of their own.
"""

from collections.abc import Sequence
from random import Random

from benchmarks.common.tables import tokens_text
from benchmarks.real import context_questions
from benchmarks.real.context_questions import ContextFacts, Told
from benchmarks.real.hay import Hay, Needle, Offsets
from benchmarks.real.plan import Plan, Question, Rule, Stated
from memstore.training.recipes import facts as language
from memstore.training.selectors.questions import Fact, Facts, capital, of_split
from memstore.training.selectors.word_pools import word_pools

TASKS = {
    "natural": "everyday questions, nothing primed",
    **context_questions.TITLES,  # nothing primed either
    "passkey": "pass key, the paper's words",
    "fact": "one fact, a number",
    "of_20": "one of 20 facts of the same form",
    "reworded": "a fact asked for in other words",
    "synonyms": "the same, its subject by synonyms",
    "updated": "a fact stated twice, the later counts",
    "absent": "no fact answers, literal",
    "absent_reworded": "no fact answers, in other words",
}
PASSAGE = 128  # tokens around a pass key


def _list(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


# Of training's attributes only those held out may be among these (a test looks).
ATTRIBUTES = _list(
    "tonnage,wingspan,horsepower,subsidy,ransom,dowry,pension,levy,bail,tariff,surcharge,royalty,"
    "stipend,dividend,mortgage,quota,longitude,calibre,wavelength,acreage,circumference,thickness,"
    "headcount,tally,wager,jackpot,handicap,docket number,lot number,plot number,catalogue number",
    ",",
)
_HELD_OUT = of_split(word_pools().number_attributes, "held-out")
UPDATES = (
    "A month later the {a} of {e} was set to {v}.",
    "Since then the {a} of {e} has become {v}.",
    "The {a} of {e} is not what it was: it is {v} now.",
)
_MONTHS = _list("January February March April May June July August September October")


def build(
    offsets: Offsets,
    texts: Sequence[str],
    lengths: Sequence[int],
    trials: dict[int, int],
    seed: int,
) -> Plan:
    """All questions at each length (tokens of what is attached), `trials` a task.

    A document of a length carries many facts, each asked for once; a pass key, of which a document
    has one, stands in a passage of its own that is attached beside the document.
    """
    plan = Plan()
    keys = _pass_keys(offsets, texts, max(trials.values()), seed)
    plan.documents |= {name: text for name, text, _, _ in keys}
    for length in lengths:
        plan.merge(_Writer(offsets, texts, length, trials[length], seed).write(keys))
    return plan


def _pass_keys(
    offsets: Offsets, texts: Sequence[str], count: int, seed: int
) -> list[tuple[str, str, str, Stated]]:
    """Passages with a pass key: name, text, key, where it stands."""
    rng = Random(f"pass keys {seed}")
    hay, found = Hay(offsets, texts, rng), []
    for number in range(count):
        key, name = str(rng.randint(10_000, 99_999)), f"key {number}"
        needle = Needle(language.pass_key_statement(key).text, key)
        text, stated = hay.plant(name, PASSAGE, [[needle]])
        found.append((name, text, key, stated[0][0]))
    return found


class _Writer:
    """Writes the documents and questions of one length."""

    def __init__(
        self, offsets: Offsets, texts: Sequence[str], length: int, trials: int, seed: int
    ) -> None:
        self.length, self.trials = length, trials
        self.rng = Random(f"recall {length} {seed}")
        self.hay = Hay(offsets, texts, self.rng)
        self.facts = Facts("held-out", self.rng)
        self.plan = Plan()

    def write(self, keys: Sequence[tuple[str, str, str, Stated]]) -> Plan:
        documents = -(-self.trials // max(1, self.length // 1024))
        own = [self.name("book", number) for number in range(documents)]
        with_sets = min(documents, -(-self.trials // 5))  # five questions of a set or more
        for number, name in enumerate(own):
            of_20 = share(self.trials, with_sets, number) if number < with_sets else 0
            self.document(name, share(self.trials, documents, number), of_20)
        for number, (passage, _, key, stated) in enumerate(keys[: self.trials]):
            asked = (own[number % documents], passage)
            question, begun = language.pass_key_question(key).prompt.split("? ")
            words = (f"{question}?", begun, (key,))
            self.ask("passkey", asked[:: self.rng.choice((1, -1))], words, [stated])
        for number in range(documents):
            name = self.name("context", number)
            self.context_document(name, share(self.trials, documents, number))
        return self.plan

    def document(self, name: str, count: int, of_20: int) -> None:
        """A document with `count` facts of each kind, and sets of twenty for `of_20` questions."""
        rng, facts = self.rng, self.facts
        attributes = [*ATTRIBUTES, *_HELD_OUT]
        rng.shuffle(attributes)
        sets = [self.like_facts(attributes.pop()) for _ in range(-(-of_20 // 20))]
        single = [facts.literal(rng.choice(attributes)) for _ in range(count)]
        reworded = [facts.reworded(synonyms=other) for other in (False, True) for _ in range(count)]
        updated = [self.updated(rng.choice(attributes)) for _ in range(count)]
        natural = [self.everyday() for _ in range(count)]
        groups = [[Needle(fact.sentence, fact.value)] for fact in (*single, *reworded)]
        groups += [needles for needles, _ in updated] + [[needle] for needle, _ in natural]
        groups += [[Needle(fact.sentence, fact.value)] for like in sets for fact in like]
        self.plan.documents[name], stated = self.hay.plant(name, self.length, groups)
        places = iter(stated)
        for task, those in (
            ("fact", single),
            ("reworded", reworded[:count]),
            ("synonyms", reworded[count:]),
        ):
            for fact in those:
                self.ask(task, (name,), words_of(fact), next(places))
        for _, words in updated:
            self.ask("updated", (name,), words, next(places)[-1:])
        for _, words in natural:
            self.ask("natural", (name,), words, next(places), rule="all")
        like = [(fact, next(places)) for those in sets for fact in those]
        for fact, place in rng.sample(like, of_20):
            self.ask("of_20", (name,), words_of(fact), place)
        for _ in range(count):
            absent = facts.literal(rng.choice(attributes))
            self.ask("absent", (name,), (absent.question, absent.begun, ()), ())
            absent = facts.reworded()
            self.ask("absent_reworded", (name,), (absent.question, absent.begun, ()), ())

    def context_document(self, name: str, count: int) -> None:
        """A document with `count` facts of each kind that needs context."""
        attributes = list(dict.fromkeys((*ATTRIBUTES, *_HELD_OUT)))
        facts = ContextFacts(self.facts, attributes, self.rng)
        told: list[tuple[str, Told]] = [
            (task, facts.make(task)) for task in context_questions.TITLES for _ in range(count)
        ]
        groups = [[needle] for _, fact in told for needle in fact.needles]
        self.plan.documents[name], places = self.hay.plant(name, self.length, groups)
        for task, fact in told:
            stated, places = places[0], places[len(fact.needles) :]
            self.ask(task, (name,), (fact.question, "", fact.answers), stated, rule="all")

    def like_facts(self, attribute: str) -> list[Fact]:
        """Twenty facts of one attribute in one form, all values different."""
        found: dict[str, Fact] = {}
        while len(found) < 20:
            fact = self.facts.literal(attribute)
            _, subject = fact.key.split("|")
            sentence = capital(f"the {attribute} of {subject} is {fact.value}.")
            asked = f"What is the {attribute} of {subject}?"
            begun = f"The {attribute} of {subject} is"
            found[fact.value] = Fact(fact.kind, fact.key, sentence, asked, begun, fact.value)
        return list(found.values())

    def updated(self, attribute: str) -> tuple[list[Needle], tuple[str, str, tuple[str, ...]]]:
        """A fact, and the sentence that gives it another value; the question for the later one."""
        fact, value = self.facts.literal(attribute), ""
        while value in ("", fact.value):
            value = str(self.rng.randrange(100, 100_000))
        _, subject = fact.key.split("|")
        later = self.rng.choice(UPDATES).format(a=attribute, e=subject, v=value)
        words = (
            f"What is the {attribute} of {subject} now?",
            f"The {attribute} of {subject} is now",
            (value,),
        )
        return [Needle(fact.sentence, fact.value), Needle(later, value)], words

    def everyday(self) -> tuple[Needle, tuple[str, str, tuple[str, ...]]]:
        """What people note and ask: a phone number, a date, a price."""
        rng = self.rng
        kind, value = rng.randrange(3), str(rng.randrange(100_000, 1_000_000))
        if kind == 0:
            person = self.facts.person()
            needle = Needle(f"{person}'s phone number is {value}.", value)
            return needle, (f"What is the phone number of {person}?", "", (value,))
        if kind == 1:
            person, month, day = self.facts.person(), rng.choice(_MONTHS), str(rng.randint(1, 28))
            needle = Needle(f"The appointment with {person} is on {month} {day}.", f"{month} {day}")
            return needle, (f"When is my appointment with {person}?", "", (month, day))
        subject, value = self.facts.subject("tp").name, value[:3]
        needle = Needle(f"We paid {value} dollars for {subject}.", value)
        return needle, (f"How much did we pay for {subject}?", "", (value,))

    def ask(
        self,
        task: str,
        documents: tuple[str, ...],
        words: tuple[str, str, tuple[str, ...]],
        stated: Sequence[Stated],
        rule: Rule = "forced",
    ) -> None:
        text, primed, answers = words
        if answers and primed and answers[0][0].isdigit():
            primed += " "  # a token of its own before digits, where small models hesitate
        number = sum(question.task == task for question in self.plan.questions)
        name, place = self.name(task, number), tuple(stated)
        self.plan.questions.append(
            Question(name, task, self.length, documents, text, primed, answers, rule, place)
        )

    def name(self, kind: str, number: int) -> str:
        """What other lengths and numbers of trials give no other document or question."""
        return f"{kind} {tokens_text(self.length)} {number} of {self.trials}"


def words_of(fact: Fact) -> tuple[str, str, tuple[str, ...]]:
    """Question, beginning of the answer, answer; that of a literal question names the fact, however
    it was asked.
    """
    begun = fact.begun
    if fact.kind == "literal":
        attribute, subject = fact.key.split("|")
        begun = f"The {attribute} of {subject} is"
    return fact.question, begun, (fact.value,)


def share(total: int, parts: int, number: int) -> int:
    """The part `number` of `total` dealt out to `parts`."""
    return total // parts + (number < total % parts)
