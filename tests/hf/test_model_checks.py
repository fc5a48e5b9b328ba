"""What of a model cannot be used is refused, or reported, in one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import refused, run, run_apart
from support.tiny_decoder import decoder, saved_gguf, tokenizer

pytest.importorskip("transformers")

from memstore import MemoryStore
from memstore.errors import InvalidWeights
from memstore.hf.load import load_reader, load_stock, wrap
from memstore.hf.tokenizer import LandmarkTokenizer

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 269060552\n"
)
NFKC = {"type": "NFKC"}


def pointer(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(POINTER)


def weight(value: float) -> Callable[[Path], None]:
    """Writes this value into one of the weights."""

    def change(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        weights["model.layers.2.mlp.up_proj.weight"][3, 4] = value
        save_file(weights, directory / "model.safetensors", {"format": "pt"})

    return change


def cut(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        os.truncate(directory / name, (directory / name).stat().st_size // 2)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (pointer("model.safetensors"), "model.safetensors is a Git LFS pointer"),
        (pointer("tokenizer.json"), "tokenizer.json is a Git LFS pointer"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "has no tokenizer"),
        (cut("model.safetensors"), "model.safetensors is truncated"),
        (cut("tokenizer.json"), "tokenizer.json"),
        (weight(float("nan")), "model.layers.2.mlp.up_proj.weight hold NaN or infinite"),
        (weight(float("inf")), "model.layers.2.mlp.up_proj.weight hold NaN or infinite"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "merge_and_unload"),
        (lambda d: (d / "adapter_model.safetensors").write_text(""), "merge_and_unload"),
    ],
)
def test_a_damaged_or_incomplete_model_directory_is_refused_in_one_line(
    directory: Path, change: Callable[[Path], object], why: str
) -> None:
    change(directory)
    book, memory = directory.parent / "book.txt", directory.parent / "memory"
    book.write_text("The kettle is red. " * 9)
    said = run("ingest", book, "--store", memory, "--model", directory)
    refused(said, why, str(directory))
    assert not memory.exists()


def test_wrapped_weights_that_are_not_finite_are_refused() -> None:
    model = decoder("llama")
    with torch.no_grad():
        model.lm_head.weight[7, 7] = torch.nan
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight hold NaN"):
        wrap(model, tokenizer())


def test_a_gguf_file_is_converted_once_and_a_cut_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    file = saved_gguf(tmp_path / "model.gguf")
    expected = decoder("llama").state_dict()
    for _ in range(2):
        loaded, cut_with, _ = load_stock(file)
        assert all(loaded.state_dict()[name].equal(expected[name]) for name in expected)
    assert cut_with("The red fox").input_ids == tokenizer()("The red fox").input_ids
    os.truncate(file, file.stat().st_size * 3 // 4)
    with pytest.raises(InvalidWeights, match=r"model\.gguf is cut short or damaged") as caught:
        load_reader(file)
    assert "\n" not in str(caught.value)
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only tools') }}", "only tools"),
        ("always the same", "does not write every message"),
        ("{{ oops", "unexpected end"),
        ({"tool_use": "{{ messages }}"}, "multiple chat templates"),
    ],
)
def test_a_chat_template_that_cannot_be_rendered_is_reported(
    template: str | dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = tokenizer()
    made.chat_template = template
    made.bos_token = "<|user|>"
    reader = wrap(decoder("llama"), made)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "memstore"]
    assert "chat template cannot be rendered" in said and why in said and "\n" not in said
    assert "the model reads '<|user|>', the passages and the question as it was typed" in said
    ids, words = reader.turn_ids("The number is ", first=True)
    assert ids == reader.tokenizer.encode("The number is") and words == range(len(ids))
    assert reader.prefix_ids == [made.bos_token_id]


def test_the_command_line_shows_the_report_of_a_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    book = directory.parent / "book.txt"
    book.write_text("The kettle is red. " * 9)
    done = run_apart("ingest", book, "--store", directory.parent / "memory", "--model", directory)
    assert done.status == 0 and done.err.count("only tools") == 1


def test_a_tokenizer_that_normalises_text_is_reported_once_for_each_document_it_alters(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    described = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(described | {"normalizer": NFKC}))
    reader = load_reader(directory, dtype=torch.float32)
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest("Nothing is altered here. " * 40, store, name="plain")
        assert not caplog.records
        reader.ingest("The office has ﬁve ﬂoors. " * 40, store, name="office")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("office: ") and "'ﬁve ﬂoors.' becomes 'five floors.'" in said
    caplog.clear()
    segments = LandmarkTokenizer(load_stock(directory)[1], 10_000).encode_stream(["ﬁve ", "ﬂoors"])
    assert len(list(segments)) == 1 and len(caplog.records) == 1
