"""Pages of landmark training: windows and chunks of book text that state facts or ask for them, as
token ids and loss weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from memstore.model.tokenizer import Tokenizer
from memstore.training import facts as language
from memstore.training.corpus import TokenCorpus
from memstore.training.curriculum import RecallConfig
from memstore.training.facts import Fact, Pools, Sentence, draw_value

# tokens of the corpus kept free after a plain window, for chunks that continue it
_TEXT_AFTER = 1024
# Loss weights; answers have weight 1, random values and landmarks 0
_FILLER = 0.1  # text between facts, and what sentences say besides values
PLAIN = 0.3  # windows of plain text, and chunks that continue them
_COPY = 0.5  # spans repeated from earlier in the window
_SPAN = 0.3  # spans repeated from a visible window of the memory
_REPEATED = 0.3  # second statement of a pass key
_ACROSS = 0.2  # statements moved so that their value falls across two blocks
_FLOWING = (
    0.5  # windows whose filler is one passage, interrupted; else each piece is from elsewhere
)
_RUN_GAP = 256  # tokens left out between the windows of a run, for chunks that continue them


class Source:
    """The tokenizer, corpus and random generator that pages are drawn with."""

    def __init__(self, tokenizer: Tokenizer, corpus: TokenCorpus, rng: Random) -> None:
        self.rng = rng
        self.corpus = corpus
        self.encode = tokenizer.encode
        # a plain view: slicing a memory map costs ten times as much
        self._tokens = np.asarray(corpus.tokens)
        texts = [tokenizer.decode([token]) for token in range(tokenizer.text_ids)]
        self.space = tokenizer.encode(" ")
        self.ends_line = [text.endswith("\n") for text in texts]
        self.ends_sentence = np.array([text[-1:] in (".", "!", "?", "\n") for text in texts])

    def text(self, offset: int, length: int) -> np.ndarray:
        """Ids of the corpus from `offset` on; at its end fewer than `length`."""
        return self._tokens[offset : offset + length]


@dataclass
class StatedFact:
    """A fact stated in a window of a memory."""

    fact: Fact
    window: int
    start: int  # content token of the window where the value begins
    length: int  # tokens of the value
    replaces: int | None = None  # the window whose statement this one updates
    current: bool = True  # no later statement updates it


Known = dict[tuple[str, str], StatedFact | None]
"""What the windows of a memory have stated so far, by entity and attribute: the latest statement,
or None where it cannot be updated.
"""


class Page:
    """Content ids (no landmarks) and loss weights of one window or chunk, written in order."""

    def __init__(self, source: Source, config: RecallConfig, blocks: int, block_size: int) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self._source, self._config, self._rng = source, config, source.rng
        self._size, self._block_size = blocks * block_size, block_size
        self._flowing = self._rng.random() < _FLOWING
        self._place: int | None = None  # where in the corpus a flowing page's next filler begins

    def put(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def filler(self, length: float, *, exact: bool = False) -> None:
        """Write about `length` tokens of text; unless `exact`, it may stop at the end of a
        sentence.
        """
        n = int(length)
        if n <= 0:
            return
        rng, source = self._rng, self._source
        n = min(n, len(source.corpus))
        place = self._place
        if place is None or place + n > len(source.corpus):
            place = source.corpus.offset(rng, n)
        text = source.text(place, n)
        if not exact and rng.random() < 0.5:
            ends = np.flatnonzero(source.ends_sentence[text])
            text = text[: ends[-1] + 1] if len(ends) else text
        if self._flowing:
            self._place = place + len(text)
        self.put(text.tolist(), _FILLER)

    def finish(self) -> None:
        """Cut or fill the page to its size."""
        while len(self.ids) < self._size:
            self.filler(self._size - len(self.ids), exact=True)
        del self.ids[self._size :], self.weights[self._size :]

    def say(
        self,
        sentence: Sentence,
        value_weights: Sequence[float],
        *,
        last_weight: float | None = None,
        across: bool = False,
    ) -> tuple[int, int]:
        """Write a sentence; return where its first value begins and its number of tokens.

        `value_weights` are the weights of its values in turn, `last_weight` that of the text after
        the last. With `across`, filler first moves it so that a block ends inside the first value,
        if possible.
        """
        rng, block = self._rng, self._block_size
        if self.ids and rng.random() < 0.15:
            self.put(self._source.encode("\n"), _FILLER)
        if not self.ids:
            separator = rng.choice(("", " "))
        else:
            separator = "" if self._source.ends_line[self.ids[-1]] else " "
        encoded = []
        for text, is_value in sentence.parts:
            encoded.append((self._source.encode(separator + text), is_value))
            separator = ""
        before = 0
        for ids, is_value in encoded:
            if is_value:
                if across and len(ids) > 1:
                    self.filler(
                        -(len(self.ids) + before + rng.randrange(1, len(ids))) % block, exact=True
                    )
                break
            before += len(ids)
        start, length = len(self.ids), 0
        values = iter(value_weights)
        for index, (ids, is_value) in enumerate(encoded):
            if is_value:
                if not length:
                    start, length = len(self.ids), len(ids)
                weight = next(values)  # no form has more values than the paper's pass key, two
                lead = 2 if ids[:1] == self._source.space else 1
                self.put(ids, weight)
                if weight >= 1:
                    # Behind its first digit a number can be continued by its own digits; the first
                    # one needs the fact.
                    self.weights[start + lead - 1] = weight * self._config.first_weight
            elif last_weight is not None and index == len(encoded) - 1:
                self.put(ids, last_weight)
            else:
                self.put(ids, _FILLER)
        return start, length

    def plain(self, after: int | None = None) -> int:
        """Fill the page with text of the corpus, from a random offset or shortly after offset
        `after`; return the offset of the following text.
        """
        corpus = self._source.corpus
        if after is not None and after + _RUN_GAP + self._size + _TEXT_AFTER <= len(corpus):
            offset = after + _RUN_GAP
        else:
            offset = corpus.offset(self._rng, min(self._size + _TEXT_AFTER, len(corpus)))
        self.put(self._source.text(offset, self._size).tolist(), PLAIN)
        return offset + self._size

    def copies(self, gap: float) -> None:
        """Fill the page with text, and then with repeated spans of 8-32 tokens of it."""
        rng = self._rng
        self.filler(max(8, rng.random() * self._size * 0.6), exact=True)
        while len(self.ids) < self._size:
            self.filler(rng.expovariate(1) * gap * 0.5)
            length = rng.randint(8, 32)
            start = rng.randrange(max(1, len(self.ids) - length - 1))
            span = self.ids[start : start + length]
            self.put(span[:3], _FILLER)  # which span it is shows only after these
            self.put(span[3:], _COPY)

    def asked_facts(self, gap: float, pools: Pools, pass_key: bool, known: Known) -> None:
        """Fill the page with facts, filler between them, and questions about them. `known`: facts
        that must not be stated again; new ones are added.
        """
        rng = self._rng
        facts: list[Fact] = []
        unasked: list[Fact] = []
        self.filler(rng.randrange(min(16, self._size)))
        if pass_key:
            key = language.draw_pass_key(rng, self._config.repeats)
            if rng.random() < 0.8:
                self.put(self._source.encode(f" {language.PASS_KEY_HEAD}"), _FILLER)
            self.filler(rng.random() * gap * 3)
            self._state_pass_key(key, pools)
            facts.append(key)
            unasked.append(key)
        while len(self.ids) < self._size:
            if not facts or rng.random() < 0.5 or (not unasked and rng.random() < 0.8):
                fact, old, form = self._next(facts, pools, forms("STATEMENTS", pools), known)
                for some in (facts, unasked):
                    some[:] = [*(one for one in some if one != old), fact]
                self.say(language.sentence(form, fact), (0.0,))
                self.filler(rng.expovariate(1) * gap)
            else:
                fact = rng.choice(unasked if unasked and rng.random() < 0.9 else facts)
                if fact in unasked:
                    unasked.remove(fact)
                self._ask(fact, pools)
                if rng.random() < 0.5:
                    self.filler(rng.expovariate(1) * gap * 0.5)

    def stated_facts(
        self,
        window: int,
        gap: float,
        pools: Pools,
        statements: Sequence[str],
        key: Fact | None,
        known: Known,
    ) -> list[StatedFact]:
        """Fill the page, window `window` of a memory, with facts; return those that are stated
        completely. `known` is updated. key: the memory's pass key, if any.
        """
        rng = self._rng
        stated: list[StatedFact] = []
        key_at = int(rng.random() * max(1, self._size - 100))
        if key is not None and rng.random() < 0.3:
            self.put(self._source.encode(language.PASS_KEY_HEAD), _FILLER)
        self.filler(rng.randrange(min(int(gap * 2) + 2, max(1, self._size // 3))))
        while len(self.ids) < self._size:
            if key is not None and len(self.ids) >= key_at:
                start, length = self._state_pass_key(key, pools)
                if len(self.ids) <= self._size:
                    stated.append(StatedFact(key, window, start, length))
                key = None
                self.filler(rng.expovariate(1) * gap)
                continue
            latest = [each.fact for each in known.values() if each is not None]
            fact, _, form = self._next(latest, pools, statements, known)
            sentence = language.sentence(form, fact)
            start, length = self.say(sentence, (0.0,), across=rng.random() < _ACROSS)
            name = (fact.entity, fact.attribute)
            replaced, known[name] = known[name], None
            if replaced is not None:
                replaced.current = False
            # A sentence that the end of the page cuts may have changed the value, but cannot be
            # asked for.
            if len(self.ids) <= self._size:
                before = None if replaced is None else replaced.window
                known[name] = one = StatedFact(fact, window, start, length, before)
                stated.append(one)
            space = rng.expovariate(1) * gap
            self.filler(min(space, max(0, key_at - len(self.ids))) if key is not None else space)
        return stated

    def questions(self, asked: Sequence[Fact], spans: Sequence[list[int]], pools: Pools) -> None:
        """Fill the page with questions for `asked`, in order, after unrelated text or a copy from
        `spans`.
        """
        rng, config = self._rng, self._config
        u = rng.random()
        if u < config.unrelated:
            self.filler(rng.randrange(1, max(2, int(self._size * 0.75))))
        elif u < config.unrelated + config.spans:
            span = rng.choice(spans)
            length = min(rng.randint(24, max(24, self._size - 40)), len(span))
            start = rng.randrange(len(span) - length + 1)
            self.put(span[start : start + length][:6], 0.0)
            self.put(span[start : start + length][6:], _SPAN)
        for fact in asked:
            if len(self.ids) >= self._size:
                break
            self._ask(fact, pools)
            if rng.random() < 0.25:
                self.filler(rng.expovariate(1) * 15)

    def _state_pass_key(self, key: Fact, pools: Pools) -> tuple[int, int]:
        form = self._usual("PASS_KEY_STATEMENTS", pools)
        sentence = language.sentence(form, key)
        across = self._rng.random() < _ACROSS
        return self.say(sentence, (0.0, _REPEATED), across=across)

    def _ask(self, fact: Fact, pools: Pools) -> None:
        if fact.is_pass_key:
            sentence = language.question(self._usual("PASS_KEY_QUESTIONS", pools), fact)
        else:
            sentence = language.question(self._rng.choice(forms("QUESTIONS", pools)), fact)
        self.say(sentence, (1.0,), last_weight=self._config.stop_weight)

    def _usual(self, name: str, pools: Pools) -> str:
        """The first form of a list, which is the paper's, in most cases."""
        choices = forms(name, pools)
        return choices[0] if pools.simple or self._rng.random() < 0.6 else self._rng.choice(choices)

    def _next(
        self, facts: Sequence[Fact], pools: Pools, statements: Sequence[str], known: Known
    ) -> tuple[Fact, Fact | None, str]:
        """A new fact, or a new value of one of `facts`: the fact, the fact that it changes, and the
        form that states it.
        """
        rng = self._rng
        old = rng.choice(facts) if facts and rng.random() < self._config.updates else None
        if old is None or old.is_pass_key:
            return self._new_fact(facts, pools, known), None, rng.choice(statements)
        while (value := draw_value(rng, pools)) == old.value:
            pass
        changed = Fact(old.entity, old.attribute, value)
        return changed, old, rng.choice(forms("UPDATES", pools))

    def _new_fact(self, facts: Sequence[Fact], pools: Pools, known: Known) -> Fact:
        """A fact about something not in `known`, sometimes similar to one of `facts`."""
        rng, attempt = self._rng, 0
        while True:
            # A few colours and nouns can be used up; then anything of the split will do.
            choice = pools if attempt < 30 else Pools.of(pools.split)
            fact = language.draw_fact(rng, choice)
            if facts and attempt < 30 and rng.random() < self._config.near:
                near = rng.choice(facts)
                if not near.is_pass_key:
                    if rng.random() < 0.5:
                        attribute = rng.choice(Pools.of(pools.split).attributes)
                        fact = Fact(near.entity, attribute, fact.value)
                    else:
                        entity = f"{near.entity.split()[0]} {fact.entity.split()[-1]}"
                        fact = Fact(entity, near.attribute, fact.value)
            if (fact.entity, fact.attribute) not in known:
                known[fact.entity, fact.attribute] = None
                return fact
            attempt += 1


def forms(name: str, pools: Pools) -> Sequence[str]:
    """The sentence forms of the split, e.g. of "STATEMENTS"; of simple pools, the first four."""
    choices: Sequence[str] = getattr(language, name)[pools.split]
    return choices[:4] if pools.simple else choices
