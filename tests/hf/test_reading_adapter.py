"""Reading adapters: where they apply, and their files in peft's format."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from memstore.errors import InvalidWeights, WrongModel
from memstore.model.session import read_pending
from memstore.store.memory_store import MemoryStore
from support.fake_device import FakeDevice
from support.tiny_decoder import decoder, random_adapter, saved, tokenizer

pytest.importorskip("transformers")

from memstore.hf import traced_step
from memstore.hf import weights as known_weights
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import CONFIG, TENSORS, ReadingAdapter
from memstore.model.passages.adaptation import UNADAPTED, Doubt
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.model.passages.selector import Chosen

TEXT = " ".join(f"The keeper of lighthouse {n} counts {n * 7} bells at night." for n in range(12))
IDS = torch.tensor([[5, 17, 40, 8, 93]])


def reader_of(model, adapter=None, adaptation=UNADAPTED, **options):
    options = {"adapter": adapter, "kv_dtype": torch.float32} | options
    return HuggingFacePassageModel(model, tokenizer(), adaptation, **options)


def model_of(kind="both"):
    """A reader with an adapter, and the same without."""
    model = decoder("llama")
    return reader_of(model, random_adapter(model, kind)), reader_of(decoder("llama"))


def memory(reader, path: Path) -> MemoryStore:
    store = MemoryStore.create(path, reader.signature, selector=reader.keeps, codec="raw")
    reader.ingest(TEXT, store, name="text")
    return store


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_peft_reads_an_adapter_file_and_computes_the_same_logits(tmp_path):
    peft = pytest.importorskip("peft")
    model = decoder("llama")
    stock = model(IDS).logits
    adapter = replace(random_adapter(model), refuse_above=0.4)
    adapter.save(tmp_path)
    loaded = ReadingAdapter.load(tmp_path, model)
    assert (loaded.refuse_above, loaded.digest) == (0.4, adapter.digest)
    reader = reader_of(model, loaded)
    assert torch.equal(model(IDS).logits, stock)

    def logits(adapt: bool | torch.Tensor) -> torch.Tensor:
        attend = RepositionedAttention(reader, []).attend
        return reader.logits(reader.hidden(IDS, attend, adapt=adapt))

    ours = logits(True)
    theirs = peft.PeftModel.from_pretrained(decoder("llama"), tmp_path)(IDS).logits
    assert close(ours, theirs) and not close(ours, stock)
    first = logits(torch.tensor([[[1.0], [1.0], [0.0], [0.0], [0.0]]]))
    assert close(first[:, :2], ours[:, :2]) and not close(first[:, 2:], ours[:, 2:])


def test_generating_with_an_adapter_uses_traced_graphs_and_quantized_weights():
    for bits in ("full", "int8"):
        model = decoder("llama")
        reader = reader_of(model, random_adapter(model), generating=bits)

        def attend(layer, q, k, v):
            return q

        for adapt in (False, True):
            with torch.no_grad():
                token = reader.hidden(IDS[:, :1], attend, quantized=True, adapt=adapt)
                modules = reader.hidden(IDS[:, :1], attend, adapt=adapt)
            error = float((token - modules).norm() / modules.norm())
            assert error < (1e-5 if bits == "full" else 0.05)
        assert [step is not None for _, step in reader._step._traced.values()] == [True, True]


@pytest.mark.parametrize("kind", ["both", "writer"])
def test_an_adapter_applies_to_passages_and_leaves_plain_text_to_the_stock_model(kind, tmp_path):
    reader, stock = model_of(kind)
    question, _ = reader.turn_ids("How many bells?", first=True)
    with memory(reader, tmp_path / "a") as store, memory(stock, tmp_path / "b") as plain:
        one = [Chosen(store.document("text").id, block) for block in (1, 3)]
        other = [Chosen(plain.document("text").id, block) for block in (1, 3)]
        with reader.session(store, retrieve=False) as session:
            with stock.session(plain, retrieve=False) as expected:
                assert close(session.feed(question), expected.feed(question))
                session.read(one)
                expected.read(other)
                assert session.adapt is (kind == "both")
                assert not close(session.feed([7, 8]), expected.feed([7, 8]))
                session.read([])
                expected.read([])
                assert session.adapt is False
            with stock.session(plain, retrieve=False) as expected:
                expected.feed([*question, 7, 8])
                # the earlier turns are read by the stock model again
                assert session._local.ids == [*question, 7, 8]
                if kind == "both":
                    assert close(session.feed([9]), expected.feed([9]))
        with reader.session(store, retrieve=False) as first:
            first.read(one)
            alone = first.feed(question)
        with reader.session(store, retrieve=False) as then:
            then.feed(question[:2])
            then.read(one)
            if kind == "both":  # what was said before is computed again
                assert close(then.feed(question[2:]), alone[2:])


def test_an_adapter_refuses_by_its_doubt_and_can_answer_without_the_memory(tmp_path):
    model = decoder("llama")
    reader = reader_of(model, replace(random_adapter(model), refuse_above=0.0))
    question = "How many bells does the keeper of lighthouse 3 count?"
    with memory(reader, tmp_path / "m") as store:

        def ask(**settings):
            return reader.ask(question, store, max_new_tokens=4, **settings)

        refused, answered = ask(caution=0.3), ask(caution=0.0)
        assert refused.refused and refused.sources and refused.needed is None
        assert answered.answered and 0 < answered.doubt == refused.doubt < 1
        assert answered.tokens and answered.tokens[0] != reader.refusal.token
        alone = ask(caution=0.3, from_memory=False)
        with reader.session(store, retrieve=False) as session:
            expected = list(session.generate(session.ask(question, lambda: None), 4))
        assert not alone.answered and alone.tokens == expected and not alone.sources


def test_a_fitted_doubt_decides_for_the_adapter_that_it_was_fitted_with(tmp_path):
    adapter = replace(random_adapter(decoder("llama")), refuse_above=0.0)
    question = "How many bells does the keeper of lighthouse 3 count?"

    def asked(doubt, caution):
        reader = reader_of(decoder("llama"), adapter, replace(UNADAPTED, doubt=doubt))
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        reader.lookup = reader.lookup.changed(score_range=1e9)
        with memory(reader, path) as store, reader.session(store, caution=caution) as session:
            session.ask(question, lambda: None)
            assert len(session.chosen) == 4  # near is what is read by default, all the same
            return session

    session = asked(None, 0.3)
    evidence = session.evidence
    assert session.doubt == evidence.unknown and not session.answered
    assert evidence.blocks > 1 and evidence.near == 1 and evidence.score > 0
    assert replace(evidence, unknown=0.5, score=3.0, near=9).numbers == (0.0, 3.0, 2.0, 2.0)
    for weights, bias, other, expected in (
        ((1.0, 0.0, 0.0, 0.0), 0.0, False, evidence.unknown),
        ((0.0, 1.0, 0.0, 0.0), 0.0, False, torch.tensor(evidence.score).sigmoid().item()),
        ((0.0, 0.0, -9.0, -9.0), -9.0, False, 0.0),
        ((0.0, 0.0, 0.0, 0.0), 9.0, True, evidence.unknown),
    ):
        steps = (0.9, 0.8, 0.7, 0.6, 0.5)
        doubt = Doubt(weights, bias, steps, "another" if other else adapter.digest)
        session = asked(doubt, 0.15)
        assert session.doubt == pytest.approx(expected, abs=1e-5)
        above = 0.0 if other else 0.65  # half way between two steps
        assert session.answered is (session.doubt <= above)


def test_sessions_with_and_without_it_are_decoded_together(tmp_path):
    reader, _ = model_of()
    with memory(reader, tmp_path / "m") as store:
        chosen = [Chosen(store.document("text").id, 2)]
        sessions = [reader.session(store, retrieve=False) for _ in range(4)]
        alone = [reader.session(store, retrieve=False) for _ in range(4)]
        running = []
        for some in (alone, sessions):
            for at, session in enumerate(some):
                session.read(chosen if at % 2 else [])
                running.append(session.generate(session.feed([5, 6, 7])[-1], 2))
        tokens = [next(one) for one in running[4:]]
        read_pending(running[4:])
        for session, token, one in zip(alone, tokens, running[4:]):
            assert close(one.state, session.read_token(token))
        for session in (*sessions, *alone):
            session.close()


def test_a_memory_belongs_to_a_model_with_its_adapter(tmp_path):
    reader, stock = model_of()
    with memory(reader, tmp_path / "m"):
        pass
    with pytest.raises(WrongModel):
        MemoryStore.open(tmp_path / "m", stock.signature)


def test_the_adapter_made_for_a_models_weights_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    path = saved(tmp_path / "model")
    stock = load_reader(path)
    assert stock.adapter is None and not stock.adapted_passages
    digest = stock.signature.weights
    made = random_adapter(stock.model)
    replace(made, weights=(digest,)).save(known_weights.adapter_made_here(digest))
    reader = load_reader(path)
    assert reader.adapter is not None and reader.adapter.digest == made.digest
    assert load_reader(path, adapter=False).signature == stock.signature != reader.signature
    half = load_reader(path, dtype=torch.bfloat16)
    assert half.signature.difference(reader.signature) == load_reader(
        path, dtype=torch.bfloat16, adapter=False
    ).signature.difference(stock.signature)


def spoiled(directory: Path, how: str) -> None:
    if how == "cut":
        data = (directory / TENSORS).read_bytes()
        (directory / TENSORS).write_bytes(data[: len(data) // 2])
    elif how == "no header":
        save_file(load_file(directory / TENSORS), directory / TENSORS)
    elif how == "no config":
        (directory / CONFIG).write_text("[]")
    elif how == "gone":
        (directory / CONFIG).unlink()
    else:
        kept = random_adapter(decoder("llama"))
        name = next(iter(kept.pairs))
        a, b = kept.pairs[name]
        kept.pairs[name] = (a[:, :-1], b) if how == "another shape" else (a, b * float("nan"))
        kept.save(directory)


@pytest.mark.parametrize(
    "how", ["cut", "no header", "no config", "gone", "another shape", "not finite"]
)
def test_a_damaged_adapter_is_refused(how, tmp_path):
    model = decoder("llama")
    random_adapter(model).save(tmp_path)
    spoiled(tmp_path, how)
    with pytest.raises(InvalidWeights, match="adapter"):
        ReadingAdapter.load(tmp_path, model)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    random_adapter(decoder("llama")).save(tmp_path)
    with pytest.raises(InvalidWeights, match="does not fit this model"):
        ReadingAdapter.load(tmp_path, decoder("llama", hidden_size=32))
    assert json.loads((tmp_path / CONFIG).read_text())["peft_type"] == "LORA"


class Launches(TorchDispatchMode):
    """Counts operations that a GPU computes: no views, no scalars taken out of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        free = name.startswith(("empty", "new_empty", "_local_scalar", "_unsafe_view"))
        shares = any(one.alias_info for one in func._schema.returns) and not name.endswith("_")
        self.count += not (free or shares)
        return func(*args, **(kwargs or {}))


def asked(path, monkeypatch, layers, top_k, free=None):
    """Logits of an answer's first token, how much it attends to each passage, and the operations
    until then; free: bytes of a GPU, None for a CPU.
    """
    trace, device = traced_step.traced, "cpu" if free is None else "cuda"

    def traced(*given):
        with _pop_mode_temporarily():  # the tracer has fake tensors of its own
            return trace(*given)

    with monkeypatch.context() as patch, nullcontext() if free is None else FakeDevice():
        patch.setattr(traced_step, "traced", traced)
        patch.setattr(traced_step, "_free_bytes", lambda device: free)
        model = decoder("llama", num_hidden_layers=layers).to(device)
        adaptation = replace(UNADAPTED, top_k=top_k, score_range=None)
        reader = reader_of(model, random_adapter(model), adaptation)
        options = {"selector": reader.keeps, "codec": "raw"} | ({"device": device} if free else {})
        with MemoryStore.create(path, reader.signature, **options) as store:
            reader.ingest(TEXT, store, name="text")
            for _ in range(2):  # the first question traces
                told = []
                with Launches() as launches, reader.session(store, on_read=told.append) as session:
                    state = session.ask("How many bells?", lambda: None)
                    logits = session.logits(state[None]).cpu()
                    assert len(session.chosen) == top_k
    return logits, torch.from_numpy(told[-1].masses), launches.count


def test_a_question_on_a_gpu_takes_few_operations_however_many_passages_it_reads(
    tmp_path, monkeypatch
):
    counts = []
    for layers, top_k, free in ((2, 1, 1 << 40), (4, 1, 1 << 40), (4, 4, 1 << 40), (4, 1, 1)):
        given, number = (monkeypatch, layers, top_k), len(counts)
        *found, count = asked(tmp_path / f"gpu {number}", *given, free)
        *expected, _ = asked(tmp_path / f"cpu {number}", *given)
        assert all(map(close, found, expected))
        counts.append(count)
    few, more, passages, unmerged = counts
    assert more - few <= 2 * 35  # a norm is seven of them here, and one on a GPU
    assert passages == more < unmerged
