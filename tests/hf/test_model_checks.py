"""A model that cannot be used, or only in part, is reported in one line."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import refused, run
from support.tiny_decoder import decoder, saved_gguf, tokenizer

pytest.importorskip("transformers")

from memstore.errors import InvalidWeights, MemstoreError
from memstore.hf.load import load_reader, load_stock, wrap
from memstore.hf.model_directory import new_directory
from memstore.hf.models_by_name import reader_named
from memstore.hf.weights import made_here
from memstore.model.passages.adaptation import UNADAPTED

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 269060552\n"
)
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], object]


def pointer(name: str) -> Change:
    return lambda directory: (directory / name).write_text(POINTER)


def removed(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def written(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def cut(name: str) -> Change:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size // 2)


def merged(name: str, **changed: Any) -> Change:
    """Changes values of a JSON file."""

    def change(directory: Path) -> None:
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(values | changed))

    return change


def configured(**changed: Any) -> Change:
    return merged("config.json", **changed)


def weight(value: float | None) -> Change:
    """Writes a value into one of the weights; None: leaves these weights out."""

    def change(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        if value is None:
            del weights["model.layers.2.mlp.up_proj.weight"]
        else:
            weights["model.layers.2.mlp.up_proj.weight"][3, 4] = value
        save_file(weights, directory / "model.safetensors", {"format": "pt"})

    return change


def in_shards(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(names.values()):
        part = {name: weights[name] for name in weights if names[name] == file}
        save_file(part, directory / file, {"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"weight_map": names, "metadata": {}}))


def without_a_shard(directory: Path) -> None:
    in_shards(directory)
    (directory / "model-1.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (pointer("model.safetensors"), "model.safetensors is a Git LFS pointer"),
        (removed("tokenizer.json"), "has no tokenizer"),
        (cut("tokenizer.json"), "(its tokenizer)"),
        (cut("model.safetensors"), "incomplete metadata"),
        (removed("model.safetensors"), "only safetensors are read"),
        (without_a_shard, "model-1.safetensors"),
        (weight(float("nan")), "model.layers.2.mlp.up_proj.weight hold NaN or infinite"),
        (weight(None), "lacks 1 of its weights, such as model.layers.2.mlp.up_proj.weight"),
        (written("adapter_config.json", "{}"), "merge_and_unload"),
        (configured(num_hidden_layers=6), "lacks 18 of its weights"),
        (configured(vocab_size=1 << 12), "other sizes than the weights"),
        (configured(quantization_config={"quant_method": "fp8"}), "quantized"),
        (configured(model_type="unknown"), "cannot be loaded as a Hugging Face model"),
    ],
)
def test_a_damaged_or_incomplete_model_directory_is_refused_in_one_line(
    directory: Path, change: Change, why: str
) -> None:
    change(directory)
    book, memory = directory.parent / "book.txt", directory.parent / "memory"
    book.write_text("The kettle is red. " * 9)
    refused(run("ingest", book, "--store", memory, "--model", directory), why, str(directory))
    assert not memory.exists()


def test_no_code_of_a_model_is_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.Model"}
    configured(model_type="other", auto_map=code)(directory)
    (directory / "other.py").write_text(
        f"open({str(directory / 'RAN')!r}, 'w')\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(InvalidWeights):
        load_reader(directory)
    assert not (directory / "RAN").exists() and answers.tell() == 0
    assert capsys.readouterr().out == ""


def test_a_configuration_does_not_choose_kernels(directory: Path) -> None:
    kernels = {"attn_implementation": "some-one/kernel", "experts_implementation": "deepgemm"}
    configured(**kernels)(directory)
    config = load_stock(directory)[0].config
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "eager")


def test_a_gguf_file_is_converted_once_wherever_it_is_and_a_cut_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    file = saved_gguf(tmp_path / "model.gguf")
    (tmp_path / "elsewhere").mkdir()
    expected = decoder("llama").state_dict()
    for one in (file, Path(shutil.copy(file, tmp_path / "elsewhere"))):
        loaded, cut_with, _ = load_stock(one)
        assert all(loaded.state_dict()[name].equal(expected[name]) for name in expected)
    assert cut_with("The red fox").input_ids == tokenizer()("The red fox").input_ids
    for size in (file.stat().st_size * 3 // 4, 1000, 20, 0):
        os.truncate(file, size)
        with pytest.raises(InvalidWeights, match=r"model\.gguf is truncated") as caught:
            load_reader(file)
        assert "\n" not in str(caught.value)
    file.write_text(POINTER)
    with pytest.raises(InvalidWeights, match="Git LFS pointer"):
        load_reader(file)
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_a_conversion_removes_files_that_a_killed_one_left_a_day_ago(tmp_path: Path) -> None:
    left, lately = tmp_path / ".converting-a", tmp_path / ".converting-b"
    left.mkdir()
    lately.mkdir()
    os.utime(left, (0, 0))
    with new_directory(tmp_path, ".converting-") as made:
        assert {*tmp_path.iterdir()} == {lately, made}
    assert {*tmp_path.iterdir()} == {lately}


def test_a_model_downloaded_from_the_hub_is_loaded_from_its_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = directory.parent / "hub" / "models--some-one--model.v1"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    directory.rename(cache / "blobs")
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, _, where = load_stock("some-one/model.v1")
    assert model.config.hidden_size == 64 and where.is_relative_to(cache)
    for name, words in [("some-one/other", "downloaded from the hub"), ("./other", "no model ./")]:
        with pytest.raises(MemstoreError, match=words):
            load_stock(name)


@pytest.mark.parametrize("where", ["every token", "one token"])
def test_a_model_whose_keys_cannot_be_stored_leaves_no_memory(
    directory: Path, tmp_path: Path, where: str
) -> None:
    model, made, _ = load_stock(directory)
    book, memory = tmp_path / "book.txt", tmp_path / "memory"
    book.write_text("The kettle is red. " * 9)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        seldom = made("kettle", add_special_tokens=False).input_ids[-1]
        embedding[:, 0] = 1.0 if where == "every token" else 0.0
        embedding[seldom, 0] = 9.0
        model.model.layers[0].self_attn.k_proj.weight[:, 0] = 1e9
    model.save_pretrained(directory)
    refused(
        run("ingest", book, "--store", memory, "--model", directory, "--keep", "kv"),
        "out of range of",
    )


def test_a_damaged_selector_can_be_made_again(directory: Path) -> None:
    reader = load_reader(directory, dtype=torch.float32)
    path = made_here(reader.made_for.weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    with pytest.raises(MemstoreError, match="memstore adapt"):
        reader_named(directory)
    assert reader_named(directory, adaptation=UNADAPTED).selector is UNADAPTED.selector


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


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused() -> None:
    made, model = tokenizer(), decoder("llama")
    while len(made) <= model.config.vocab_size:
        made.add_tokens([f"lighthouse{len(made)}"])
    with pytest.raises(InvalidWeights, match="the model knows"):
        wrap(model, made)
