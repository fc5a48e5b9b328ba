"""Texts read with other memories: left and taken up again, kept in stores, and told apart from
landmark models.
"""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_model import text, tiny_model
from torch import Tensor

from memstore import MemoryStore, load_model
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights
from memstore.model.checkpoint import SHIPPED, save_checkpoint
from memstore.model.config import ModelConfig
from memstore.model.ingest import IngestProgress
from memstore.model.tokenizer import Tokenizer
from memstore.rivals.config import MEMORIES
from memstore.rivals.reading import RivalModel, load_rival
from memstore.rivals.transformer import RivalTransformer

SEGMENT = 32


def save_rival(directory: Path, name: str, seed: int = 0, **changes: object) -> Path:
    tokenizer = Tokenizer.load(SHIPPED / "tokenizer.json")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=48,
        block_size=8,
        chunk_blocks=4,
        kv_dtype="float64",
    )
    model = RivalTransformer(config, replace(MEMORIES[name], **changes))
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
        elif parameter.dim() != 1 or parameter.std() == 0:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    save_checkpoint(model, tokenizer, directory, torch.float64)
    return directory


def rival(directory: Path, name: str, seed: int = 0, **changes: object) -> RivalModel:
    return load_rival(save_rival(directory, name, seed, **changes), dtype=torch.float64)


def ids(model: RivalModel, count: int, seed: int = 0) -> list[int]:
    return model.tokenizer.encode(text(count, seed))[:count]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_reading_goes_on_in_another_process_with_the_same_bits(tmp_path: Path, name: str) -> None:
    model = rival(tmp_path / "model", name, top_k=5)
    words = ids(model, 200)
    with model.session() as reading:
        reading.feed(words[:75])
        reading.save(tmp_path / "state")
        expected = torch.cat([reading.feed(words[75:80]), reading.feed(words[80:])])
    with load_rival(tmp_path / "model", dtype=torch.float64).session() as resumed:
        resumed.resume(tmp_path / "state")
        assert resumed.tokens == 75
        found = torch.cat([resumed.feed(words[75:80]), resumed.feed(words[80:])])
        assert torch.equal(found, expected) and resumed.tokens == 200


@pytest.mark.parametrize("name", MEMORIES)
def test_a_text_fed_in_pieces_is_the_text_fed_at_once(tmp_path: Path, name: str) -> None:
    """Pieces that end before, at and behind the ends of segments, and pieces of nothing."""
    model = rival(tmp_path, name, top_k=5)
    words = ids(model, 5 * SEGMENT + 7)
    with model.session() as whole, model.session() as reading:
        cuts = [0, 0, 1, 31, 32, 32, 33, 64, 95, 96, 97, 129, len(words), len(words)]
        pieces = [reading.feed(words[first:end]) for first, end in pairwise(cuts)]
        assert [len(piece) for piece in pieces] == [end - first for first, end in pairwise(cuts)]
        assert reading.tokens == len(words)
        torch.testing.assert_close(torch.cat(pieces), whole.feed(words))
        assert reading.past.attended == whole.past.attended
        assert model.score(reading, words[:1]).shape == (0,)


def test_pieces_in_half_precision_differ_by_nothing_but_a_choice_between_near_tokens(
    tmp_path: Path,
) -> None:
    """All tokens are retrieved here: there is nothing to choose."""
    exact = rival(tmp_path, "memorizing", top_k=1024)
    half = RivalTransformer(
        replace(exact.config, kv_dtype="float16"), exact.transformer.memory_config
    )
    half.load_state_dict(exact.transformer.state_dict())
    model, words = RivalModel(half, exact.tokenizer), ids(exact, 400)
    with model.session() as whole, model.session() as reading:
        pieces = [reading.feed(words[first : first + 7]) for first in range(0, len(words), 7)]
        expected = whole.feed(words)
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-3)


def test_a_saved_reading_is_of_its_model_and_undamaged(tmp_path: Path) -> None:
    model = rival(tmp_path / "a", "infini")
    with model.session() as reading:
        reading.feed(ids(model, 50))
        reading.save(tmp_path / "state")
    others = {"memory": ("infini-linear", 0), "weights": ("infini", 1)}
    for what, (name, seed) in others.items():
        with (
            rival(tmp_path / what, name, seed).session() as other,
            pytest.raises(InvalidInput, match="no reading of this model and memory"),
        ):
            other.resume(tmp_path / "state")
    written = bytearray((tmp_path / "state").read_bytes())
    written[-3] ^= 1
    (tmp_path / "changed").write_bytes(written)
    (tmp_path / "cut").write_bytes(written[: len(written) // 2])
    with model.session() as reading:
        for name, says in (("changed", "damaged"), ("cut", "no saved"), ("none", "no saved")):
            with pytest.raises(InvalidInput, match=says):
                reading.resume(tmp_path / name)


@pytest.mark.parametrize("name", ["transformer-xl", "memorizing", "infini", "full"])
def test_a_fork_goes_on_by_itself(tmp_path: Path, name: str) -> None:
    model = rival(tmp_path, name)
    words = ids(model, 150)
    with model.session() as reading:
        reading.feed(words[:70])
        with reading.fork() as other:
            other.feed(ids(model, 60, seed=4))
            found = reading.feed(words[70:])
    with model.session() as alone:
        alone.feed(words[:70])
        assert torch.equal(found, alone.feed(words[70:]))


@pytest.mark.parametrize("kept", [None, 40])
def test_a_memory_in_a_store_is_a_memory_in_tensors(tmp_path: Path, kept: int | None) -> None:
    """The index, the tiers and the kernel of landmark memories, with blocks of one token."""
    model = rival(tmp_path, "memorizing", top_k=6, tokens=kept)
    words = ids(model, 5 * SEGMENT + 7)
    with model.session() as reading, torch.no_grad():
        stored = torch.cat([reading.feed(words[:50]), reading.feed(words[50:])])
        past = model.transformer.begin()
        in_tensors = model.transformer.read(torch.tensor([words]), past)[0]
        torch.testing.assert_close(stored, in_tensors)
        for name, x in past.state().items():
            torch.testing.assert_close(reading.past.state()[name], x)
        assert reading.past.attended == past.attended


def test_rows_that_ask_for_more_than_a_tier_holds_are_read_in_parts(tmp_path: Path) -> None:
    model = rival(tmp_path / "model", "memorizing", top_k=4)
    unit, question = 2 * 8 * 8, ids(model, 20, seed=3)  # bytes of K and V of one token and head
    with MemoryStore.create(tmp_path / "memory", model.signature) as store:
        model.ingest(text(150), store, name="book")
    found = []
    for units in (1 << 10, 20):
        with (
            MemoryStore.open(tmp_path / "memory", host_budget=units * unit) as store,
            model.session(store) as reading,
        ):
            found.append(reading.feed(question))
            assert store.stats()["tiers"]["host"]["held"] <= units * unit
    torch.testing.assert_close(*found)


def read_in_another_process(directory: Path, question: list[int]) -> Tensor:
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from memstore import MemoryStore\n"
        "from memstore.rivals.reading import load_rival\n"
        "directory = Path(sys.argv[1])\n"
        "model = load_rival(directory / 'model', dtype=torch.float64)\n"
        "with MemoryStore.open(directory / 'memory', model.signature, read_only=True) as store:\n"
        "    with model.session(store, ['book']) as reading:\n"
        "        torch.save(reading.feed(eval(sys.argv[2])), directory / 'states')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(directory), repr(question)], check=True)
    found: Tensor = torch.load(directory / "states", weights_only=True)
    return found


def test_a_document_is_remembered_by_another_process(tmp_path: Path) -> None:
    model = rival(tmp_path / "model", "memorizing", top_k=6)
    book, question = text(150), ids(model, 20, seed=3)
    count = len(model.tokenizer.encode(book))
    with MemoryStore.create(tmp_path / "memory", model.signature) as store:
        found = model.ingest(book, store, name="book")
        assert (found.tokens, found.blocks, found.state) == (count, count, "ready")
        model.ingest(text(90, seed=7), store, name="other")
        assert store.verify().clean
    with torch.no_grad():  # what was read, without the cache before the segment
        past = model.transformer.begin()
        model.transformer.read(torch.tensor([model.tokenizer.encode(book)]), past)
        if past.length:
            past.end_segment()
        kept = {name: x for name, x in past.state().items() if "past.memory" in name}
        fresh = model.transformer.begin()
        fresh.restore({"length": torch.tensor(0), **kept})
        expected = model.transformer.read(torch.tensor([question]), fresh)[0]
    torch.testing.assert_close(read_in_another_process(tmp_path, question), expected)


def test_a_reading_beside_documents_goes_on_beside_the_same_ones(tmp_path: Path) -> None:
    model = rival(tmp_path / "model", "memorizing", top_k=6)
    words = ids(model, 100)
    with MemoryStore.create(tmp_path / "memory", model.signature) as store:
        model.ingest(text(150), store, name="book")
        model.ingest(text(90, seed=7), store, name="other")
        with model.session(store, ["book"]) as reading:
            reading.feed(words[:45])
            reading.save(tmp_path / "state")
            expected = reading.feed(words[45:])
    with MemoryStore.open(tmp_path / "memory", model.signature) as store:
        with model.session(store, ["book"]) as resumed:
            resumed.resume(tmp_path / "state")
            assert torch.equal(resumed.feed(words[45:]), expected)
        for others in (
            model.session(),
            model.session(store),
            model.session(store, ["other"]),
            model.session(store, ["book"], cache=8),
        ):
            with others, pytest.raises(InvalidInput, match=r"'?documents.*book.*same documents"):
                others.resume(tmp_path / "state")


def test_an_interrupted_document_ends_as_one_that_was_not(tmp_path: Path) -> None:
    model = rival(tmp_path / "model", "memorizing", top_k=6)
    book = text(300)

    def stop(state: IngestProgress) -> None:
        if state.tokens >= 5 * SEGMENT:
            raise KeyboardInterrupt

    files = []
    for name, interrupted in (("whole", False), ("parts", True)):
        with MemoryStore.create(tmp_path / name, model.signature, codec="raw") as store:
            if interrupted:
                with pytest.raises(KeyboardInterrupt):
                    model.ingest(book, store, name="book", progress=stop)
                assert 0 < store.document("book").tokens < 300
            model.ingest(book, store, name="book")
            document = store.document("book")
            scope = [(document.id, 0, document.blocks)]
            files.append(store.landmark_keys(0, scope).clone())
    assert torch.equal(*files)


def test_what_is_appended_is_remembered_as_if_it_had_been_there(tmp_path: Path) -> None:
    model = rival(tmp_path / "model", "memorizing", top_k=6)
    parts = text(140), text(120, seed=5)
    keys = []
    for name, pieces in (("whole", ["".join(parts)]), ("parts", parts)):
        with MemoryStore.create(tmp_path / name, model.signature, codec="raw") as store:
            for number, piece in enumerate(pieces):
                mode = "append" if number else "new"
                model.ingest(piece, store, name="book", mode=mode)  # type: ignore[arg-type]
            document = store.document("book")
            keys.append(store.landmark_keys(0, [(document.id, 0, document.blocks)]).clone())
    assert torch.equal(*keys)


def test_stores_are_for_memories_of_tokens(tmp_path: Path) -> None:
    model = rival(tmp_path / "xl", "transformer-xl")
    with pytest.raises(InvalidConfig, match="transformer-xl model keeps no tokens in a store"):
        _ = model.signature
    memorizing = rival(tmp_path / "m", "memorizing")
    with (
        MemoryStore.in_memory(memorizing.signature) as store,
        pytest.raises(InvalidConfig, match="keeps no tokens in a store"),
    ):
        model.session(store)


def test_a_checkpoint_says_which_memory_it_has(tmp_path: Path) -> None:
    for name, memory in MEMORIES.items():
        found = rival(tmp_path / name, name).transformer.memory_config
        assert found == memory.of(found_config(tmp_path / name))
        with pytest.raises(InvalidWeights, match=f"memory than landmarks .'{memory.kind}'.: .*ask"):
            load_model(tmp_path / name)
    tiny_model(tmp_path / "landmarks")
    with pytest.raises(InvalidWeights, match="is a landmark model: ask, ingest and search work"):
        load_rival(tmp_path / "landmarks")


def found_config(directory: Path) -> ModelConfig:
    return load_rival(directory).config


@pytest.mark.parametrize(
    "memory", ['{"kind": "hopfield"}', "[]", '{"kind": "infini", "depth": 3}', "7", '{"top_k": 1}']
)
def test_a_memory_that_is_unknown_is_one_line(tmp_path: Path, memory: str) -> None:
    directory = save_rival(tmp_path, "none")
    config = (directory / "config.json").read_text()
    at = config.index('"memory"')
    (directory / "config.json").write_text(config[:at] + f'"memory": {memory}}}')
    with pytest.raises((InvalidConfig, InvalidWeights)) as refused:
        load_rival(directory)
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidWeights):
        load_model(directory)


def test_what_is_no_text_is_never_generated(tmp_path: Path) -> None:
    model = rival(tmp_path, "transformer-xl")
    with model.session() as reading:
        state = reading.feed(ids(model, 40))[-1]
        out = list(reading.generate(state, 50, temperature=2.0, seed=0))
        assert len(out) == 50 and max(out) < model.config.landmark_id
        assert model.score(reading, out).shape == (49,)
