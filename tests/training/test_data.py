"""Training data: corpora read from files, and recall batches in which every answer is stated where
the batch says.
"""

import json
import random

import numpy as np
import pytest
import zstandard

from memstore.errors import InvalidInput
from memstore.model.tokenizer import Tokenizer
from memstore.training import facts as language
from memstore.training.batches import RecallData
from memstore.training.corpus import TokenCorpus, read_documents
from memstore.training.curriculum import RecallConfig
from memstore.training.facts import SPLITS, VALUE_SHARES, Fact, Pools, draw_fact

BLOCK = 16


def book(seed, words=6000):
    rng = random.Random(seed)
    names = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(3, 9))) for _ in range(900)]
    sentences = []
    while words > 0:
        n = rng.randint(4, 14)
        sentences.append(
            " ".join(rng.choices(names, k=n)).capitalize() + rng.choice((".", ".", "!", ".\n"))
        )
        words -= n
    return " ".join(sentences)


def write_json_lines(path, texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "one.txt").write_text(book(1))
    return [folder / "one.txt", write_json_lines(folder / "more.jsonl.zst", [book(2), book(3)])]


@pytest.fixture(scope="module")
def tokenizer(files):
    forms = " ".join(form for group in language.QUESTIONS.values() for form in group)
    return Tokenizer.train([*read_documents(files), forms], 600)


@pytest.fixture(scope="module")
def corpus(files, tokenizer, tmp_path_factory):
    return TokenCorpus.build(files, tokenizer, tmp_path_factory.mktemp("cache"))


def recall(tokenizer, corpus, seed=0, **settings):
    return RecallData(tokenizer, corpus, RecallConfig(**settings), BLOCK, seed)


# --- documents and corpora


def test_documents_of_both_kinds_are_read_in_order(files):
    assert list(read_documents(files)) == [book(1), book(2), book(3)]


def test_unusable_files_are_named(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    for name, content, why in (
        ("absent.txt", None, "no such file"),
        ("blank.txt", b" \n\n ", "holds no text"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8"),
        ("binary.txt", b"ab\0cd", "binary"),
        ("page.html", b"<p>", "neither"),
        ("broken.jsonl.zst", b"no zstandard frame", "zstandard"),
        ("other.jsonl.zst", compress(b'{"text": "a"}\n{"body": "b"}\n'), "line 2: .*field `text`"),
        ("number.jsonl.zst", compress(b'{"text": 3}\n'), "line 1: Expected `str`, got `int`"),
        ("none.jsonl.zst", compress(b"\n"), "holds no documents"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidInput, match=why) as caught:
            list(read_documents([path]))
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_corpus_concatenates_its_documents(corpus, files, tokenizer):
    assert corpus.tokens.dtype == np.uint16
    assert corpus.tokens.tolist() == [
        token for text in read_documents(files) for token in tokenizer.encode(text)
    ]
    assert corpus.offset(random.Random(1), len(corpus)) == 0
    with pytest.raises(InvalidInput, match="fewer than"):
        corpus.offset(random.Random(2), len(corpus) + 1)


def test_a_corpus_is_tokenised_once_for_the_same_files_and_tokenizer(files, tokenizer, tmp_path):
    built = TokenCorpus.build(files, tokenizer, tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    stamps = [(tmp_path / name).stat().st_mtime_ns for name in made]
    again = TokenCorpus.build(files, tokenizer, tmp_path)
    assert [(tmp_path / name).stat().st_mtime_ns for name in made] == stamps
    assert np.array_equal(built.tokens, again.tokens) and built.words == again.words
    TokenCorpus.build(files[:1], tokenizer, tmp_path)
    TokenCorpus.build(files, Tokenizer.train([book(1)], 300), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3 * len(made)
    broken = write_json_lines(tmp_path / "broken.jsonl.zst", [book(5)])
    broken.write_bytes(broken.read_bytes()[:-40])
    with pytest.raises(InvalidInput):
        TokenCorpus.build([*files, broken], tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing of a build that stopped halfway


# --- the language of facts


def test_training_never_draws_what_is_held_out():
    for name in ("STATEMENTS", "UPDATES", "QUESTIONS", "PASS_KEY_STATEMENTS", "PASS_KEY_QUESTIONS"):
        forms = getattr(language, name)
        assert len(forms["held_out"]) == 2 and not set(forms["train"]) & set(forms["held_out"])
    assert len(language.STATEMENTS["train"]) >= 8 and len(language.QUESTIONS["train"]) >= 8
    assert "format" not in VALUE_SHARES["train"]
    rng = random.Random(0)
    train, held_out = (
        [draw_fact(rng, pools) for _ in range(3000)] for pools in map(Pools.of, SPLITS)
    )
    assert not {fact.attribute for fact in train} & {fact.attribute for fact in held_out}
    assert not {fact.entity for fact in train} & {fact.entity for fact in held_out}


def test_sentences_hold_their_fact_and_questions_end_before_the_answer():
    fact = Fact("red fox", "code", "48213")
    plain = language.STATEMENTS["train"][0]
    assert language.sentence(plain, fact).text == "The code of the red fox is 48213."
    named = Fact("Dorvel", "code", "7")
    assert language.sentence(plain, named).text == "The code of Dorvel is 7."
    for split in SPLITS:
        for form in (*language.STATEMENTS[split], *language.UPDATES[split]):
            sentence = language.sentence(form, fact)
            assert all(word in sentence.text for word in ("red fox", "code", "48213"))
            assert [text.strip() for text, is_value in sentence.parts if is_value] == ["48213"]
        for form in language.QUESTIONS[split]:
            asked = language.question(form, fact)
            assert (asked.answer, asked.prompt + asked.answer + ".") == (" 48213", asked.text)
            assert "48213" not in asked.prompt
    key = language.pass_key("9054")
    stated = language.sentence(language.PASS_KEY_STATEMENTS["train"][0], key)
    assert stated.text == "The pass key is 9054. Remember it. 9054 is the pass key."
    asked = language.question(language.PASS_KEY_QUESTION, key)
    assert asked.prompt == "What is the pass key? The pass key is"


# --- batches


def content(batch, tokenizer):
    """Content ids and weights [B, blocks * l] of a batch with a landmark of no weight after every
    block, which is checked.
    """
    ids, weights = (x.view(len(x), -1, BLOCK + 1) for x in (batch.ids, batch.weights))
    assert (ids[:, :, BLOCK] == tokenizer.landmark_id).all() and not weights[:, :, BLOCK].any()
    assert (ids[:, :, :BLOCK] < tokenizer.landmark_id).all()
    assert ((weights >= 0) & (weights <= RecallConfig().first_weight)).all()
    return ids[:, :, :BLOCK].flatten(1), weights[:, :, :BLOCK].flatten(1)


def answers(ids, weights, tokenizer):
    """(prompt before it, answer, whether it is whole) for each run of weight 1 or more in a row of
    content.
    """
    found, start = [], None
    for place, weight in enumerate([*weights.tolist(), 0.0]):
        if weight >= 1 and start is None:
            start = place
        elif weight < 1 and start is not None:
            prompt = tokenizer.decode(ids[:start].tolist())
            found.append((prompt, tokenizer.decode(ids[start:place].tolist()), place < len(ids)))
            start = None
    return found


def test_answers_in_windows_are_stated_before_them(tokenizer, corpus):
    data = recall(tokenizer, corpus, plain_share=0, copy_share=0, updates=0.2)
    asked = 0
    for _ in range(8):
        for ids, weight in zip(*content(data.windows(8, 20, gap=5), tokenizer)):
            for prompt, answer, _ in answers(ids, weight, tokenizer):
                assert answer.strip() in prompt, (prompt, answer)
                asked += 1
    assert asked > 100


def test_random_values_have_no_weight_where_they_are_stated(tokenizer, corpus):
    memory = recall(tokenizer, corpus, own_questions=0, copies=0).memory(8, 20)
    ids, weights = content(memory, tokenizer)
    assert ids.shape == (8, 20 * BLOCK)
    stated = [stated for facts in memory.facts for stated in facts]
    assert len(stated) > 10
    for one in stated:
        place = slice(one.start, one.start + one.length)
        assert tokenizer.decode(ids[one.window][place].tolist()).strip() == one.fact.value
        assert (weights[one.window][place] == 0).all()


def test_every_answer_of_a_chunk_is_stated_in_a_window_it_may_read(tokenizer, corpus):
    data = recall(tokenizer, corpus, updates=0.3, gaps=(4, 12), continuations=0, spans=0)
    asked = 0
    for _ in range(10):
        memory = data.memory(6, 16)
        chunks = data.questions(memory, 10, 6)
        outdated = {one.fact for facts in memory.facts for one in facts if not one.current}
        for ids, weight, visible in zip(*content(chunks, tokenizer), chunks.visible.tolist()):
            assert len(set(visible)) == 2
            readable = {
                one.fact for window in visible for one in memory.facts[window] if one.current
            }
            for prompt, answer, whole in answers(ids, weight, tokenizer):
                if whole:
                    matching = {
                        fact
                        for fact in readable
                        if fact.value == answer.strip()
                        and (fact.is_pass_key or fact.entity in prompt)
                    }
                    assert matching and not matching & outdated, (prompt, answer)
                    asked += 1
    assert asked > 100


def test_an_updated_fact_is_asked_with_both_values_visible(tokenizer, corpus):
    stated = {"plain": 0.0, "copies": 0.0, "own_questions": 0.0, "pass_key": 0.0, "gaps": (4,)}
    asked = {"updates_asked": 1.0, "continuations": 0, "unrelated": 0, "spans": 0}
    data = recall(tokenizer, corpus, updates=0.4, **stated, **asked)
    followed = 0
    for _ in range(10):
        memory = data.memory(6, 16)
        moved = {
            (stated.replaces, stated.window): stated.fact
            for facts in memory.facts
            for stated in facts
            if stated.current and stated.replaces not in (None, stated.window)
        }
        if not moved:
            continue
        chunks = data.questions(memory, 6, 4)
        for visible, continues in zip(chunks.visible.tolist(), chunks.continues.tolist()):
            assert (min(visible), max(visible)) in moved
            assert visible == sorted(visible, reverse=continues)  # a chunk follows the newer one
            followed += 1
    assert followed > 20


def test_a_memory_of_plain_text_has_runs_that_chunks_continue(tokenizer, corpus):
    data = recall(tokenizer, corpus, readings=1.0, run=3)
    memory = data.memory(8, 2)
    assert memory.runs == [[0, 1, 2], [3, 4, 5]] and sorted(memory.text_windows) == list(range(8))
    assert memory.pass_key_window is None and not any(memory.facts)
    size = len(memory.contents[0])
    tokens = np.asarray(corpus.tokens)
    for window, end in memory.text_windows.items():
        assert tokens[end - size : end].tolist() == memory.contents[window]
    for first, second in ((0, 1), (1, 2), (3, 4)):
        # what is between is never in memory
        assert memory.text_windows[second] > memory.text_windows[first] + size
    batch = data.questions(memory, 6, 2)
    for ids, visible in zip(content(batch, tokenizer)[0], batch.visible.tolist()):
        assert sorted(visible) in memory.runs
        start = memory.text_windows[visible[0]]
        assert ids.tolist() == tokens[start : start + size].tolist()
