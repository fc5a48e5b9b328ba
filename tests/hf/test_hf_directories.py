"""Model directories from strangers: whatever they hold is loaded within bounds, or refused in one
line; and nothing that they name is run, fetched or followed.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import refused, run
from support.tiny_decoder import decoder, tokenizer

pytest.importorskip("transformers")

from memstore.errors import InvalidWeights, MemstoreError
from memstore.hf.chat_turns import Turns
from memstore.hf.checks.trial import rendered
from memstore.hf.load import load_stock
from memstore.hf.models_by_name import reader_named
from memstore.hf.tokenizer import OffsetTokenizer

Change = dict[str, Any]


def change(file: Path, **changed: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changed))


def refusal(load: Callable[[], object]) -> str:
    """The one line by which it is refused."""
    with pytest.raises(InvalidWeights) as refused:
        load()
    said = str(refused.value)
    assert len(said.splitlines()) == 1 and len(said) < 700
    return said


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_only_regular_files_of_bounded_size_are_opened(
    directory: Path, name: str, kind: str
) -> None:
    (directory / name).unlink()
    if kind == "pipe":
        os.mkfifo(directory / name)
    elif kind == "device":
        (directory / name).symlink_to("/dev/zero")
    else:
        os.truncate(os.open(directory / name, os.O_CREAT | os.O_WRONLY), 1 << 42)
    said = refusal(lambda: reader_named(directory))
    assert name in said and ("no regular file" in said or "bytes" in said or "header" in said)


def test_links_to_files_are_followed_as_the_hubs_cache_has_them(directory: Path) -> None:
    blobs = directory.parent / "blobs"
    directory.rename(blobs)
    directory.mkdir()
    for file in blobs.iterdir():
        (directory / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert load_stock(directory)[0].config.hidden_size == 64


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 60_000}, "60,000 layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"layer_types": ["full_attention"] * 200_000}, "too large"),
        ({"hidden_size": 1 << 40}, "states of 1,099,511,627,776"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": 1 << 40}, "vocabulary of"),
        ({"intermediate_size": 1 << 33}, "much larger model"),
        ({"head_dim": 1 << 16, "num_attention_heads": 64}, "much larger model"),
        ({"num_key_value_heads": 10**30}, "num_key_value_heads"),
        ({"dtype": "load"}, "dtype"),
        ({"dtype": "complex64"}, "dtype"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_numbers_that_the_weights_do_not_explain_are_refused_before_anything_is_built(
    directory: Path, changed: Change, why: str
) -> None:
    change(directory / "config.json", **changed)
    assert why in refusal(lambda: load_stock(directory))


@pytest.mark.parametrize(
    "changed",
    [
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "somebody/kernel"},
        {"_attn_implementation_internal": "somebody/kernel"},
        {"attn_implementation": "paged|eager"},
        {"experts_implementation": "deepgemm"},
        {"fusion_config": {"patch_embeddings": True}},
        {"transformers_weights": "../other.safetensors"},
        {"configuration_files": ["config.4.0.json"]},
        {"auto_map": {"AutoConfig": "evil.Config"}},
        {"return_dict": False, "output_attentions": True, "num_labels": 10**12},
    ],
)
def test_what_a_configuration_names_of_code_files_or_kernels_is_not_its_to_name(
    directory: Path, changed: Change
) -> None:
    change(directory / "config.json", **changed)
    config = load_stock(directory)[0].config
    assert config._attn_implementation == "sdpa" and config.return_dict
    assert not {"fusion_config", "auto_map", "transformers_weights"} & config.to_dict().keys()


PER_LAYER = {"vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 16}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("gemma4_text", PER_LAYER), ("bamba", {}), ("mixtral", {"num_local_experts": 4})],
)
def test_layers_that_differ_numbers_that_are_not_finite_and_fused_experts_are_loaded(
    tmp_path: Path, kind: str, changed: Change
) -> None:
    made = decoder(kind, **changed)
    made.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_stock(tmp_path / "model")[0].state_dict()
    assert all(loaded[name].equal(weight) for name, weight in made.state_dict().items())


def test_settings_of_a_tokenizer_and_of_generate_name_no_files_and_no_code(directory: Path) -> None:
    there = load_stock(directory)[1]
    change(
        directory / "tokenizer_config.json",
        tokenizer_file="/dev/zero",
        vocab_file="/dev/zero",
        fast_tokenizer_files=["../x.json"],
        init_inputs=[1, 2],
        gguf_file="x",
        auto_map={"AutoTokenizer": ["evil.T", None]},
        tokenizer_padding={"length": 1 << 40},
    )
    change(directory / "special_tokens_map.json", tokenizer_file="/dev/zero")
    change(
        directory / "generation_config.json", custom_generate="evil", cache_implementation="static",
        max_new_tokens=7,
    )  # fmt: skip
    os.mkfifo(directory / "tokenizer.model")
    os.mkfifo(directory / "evil.py")
    model, made, _ = load_stock(directory)
    assert OffsetTokenizer(made).fingerprint == OffsetTokenizer(there).fingerprint
    assert model.generation_config.max_new_tokens == 7
    assert model.generation_config.cache_implementation is None
    assert model.name_or_path == made.name_or_path == str(directory)


@pytest.mark.parametrize("where", ["../model.safetensors", "/dev/zero", "x/y.safetensors"])
def test_shards_lie_beside_their_index(directory: Path, where: str) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = directory / "model.safetensors.index.json"
    change(index, weight_map={"model.norm.weight": where})
    assert "index of weights" in refusal(lambda: load_stock(directory))


def test_weights_in_shards_are_loaded_as_in_one_file(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(names.values()):
        part = {name: weights[name] for name in weights if names[name] == file}
        save_file(part, directory / file, {"format": "pt"})
    change(directory / "model.safetensors.index.json", weight_map=names, metadata={})
    loaded = load_stock(directory)[0].state_dict()
    assert all(loaded[name].equal(weights[name]) for name in weights)


CHAIN = {"type": "Sequence", "normalizers": [
    {"type": "Replace", "pattern": {"String": "Ψ"}, "content": "ΨΨ"}] * 40}  # fmt: skip
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"added_tokens": [{"id": (1 << 32) - 2, "content": "x", "special": True}]}, "id"),
        ({"normalizer": CHAIN}, "longer"),
        ({"pre_tokenizer": SPLIT}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}}, "vocab"),
        ({"model": 7}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_a_tokenizer_that_would_hang_abort_or_fill_memory_does_so_in_a_process_of_its_own(
    directory: Path, changed: Change, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(directory / "tokenizer.json", **changed)
    said = refusal(lambda: load_stock(directory))
    assert "tokenizer.json" in said and why in said
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_that_passed_is_tried_again_when_it_changed(directory: Path) -> None:
    load_stock(directory)
    load_stock(directory)
    change(directory / "tokenizer.json", normalizer=CHAIN)
    assert "longer" in refusal(lambda: load_stock(directory))


def test_what_a_tokenizer_panics_with_is_one_line_wherever_it_does() -> None:
    made = tokenizer()
    cut = OffsetTokenizer(made)
    from tokenizers import Regex, pre_tokenizers

    cut._backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert "gave up" in refusal(lambda: cut.encode("a" * 64 + "!"))
    assert "gave up" in refusal(lambda: cut.encode_batch(["a" * 64 + "!"]))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOPS + "{% endfor %}" * 3,
        "{{ 'x' * 10**10 }}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_a_chat_template_has_a_budget(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer()
    made.chat_template = template
    monkeypatch.setattr("memstore.hf.checks.trial.SECONDS", {"template": 1})
    assert "chat template" in refusal(lambda: Turns(made, OffsetTokenizer(made)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content | trim }}\n"
        "  {% if add_generation_prompt %}\n  {{ m | tojson }}{{ dict(a=1)|tojson(indent=2) }}"
        "{% endif %}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{% if tools is none and documents is none %}{{ eos_token }}<{{ messages[1:]|length }}"
        "{% endif %}{{ undefined_token }}",
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date_string|length }}",
    ],
)
def test_a_chat_template_gives_what_transformers_makes_of_it(template: str) -> None:
    made = tokenizer()
    said = [{"role": "user", "content": "Who? "}, {"role": "assistant", "content": "é<&"}] * 2
    theirs = made.apply_chat_template(
        said, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    tokens = {name: str(token) for name, token in made.special_tokens_map.items()}
    assert rendered(template, said, tokens, "26 Jul 2024") == theirs
    with pytest.raises(ValueError, match="no"):
        rendered(template + "{{ raise_exception('no') }}", said, tokens, "")


def test_a_hub_model_that_was_downloaded_is_loaded_as_its_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = directory.parent / "hub" / "models--some-one--model.v1"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    directory.rename(cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, _, where = load_stock("some-one/model.v1")
    assert model.config.hidden_size == 64 and where.is_relative_to(cache)
    with pytest.raises(MemstoreError, match="cannot be had from the hub"):
        load_stock("some-one/other")


@pytest.mark.parametrize("where", ["every token", "one token"])
def test_a_model_whose_keys_cannot_be_stored_leaves_no_memory_behind(
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
    refused(run("ingest", book, "--store", memory, "--model", directory), "cannot be stored")
    assert not memory.exists()
    assert run("ingest", book, "--store", memory).status == 0
