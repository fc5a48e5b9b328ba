"""The command line as its users meet it: every command, its --json, and one line for everything
that can be wrong.
"""

import contextlib
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import memstore
from memstore.cli import main as cli
from memstore.cli.demo.planted_facts import print_planted
from memstore.cli.terminal import answers, console
from memstore.disk.format.codec import CODECS
from memstore.disk.lmdb.database import Database
from memstore.errors import InvalidConfig
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import SHIPPED
from memstore.model.landmark.config import PRESETS, ModelConfig
from memstore.store.memory_store import MemoryStore
from memstore.training import curriculum
from support.commands import (
    OTHER,
    STORY,
    become_nobody,
    intact,
    refused,
    run,
    run_apart,
    run_forked,
    start,
    whole,
    write_model,
)
from support.forked_questions import forked_questions

COMMANDS = [
    "ingest",
    "ask",
    "chat",
    "search",
    "ls",
    "stats",
    "rm",
    "verify",
    "export",
    "import",
    "compact",
    "index",
    "serve",
    "mcp",
    "train",
    "adapt",
    "calibrate",
    "demo",
]
OF_SHARE = ["push", "pull", "rm", "merge", "prune"]
pytestmark = pytest.mark.usefixtures("the_model")


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    return path


@pytest.fixture(scope="module")
def kept(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory that holds `story`, to be copied."""
    here = tmp_path_factory.mktemp("kept")
    (here / "story.txt").write_text(STORY)
    command = ("ingest", here / "story.txt", "--store", here / "mem", "--model", model_path)
    assert run(*command).status == 0
    return here / "mem"


@pytest.fixture
def store(tmp_path: Path, kept: Path) -> Path:
    """A memory that holds `story`."""
    return shutil.copytree(kept, tmp_path / "mem")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user of the machine can reach."""
    directory = Path(tempfile.mkdtemp(prefix="memstore-test-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    for path in [path for path in directory.rglob("*") if path.is_dir()]:
        path.chmod(0o755)
    shutil.rmtree(directory)


# Help


@pytest.mark.parametrize(
    "name", [*COMMANDS, *(f"share {name}" for name in OF_SHARE), "bench tiers"]
)
def test_help_of_a_command_has_an_example(name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.status == 0
    assert "Example:" in result.out and f"memstore {name}" in result.out.split("Example:")[1]
    assert "--json" in result.out or name == "mcp"  # whose standard output is MCP's


def test_the_commands_are_those_that_are_tested_here() -> None:
    assert [command.name for command in cli.app.registered_commands] == COMMANDS
    share, bench = cli.app.registered_groups
    assert (share.name, bench.name) == ("share", "bench")
    assert share.typer_instance and bench.typer_instance
    assert [command.name for command in share.typer_instance.registered_commands] == OF_SHARE
    assert [command.name for command in bench.typer_instance.registered_commands] == ["tiers"]


def test_no_arguments_show_the_help_and_wrong_ones_end_with_status_2(
    story: Path, tmp_path: Path
) -> None:
    assert "Commands:" in run().out and run().status == 0
    assert run("--version").out.startswith("memstore ")
    refused(run("remember"), "remember", status=2)
    refused(
        run("ingest", story, "--store", tmp_path / "m", "--append", "--replace"),
        "exclude",
        status=2,
    )
    refused(
        run("ingest", story, story, "--store", tmp_path / "m", "--name", "x"), "--name", status=2
    )
    for quota, said in (("much", "64MB"), ("9223372036GB", "below"), ("9" * 400 + "TB", "below")):
        ingest = run("ingest", story, "--store", tmp_path / "m", "--quota", quota)
        refused(ingest, said, status=2)
    refused(run("train", story, "--out", tmp_path / "run", "--preset", "huge"), "paper", status=2)
    refused(
        run("ingest", story, "--store", tmp_path / "m", "--score-range", "2"),
        "--retrieve",
        status=2,
    )
    refused(run("search", "x", "--store", story, "--top-k", "0"), "--top-k", status=2)
    refused(run("search", "x", "--store", story, "--shortlist", "0"), "--shortlist", status=2)
    refused(run("bench"), "command", status=2)
    refused(run("bench", "tiers", "--store", tmp_path, "--replay", story), "exclude", status=2)
    refused(
        run("bench", "tiers", "--replay", story, "--trace", tmp_path / "t"), "--trace", status=2
    )
    refused(run("bench", "tiers", "--budgets", "much"), "2%", status=2)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64MB", 64_000_000),
        ("1.5gb", 1_500_000_000),
        ("512MiB", 1 << 29),
        ("2 K", 2000),
        ("10b", 10),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert console.parse_size(text) == size


# The commands


def test_ingest_reports_and_is_idempotent(tmp_path: Path, story: Path) -> None:
    first = run("ingest", story, "--store", tmp_path / "mem", "--json").json["documents"]
    again = run("ingest", story, "--store", tmp_path / "mem", "--json").json["documents"]
    assert [first[0]["status"], again[0]["status"]] == ["read", "already read"]
    assert first[0]["name"] == "story" and first[0]["tokens"] > 500 and first[0]["blocks"] > 16
    assert {key: first[0][key] for key in ("tokens", "blocks", "bytes")} == {
        key: again[0][key] for key in ("tokens", "blocks", "bytes")
    }
    assert "already read" in run("ingest", story, "--store", tmp_path / "mem").out
    intact(tmp_path / "mem", "story")


def test_ingest_reads_several_files_each_as_a_document(tmp_path: Path, story: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(OTHER)
    assert (
        run("ingest", story, other, "--store", tmp_path / "mem", "--codec", "raw").out.count(
            ": read;"
        )
        == 2
    )
    intact(tmp_path / "mem", "story", "other")


def test_ingest_of_many_texts_does_not_list_all_documents_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = []
    listed = MemoryStore.documents

    def documents(store: MemoryStore) -> object:
        listings.append(store)
        return listed(store)

    monkeypatch.setattr(MemoryStore, "documents", documents)
    texts = [tmp_path / f"{number}.txt" for number in range(6)]
    for text in texts:
        text.write_text(f"This is {text.stem}.\n" * 9)
    assert run("ingest", *texts, "--store", tmp_path / "mem").status == 0
    assert len(listings) <= 1


def test_a_memory_is_made_with_any_codec_and_keeps_it(tmp_path: Path, story: Path) -> None:
    help_text = run("ingest", "--help").out
    sizes = {}
    for codec in CODECS:
        memory = tmp_path / codec
        result = run("ingest", story, "--store", memory, "--codec", codec, "--json").json
        sizes[codec] = result["documents"][0]["bytes"]
        assert run("stats", "--store", memory, "--json").json["codec"] == codec
        assert f"({codec})" in run("stats", "--store", memory).out
        assert run("ls", "--store", memory, "--json").json["codec"] == codec
        assert run("ls", "--store", memory).out.endswith(f"stored with {codec}\n")
        assert codec in help_text
        intact(memory, "story")
    assert sizes["int8"] < sizes["zstd"] < sizes["raw"]
    again = run("ingest", story, "--store", tmp_path / "int8", "--codec", "raw")
    assert "keeps its codec, int8" in again.err and "already read" in again.out


def test_append_continues_and_replace_swaps_a_document(store: Path, tmp_path: Path) -> None:
    before = run("ls", "--store", store, "--json").json["documents"][0]
    more = tmp_path / "more.txt"
    more.write_text(OTHER)
    appended = run("ingest", more, "--store", store, "--name", "story", "--append", "--json").json[
        "documents"
    ][0]
    assert appended["status"] == "appended" and appended["tokens"] > before["tokens"]
    assert appended["resumed_at"] <= appended["appended_to"] == before["tokens"]
    intact(store, "story")
    replaced = run("ingest", more, "--store", store, "--name", "story", "--replace", "--json").json[
        "documents"
    ][0]
    assert replaced["status"] == "replaced"
    assert replaced["tokens"] == len(Tokenizer.load(SHIPPED / "tokenizer.json").encode(OTHER))
    intact(store, "story")


def test_an_append_says_behind_which_token_its_text_begins(tmp_path: Path) -> None:
    one, two, store = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "m"
    one.write_text("Shorter than a chunk. ")
    two.write_text("And what follows. ")
    read = run("ingest", one, "--store", store, "--json").json["documents"][0]
    assert "appended_to" not in read
    shown = run("ingest", two, "--store", store, "--name", "one", "--append").out
    assert f"one: appended behind token {read['tokens']};" in shown


def test_another_process_answers_with_sources_and_cost(store: Path) -> None:
    result = run_apart(
        "ask",
        "What is the code of the red fox? The code of the red fox is",
        "--store",
        store,
        "--json",
    )
    answer = result.json
    assert result.status == 0 and result.err == ""
    assert {"text", "sources", "lookups", "tiers", "seconds"} <= answer.keys()
    assert set(answer["lookups"]) == {"done", "skipped"}
    assert all({"hits", "misses", "bytes"} <= counts.keys() for counts in answer["tiers"].values())
    assert answer["tiers"]["disk"]["hits"] > 0
    for source in answer["sources"]:
        first, end = source["span"]
        assert source["document"] == "story" and source["text"] == STORY[first:end]


@pytest.mark.parametrize("columns", [30, 60, 140])
def test_ask_prints_the_answer_and_below_it_a_line_a_source(
    store: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ask = ("ask", "Who lives in the old mill?", "--store", store, "--cmt-cutoff", "0")
    told = run(*ask, "--json").json
    text, empty, *sources = run(*ask).out.splitlines()
    assert (text, empty) == (told["text"], "") and 1 < len(told["sources"]) == len(sources)
    for number, (line, source) in enumerate(zip(sources, told["sources"]), 1):
        head, passage = f"{number}. story: ", " ".join(source["text"].split())
        assert line.startswith(head) and passage.startswith(line[len(head) :].removesuffix("..."))
        assert len(line) <= max(columns, len(head) + 30)


def test_stats_of_an_answer_are_its_weights_places_tiers_and_cost(store: Path) -> None:
    ask = ("ask", "Who lives in the old mill?", "--store", store, "--cmt-cutoff", "0", "--stats")
    _, empty, first, *_, last = run(*ask).out.splitlines()
    assert empty == "" and re.match(r"1\. +\d+\.\d\d  story \[[\d,]+-[\d,]+\] \(", first)
    assert re.match(r"lookups [\d,]+ done, .* host .*; disk .* s$", last)


@pytest.mark.parametrize("streamed", [True, False])
def test_an_empty_answer_says_that_nothing_was_found(
    capsys: pytest.CaptureFixture[str], streamed: bool
) -> None:
    lookups = {"done": 1, "skipped": 0}
    answer = {"text": "", "sources": [], "lookups": lookups, "tiers": {}, "seconds": 1.0}
    answers.print_answer(answer, streamed=streamed)
    assert capsys.readouterr().out.splitlines()[0] == "(nothing was found)"


def test_questions_on_standard_input_are_answered_each_in_a_session_of_its_own(store: Path) -> None:
    questions = ["The code of the red fox is", "Who lives there?", "The code of the red fox is"]
    answers = run("ask", "-", "--store", store, "--json", stdin="\n".join(questions)).json[
        "answers"
    ]
    assert [answer["question"] for answer in answers] == questions
    assert answers[0]["text"] == answers[2]["text"]
    assert (
        answers[0]["tokens"] == run("ask", questions[0], "--store", store, "--json").json["tokens"]
    )
    refused(run("ask", "-", "--store", store, stdin=" \n"), "no question")
    refused(run("ask", "-", "--store", store, stdin=b"caf\xe9?\n"), "UTF-8")


def test_a_question_that_cannot_be_asked_costs_no_other_its_answer(store: Path) -> None:
    lines = b"Who lives there?\ncaf\xe9?\nWho lives there?\n"
    for command in (("ask", "-"), ("chat",)):
        done = run(*command, "--store", store, "--json", stdin=lines)
        first, bad, last = json.loads(done.out)["answers"]
        assert done.status == 1 and first["text"] and "text" in last
        assert bad["question"] == "caf\udce9?" and bad["error"]["name"] == "InvalidInput"
        shown = run(*command, "--store", store, "--stats", stdin=lines)
        assert shown.status == 1 and shown.out.count("lookups") == 2
        assert shown.err.count("error: ") == 1 and "UTF-8" in shown.err
    for wrong in (("--temperature", "nan"), ("--top-k", "0"), ("--document", "nobody")):
        for command in (("ask", "-"), ("chat",)):
            done = run(*command, "--store", store, "--json", *wrong, stdin=lines)
            assert done.status == 1 and list(json.loads(done.out)) == ["error"]


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", "nan"), ("temperature", "inf"), ("seed", "9" * 20)]
)
def test_what_nothing_can_be_sampled_by_is_one_line(store: Path, option: str, value: str) -> None:
    refused(run("ask", "who?", "--store", store, f"--{option}", value), f"{option} must be a")


def test_sampling_repeats_under_a_seed(store: Path) -> None:
    ask = ("ask", "Who?", "--store", store, "--temperature", "2", "--json", "--max-new-tokens", "8")
    texts = [run(*ask, "--seed", seed).json["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_long_question_is_read_in_chunks(store: Path) -> None:
    question = OTHER * 4 + "The code of the red fox is"
    answer = run("ask", "-", "--store", store, "--json", stdin=question.replace("\n", " ")).json[
        "answers"
    ][0]
    assert answer["text"] is not None
    # More of its own blocks than the host tier may keep: the oldest are let go.
    small = run("ask", question, "--store", store, "--json", "--host-budget", "128kB")
    assert small.status == 0


def test_chat_answers_line_by_line(store: Path) -> None:
    conversation = run(
        "chat", "--store", store, "--json", stdin="Who lives there?\n\nAnd where?\n"
    ).json["answers"]
    assert [answer["question"] for answer in conversation] == ["Who lives there?", "And where?"]
    shown = run("chat", "--store", store, "--stats", stdin="Who lives there?\n")
    assert shown.status == 0 and "lookups" in shown.out


def test_search_shows_places(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = run("search", "the old mill", "--store", store, "--top-k", "3", "--json").json[
        "sources"
    ]
    assert len(sources) == 3
    assert sorted(sources, key=lambda source: -source["weight"]) == sources
    first, end = sources[0]["span"]
    assert sources[0]["text"] == STORY[first:end]
    monkeypatch.setenv("COLUMNS", "1000")
    search = ("search", "the old mill", "--store", store, "--top-k", "3")
    for stats in ((), ("--stats",)):
        lines = run(*search, *stats).out.splitlines()
        for number, (line, source) in enumerate(zip(lines, sources, strict=True), 1):
            assert line.startswith(f"{number}. {source['weight']:4.0%}  story")
            assert line.endswith(f": {' '.join(source['text'].split())}")
            assert (f"story [{source['span'][0]:,}-" in line) == bool(stats)


def test_search_ranks_documents(store: Path) -> None:
    (best,) = run("search", "the old mill", "--store", store, "--by", "document", "--json").json[
        "documents"
    ]
    (passage,) = run("search", "the old mill", "--store", store, "--top-k", "1", "--json").json[
        "sources"
    ]
    assert best["document"] == "story" and best["weight"] == passage["weight"]
    assert {"block", "span", "text"} <= best["best"].keys() and best["best"]["block"] == passage[
        "block"
    ]
    assert (
        run("search", "the old mill", "--store", store, "--by", "document").out.count("story: ")
        == 1
    )


def test_a_memory_can_be_looked_after_without_a_model(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_MODEL", str(tmp_path / "gone"))
    assert run("ls", "--store", store).out.splitlines()[1].startswith("story")
    stats = run("stats", "--store", store, "--json").json
    assert (
        stats["documents"] == 1
        and stats["tokens"] > 0
        and stats["tiers"] == {}  # nothing was looked up
    )
    assert "1 documents" in run("stats", "--store", store).out
    file = tmp_path / "story.memstore"
    assert (
        run("export", "story", file, "--store", store, "--json").json["bytes"]
        == file.stat().st_size
    )
    imported = run("import", file, "--store", tmp_path / "copy", "--name", "tale", "--json").json[
        "imported"
    ]
    assert imported["name"] == "tale" and imported["state"] == "ready"
    intact(tmp_path / "copy", "tale")
    assert [d["name"] for d in run("rm", "story", "--store", store, "--json").json["removed"]] == [
        "story"
    ]
    sizes = run("compact", "--store", store, "--json").json
    assert sizes["bytes_after"] < sizes["bytes_before"]
    assert run("ls", "--store", store).out == "no documents\n"
    intact(store)


def test_verify_finds_damage_and_repair_drops_it(store: Path, tmp_path: Path) -> None:
    assert run("verify", "--store", store).out.endswith("clean\n")
    other = tmp_path / "other.txt"
    other.write_text(OTHER)
    assert run("ingest", other, "--store", store).status == 0
    with Database.open(store) as database:
        key, value = database.write(lambda txn: [(k, bytes(v)) for k, v in txn.scan("blocks")][5])
        database.write(lambda txn: txn.put("blocks", key, value[:-1] + bytes([value[-1] ^ 1])))
    found = run("verify", "--store", store, "--json")
    assert found.status == 1 and found.json["problems"][0]["name"] == "story"
    assert run("verify", "--store", store, "--repair", "--json").json["dropped"] == ["story"]
    intact(store, "other")


def test_tier_options_change_what_is_counted_and_never_the_answer(
    store: Path, tmp_path: Path
) -> None:
    ask = (
        "ask",
        STORY + "The code of the red fox is",
        "--store",
        store,
        "--json",
        "--cmt-cutoff",
        "0",
    )
    small = ("--host-budget", "128kB")
    plain = run(*ask).json
    for policy in ("arc", "lru"):
        answer = run(*ask, *small, "--policy", policy, "--prefetch", "speculative").json
        assert answer["tokens"] == plain["tokens"]
        host = answer["tiers"]["host"]
        assert {
            "hits",
            "misses",
            "bytes",
            "seconds",
            "evictions",
            "prefetched",
            "late",
            "unused",
        } == host.keys()
        assert host["evictions"] > 0
    assert plain["tiers"]["host"]["evictions"] == plain["tiers"]["host"]["prefetched"] == 0


def test_a_trace_of_any_command_can_be_replayed(store: Path, story: Path, tmp_path: Path) -> None:
    trace = tmp_path / "lookups.zst"
    for arguments, stdin in [
        (
            (
                "ask",
                "The code of the red fox is",
                "--store",
                store,
                "--cmt-cutoff",
                "0",
                "--prefetch",
                "speculative",
            ),
            "",
        ),
        (("chat", "--store", store, "--cmt-cutoff", "0"), "Who lives there?\n"),
        (("search", "the old mill", "--store", store), ""),
        (("ingest", story, "--store", tmp_path / "new", "--retrieve", "--chunk-blocks", "1"), ""),
    ]:
        assert run(*arguments, "--trace", trace, stdin=stdin).status == 0
        replayed = run(
            "bench",
            "tiers",
            "--replay",
            trace,
            "--budgets",
            "20%,50%",
            "--policies",
            "lru",
            "--json",
        ).json
        assert (
            replayed["lookups"] > 0
            and len(replayed["runs"]) == 2 * 2
            and len(replayed["belady"]) == 2
        )
    assert "belady" in run("bench", "tiers", "--replay", trace, "--prefetch", "off").out


def test_bench_tiers_asks_a_memory_and_leaves_it_as_it_was(store: Path, tmp_path: Path) -> None:
    before = (store / "data.mdb").read_bytes()
    trace = tmp_path / "lookups.zst"
    bench = (
        "bench",
        "tiers",
        "--store",
        store,
        "--budgets",
        "50%",
        "--questions",
        "2",
        "--policies",
        "arc,lru",
    )
    result = run(*bench, "--json", "--trace", trace)
    assert result.status == 0 and result.json["same_answers"] and len(result.json["runs"]) == 4
    assert "runs done" in result.err and trace.stat().st_size > 100
    shown = run(*bench, "--prefetch", "speculative")
    assert len([line for line in shown.out.splitlines() if "speculative" in line]) == 2
    assert (store / "data.mdb").read_bytes() == before


def test_chat_serves_metrics_while_it_runs(store: Path) -> None:
    pytest.importorskip("prometheus_client")
    process = start(
        "chat",
        "--store",
        store,
        "--metrics-port",
        "0",
        "--cmt-cutoff",
        "0",
        "--stats",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        url = process.stderr.readline().split()[-1]
        process.stdin.write("The code of the red fox is\n")
        process.stdin.flush()
        assert process.stdout.readline()
        while "lookups" not in process.stdout.readline():
            pass
        with urllib.request.urlopen(url) as answer:
            page = answer.read().decode()
        port = url.split(":")[2].split("/")[0]
        refused(run("chat", "--store", store, "--metrics-port", port), port, "another port")
        process.stdin.close()
        assert process.wait() == 0
    assert (
        'memstore_tier_misses_total{layer="1",tier="host"}' in page
        and "memstore_tier_held_bytes" in page
    )


@pytest.fixture
def small_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole plan of `memstore train`, in small batches for small models."""
    small = {"batch": 4, "blocks": 3, "chunk_blocks": 2, "memory_windows": 4, "memory_blocks": 4}
    stages = tuple(replace(stage, **small) for stage in curriculum.default_curriculum())
    monkeypatch.setattr(curriculum, "default_curriculum", lambda: stages)
    shape = {"vocab_size": 1024, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}
    test = ModelConfig(**shape, head_dim=16, num_layers=2, mlp_size=48)
    books = replace(test, num_layers=3, mlp_size=64, memory_layers=(2,))
    monkeypatch.setitem(PRESETS, "test", test)
    monkeypatch.setitem(PRESETS, "books", books)


@pytest.mark.usefixtures("small_training")
def test_train_leaves_a_model_that_can_be_asked(tmp_path: Path, story: Path) -> None:
    from pydoc_data.topics import topics

    text = tmp_path / "text.txt"
    text.write_text("\n".join(list(topics.values())[:25]))
    trained = run("train", text, "--out", tmp_path / "run", "--minutes", "0.002", "--json")
    assert trained.status == 0 and trained.json["out"] == str(tmp_path / "run")
    assert trained.err.startswith("precision ")
    refused(run("train", text, "--out", tmp_path / "run"), "--resume")
    assert (
        run("train", text, "--out", tmp_path / "run", "--minutes", "0.002", "--resume").status == 0
    )
    ingest = run("ingest", story, "--store", tmp_path / "m", "--model", tmp_path / "run")
    assert ingest.status == 0
    asked = run(
        "ask",
        "Who?",
        "--store",
        tmp_path / "m",
        "--model",
        tmp_path / "run",
        "--json",
        "--max-new-tokens",
        "3",
    )
    assert asked.status == 0 and len(asked.json["tokens"]) <= 3
    refused(run("train", tmp_path / "no.txt", "--out", tmp_path / "run2"), "no.txt")
    refused(run("train", text, "--out", tmp_path / "run3", "--resume"), "no training run")
    last = ("--from-stage", "wide", "--minutes", "0.002")
    assert (
        run("train", text, "--out", tmp_path / "run4", "--init", tmp_path / "run", *last).status
        == 0
    )
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in ("run", "run4")]
    assert tokenizers[0] == tokenizers[1]
    refused(
        run("train", text, "--out", tmp_path / "run5", "--from-stage", "dense"), "windows, varied"
    )
    refused(
        run("train", text, "--out", tmp_path / "run5", "--device", "cuda:99"),
        "'cuda:99'",
        "choose auto, cuda, mps or cpu",
    )
    assert not (tmp_path / "run5").exists()
    other = ("--init", tmp_path / "run", "--preset")
    refused(run("train", text, "--out", tmp_path / "run6", *other, "small"), "1024 ids")
    refused(run("train", text, "--out", tmp_path / "run7", *other, "books"), "another architecture")
    refused(run("train", text, "--out", tmp_path / "run9", "--init", tmp_path / "none"), "none")


def test_demo_asks_a_new_process_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text(OTHER * 4)
    result = run(
        "demo",
        "--landmarks",
        "--text",
        plain,
        "--seed",
        "1",
        "--questions",
        "3",
        "--store",
        tmp_path / "mem",
        "--json",
    ).json
    assert result["of"] == 3 == len(result["questions"]) and 0 <= result["right"] <= 3
    assert result["questions"][0]["question"] == "What is the pass key? The pass key is"
    print_planted(result)
    assert capsys.readouterr().out.splitlines()[-1] == f"facts right: {result['right']} of 3"
    intact(tmp_path / "mem", "demo")
    refused(run("demo", "--landmarks", "--text", plain, "--tokens", "5"), "longer")


def test_demo_replaces_what_it_wrote_itself_and_nobody_elses_document(
    tmp_path: Path, story: Path
) -> None:
    (tmp_path / "plain.txt").write_text(OTHER * 4)
    demo = ("demo", "--landmarks", "--text", tmp_path / "plain.txt", "--questions", "1", "--store")
    with forked_questions():
        for seed in ("1", "2"):
            assert run(*demo, tmp_path / "mem", "--seed", seed).status == 0
    listed = ("ls", "--store", tmp_path / "mem", "--json")
    for how in ("--append", "--replace"):
        mine = run("ingest", story, "--name", "demo", "--store", tmp_path / "mem", how)
        assert mine.status == 0
        before = run(*listed).json["documents"]
        refused(run(*demo, tmp_path / "mem", "--seed", "3"), "no demonstration of this")
        assert run(*listed).json["documents"] == before


# What bad input gets


def test_ingest_refuses_what_is_no_text(tmp_path: Path, store: Path, story: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "binary.txt").write_bytes(b"abc\0def")
    (tmp_path / "latin.txt").write_bytes("Caf\xe9 au lait".encode("latin-1"))
    os.mkfifo(tmp_path / "pipe")
    for name, word in [
        ("none.txt", "does not exist"),
        ("empty.txt", "empty"),
        ("blank.txt", "empty"),
        (".", "directory"),
        ("binary.txt", "binary"),
        ("latin.txt", "UTF-8"),
        ("pipe", "regular"),
    ]:
        refused(run("ingest", tmp_path / name, "--store", store), word)
        refused(run("ingest", tmp_path / name, "--store", tmp_path / "new"), word)
    assert not (tmp_path / "new").exists()
    several = run(
        "ingest", tmp_path / "none.txt", tmp_path / "latin.txt", "--store", tmp_path / "new"
    )
    assert several.status == 1 and several.err.count("error: ") == several.err.count("\n") == 2
    assert not (tmp_path / "new").exists()
    intact(store, "story")


def test_a_name_in_use_for_other_content_is_refused(
    store: Path, tmp_path: Path, story: Path
) -> None:
    story.write_text(OTHER)
    refused(run("ingest", story, "--store", store), "story", "append", "replace")
    refused(
        run("ingest", story, "--store", store, "--name", "nobody", "--append"), "nobody", "'story'"
    )
    intact(store, "story")


def test_only_ingest_and_import_make_a_memory(tmp_path: Path, story: Path) -> None:
    none = tmp_path / "none"
    for arguments in [
        ("ask", "Who?"),
        ("chat",),
        ("search", "x"),
        ("ls",),
        ("stats",),
        ("rm", "x"),
        ("verify",),
        ("export", "x", tmp_path / "f"),
        ("compact",),
    ]:
        refused(run(*arguments, "--store", none), str(none))
        refused(run(*arguments, "--store", tmp_path), str(tmp_path))
        refused(run(*arguments, "--store", story), str(story))
    assert not none.exists()
    refused(run("ingest", story, "--store", story), "directory")
    refused(run("ingest", story, "--store", tmp_path), "not empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["story.txt"]


def test_a_memory_of_another_model_or_a_newer_format_is_refused(
    store: Path, tmp_path: Path, story: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    refused(run("ask", "Who?", "--store", store, "--model", other), "was made with tiny", "other")
    refused(run("ingest", story, "--store", store, "--model", other), "was made with tiny", "other")
    longer = write_model(tmp_path / "longer", block_size=16)
    refused(run("ask", "Who?", "--store", store, "--model", longer), "longer")
    intact(store, "story")
    with Database.open(store) as database:

        def newer(txn: Any) -> None:
            row = msgpack.unpackb(txn.get_checked("meta", b"memory"))
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "format": 99}))

        database.write(newer)
    refused(run("ask", "Who?", "--store", store), "99", "update")


def test_weights_that_are_truncated_or_of_another_architecture_are_refused(
    store: Path, tmp_path: Path
) -> None:
    broken = write_model(tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    refused(run("ask", "Who?", "--store", store, "--model", broken), "truncated")
    other = write_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"mlp_size": 128}))
    refused(run("ask", "Who?", "--store", store, "--model", other), "architecture")
    (other / "config.json").write_text(json.dumps(config | {"num_kv_heads": 3}))
    refused(run("ask", "Who?", "--store", store, "--model", other), "num_kv_heads")
    refused(run("ask", "Who?", "--store", store, "--model", tmp_path), "config.json")
    refused(run("ask", "Who?", "--store", store, "--model", tmp_path / "none"), "none")


def test_unknown_documents_and_empty_memories_are_named(store: Path, tmp_path: Path) -> None:
    for arguments in [
        ("ask", "Who?", "--document", "tale"),
        ("rm", "tale"),
        ("export", "tale", tmp_path / "f"),
        ("search", "mill", "--document", "tale"),
        ("chat", "--document", "tale"),
    ]:
        refused(run(*arguments, "--store", store), "'tale'", "'story'")
    refused(run("ask", "  ", "--store", store), "empty")
    assert run("rm", "story", "--store", store).status == 0
    refused(run("ask", "Who?", "--store", store), "no finished document")


def test_settings_out_of_range_are_named(store: Path, story: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for arguments, word in [
        (("ask", "Who?", "--store", store, "--top-k", "0"), "top_k"),
        (("ask", "Who?", "--store", store, "--top-k", "100000"), "top_k"),
        (("ask", "Who?", "--store", store, "--score-range", "-1"), "score_range"),
        (("chat", "--store", store, "--score-range", "nan"), "score_range"),
        (("ask", "Who?", "--store", store, "--cmt-cutoff", "1.5"), "cmt_cutoff"),
        (("ask", "Who?", "--store", store, "--granularity", "per_word"), "granularity"),
        (("ask", "Who?", "--store", store, "--max-new-tokens", "0"), "max_new_tokens"),
        (("ask", "Who?", "--store", store, "--temperature", "-1"), "temperature"),
        (("ask", "Who?", "--store", store, "--host-budget", "1kB"), "budget"),
        (("ask", "Who?", "--store", store, "--policy", "fifo"), "lru"),
        (("chat", "--store", store, "--prefetch", "all"), "speculative"),
        (("search", "mill", "--store", store, "--trace", tmp_path / "no" / "trace"), "trace"),
        (("ingest", story, "--store", new, "--policy", "fifo"), "lru"),
        (("ingest", story, "--store", new, "--prefetch", "all"), "speculative"),
        (("ingest", story, "--store", new, "--trace", tmp_path / "no" / "trace"), "trace"),
        (("bench", "tiers", "--store", store, "--policies", "fifo"), "lru"),
        (("bench", "tiers", "--store", store, "--prefetch", "recorded"), "speculative"),
        (("bench", "tiers", "--store", store, "--budgets", "0%"), "100%"),
        (("bench", "tiers", "--store", new), "new"),
        (("bench", "tiers", "--text", tmp_path / "no.txt"), "no.txt"),
        (("bench", "tiers", "--replay", tmp_path / "no.zst"), "no.zst"),
        (("bench", "tiers", "--replay", story), "no trace"),
        (("ingest", story, "--store", new, "--chunk-blocks", "0"), "chunk_blocks"),
        (("ingest", story, "--store", new, "--top-k", "-1"), "top_k"),
        (("ingest", story, "--store", new, "--retrieve", "--score-range", "inf"), "score_range"),
        (("ingest", story, "--store", new, "--host-budget", "1kB"), "budget"),
        (("ingest", story, "--store", tmp_path / "newer", "--codec", "jpeg"), "int8"),
        (("ingest", story, "--store", store, "--codec", "jpeg"), "int8"),
    ]:
        refused(run(*arguments), word)
    intact(store, "story")


def test_a_landmark_model_has_no_selector_to_be_found_by(store: Path) -> None:
    assert "too few landmarks" in run("index", "--store", store).out


def test_one_unknown_name_keeps_all_documents(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(OTHER)
    assert run("ingest", other, "--store", store).status == 0
    refused(run("rm", "story", "nobody", "--store", store), "nobody")
    intact(store, "story", "other")
    told = run("rm", "story", "other", "story", "--store", store, "--erase", "--json").json
    assert [document["name"] for document in told["removed"]] == ["story", "other"]
    intact(store)


def test_a_quota_is_kept(store: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(OTHER * 40)
    full = run("ingest", long, "--store", store, "--quota", "3MB")
    assert full.status == 1 and "Traceback" not in full.err
    assert re.search(
        r"needs \d+\.\d MB more, .* of the quota of 3\.0 MB", full.err.splitlines()[-1]
    )
    assert (store / "data.mdb").stat().st_size <= 3_000_000
    states = {
        d["name"]: d["state"] for d in run("ls", "--store", store, "--json").json["documents"]
    }
    assert states["story"] == "ready" and whole(store)
    assert run("ingest", long, "--store", store, "--quota", "1GB").status == 0
    intact(store, "story", "long")


def test_a_full_disk_is_named_and_leaves_the_memory_as_it_was(store: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(OTHER * 40)
    most = (store / "data.mdb").stat().st_size + (1 << 20)

    def leave_little_room() -> None:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    full = run_forked(leave_little_room, tmp_path, "ingest", long, "--store", store)
    assert (
        full.status == 1
        and full.err.splitlines()[-1].startswith("error: ")
        and "Traceback" not in full.err
    )
    assert "full" in full.err or "make room" in full.err
    assert whole(store)
    assert run("ingest", long, "--store", store).status == 0
    intact(store, "story", "long")


def test_a_read_only_memory_is_asked_but_not_written(
    open_directory: Path, model_path: Path, story: Path
) -> None:
    store, model = open_directory / "mem", open_directory / "model"
    shutil.copytree(model_path, model)
    shutil.copy(story, open_directory / "other.txt")
    assert run("ingest", story, "--store", store).status == 0
    for path in [store, *store.rglob("*"), model, *model.iterdir(), open_directory / "other.txt"]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def prepare() -> None:
        torch.set_num_threads(1)
        become_nobody()

    scratch = Path(tempfile.mkdtemp(dir=open_directory))
    scratch.chmod(0o777)
    asked = run_forked(
        prepare, scratch, "ask", "The code is", "--store", store, "--model", model, "--json"
    )
    assert (asked.status, asked.err) == (0, "") and asked.json["sources"]
    refused(
        run_forked(
            prepare,
            scratch,
            "ingest",
            open_directory / "other.txt",
            "--store",
            store,
            "--model",
            model,
        ),
        str(store),
        "reading only",
    )
    refused(run_forked(prepare, scratch, "rm", "story", "--store", store), str(store))
    intact(store, "story")


@pytest.mark.parametrize(
    ("version", "words"), [(None, "need transformers"), ("5.2.0", "5.2.0 is too old")]
)
def test_hugging_face_models_say_what_they_need(
    store: Path, story: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    if version is None:
        monkeypatch.setattr("memstore.hf.models_by_name.find_spec", lambda name: None)
    else:
        monkeypatch.setattr(metadata, "version", lambda name: version)
    for command in (
        ("ask", "Who?", "--store", store, "--model", "smollm2"),
        ("ingest", story, "--store", store, "--model", "some/decoder"),
        ("adapt", "smollm2", "--text", story),
        ("train", story, "--model", "smollm2", "--out", store.parent / "out"),
    ):
        refused(run(*command), words, "pip install '.[hf]'")
    with pytest.raises(InvalidConfig, match=words):
        _ = memstore.load_reader


def test_an_import_of_no_export_is_refused(store: Path, tmp_path: Path, story: Path) -> None:
    refused(run("import", story, "--store", tmp_path / "new"), "story.txt")
    refused(run("import", tmp_path / "none", "--store", tmp_path / "new"), "none")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "story.memstore"
    assert run("export", "story", file, "--store", store).status == 0
    file.write_bytes(file.read_bytes()[:-50])
    refused(run("import", file, "--store", store, "--name", "again"), "story.memstore")
    refused(run("export", "story", tmp_path / "no" / "where", "--store", store), "where")
    intact(store, "story")


def test_json_names_the_error_too(tmp_path: Path) -> None:
    result = run("ls", "--store", tmp_path / "none", "--json")
    assert result.status == 1 and result.err.startswith("error: ")
    assert result.json["error"]["name"] == "MemoryNotFound"


# Interrupts, pipes, terminals


def test_ctrl_c_leaves_an_ingest_that_the_same_command_finishes(
    tmp_path: Path, story: Path
) -> None:
    from pydoc_data.topics import topics

    book, store = tmp_path / "book.txt", tmp_path / "mem"
    book.write_text("\n".join(topics.values())[:120_000])
    with start(
        "ingest", book, "--store", store, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "tokens, up to" in first
        assert "tokens a second, about" in process.stderr.readline()
        process.send_signal(signal.SIGSTOP)  # while another process writes, however long this takes
        refused(run("ingest", story, "--store", store), str(process.pid))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "same command" in err.splitlines()[-1] and "Traceback" not in err
    refused(run("ask", "Who?", "--store", store), "no finished document")
    refused(run("ask", "Who?", "--store", store, "--document", "book"), "ingest again")
    assert whole(store)
    resumed = run("ingest", book, "--store", store, "--json").json["documents"][0]
    assert resumed["status"] == "resumed" and 0 < resumed["resumed_at"] < resumed["tokens"]
    intact(store, "book")


def test_a_reader_that_stops_reading_is_no_error(store: Path) -> None:
    for command, fresh in ((["ls"], True), (["ask", "Who?"], False)):
        process = start(
            *command, "--store", store, fresh=fresh, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait() in (0, 1)


def test_output_that_does_not_fit_is_one_line(store: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("ls", "--store", store, fresh=True, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert process.returncode == 1 and err.startswith("error: ") and err.count("\n") == 1


def test_a_terminal_gets_a_bar_and_the_answer_as_it_comes(tmp_path: Path, story: Path) -> None:
    store = tmp_path / "mem"
    shown = []
    for command in (["ingest", story], ["ask", "The code of the red fox is"]):
        ours, theirs = pty.openpty()
        process = start(*command, "--store", store, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal that nobody holds any more
            while piece := os.read(ours, 4096):
                text += piece
        os.close(ours)
        assert process.wait() == 0
        shown.append(text.decode())
    assert "story: read;" in shown[0] and "Traceback" not in shown[0]
    assert "\r\n\r\n1. story: " in shown[1]  # below the answer, which streamed


def test_a_setting_out_of_range_creates_no_memory(story: Path, tmp_path: Path) -> None:
    refused(run("ingest", story, "--store", tmp_path / "new", "--top-k", "0"), "top_k")
    assert not (tmp_path / "new").exists()
