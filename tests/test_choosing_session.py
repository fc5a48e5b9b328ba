"""Sessions of a reader that chooses once for a question: what of a long chat is held, and found
again when it has left, and what is chosen while an answer is generated.
"""

import pytest
import torch
from tiny_decoder import decoder, tokenizer

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.store.memory_store import MemoryStore

pytest.importorskip("transformers")

from memstore.block import BlockKey
from memstore.hf.reader import HuggingFaceReader
from memstore.model.adaptation import Adaptation
from memstore.model.chosen import Chosen
from memstore.model.compact import CompactAttention, Window, read_beginning, read_separator
from memstore.model.selector_heads import PointerHeads
from memstore.model.selector_sum import Sum, Words
from memstore.model.selectors import Gate
from memstore.model.tap import TapWalk, tap

BLOCK, WINDOW = 64, 4 * 64
FACT = "The copper anchor of the orchard weighs ninety pounds."
QUESTION = "How much does the copper anchor of the orchard weigh?"
KETTLE, LADDER = "The red kettle of the mill has no lid. ", "The grey ladder of the quarry broke. "
DOCUMENT = KETTLE * 8 + LADDER * 8


def reader_of(pointing=False, **adapted):
    """Four local blocks, read two at once; found by words, or by words and pointer heads."""
    made = HuggingFaceReader(
        decoder("llama"), tokenizer(), Adaptation(Words(), **{"top_k": 1, "margin": 0, **adapted})
    )
    if pointing:
        shape = made.shape
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        heads = PointerHeads([(2, 1), (1, 3)], sizes, BLOCK, made.rotate)
        made.selector = Sum([(heads, 1.0), (Words(), 50.0)])
    made.lookup = made.lookup.changed(chunk_blocks=2, local_blocks=4)
    return made


@pytest.fixture(scope="module")
def reader():
    return reader_of()


@pytest.fixture(scope="module")
def pointing():
    return reader_of(pointing=True)


def memory(reader, tmp_path, **options):
    store = MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps, **options)
    reader.ingest(DOCUMENT, store, name="inventory")
    return store


def filler(tokens, seed=0):
    """Ids of text that says nothing of what is asked."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, 900, (tokens,), generator=generator).tolist()


def tell(session, text):
    """Feed a text, up to the border of a block, so that it stands in one."""
    ids = session.reader.tokenizer.encode(text)
    session.feed([*ids, *filler(-len(ids) % BLOCK)])


def kept(store, layer, block):
    """Keys and values [heads, block size, head_dim] of a block as stored."""
    heads = range(store.signature.num_kv_heads)
    units = [BlockKey(block.document, layer, block.block, head) for head in heads]
    with store.lease(units) as lease:
        return lease.k[lease.slots].clone(), lease.v[lease.slots].clone()


def test_until_the_window_overflows_all_of_the_text_is_local(reader, tmp_path):
    with memory(reader, tmp_path) as store:
        states = []
        for local_blocks in (4, 1000):
            with reader.session(store, local_blocks=local_blocks) as session:
                said = [session.feed(filler(100)), session.ask(QUESTION, lambda: None)]
                said += [session.feed(filler(120, seed=1))]
                states.append(torch.cat([said[0], said[1][None], said[2]]))
                assert session.lookups.done == 1
        assert torch.equal(*states)


def test_what_leaves_moves_the_rest_up_and_nothing_else(reader):
    """Oracle: the keys and values that are left, attended to in a fresh context."""
    beginning = read_beginning(reader)
    rolling = CompactAttention(reader, beginning)
    kept = {}

    def keeping(layer, q, k, v):
        held = kept.get(layer, (k[:, :, :0], v[:, :, :0]))
        kept[layer] = tuple(torch.cat((old, new), 2) for old, new in zip(held, (k, v)))
        return rolling.attend(layer, q, k, v)

    torch.manual_seed(1)
    remembered = torch.randn(2, 20, 16), torch.randn(2, 20, 16)
    with torch.no_grad():
        rolling.remember(1, *remembered)
        for piece in (70, 1, 60):
            reader.hidden(torch.tensor([filler(piece, seed=piece)]), keeping)
        gone = rolling.let_go(BLOCK)
        assert rolling.local == 131 - BLOCK
        fresh = CompactAttention(reader, beginning)
        fresh.remember(1, *remembered)
        for layer, (k, v) in kept.items():
            for taken, all_of_it in zip(gone[layer], (k, v)):
                assert torch.equal(taken, all_of_it[0, :, :BLOCK])
            rows = torch.zeros(1, 4, 131 - BLOCK, 16)
            fresh.attend(layer, rows, k[:, :, BLOCK:], v[:, :, BLOCK:])
        forked = rolling.fork()
        ids = torch.tensor([filler(9, seed=3)])
        expected = reader.hidden(ids, fresh.attend)
        for context in (forked, rolling):  # what one of them reads, the other has not read
            assert torch.allclose(reader.hidden(ids, context.attend), expected, atol=1e-4)


def test_a_walk_in_parts_shows_what_a_whole_one_does(pointing):
    beginning, ids = read_beginning(pointing), filler(150)
    whole = tap(pointing, beginning, ids)
    walk = TapWalk(pointing, beginning, Window(WINDOW, BLOCK, 2 * BLOCK))
    first = walk.read(ids[:90])
    walk.fork().read(filler(50, seed=1))  # another text, that this one does not see
    for layer, q in whole.q.items():
        parts = [first.q[layer]] + [walk.read([token]).q[layer] for token in ids[90:93]]
        assert torch.allclose(torch.cat(parts, 1), q[:, :93], atol=1e-4)
        break


def test_a_later_turn_is_scored_as_if_all_before_it_were_read_again(pointing, tmp_path):
    seen = []
    selector = pointing.selector

    class Watched:
        def __getattr__(self, name):
            return getattr(selector, name)

        def scores(self, tapped, *given):
            seen.append(tapped)
            return selector.scores(tapped, *given)

    with memory(pointing, tmp_path) as store:
        pointing.selector = Watched()
        try:
            with pointing.session(store) as session:
                read = []
                for question in ("Where is the red kettle?", "And the grey ladder?", QUESTION):
                    ids, words = pointing.turn_ids(question, first=not read)
                    state = session.ask(question, lambda: None)
                    whole = tap(pointing, read_beginning(pointing), read + ids)
                    asked = whole.part(range(len(read) + words.start, len(read) + words.stop))
                    assert seen[-1].ids == asked.ids
                    for layer, q in asked.q.items():
                        assert torch.allclose(seen[-1].q[layer], q, atol=1e-4)
                    said = list(session.generate(state, 4))
                    read += ids + said[: len(said) - 1]
        finally:
            pointing.selector = selector


@pytest.mark.parametrize("kind", ["words", "words and heads"])
def test_what_was_said_three_windows_ago_is_found_and_read(reader, pointing, tmp_path, kind):
    reader = reader if kind == "words" else pointing
    with memory(reader, tmp_path) as store, reader.session(store) as session:
        layers = {}

        def keeping(layer, q, k, v):
            layers.setdefault(layer, (k[0].half(), v[0].half()))  # of the first forward
            return attend(layer, q, k, v)

        attend, session.attend = session.attend, keeping
        tell(session, FACT)
        session.feed(filler(3 * WINDOW))
        states = session.ask(QUESTION, lambda: None)
        (chosen,) = session.chosen
        assert chosen.document < 0 and chosen.block == 0 and states.isfinite().all()
        for layer, halves in layers.items():  # as it was when it was said
            units = [BlockKey(chosen.document, layer, 0, head) for head in range(2)]
            with store.lease(units) as lease:
                for stored, said in zip((lease.k, lease.v), halves):
                    assert torch.equal(stored[lease.slots], said[:, :BLOCK])
        session.ask("What of the grey ladder of the quarry?", lambda: None)
        assert session.chosen[0].document > 0
        alone = reader.session(store)
        tell(alone, FACT)
        alone.ask(QUESTION, lambda: None)  # it is in the local text still
        assert all(block.document > 0 for block in alone.chosen)


def test_a_chat_without_documents_remembers_itself(reader, tmp_path):
    with (
        MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store,
        reader.chat(store) as chat,
    ):
        chat.ask(FACT, max_new_tokens=2)
        for number in range(12):
            chat.ask(
                f"Number {number}: " + reader.tokenizer.decode(filler(80, number)), max_new_tokens=2
            )
        answer = chat.ask(QUESTION, max_new_tokens=2)
        assert answer.lookups == {"done": 1, "skipped": 0}
        assert answer.sources == []  # no document was read


def test_a_turn_longer_than_the_window_is_read_and_its_beginning_found(reader, tmp_path):
    with memory(reader, tmp_path) as store, reader.session(store) as session:
        long = f"{FACT} {reader.tokenizer.decode(filler(500))} {QUESTION} {QUESTION}"
        state = session.ask(long, lambda: None)
        assert state.isfinite().all() and session.held["own_blocks"] == 4
        assert session.chosen[0].document < 0  # a part of the turn itself
        assert session.choose(QUESTION, [], range(0))[0].block <= 1


def test_memory_is_bounded_however_long_the_chat(pointing, tmp_path):
    unit = 2 * BLOCK * 16 * 2  # bytes of keys and values of a block and head
    per_block = 4 * 2
    with memory(pointing, tmp_path, host_budget=12 * per_block * unit) as store:
        most = store.own_capacity // (2 * per_block)
        sizes = []
        with pointing.session(store) as session:
            for number in range(9):
                tell(session, f"{FACT} {number}")
                for piece in range(4):
                    session.feed(filler(300, seed=piece))
                session.ask(QUESTION, lambda: None)
                held = session.held
                assert held["local_tokens"] < WINDOW + BLOCK
                assert held["own_blocks"] <= most
                sizes.append((store.tier_stats()["host"]["held"], store.stats()["landmarks"]))
                assert session.chosen  # with so little room, it is read in parts
        slots, landmarks = zip(*sizes)
        assert max(slots) <= 12 * per_block * unit and 4 <= most <= 12
        assert max(landmarks[6:]) < 1.5 * max(landmarks[:3])


def test_what_the_session_itself_said_counts_as_an_answer(tmp_path):
    reader = reader_of(gate=Gate(4.0))
    with memory(reader, tmp_path) as store, reader.session(store) as session:
        session.ask(QUESTION, lambda: None)
        assert not session.answered and session.chosen == []
        tell(session, FACT)
        session.feed(filler(3 * WINDOW))
        session.ask(QUESTION, lambda: None)
        assert session.answered and session.chosen[0].document < 0
        assert (session.lookups.done, session.lookups.skipped) == (1, 1)


@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_a_separator_stands_behind_what_is_read(separator, tmp_path, monkeypatch):
    reader = reader_of(separator=separator, top_k=4)
    between = read_separator(reader)
    assert len(between) == (reader.shape.num_layers if separator else 0)
    given = {}
    with memory(reader, tmp_path) as store, reader.session(store, retrieve=False) as session:
        monkeypatch.setattr(
            CompactAttention, "remember", lambda _, layer, k, v: given.setdefault(layer, (k, v))
        )
        document = store.document("inventory")
        blocks = [Chosen(document.id, block, 0.0) for block in (0, 1, 0)]
        session.read([*blocks[:2], blocks[2]._replace(first=8, end=20)])
        for layer in reader.shape.memory_layers:
            for half in (0, 1):
                stored = [kept(store, layer, block)[half] for block in blocks]
                behind = [between[layer][half].to(stored[0].dtype)] if separator else []
                parts = [stored[0], stored[1], stored[2][:, 8:20], *behind]
                assert torch.equal(given[layer][half], torch.cat(parts, 1))


def test_the_separator_is_read_once_behind_the_prefix(reader):
    k, v = read_separator(reader)[1]
    assert read_separator(reader)[1][0] is k
    context, found = CompactAttention(reader, read_beginning(reader)), {}

    def attend(layer, q, k, v):
        found[layer] = k[0], v[0]
        return context.attend(layer, q, k, v)

    with torch.no_grad():
        reader.hidden(torch.tensor([reader.separator_ids]), attend)
    torch.testing.assert_close((k, v), found[1])


def test_a_closed_session_holds_nothing(pointing, tmp_path):
    with memory(pointing, tmp_path) as store:
        store.word_scores({1: 1.0}, [(1, 0, store.document("inventory").blocks)])
        session = pointing.session(store)
        tell(session, FACT)
        session.feed(filler(2 * WINDOW))
        session.ask(QUESTION, lambda: None)
        own = session.chosen[0]
        assert own.document < 0
        before = store.tier_stats()["host"]["held"]
        session.close()
        assert store.tier_stats()["host"]["held"] < before
        with pytest.raises(DocumentNotFound):
            store.word_scores({1: 1.0}, [(own.document, 0, 1)])
        with pytest.raises(DocumentNotFound):
            store.token_maxima(torch.ones(1, 16), 0, [(own.document, 0, 1)])


def test_a_session_that_chooses_nothing_forgets_what_leaves(reader, tmp_path):
    with memory(reader, tmp_path) as store, reader.session(store, retrieve=False) as session:
        session.feed(filler(5 * WINDOW))
        assert session.held == {"local_tokens": 5 * WINDOW - 16 * BLOCK, "own_blocks": 0}
        assert session.ask(QUESTION, lambda: None).isfinite().all() and not session.chosen


def test_what_is_generated_chooses_anew(reader, tmp_path):
    with memory(reader, tmp_path) as store, reader.session(store) as session:
        first = session.choose("Where is the kettle?", [], range(0))
        session.feed(reader.tokenizer.encode(" a grey ladder of the quarry"))
        assert session.chosen == first  # until it is asked to
        again = session.choose_again()
        assert again == session.chosen and session.lookups.done == 2
        assert first[0].block < again[0].block


@pytest.mark.parametrize(("every", "choices"), [(None, 1), (0, 1), (4, 3), (100, 1)])
def test_blocks_are_chosen_every_so_many_tokens(reader, tmp_path, every, choices):
    with memory(reader, tmp_path) as store, reader.session(store, choose_every=every) as session:
        state = session.ask("Where is the red kettle?", lambda: None)
        said = list(session.generate(state, 10))
        assert len(said) == 10 and session.lookups.done == choices


def test_a_later_choice_that_finds_nothing_leaves_what_is_read(tmp_path):
    reader = reader_of(gate=Gate(0.5))
    with memory(reader, tmp_path) as store, reader.session(store) as session:
        session.ask("Where is the lid of the red kettle of the mill?", lambda: None)
        chosen = session.chosen
        assert chosen and session.answered
        session.reader.gate = Gate(1e9)
        session.choose_again()
        assert session.chosen == chosen and session.answered and session.lookups.skipped == 1


def test_settings_out_of_range_are_named(reader):
    for setting in ({"local_blocks": 0}, {"choose_every": -1}):
        with pytest.raises(InvalidInput, match=next(iter(setting))):
            reader.lookup.changed(**setting)
