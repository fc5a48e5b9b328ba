"""How real models are measured: going on with a book and the time to an answer compute what the
stock model does, and the choice sees nothing that comes later.
"""

import argparse
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")
pytest.importorskip("bm25s")

from benchmarks.common.stock import Stock
from benchmarks.real import speed
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.hay import Hay
from benchmarks.real.language import SEGMENT, Continuation, differences, passed
from benchmarks.real.memory import Memory
from benchmarks.real.prompting import Prompted, counting, tokenizer_of
from benchmarks.real.selectors import found_among, let_through
from memstore.hf.load import load_reader
from memstore.model.passages.selector import Gate

STORY = [
    "the code of the fox is 7 . the grass is green and the sky is blue . ",
    "an owl sat on the old oak and saw the moon rise over the mill . ",
    "nobody knew who had left the gate open that night . ",
]
WINDOW, START = 128, 512


@pytest.fixture(scope="module")
def memory(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two texts that are the same but for what follows token START."""
    texts = {"a": "".join(STORY[n % 3] for n in range(40))}
    offsets = counting(tiny)
    until = offsets(texts["a"])[START][0]
    texts["b"] = texts["a"][:until] + "the fox is 7 7 7 " * 60
    reader = load_reader(tiny, dtype=torch.float32)
    place = tmp_path_factory.mktemp("m") / "memory"
    with Memory(reader, place, Blocks(passages(tokenizer_of(tiny)), texts)) as memory:
        memory.read_in(texts)
        yield memory


def continuation(memory: Memory, **changed: Any) -> Continuation:
    options = {"window": WINDOW, "rows": 32, "top_k": 2, "score_range": 1e9}
    offsets = counting(memory.reader.model.name_or_path)
    return Continuation(memory, offsets, argparse.Namespace(**(options | changed)))


def nats(memory: Memory, before: list[int], window: list[int]) -> float:
    """What the stock model says of the last SEGMENT tokens of a window."""
    reader = memory.reader
    whole = torch.tensor([[*reader.prefix_ids, *before, *window]])
    with torch.no_grad():
        logits = reader.model(whole).logits[0, -SEGMENT - 1 : -1]
        return float(cross_entropy(logits, whole[0, -SEGMENT:]))


def test_a_window_alone_is_what_the_stock_model_says(memory: Memory) -> None:
    ids = memory.reader.tokenizer.encode(memory.blocks.documents["a"])
    for method, before in (("window", WINDOW), ("longer window", WINDOW + 2 * 64)):
        expected = nats(memory, [], ids[START - before : START + SEGMENT])
        found = continuation(memory).measure("a", START, method)
        assert found["nats"] == pytest.approx(expected, abs=1e-4)


def test_a_passage_read_is_what_the_stock_model_says_after_it(memory: Memory) -> None:
    text = memory.blocks.documents["a"]
    ids = memory.reader.tokenizer.encode(text)
    window = ids[START - WINDOW : START + SEGMENT]
    blocks = range(len(memory.blocks.spans("a")))
    read = continuation(memory, top_k=1).measure("a", START, "256")
    encode = memory.reader.tokenizer.encode
    after = [nats(memory, encode(memory.blocks.text(("a", block))), window) for block in blocks]
    assert read["blocks"] == 1
    assert min(abs(one - read["nats"]) for one in after) < 1e-4
    assert abs(nats(memory, [], window) - read["nats"]) > 1e-3


def test_the_choice_knows_nothing_of_what_is_to_come(memory: Memory) -> None:
    a, b = (continuation(memory).measure(name, START, "256") for name in "ab")
    assert (a["best"], a["blocks"]) == (b["best"], b["blocks"])
    assert a["nats"] != b["nats"]
    assert continuation(memory, rows=8).measure("a", START, "256")["best"] != a["best"]


def test_tables_of_continuing_tell_differences_to_the_window() -> None:
    rows = [
        {"question": str(n), "method": method, "nats": at + n, "best": float(n), "blocks": 3}
        for method, at in (("window", 3.0), ("1024", 2.5))
        for n in range(4)
    ]
    told = differences(rows, ["window", "1024"])
    assert "memory of 1K" in told and "-0.5000 (-0.5000 to -0.5000)" in told and "100%" in told
    gated = passed(rows, [1024], Gate(2.0))
    assert "| 50% " in gated and "-0.2500" in gated


def test_the_stock_model_reads_a_prompt_in_chunks_as_at_once(tiny: Path) -> None:
    prompted = Prompted(tiny)
    ids = prompted.ids("".join(STORY) * 3)
    behind, token = Stock(prompted.model, 17).read(ids)
    with torch.no_grad():
        assert token == int(prompted.model(torch.tensor([ids])).logits[0, -1].argmax())
    (cache,) = behind.values()
    assert cache.get_seq_length() == len(ids)


def test_the_first_token_that_is_timed_is_that_of_the_answer(memory: Memory) -> None:
    asked = speed.Asked(memory, "a", speed.exactly(2))
    answer = memory.reader.ask(
        speed.QUESTION, memory.store, documents=["a"], max_new_tokens=1, **speed.exactly(2)
    )
    first = asked.first_token()
    ended = memory.reader.ends_turn(first)
    assert answer.text == ("" if ended else memory.reader.tokenizer.decode([first]).strip())
    for part in asked.parts().values():
        part()


def test_every_time_is_measured_and_told(
    memory: Memory, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "length": 512,
        "passages": [1, 2],
        "full": 1,
        "tokens": 2,
        "repeats": 1,
        "index_tokens": 256,
        "keep": "kv",
    }
    options = argparse.Namespace(**given, dtype="float32")
    hay = Hay(counting(tiny), ["".join(STORY) * 60], Random(0))
    found = speed.measure(memory, Prompted(tiny), hay, options, document="a")
    speed.report(found, options)
    told = capsys.readouterr().out
    assert all(f"| {name} " in told for name in [*found["first"], *found["decoding"]])
    assert "the whole document in the prompt" in told
    assert "| memory, 1 passages " in told and "| the same 2 as text " in told
    assert found["busy"].keys() == found["first"].keys()


def test_what_is_kept_as_text_is_computed_again_for_each_time_measured(
    memory: Memory, tmp_path: Path
) -> None:
    reader = load_reader(memory.reader.model.name_or_path, dtype=torch.float32)
    with Memory(reader, tmp_path / "m", memory.blocks) as text:
        text.read_in(["a"], keep="text")
        asked = speed.Asked(text, "a", speed.exactly(1))
        first = asked.first_token()
        computed = text.store.tier_stats()["computed"]["hits"]
        assert computed and asked.first_token() == first
        assert text.store.tier_stats()["computed"]["hits"] == computed
        text.reopen()
        assert asked.first_token() == first
        assert text.store.tier_stats()["computed"]["hits"] == computed


def test_what_passes_is_told_for_shares_of_false_answers_and_for_the_gate() -> None:
    def row(task: str, best: float, rank: int | None, answered: bool) -> dict[str, Any]:
        return {"method": "m", "task": task, "best": best, "rank": rank, "answered": answered}

    absent = [row("absent", i / 20, None, i == 19) for i in range(20)]
    rows = [*absent, row("fact", 0.99, 0, True), row("fact", 0.82, 5, False)]
    found = let_through(rows)
    assert [(one.false, one.shares["fact"]) for one in found] == [
        (0.05, 0.5),
        (0.1, 0.5),
        (0.15, 1.0),
        (0.25, 1.0),
        (0.4, 1.0),
        (0.05, 0.5),
    ]
    assert found[-1].name == "m, its gate"
    assert found_among(rows) == {"m": {"fact": [0.5, 0.5, 1.0, 1.0]}}
