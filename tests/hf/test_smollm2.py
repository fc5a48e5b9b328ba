"""SmolLM2-135M-Instruct from its package: ingest a text, ask it in a new process."""

import json
import subprocess
import sys

import pytest
import torch

from memstore.cli import demo
from memstore.cli.main import main
from memstore.hf.load import load_reader
from memstore.store.memory_store import MemoryStore

pytestmark = [pytest.mark.models, pytest.mark.timeout(600)]

FACTS = {
    "What is the pass key?": (
        "The pass key is 71432. Remember it. 71432 is the pass key.",
        "71432",
    ),
    "What is the price of the silver lantern?": (
        "The price of the silver lantern is 845 crowns.",
        "845",
    ),
    "How many bells are in the tower of Marne?": ("The tower of Marne has 17 bells.", "17"),
    "What is the colour of the door of the mill?": (
        "The colour of the door of the mill is green.",
        "green",
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache directory of the tests' own; a model is converted there once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def reader(cache):
    return load_reader("smollm2")


@pytest.fixture(scope="module")
def text():
    """Some 3,400 tokens of prose, a fact after every 3,000 characters."""
    from pydoc_data.topics import topics

    paragraphs, length = [], 0
    facts = [statement for statement, _ in FACTS.values()]
    for paragraph in "\n".join(topics.values()).split("\n\n"):
        paragraphs.append(paragraph)
        length += len(paragraph)
        if facts and length > 3_000 * (len(FACTS) - len(facts) + 1):
            paragraphs.append(facts.pop(0))
        if length > 14_000:
            break
    return "\n\n".join(paragraphs)


def command(*arguments, given=""):
    done = subprocess.run(
        [sys.executable, "-m", "memstore", *map(str, arguments), "--json"],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_text_is_read_once_and_asked_about_by_a_new_process(reader, text, tmp_path):
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    store = tmp_path / "memory"
    read = command("ingest", tmp_path / "text.txt", "--store", store, "--model", "smollm2")
    assert read["documents"][0]["tokens"] > 3_000
    again = command("ingest", tmp_path / "text.txt", "--store", store, "--model", "smollm2")
    assert again["documents"][0]["status"] == "unchanged"
    asked = ("ask", "-", "--store", store, "--model", "smollm2", "--max-new-tokens", 24)
    answers = command(*asked, given="\n".join(FACTS))["answers"]
    right = 0
    for answer, (statement, value) in zip(answers, FACTS.values(), strict=True):
        assert answer["answered"]
        read = sorted(answer["sources"], key=lambda source: source["span"])
        assert statement[:20] in "".join(source["text"] for source in read)
        right += value in answer["text"]
    assert right >= 3  # a model of this size misreads one now and then; without a memory it is 0


def test_without_a_memory_it_is_the_stock_model(reader):
    from transformers import AutoModelForCausalLM

    path = reader.model.name_or_path
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=reader.dtype)
    ids, _ = reader.turn_ids("What is the capital of France?", first=True)
    given = torch.tensor([[*reader.prefix_ids, *ids]])
    options = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(reader.model.generate(given, **options), stock.generate(given, **options))


def test_a_memory_serves_its_model_in_every_precision(reader, text, tmp_path):
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        reader.ingest(text[:4_500], store, name="text")
    other = torch.float32 if reader.dtype == torch.bfloat16 else torch.bfloat16
    reader = load_reader("smollm2", dtype=other)
    question, (_, value) = next(iter(FACTS.items()))
    with MemoryStore.open(tmp_path / "m", reader.signature) as store:
        assert value in reader.ask(question, store, max_new_tokens=16).text


def test_the_demonstration_reads_a_chapter_and_a_new_process_asks(cache, monkeypatch, capsys):
    first = demo.chapters()[:1]
    monkeypatch.setattr(demo, "chapters", lambda: first)
    words = ["memstore", "demo", "--model", "smollm2", "--questions", "3", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code in (0, None) and told["chapters"] == 1 and told["of"] == 3
    assert told["tokens"] > 2_500 and told["right"] >= 1 and told["as_text"]["seconds_per_question"]
