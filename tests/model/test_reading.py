"""The report on an answer: its sources, tokens and costs."""

import json

import pytest

import memstore
from memstore.model.answer import sources_of
from memstore.model.session import OF_TOKEN, Trace
from memstore.serve.answers import Question, QueuedAnswer, pieces, report_trace
from memstore.store.memory_store import MemoryStore
from support.diary import DIARY, QUESTION
from support.tiny_decoder import word_reader

TEXT = DIARY + "At the inn — the café was shut — they told us that the bridge had been gone. " * 12


@pytest.fixture(scope="module")
def reader():
    return memstore.load_model()


@pytest.fixture(scope="module")
def store(reader, tmp_path_factory):
    path = tmp_path_factory.mktemp("reading") / "m"
    with MemoryStore.create(path, reader.signature) as made:
        reader.ingest(TEXT, made, name="diary")
        reader.ingest("The weight of the grey goat is 77 pounds.\n", made, name="goats")
        yield made


class Asked:
    """One question asked with a trace."""

    def __init__(self, reader, store, question=QUESTION, tokens=6, **lookup):
        self.trace = Trace(reader)

        def answering():
            self.trace.start()
            self.before = session.lookups.done, session.lookups.skipped

        with reader.session(store, on_read=self.trace, **lookup) as session:
            self.trace.begin(session)
            with self.trace.step():
                state = session.ask(question, answering)
            self.tokens = list(self.trace.tokens_of(session.generate(state, tokens)))
            after = session.lookups.done, session.lookups.skipped
            self.done, self.skipped = (b - a for a, b in zip(self.before, after))
            self.sources = sources_of(self.trace, store, 100)
            self.text = reader.tokenizer.decode(self.tokens)
            self.told = report_trace(self.trace, session, self.text, self.sources, bool)
            best = sources_of(self.trace, store, 1, "4467")
            self.short = report_trace(self.trace, session, "4467", best, bool)
        for_goats = Question(question, {}, list, trace=True, may_read="goats".__eq__)
        steps = QueuedAnswer(for_goats, lambda _: reader.chat(store), 60, lambda *_: None)
        assert "".join(steps)
        self.hidden = steps.outcome.memstore


@pytest.fixture(scope="module")
def asked(reader, store):
    return Asked(reader, store)


def test_the_report_and_the_answer_have_the_same_sources(asked, store):
    assert "4467" in asked.text
    got = [(s["document"], s["block"], tuple(s["span"]), s["text"]) for s in asked.told["sources"]]
    assert got == [(s.document, s.block, s.span, s.text) for s in asked.sources]
    for mine, theirs in zip(asked.told["sources"], asked.sources):
        assert mine["weight"] == pytest.approx(theirs.weight, abs=1e-3)
        assert sum(theirs.tiers.values()) == pytest.approx(theirs.weight, abs=1e-3)
        assert mine["tiers"] == sorted(theirs.tiers)
    assert sources_of(asked.trace, store, 2) == asked.sources[:2]


def test_attention_by_token_and_by_source_has_the_same_sum(asked, reader):
    by_source = sum(source["weight"] for source in asked.told["sources"])
    shown = sum(mass for token in asked.told["tokens"] for _, mass in token["sources"])
    assert 0 < shown <= by_source + 1e-2
    heads = len(reader.shape.memory_layers) * reader.shape.num_heads
    assert asked.done + asked.skipped == len(asked.tokens) * heads and asked.skipped > 0
    assert by_source <= asked.done * 1.001


def test_digits_of_an_answer_are_attributed_to_the_passage_with_the_fact(asked):
    fact = ["4467" in source["text"] for source in asked.told["sources"]].index(True)
    digits = [token for token in asked.told["tokens"] if token["text"].strip() in list("467")]
    assert len(digits) == 4
    assert all(token["sources"][0][0] == fact for token in digits[1:])
    assert all(len(token["sources"]) <= OF_TOKEN for token in asked.told["tokens"])


def test_reported_tokens_join_to_the_reported_text(asked):
    assert "".join(token["text"] for token in asked.told["tokens"]) == asked.text
    assert "".join(token["text"] for token in asked.short["tokens"]) == "4467"
    assert len(asked.short["sources"]) == 1
    assert {number for token in asked.short["tokens"] for number, _ in token["sources"]} <= {0}


def test_a_document_that_may_not_be_shown_appears_nowhere(asked, choosing):
    names = {source["document"] for source in asked.hidden["sources"]}
    assert names <= {"goats"} and "4467" not in json.dumps(asked.hidden["sources"])
    hidden = choosing[0].hidden
    assert hidden["tokens"] and not hidden["sources"] and not hidden["choice"]["candidates"]


def test_the_report_has_times_lookups_and_tiers_as_json(asked, reader, store):
    cost = json.loads(json.dumps(asked.told, allow_nan=False))
    assert cost == asked.told and cost["reader"] == "landmarks" and cost["choice"] is None
    assert 0 < cost["first_token_seconds"] <= cost["model_seconds"] <= cost["seconds"]
    assert cost["lookups"]["skipped"] >= asked.skipped
    again = Asked(reader, store).told
    assert again["tiers"]["disk"]["hits"] == 0  # all of it is in main memory now
    assert all(source["tiers"] == ["host"] for source in again["sources"])


def test_a_trace_starts_again_with_every_question(reader, store):
    trace = Trace(reader)
    with reader.session(store, on_read=trace) as session:
        said = []
        for question in (QUESTION, "What is the price of the brown mare?"):
            trace.begin(session)
            with trace.step():
                state = session.ask(question, trace.start)
            tokens = list(trace.tokens_of(session.generate(state, 4)))
            session.feed(reader.tokenizer.encode(" and then"))  # is not reported
            text = "".join(pieces(reader, tokens))
            said.append(report_trace(trace, session, text, [], bool))
            assert text == reader.tokenizer.decode(tokens)
        assert len(said[1]["tokens"]) == 4


KETTLE, LADDER = "The red kettle of the mill has no lid. ", "The grey ladder of the quarry broke. "
FACT = "The copper anchor of the orchard weighs ninety pounds. "


@pytest.fixture(scope="module")
def choosing(tmp_path_factory):
    made = word_reader(top_k=3, score_range=None)
    path = tmp_path_factory.mktemp("choosing") / "m"
    with MemoryStore.create(path, made.signature, selector=made.keeps) as store:
        made.ingest(KETTLE * 40 + FACT + LADDER * 40, store, name="inventory", keep="kv")
        yield Asked(made, store, "How much does the copper anchor of the orchard weigh?", 4), made


def test_a_passage_model_reports_its_candidates(choosing):
    asked, reader = choosing
    choice = asked.told["choice"]
    scores = [row["score"] for row in choice["candidates"]]
    assert asked.told["reader"] == "choosing" and scores == sorted(scores, reverse=True)
    assert choice["blocks"] >= len(scores) and choice["confidence"] == scores[0]
    best = choice["candidates"][0]
    assert "copper anchor" in best["text"] and best["chosen"]
    assert sum(row["chosen"] for row in choice["candidates"]) == 3
    # a head gives the chosen passages all that it does not give the text around them
    shape = reader.shape
    mass = sum(source["weight"] for source in asked.told["sources"])
    assert 0 < mass < len(asked.tokens) * len(shape.memory_layers) * shape.num_heads


def test_a_passage_model_fetches_each_unit_once(choosing):
    asked, _ = choosing
    chosen = sum(row["chosen"] for row in asked.told["choice"]["candidates"])
    host = asked.told["tiers"]["host"]
    assert chosen == host["hits"] + host["misses"]
