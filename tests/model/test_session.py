"""Ingest, resume and ask with real stores and a tiny random landmark model: exactness, sources,
counts.
"""

import json
from pathlib import Path

import pytest
import torch

from memstore.errors import InvalidInput, MemstoreError
from memstore.model.landmark.landmark_model import load_model
from memstore.model.session import draw
from memstore.store.memory_store import MemoryStore
from memstore.training.objectives import encode_windows
from support.fork_server import RIGHT, ForkServer
from support.rounding import TINY_MODEL, assert_same_to_rounding
from support.synthetic_documents import stored
from support.tiny_model import save_tiny_model, text, tiny_model


def ingest_in_a_process(
    children: ForkServer, model: Path, memory: Path, source: Path, stop_after: int | None = None
) -> None:
    """Ingest in a new process that dies in the middle of chunk `stop_after`."""
    code = f"""
from pathlib import Path
model = load_model({str(model)!r})
path = Path({str(memory)!r})
if path.exists():
    store = MemoryStore.open(path, model.signature)
else:
    store = MemoryStore.create(path, model.signature, codec="int8")
chunks = 0
def progress(state):
    global chunks
    chunks += 1
    if chunks == {stop_after!r}:
        raise KeyboardInterrupt
try:
    with store:
        model.ingest(Path({str(source)!r}), store, name="doc", progress=progress)
except KeyboardInterrupt:
    pass
"""
    assert children.run("python_job", memory.with_suffix(".out"), code) == RIGHT


def test_an_interrupted_ingest_resumed_in_new_processes_stores_the_same_bytes_and_answers_the_same(
    children: ForkServer, tmp_path: Path
) -> None:
    directory = save_tiny_model(tmp_path / "model", cmt_cutoff=0.0)
    source = tmp_path / "text.txt"
    source.write_text(text(150))
    ingest_in_a_process(children, directory, tmp_path / "whole", source)
    for stop in (1, 3, None):
        ingest_in_a_process(children, directory, tmp_path / "parts", source, stop)
    torch.set_num_threads(1)
    model = load_model(directory)
    whole, parts = stored(tmp_path / "whole"), stored(tmp_path / "parts")
    assert whole["blocks"] and whole == parts
    logits = []
    for name in ("whole", "parts"):
        with (
            MemoryStore.open(tmp_path / name, model.signature) as store,
            model.session(store) as session,
        ):
            logits.append(
                session.logits(session.feed(model.tokenizer.encode("the lantern of the captain")))
            )
    assert torch.equal(*logits)


def test_chunked_reading_equals_full_landmark_attention_when_every_block_is_retrieved(
    tmp_path: Path,
) -> None:
    """k >= N, lossless storage, text within one window: the session's chunks see what one long
    window sees.
    """
    # stingy positions: every own block keeps its true place; layer 0 has memory too, and no gate
    # divides the softmax
    form = {"old_block_position": "stingy", "memory_layers": (0, 1), "cmt": False}
    lookups = {"kv_dtype": "float32", "top_k": 16, "chunk_blocks": 2}
    model = tiny_model(tmp_path / "model", **form, **lookups)
    ids = model.tokenizer.encode(text(70))[: 8 * 12]
    store = MemoryStore.in_memory(model.signature, host_budget=1 << 24)
    with model.session(store, []) as session:
        chunked = session.feed(ids)
    sequence = [
        x
        for block in range(12)
        for x in [*ids[block * 8 : block * 8 + 8], model.config.landmark_id]
    ]
    hidden, _ = encode_windows(model.transformer, torch.tensor([sequence]))
    rows = [block * 9 + (i if i < 7 else 8) for block in range(12) for i in range(8)]
    torch.testing.assert_close(chunked, hidden[0, rows], rtol=2e-4, atol=2e-4)


def test_another_process_gives_the_same_answer_and_lookups_are_counted(
    children: ForkServer, tmp_path: Path
) -> None:
    directory = save_tiny_model(tmp_path / "model", cmt_cutoff=0.0)
    model = load_model(directory)
    body = text(400)
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(body, store, name="a")
        assert document.state == "ready" and document.tokens == len(model.tokenizer.encode(body))
        answer = model.ask("the captain?", store, max_new_tokens=6, until_sentence=False)
    asked = len(model.tokenizer.encode("the captain?"))
    # one lookup a token, head and memory layer; the landmark after every 8th token looks up too
    rows = asked + 5 + (asked + 5) // 8
    assert answer.lookups == {"done": rows * 4, "skipped": 0}
    code = f"""
model = load_model({str(directory)!r})
with MemoryStore.open({str(tmp_path / "m")!r}, model.signature, read_only=True) as store:
    print(model.ask("the captain?", store, max_new_tokens=6, until_sentence=False).tokens)
"""
    assert children.run("python_job", tmp_path / "said", code) == RIGHT
    assert (tmp_path / "said").read_text().strip() == str(answer.tokens)


def test_sources_are_the_text_that_was_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", cmt_cutoff=0.0)
    body = "".join(f"Zoë{i} naïve — {line}\n" for i, line in enumerate(text(250).splitlines()))
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(body, store, name="a")
        settings = {"max_new_tokens": 4, "until_sentence": False, "max_sources": 10_000}
        answer = model.ask("the captain of the river", store, **settings)
        hits = model.search("the captain of the river", store, top_k=3)
        blocks = [
            store.tokens("a", source.block * 8, source.block * 8 + 8).ids.tolist()
            for source in answer.sources
        ]
    assert answer.sources and len(hits) == 3
    for source in [*answer.sources, *hits]:
        first, end = source.span
        # a block may begin or end inside a character
        assert body[first:end] == source.text
        assert source.document == "a" and 0 <= source.block < document.blocks
    for source in answer.sources:
        assert source.weight == pytest.approx(sum(source.tiers.values()), abs=0.02)
        assert set(source.tiers) <= {"host", "disk"}
    weights = [source.weight for source in answer.sources]
    assert weights == sorted(weights, reverse=True)
    assert any("�" in model.tokenizer.decode(ids) for ids in blocks), "no character was cut"


def test_the_last_partial_block_is_read_and_its_padding_is_not(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", cmt_cutoff=0.0, top_k=8)
    ids_per_chunk = 8 * 4
    body = text(60)
    tokens = len(model.tokenizer.encode(body))
    assert tokens % 8 and tokens > ids_per_chunk
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(body, store, name="a")
        assert document.blocks == -(-tokens // 8)
        settings = {"max_new_tokens": 2, "until_sentence": False, "max_sources": 1000}
        answer = model.ask("end.", store, top_k=document.blocks, **settings)
        ends = {source.block: source for source in answer.sources}
        last = ends[document.blocks - 1]
        assert last.span[1] == len(body.rstrip()) and body.rstrip().endswith(last.text)


def test_a_question_longer_than_a_chunk_and_than_the_host_budget_is_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", cmt_cutoff=0.0)
    question = text(700, seed=3)
    unit = 2 * 8 * 8 * 2
    with MemoryStore.create(tmp_path / "m", model.signature, host_budget=unit * 300) as store:
        model.ingest(text(200), store, name="a")
        answer = model.ask(question, store, max_new_tokens=3, until_sentence=False)
        assert len(answer.tokens) == 3
        assert store.stats()["tiers"]["host"]["held"] <= unit * 300


def test_sampling_is_repeatable_and_landmarks_are_never_generated(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        model.ingest(text(200), store, name="a")
        settings = {"max_new_tokens": 30, "temperature": 3.0, "until_sentence": False}
        one = model.ask("the", store, seed=5, **settings)
        two = model.ask("the", store, seed=5, **settings)
        other = model.ask("the", store, seed=6, **settings)
    assert one.tokens == two.tokens != other.tokens
    assert max(one.tokens + other.tokens) < model.config.landmark_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_smallest_temperature_and_top_p_take_the_likeliest_token(dtype: torch.dtype) -> None:
    for shift in (-100.0, 0.0, 100.0):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) + shift
        logits[3], logits[7] = shift + 9, -torch.inf  # 7: a token that may not be said
        logits = logits.to(dtype)
        for temperature in (5e-324, 1e-46, 1e-38):
            assert draw(logits, temperature, torch.Generator().manual_seed(1)) == 3
        for top_p in (5e-324, 1e-46, 1e-8):
            assert draw(logits, 1.0, torch.Generator().manual_seed(1), top_p) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_samples_are_as_frequent_as_the_softmax_says(temperature: float) -> None:
    logits = 2 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    logits[5] = -torch.inf  # a token that may not be said
    generator, draws = torch.Generator().manual_seed(1), 4000
    drawn = torch.tensor([draw(logits, temperature, generator) for _ in range(draws)])
    share = torch.bincount(drawn, minlength=8) / draws
    expected = (logits / temperature).softmax(-1)
    # four standard deviations
    torch.testing.assert_close(share, expected, rtol=0, atol=4 * (0.25 / draws) ** 0.5)
    assert share[5] == 0


def test_settings_in_config_json_reach_sessions_but_not_the_signature(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    plain, written = load_model(directory), json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"recency": 0.5}))
    fading = load_model(directory)
    assert plain.signature == fading.signature
    with MemoryStore.in_memory(plain.signature) as store, fading.session(store, []) as session:
        assert session.settings.recency == 0.5 and plain.lookup.recency == 0


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"{",
        b'{"num_layers": "4"}',
        b'{"memory_layers": 3}',
        b'{"colour": 1}',
        b'{"recency": -1}',
        b'{"recency": "2"}',
    ],
)
def test_a_damaged_configuration_is_a_named_error(tmp_path: Path, content: bytes) -> None:
    directory = save_tiny_model(tmp_path / "model")
    (directory / "config.json").write_bytes(content)
    with pytest.raises(MemstoreError):
        load_model(directory)


def test_a_session_keeps_at_most_own_blocks_of_its_own_text(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    ids = model.tokenizer.encode(text(400))[:320]  # ten chunks of four blocks
    states, held = {}, {}
    for bound in (None, 9):
        with (
            MemoryStore.in_memory(model.signature) as store,
            model.session(store, [], own_blocks=bound, cmt_cutoff=0) as session,
        ):
            session.attention.retrieve = False  # the same blocks in both
            session.feed(ids[:-32])
            session.end_chunk()
            if bound is None:
                session.blocks.own_first = session.blocks.own_end - 9
                session.attention.start_chunk()
            assert session.blocks.own == 9
            session.attention.retrieve = True
            states[bound] = session.feed(ids[-32:])
            held[bound] = store.stats()["tiers"]["host"]["held"]
    assert_same_to_rounding(states[None], states[9], products=TINY_MODEL)
    assert held[9] < held[None] / 2
    with (
        MemoryStore.create(tmp_path / "memory", model.signature) as store,
        pytest.raises(InvalidInput, match="must be at least top_k"),
    ):
        model.session(store, [], own_blocks=2)
