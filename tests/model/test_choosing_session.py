"""Sessions of a passage model: which passages are read, at which positions, and what is kept of a
long chat.
"""

import pytest
import torch

from memstore.errors import InvalidInput, StoreUnavailable
from memstore.store.retrieve.retrieval import SelectorIndex

pytest.importorskip("transformers")

from memstore.block import BlockKey
from memstore.model.passages import passage_session
from memstore.model.passages.repositioned_attention import (
    RepositionedAttention,
    capture,
    computed,
    read_on,
)
from memstore.model.passages.selector import Chosen
from memstore.model.source_text import Text
from memstore.store.memory_store import MemoryStore
from support.passage_reader import DOCUMENT, GONE, QUESTION, WINDOW, memory, reader_of
from support.rounding import TINY_MODEL, assert_same_to_rounding

FACT = "The copper anchor of the orchard weighs ninety pounds."


@pytest.fixture(scope="module")
def reader():
    return reader_of()


@pytest.fixture(scope="module")
def learned():
    return reader_of(learned=True)


def filler(tokens, seed=0):
    """Ids of text that says nothing of what is asked."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, 900, (tokens,), generator=generator).tolist()


def tell(session, text):
    """Feed a text."""
    session.feed(session.reader.tokenizer.encode(text))


def kept(store, reader, block):
    """Keys and values [tokens, layers, heads, head_dim] of a passage as stored."""
    shape = reader.shape
    size = (-1, len(shape.memory_layers), shape.num_kv_heads, shape.head_dim)
    ((number, at),) = store.retrieval.stored_at([(block.document, block.block)])
    with store.lease([BlockKey(number, 0, at, 0)]) as lease:
        rows, keys, values = lease.tokens()
        return rows[keys].view(size), rows[values].view(size)


def test_text_stays_local_until_the_window_overflows(reader, tmp_path):
    with memory(reader, tmp_path) as store:
        states = []
        for local_tokens in (WINDOW, 100_000):
            with reader.session(store, local_tokens=local_tokens) as session:
                said = [session.feed(filler(100)), session.ask(QUESTION, lambda: None)]
                said += [session.feed(filler(120, seed=1))]
                states.append(torch.cat([said[0], said[1][None], said[2]]))
                assert session.lookups.done == 1
        assert_same_to_rounding(*states, products=TINY_MODEL)


def test_tokens_that_leave_the_window_shift_the_rest_and_change_nothing_else(reader):
    """Compares with a new context that attends to the remaining keys and values."""
    beginning = reader.prefix()
    rolling = RepositionedAttention(reader, beginning)
    kept = {}

    def keeping(layer, q, k, v):
        held = kept.get(layer, (k[:, :, :0], v[:, :, :0]))
        kept[layer] = tuple(torch.cat((old, new), 2) for old, new in zip(held, (k, v)))
        return rolling.attend(layer, q, k, v)

    torch.manual_seed(1)
    remembered = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    with torch.no_grad():
        rolling.remember([1], *remembered)
        for piece in (70, 1, 60):
            reader.hidden(torch.tensor([filler(piece, seed=piece)]), keeping)
        rolling.let_go(GONE)
        assert rolling.local == 131 - GONE
        fresh = RepositionedAttention(reader, beginning)
        fresh.remember([1], *remembered)
        for layer, (k, v) in kept.items():
            rows = torch.zeros(1, 4, 131 - GONE, 16)
            fresh.attend(layer, rows, k[:, :, GONE:], v[:, :, GONE:])
        forked = rolling.fork()
        ids = torch.tensor([filler(9, seed=3)])
        expected = reader.hidden(ids, fresh.attend)
        for context in (forked, rolling):  # what one of them reads, the other has not read
            assert torch.allclose(reader.hidden(ids, context.attend), expected, atol=1e-4)


def test_states_read_in_parts_equal_those_read_at_once(learned):
    ids = filler(150)
    whole = capture(learned, ids)
    walk = RepositionedAttention(learned, adapt=learned.adapted_turns)
    first = read_on(walk, ids[:90], WINDOW)
    # another text, that this one does not see
    read_on(walk.fork(), filler(50, seed=1), WINDOW)
    parts = [first.states[2]] + [read_on(walk, [one], WINDOW).states[2] for one in ids[90:93]]
    assert torch.allclose(torch.cat(parts), whole.states[2][:93], atol=1e-4)


def test_a_later_turn_is_scored_as_if_the_whole_chat_were_read_again(learned, tmp_path):
    seen = []
    selector = learned.selector

    class Watched:
        def __getattr__(self, name):
            return getattr(selector, name)

        def scores(self, query, *given):
            seen.append(query.captured)
            return selector.scores(query, *given)

    with memory(learned, tmp_path) as store:
        learned.selector = Watched()
        try:
            with learned.session(store) as session:
                read = []
                for question in (
                    "Where is the red kettle?",
                    "How long is the grey ladder?",
                    QUESTION,
                ):
                    ids, words = learned.turn_ids(question, first=not read)
                    state = session.ask(question, lambda: None)
                    whole = capture(learned, read + ids)
                    asked = whole.part(range(len(read) + words.start, len(read) + words.stop))
                    assert seen[-1].ids == asked.ids
                    assert torch.allclose(seen[-1].states[2], asked.states[2], atol=1e-4)
                    said = list(session.generate(state, 4))
                    read += ids + said[: len(said) - 1]
        finally:
            learned.selector = selector


def test_a_question_of_too_many_tokens_is_refused_and_the_session_goes_on(learned, tmp_path):
    long = "kettle " * 5000
    with memory(learned, tmp_path) as store:
        with pytest.raises(InvalidInput, match="tokens; shorten it to 4,096"):
            learned.search(long, store)
        with learned.session(store) as session:
            with pytest.raises(InvalidInput, match="tokens"):
                session.ask(f"What is {long}?", lambda: None)
            session.ask(QUESTION, lambda: None)
            assert session.chosen and session.answered


@pytest.mark.parametrize("told", [False, True])
def test_a_follow_up_is_expanded_by_the_question_before_it(learned, tmp_path, monkeypatch, told):
    seen = []
    scores = type(learned.selector).scores

    def watched(selector, query, *given):
        seen.append(query)
        return scores(selector, query, *given)

    monkeypatch.setattr(type(learned.selector), "scores", watched)
    with memory(learned, tmp_path) as store, learned.session(store) as session:
        if told:  # as the turns before are, of a chat that a client sends whole
            session.tell("Where in mlil is the red kettle?", "In the hall.")
        else:
            session.ask("Where in mlil is the red kettle?", lambda: None)
        best = store.document("inventory").id
        for asked, meant, before in (
            ("And the grey ladder?", "And the grey ladder?", "Where in mill is the red kettle?"),
            ("How long is it?", "How long is it?", "And the grey ladder?"),
            ("Where in mlil is the lamp CP-40?", "Where in mill is the lamp CP-40?", None),
            ("And CP-60?", "Where in mill is the lamp CP-60?", None),  # another thing: as meant
        ):
            seen.clear()
            session.ask(asked, lambda: None)
            query = seen[-1]
            assert query.text == (meant if before is None else asked)
            assert (query.before and query.before.text) == before
            assert meant in learned.tokenizer.decode(session._local.ids)
            assert session._best is not None and session._best[0] == best
            # what was told is scored once, to know its document
            assert len(seen) == 1 + (told and asked.startswith("And the"))
        assert learned.tokenizer.decode(query.captured.ids).strip() == query.text
        session.ask("> mlil\nWhere in mlil is the lamp?", lambda: None)  # a quote stays as typed
        assert "> mlil\nWhere in mill is the lamp?" in learned.tokenizer.decode(session._local.ids)


@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_passages_and_separators_have_the_positions_of_a_prompt(separator, tmp_path):
    reader = reader_of(separator=separator, top_k=4)
    question, _ = reader.turn_ids(QUESTION, first=True)
    with memory(reader, tmp_path, codec="zstd") as store:
        document = store.document("inventory")
        chosen = [Chosen(document.id, block) for block in (0, 2)]
        stored = [kept(store, reader, one) for one in chosen]
        expected = RepositionedAttention(reader, reader.prefix())
        for layer in range(4):
            k, v = (torch.cat([half[:, layer] for half in halves]) for halves in zip(*stored))
            expected.remember([layer], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        computed(expected, reader.separator_ids)
        said = torch.tensor([[*question]])
        with torch.no_grad():
            states = reader.hidden(said, expected.attend)[0]
        with reader.session(store, retrieve=False) as session:
            session.read(chosen)  # the separator is read with the question
            torch.testing.assert_close(session.feed(question), states, rtol=0, atol=1e-4)
            assert session.attention.local == len(question)
        with reader.session(store, retrieve=False) as session:
            session.feed(filler(9))
            session.read(chosen)  # after a text that was read earlier, which moves up
            session.read([])
            assert session.attention.local == 9 and session.feed(question).isfinite().all()


def test_copies_of_a_text_are_read_once_from_the_last_document(tmp_path, monkeypatch):
    reader = reader_of(top_k=3)
    with memory(reader, tmp_path) as store:
        reader.ingest(FACT, store, name="note", keep="kv")
        reader.ingest(f"{FACT}\n", store, name="other note", keep="kv")
        score = SelectorIndex.word_scores

        def rounded(*given):
            """Every other score is a unit in the last place higher."""
            scores = score(*given)
            off = torch.finfo(scores.dtype).eps * (torch.arange(len(scores)) % 2)
            return scores * (1 + off)

        monkeypatch.setattr(SelectorIndex, "word_scores", rounded)
        with reader.session(store) as session:
            session.ask(QUESTION, lambda: None)
            first, last = (store.document(name).id for name in ("note", "other note"))
            (found,) = [one for one in session.chosen if one.document in (first, last)]
            assert (found.document, found.block, found.same) == (last, 0, ((first, 0),))
        sources = reader.ask(QUESTION, store, max_new_tokens=1).sources
        (named,) = [source for source in sources if source.document == "other note"]
        assert named.also == [("note", (0, len(FACT)))] and named.text == FACT


def test_a_passage_with_unavailable_tokens_is_not_taken_for_a_copy(tmp_path, monkeypatch):
    reader = reader_of(top_k=3)
    with memory(reader, tmp_path) as store:
        reader.ingest(FACT, store, name="note", keep="kv")
        reader.ingest(f"{FACT}\n", store, name="other note", keep="kv")

        def away(*given):
            raise StoreUnavailable("the store is away")

        monkeypatch.setattr(store, "passages", away)
        with reader.session(store) as session:
            session.ask(QUESTION, lambda: None)
            both = {store.document(name).id for name in ("note", "other note")}
            assert both <= {one.document for one in session.chosen}


@pytest.mark.parametrize("way", ["ask", "search"])
@pytest.mark.parametrize("named", [None, ["inventory"], lambda: ["inventory"]])
def test_a_document_replaced_during_a_search_is_searched_again(
    reader, tmp_path, monkeypatch, way, named
):
    score, pending = passage_session.score_blocks, [Text(DOCUMENT + FACT, "inventory")]
    with memory(reader, tmp_path) as store, MemoryStore.open(tmp_path / "m") as other:

        def replaced(*given):
            found = score(*given)
            while pending:
                reader.ingest(pending.pop(), other, mode="replace", keep="kv")
            return found

        monkeypatch.setattr(passage_session, "score_blocks", replaced)
        found = getattr(reader, way)(QUESTION, store, documents=named)
        first = (found if way == "search" else found.sources)[0]
        assert first.document == "inventory" and FACT in first.text


@pytest.mark.parametrize("retrieve", [True, False])
def test_a_long_chat_keeps_one_window_of_tokens_and_still_chooses_passages(
    learned, tmp_path, retrieve
):
    with memory(learned, tmp_path) as store, learned.session(store, retrieve=retrieve) as session:
        tell(session, FACT)
        session.feed(filler(5 * WINDOW))
        assert session.attention.local <= WINDOW
        long = f"{FACT} {learned.tokenizer.decode(filler(500))} {QUESTION} {QUESTION}"
        for question in (long, "What of the grey ladder of the quarry?"):
            assert session.ask(question, lambda: None).isfinite().all()
            assert session.attention.local <= WINDOW
        assert bool(session.chosen) is retrieve
        assert all(block.document > 0 for block in session.chosen)
