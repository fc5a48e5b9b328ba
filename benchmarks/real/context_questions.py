"""Facts that say nothing without what stands around them, and facts in other languages: told in two
sentences, under a heading, in a row of a table; asked for as people type.
"""

from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from benchmarks.real.hay import Needle
from memstore.training.selectors.questions import Facts, capital

TITLES = {
    "pronoun": "its value told of he, she or it",
    "heading": "its subject in a heading",
    "table": "a row of a table",
    "neighbours": "in two neighbouring passages",
    "german": "in German",
    "french": "in French",
}


class Told(NamedTuple):
    """What is planted, and what is asked about the first needle of it."""

    needles: list[Needle]
    question: str
    answers: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# {e}, {f}: the subject and another one; {v}: the value
_PRONOUNS = (
    "In the spring {e}, who had been away for the better part of two years, came back to live in "
    "the rooms above the chandler's.|She pays {v} dollars for them every quarter.|"
    "How much does {e} pay for the rooms every quarter?",
    "The committee wrote to {e} on Monday, after a long discussion of which nothing was to be made "
    "public until the autumn.|He can be reached under the number {v} until then.|"
    "Under what number can {e} be reached?",
    "At the far end of the yard stands {t}, which the new owners had meant to give away until an "
    "expert came to see it.|It was insured for {v} dollars the week after.|"
    "For how much was {t} insured?",
    "Nobody had touched {t} since the old people died, and the children were told to keep their "
    "hands off.|It weighs {v} pounds and came with the house.|How many pounds does {t} weigh?",
    "Both {e} and {f} entered their names for the regatta, although neither had been out on the "
    "water since the summer before.|The latter drew the number {v} in the first heat.|"
    "What number did {f} draw for the regatta?",
    "For the position of treasurer they had to decide between {e} and {f}, and it took the members "
    "until midnight.|The former got {v} votes in the end.|"
    "How many votes did {e} get for treasurer?",
)
_SECTIONS = (
    "Visitors ring at the side door and wait. The {a} is {v}, as of this year. Dogs stay outside.",
    "Everything has been looked over in March. For the {a} we found {v} in the books. "
    "The rest can wait until the next meeting.",
    "There is little new to report since the last time. The {a} stands at {v} now. "
    "All keys hang in the hall.",
)
_WOMEN = frozenset(_words("Flora Helga Joan Laura Martha Nora Stella"))
_INITIALS = "ABCDEFGHIJKLMNOPRSTUVWZ"
_NEIGHBOURS = (
    "{E}, which had stood under its dust sheets since the spring and which nobody in the family "
    "had cared to look at, was sold at last to {p}, before a crowd of onlookers from three "
    "villages.|The new owner, after a week of haggling with the notary and both of his clerks, "
    "paid {v} crowns for it in gold, and promised besides to have it mended before the winter.|"
    "Who bought {e}, and for how many crowns?",
    "On the last evening of the fair, when most of the stalls had been taken down and it had begun "
    "to rain, the first prize of the lottery, which was {e}, went to {p}, to everybody's surprise."
    "|The winner, whom nobody had seen buy a ticket, had drawn the number {v} at the very last "
    "moment, as the old woman who kept the box was ready to swear before any judge.|"
    "Who won {e} in the lottery, and with what number?",
    "As for {e}, about which there has been so much talk in the newspapers and so little truth, it "
    "was found by {p} behind a wall of loose bricks in the second cellar, wrapped in oilcloth.|"
    "The finder, who might have kept silent and who by the letter of the law owed nothing to "
    "anybody, was given a reward of {v} dollars for this, and a silver cup by the magistrates.|"
    "Who found {e}, and how many dollars was the reward?",
)
_GERMAN = (
    "{p} zahlt für die Wohnung {v} Mark im Jahr.|Wie viel zahlt {p} für die Wohnung?",
    "Die Telefonnummer von {p} ist {v}.|Welche Telefonnummer hat {p}?",
    "{p} hat auf der Versteigerung {v} Mark für das Klavier geboten.|"
    "Wie viel hat {p} für das Klavier geboten?",
    "Im Lager von {p} liegen noch {v} Säcke Mehl.|Wie viele Säcke Mehl liegen bei {p}?",
    "Das Grundstück von {p} misst {v} Quadratmeter.|Wie groß ist das Grundstück von {p}?",
    "{p} hat das Schließfach mit der Nummer {v}.|Welche Nummer hat das Schließfach von {p}?",
)
_GERMANS = (
    _words("Anneliese Jürgen Heinrich Gerlinde Wolfgang Liesel Dieter Hannelore Uwe Käthe"),
    _words("Schäfer Brückner Lindemann Vogelsang Kirchhoff Übermuth Rosenthal Zöllner Huber Jäger"),
)
_FRENCH = (
    "{p} paie {v} francs par an pour l'appartement.|Combien {p} paie pour l'appartement ?",
    "Le numéro de téléphone de {p} est le {v}.|Quel est le numéro de téléphone de {p} ?",
    "{p} a offert {v} francs pour le piano à la vente aux enchères.|"
    "Combien {p} a offert pour le piano ?",
    "Il reste {v} sacs de farine dans l'entrepôt de {p}.|Combien de sacs de farine a {p} ?",
    "Le terrain de {p} mesure {v} mètres carrés.|Quelle est la taille du terrain de {p} ?",
    "{p} a le casier numéro {v} à la gare.|Quel est le numéro du casier de {p} ?",
)
_FRENCHMEN = (
    _words("Geneviève Jérôme Solange Baptiste Éloïse Gaston Mireille Thibault Noémie Honoré"),
    _words("Lefèvre Beaumont Chevalier Dubreuil Fournier Garnier Lacroix Moreau Péguy Rousselot"),
)


class ContextFacts:
    """Facts of these kinds, drawn one after another from one random stream."""

    def __init__(self, facts: Facts, attributes: Sequence[str], rng: Random) -> None:
        """facts: of the split whose words are used; attributes: that have numbers."""
        self.facts, self.attributes, self.rng = facts, attributes, rng
        self._used: set[str] = set()
        self._makers: dict[str, Callable[[], Told]] = {
            "pronoun": self._pronoun,
            "heading": self._heading,
            "table": self._table,
            "neighbours": self._neighbours,
            "german": lambda: self._foreign(_GERMAN, _GERMANS),
            "french": lambda: self._foreign(_FRENCH, _FRENCHMEN),
        }

    def make(self, kind: str) -> Told:
        """A fact of a kind of TITLES."""
        return self._makers[kind]()

    def _pronoun(self) -> Told:
        form, value = self.rng.choice(_PRONOUNS), self._number()
        woman = {"She": True, "He": False}.get(form.split("|")[1].split()[0])
        thing, other = self.facts.subject("t").name, self._person()
        told = form.format(e=self._person(woman), f=other, t=thing, v=value)
        first, second, question = told.split("|")
        return Told([_sentences(first, second, value=value)], question, (value,))

    def _heading(self) -> Told:
        """Two sections that say the same of different subjects; one of them is asked for."""
        attribute = self.rng.choice(self.attributes)
        needles, asked = [], list[str]()
        for _ in range(2):
            subject, value = self.facts.subject("tpb").name, self._number()
            heading = f"## {capital(subject.removeprefix('the '))}"
            section = self.rng.choice(_SECTIONS).format(a=attribute, v=value)
            sentence = next(one for one in section.split(". ") if value in one)
            needed = (heading, sentence.rstrip(".") + ".")
            needles.append(Needle(f"{heading}\n\n{section}", value, needed, apart=True))
            asked.append(f"What is the {attribute} of {subject}?")
        return Told(needles, asked[0], (needles[0].value,))

    def _table(self) -> Told:
        """Six rows of three numbers each."""
        columns = self.rng.sample(self.attributes, 3)
        names = [self.facts.subject("tp").name.removeprefix("the ") for _ in range(6)]
        rows = [[name, *(self._number() for _ in columns)] for name in names]
        header = _line(["name", *columns])
        lines = [header, "|---|---|---|---|", *(_line(row) for row in rows)]
        row, column = self.rng.randrange(len(rows)), self.rng.randrange(len(columns))
        value = rows[row][column + 1]
        needle = Needle("\n".join(lines), value, (header, _line(rows[row])), apart=True)
        return Told([needle], f"What is the {columns[column]} of the {names[row]}?", (value,))

    def _neighbours(self) -> Told:
        """Two sentences of more than 32 tokens each, so that no passage of 64 has both."""
        subject, person, value = self.facts.subject("t").name, self._person(), self._number()
        told = self.rng.choice(_NEIGHBOURS)
        told = told.format(e=subject, E=capital(subject), p=person, v=value)
        first, second, question = told.split("|")
        return Told([_sentences(first, second, value=value)], question, (person, value))

    def _foreign(
        self, forms: Sequence[str], names: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> Told:
        value, person, form = self._number(), "", ""
        while not person or person + form in self._used:
            person, form = " ".join(map(self.rng.choice, names)), self.rng.choice(forms)
        self._used.add(person + form)
        sentence, question = form.format(p=person, v=value).split("|")
        return Told([Needle(sentence, value)], question, (value,))

    def _person(self, woman: bool | None = None) -> str:
        """One that was not drawn before, with an initial where all names were."""
        for attempt in count():
            person = self.facts.person()
            first, last = person.split()
            if attempt > 99:
                person = f"{first} {self.rng.choice(_INITIALS)}. {last}"
            fits = woman is None or (first in _WOMEN) == woman
            if fits and person not in self._used:
                break
        self._used.add(person)
        return person

    def _number(self) -> str:
        """One that was not drawn before; none is a part of another."""
        number = ""
        while not number or number in self._used:
            number = str(self.rng.randrange(1000, 10_000))
        self._used.add(number)
        return number


def _sentences(first: str, second: str, *, value: str) -> Needle:
    return Needle(f"{first} {second}", value, (first, second))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
