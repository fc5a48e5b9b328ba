"""Hugging Face directories that are incomplete, do not belong together, or bring their own code."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.tiny_decoder import decoder, learned_selector, tokenizer

pytest.importorskip("transformers")

from memstore import MemoryStore
from memstore.errors import InvalidInput, InvalidWeights, MemstoreError
from memstore.hf.chat_turns import Turns
from memstore.hf.directories.model_directory import directory_of
from memstore.hf.directories.new_directory import new_directory
from memstore.hf.known_selectors import made_here
from memstore.hf.load import load_reader, wrap
from memstore.hf.models_by_name import reader_named
from memstore.hf.tokenizer import LandmarkTokenizer, OffsetTokenizer
from memstore.model.passages.selectors.adaptation import UNADAPTED

TEXT = "The red kettle of the mill is number 7. Nobody knew it.\n" * 8


def test_what_a_killed_conversion_left_goes_with_the_next_one(tmp_path: Path) -> None:
    killed = """
import os, signal, sys
from pathlib import Path
from memstore.hf.directories.new_directory import new_directory
with new_directory(Path(sys.argv[1]), ".converting-") as made:
    (made / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    with new_directory(tmp_path, ".converting-") as live:
        assert {*tmp_path.iterdir()} == {live} and live != left
        with new_directory(tmp_path, ".converting-") as second:
            assert {*tmp_path.iterdir()} == {live, second}  # not what is being written
            second.rename(tmp_path / "whole")
    assert {*tmp_path.iterdir()} == {tmp_path / "whole"}


def test_no_code_of_a_model_is_run_whoever_would_say_yes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((directory / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {"model_type": "evil", "auto_map": code}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(
        f"open({str(directory / 'EVIL')!r}, 'w')\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(InvalidWeights):
        load_reader(directory)
    assert not (directory / "EVIL").exists() and answers.tell() == 0
    assert capsys.readouterr().out == ""


def test_weights_that_are_not_there_are_not_drawn(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"lacks 1 of its weights, such as .*layers\.1\.mlp"):
        load_reader(directory)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidWeights, match="of its weights"):
        load_reader(directory)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B", "some-one/model"]
)
def test_a_name_on_the_hub_may_have_dots(name: str) -> None:
    assert directory_of(name) == name


@pytest.mark.parametrize("name", ["models/a.gguf", "models/a.safetensors", "a", "a/b/c"])
def test_what_is_no_name_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="there is no model"):
        directory_of(name)


def test_a_packaged_model_is_meant_whatever_the_working_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr("memstore.hf.load.load_reader", lambda name, **_: asked.append(name))
    reader_named("smollm2")
    assert asked == ["smollm2"]


def test_a_template_that_writes_the_date_begins_the_same_on_all_days() -> None:
    made, plain = tokenizer(), tokenizer()
    today = "{% if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% endif %}. "
    plain.chat_template = "26 Jul 2024. " + made.chat_template
    made.chat_template = today + made.chat_template
    turns, fixed = Turns(made, OffsetTokenizer(made)), Turns(plain, OffsetTokenizer(plain))
    assert turns.templated and turns.prefix == fixed.prefix
    assert turns.of("And?", first=False) == fixed.of("And?", first=False)


def test_ids_that_fill_up_a_vocabulary_are_no_text() -> None:
    cut = OffsetTokenizer(tokenizer())
    ids = [*cut.encode("naïve"), cut.text_ids, cut.text_ids + 900]
    assert cut.decode(ids) == "naïve" and cut.characters(ids) == 5
    assert cut.whole_characters(ids[:1], ids[1:]) == cut.whole_characters(ids[:1], ids[1:-2])


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused() -> None:
    made, model = tokenizer(), decoder("llama")
    while len(made) <= model.config.vocab_size:
        made.add_tokens([f"lighthouse{len(made)}"])
    with pytest.raises(InvalidWeights, match="the model knows"):
        wrap(model, made)
    with pytest.raises(InvalidWeights, match="the model knows"):
        LandmarkTokenizer(made, model.config.vocab_size)


def test_a_damaged_selector_can_be_made_anew(directory: Path) -> None:
    reader = load_reader(directory, dtype=torch.float32)
    path = made_here(reader.made_for.weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    with pytest.raises(MemstoreError, match="memstore adapt"):
        reader_named(directory)
    assert reader_named(directory, adaptation=UNADAPTED).selector is UNADAPTED.selector


def test_a_published_memory_of_another_selector_is_refused(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    reader = load_reader(directory, dtype=torch.float32)
    url = f"file://{tmp_path / 'there'}"
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest(TEXT, store, name="inventory")
        store.publish(url)
    other = load_reader(directory, dtype=torch.float32)
    other.selector = learned_selector(other)
    with (
        MemoryStore.open(url, reader.signature) as store,
        pytest.raises(MemstoreError, match="ingest the documents again") as refused,
    ):
        other.ask("Which number?", store)
    assert str(refused.value).startswith(url)
