"""The commands ask, chat and search, and what they show on a terminal."""

import contextlib
import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from memstore.cli import console
from memstore.model.answer import NOT_SURE
from memstore.model.passages.selector import Gate
from memstore.store.memory_store import MemoryStore
from support.commands import OTHER, STORY, refused, run, start
from support.tiny_decoder import word_reader

pytestmark = pytest.mark.usefixtures("the_model")


def test_a_new_process_answers_with_sources_and_cost(store: Path) -> None:
    question = "What is the code of the red fox? The code of the red fox is"
    words = ("ask", question, "--store", store, "--json")
    process = start(*words, fresh=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    answer = json.loads(out)
    assert process.returncode == 0 and err == ""
    assert {"text", "sources", "lookups", "tiers", "seconds"} <= answer.keys()
    assert set(answer["lookups"]) == {"done", "skipped"}
    assert all({"hits", "misses", "bytes"} <= counts.keys() for counts in answer["tiers"].values())
    assert answer["tiers"]["disk"]["hits"] > 0
    for source in answer["sources"]:
        first, end = source["span"]
        assert source["document"] == "story" and source["text"] == STORY[first:end]


@pytest.mark.parametrize("columns", [30, 60, 140])
def test_sources_are_two_lines_each_below_the_answer(
    store: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ask = ("ask", "Who lives in the old mill?", "--store", store, "--cmt-cutoff", "0")
    told = run(*ask, "--json").json
    text, empty, *lines = run(*ask).out.splitlines()
    assert (text, empty) == (told["text"], "")
    assert all(source["sentence"] in source["text"] for source in told["sources"])
    sentences = list(dict.fromkeys(source["sentence"] for source in told["sources"]))
    assert len(sentences) == len(lines) / 2 < len(told["sources"])  # none is shown twice
    for number, sentence in enumerate(sentences, 1):
        head, shown = lines[2 * number - 2 : 2 * number]
        assert head == f"{number}. story" and shown.startswith("   ") and len(shown) <= columns
        assert sentence.startswith(shown[3:].removesuffix("..."))


def test_stats_show_weights_places_tiers_and_cost(store: Path) -> None:
    ask = ("ask", "Who lives in the old mill?", "--store", store, "--cmt-cutoff", "0", "--stats")
    _, empty, first, _, third, *_, seconds, lookups, host, disk = run(*ask).out.splitlines()
    assert (empty, first) == ("", "1. story")
    assert re.match(r"   attention \d+\.\d\d, characters [\d,]+-[\d,]+, from (disk|host)", third)
    assert re.match(r"[\d.]+ s, first token after [\d.]+ s$", seconds)
    assert re.match(r"[\d,]+ lookups made, 0 skipped by the gate$", lookups)
    assert re.match(r"host: [\d,]+ of [\d,]+ blocks found, .* read$", host)
    assert re.match(r"disk: [\d,]+ of [\d,]+ blocks found, .* read$", disk)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"needed": 0.66}, ". Closest passages (an answer needs 0.66):"),
        ({"needed": None, "doubt": 0.934}, " (probability 0.93). Closest passages:"),
    ],
)
def test_a_refusal_shows_its_reason_and_the_closest_passages(
    capsys: pytest.CaptureFixture[str], told: dict[str, float | None], shown: str
) -> None:
    source = {"document": "tides", "place": None, "sentence": "It leaves at noon.", "weight": 0.54}
    answer = {"text": "", "answered": False, "sources": [source], **told}
    console.print_answer(answer, streamed=False)
    first, empty, *closest = capsys.readouterr().out.splitlines()
    assert (first, empty) == (f"{NOT_SURE}{shown}", "")
    assert closest == ["1. 0.54  tides", "   It leaves at noon."]


def test_a_source_names_its_page_or_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    passage = "The ferry leaves at noon,\nand again in the evening. " * 9
    console.print_sources(
        [
            {"document": "tides.pdf", "place": "p. 3", "sentence": passage},
            {"document": "tides.md", "place": "A long heading " * 9, "sentence": passage + "8812."},
            {"document": "notes", "place": None, "sentence": "Short."},
        ],
        scored=False,
        answer="8812.",
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1. tides.pdf, p. 3" and lines[4:] == ["3. notes", "   Short."]
    assert lines[1].startswith("   The ferry leaves at noon, and again in the")
    assert lines[3].startswith("   ...") and lines[3].endswith("in the evening. 8812.")
    assert lines[2].startswith("2. tides.md, A long heading") and lines[2].endswith("...")
    assert max(map(len, lines)) <= 90


def test_each_question_of_standard_input_has_its_own_session(store: Path) -> None:
    questions = ["The code of the red fox is", "Who lives there?", "The code of the red fox is"]
    every = run("ask", "-", "--store", store, "--json", stdin="\n".join(questions)).json["answers"]
    assert [answer["question"] for answer in every] == questions
    assert every[0]["text"] == every[2]["text"]
    alone = run("ask", questions[0], "--store", store, "--json").json
    assert every[0]["tokens"] == alone["tokens"]
    refused(run("ask", "-", "--store", store, stdin=" \n"), "no question")
    shown = run("ask", "-", "--store", store, stdin="\n".join(questions)).out.splitlines()
    assert [line[2:] for line in shown if line.startswith("> ")] == questions


def test_a_bad_question_does_not_stop_the_others(store: Path) -> None:
    lines = b"Who lives there?\ncaf\xe9?\nWho lives there?\n"
    for command in (("ask", "-"), ("chat",)):
        done = run(*command, "--store", store, "--json", stdin=lines)
        first, bad, last = json.loads(done.out)["answers"]
        assert done.status == 1 and first["text"] and "text" in last
        assert bad["question"] == "caf\udce9?" and bad["error"]["name"] == "InvalidInput"
        shown = run(*command, "--store", store, "--stats", stdin=lines)
        assert shown.status == 1 and shown.out.count(" lookup") == 2
        assert shown.err.count("error: ") == 1 and "UTF-8" in shown.err
    for wrong in (("--temperature", "nan"), ("--top-k", "0"), ("--document", "nobody")):
        for command in (("ask", "-"), ("chat",)):
            done = run(*command, "--store", store, "--json", *wrong, stdin=lines)
            assert done.status == 2 and list(json.loads(done.out)) == ["error"]


def test_sampling_repeats_under_a_seed(store: Path) -> None:
    ask = ("ask", "Who?", "--store", store, "--temperature", "2", "--json", "--max-new-tokens", "8")
    texts = [run(*ask, "--seed", seed).json["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_chat_answers_line_by_line(store: Path) -> None:
    lines = "Who lives there?\n\nAnd where?\nexit\nNo.\n"
    result = run("chat", "--store", store, "--json", stdin=lines)
    questions = [answer["question"] for answer in result.json["answers"]]
    assert questions == ["Who lives there?", "And where?"]
    shown = run("chat", "--store", store, "--stats", stdin="Who lives there?\n")
    assert shown.status == 0 and " lookup" in shown.out


def test_search_shows_passages(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = ("search", "the old mill", "--store", store, "--top-k", "3")
    sources = run(*search, "--json").json["sources"]
    assert len(sources) == 3
    assert sorted(sources, key=lambda source: -source["weight"]) == sources
    first, end = sources[0]["span"]
    assert sources[0]["text"] == STORY[first:end]
    monkeypatch.setenv("COLUMNS", "1000")
    for stats in (0, 1):
        lines = run(*search, *["--stats"][:stats]).out.splitlines()
        for number, source in enumerate(sources):
            head, sentence, *more = lines[number * (2 + stats) : (number + 1) * (2 + stats)]
            assert head == f"{number + 1}. {source['weight']:.2f}  story"
            assert sentence == f"   {source['sentence']}" and source["sentence"] in source["text"]
            place = f"   characters {source['span'][0]:,}-"
            assert len(more) == stats and all(one.startswith(place) for one in more)


def test_search_by_document_ends_after_the_last_document(store: Path, tmp_path: Path) -> None:
    (tmp_path / "boats").write_text(OTHER)
    assert run("ingest", tmp_path / "boats", "--store", store).status == 0
    search = ("search", "zyx", "--store", store, "--by", "document", "--top-k", "50")
    assert len(run(*search).out.splitlines()) == 4
    assert {one["document"] for one in run(*search, "--json").json["sources"]} == {"story", "boats"}


def test_search_says_that_nothing_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, store = word_reader(gate=Gate((0.5,) * 5)), tmp_path / "mem"
    with MemoryStore.create(store, reader.signature, selector=reader.keeps) as memory:
        reader.ingest(OTHER, memory, name="boats")
    monkeypatch.setattr("memstore.memory.reader_of", lambda *_, **__: reader)
    search = ("search", "Who was the first president?", "--store", store, "--by", "document")
    first, empty, head, _ = run(*search).out.splitlines()
    assert first == f"{NOT_SURE}. Closest passages:"
    assert empty == "" and head.endswith("  boats")
    assert run(*search, "--json").json["answered"] is False


def test_tier_options_never_change_an_answer(store: Path) -> None:
    question = STORY + "The code of the red fox is"
    ask = ("ask", question, "--store", store, "--json", "--cmt-cutoff", "0")
    plain = run(*ask).json
    counts = {"hits", "misses", "bytes", "seconds", "evictions", "prefetched", "late", "unused"}
    for policy in ("arc", "lru"):
        small = ("--host-budget", "128kB", "--policy", policy, "--prefetch", "speculative")
        answer = run(*ask, *small).json
        assert answer["tokens"] == plain["tokens"]
        host = answer["tiers"]["host"]
        assert host.keys() == counts and host["evictions"] > 0
    assert plain["tiers"]["host"]["evictions"] == plain["tiers"]["host"]["prefetched"] == 0


# Terminals


def shown(*arguments: object) -> str:
    """What a command writes to the terminal that its streams are."""
    ours, theirs = pty.openpty()
    process = start(*arguments, env={"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal
        while piece := os.read(ours, 4096):
            written += piece
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


def test_a_terminal_shows_progress_and_streams_the_answer(tmp_path: Path, story: Path) -> None:
    store = ("--store", tmp_path / "memory")
    ingest = shown("ingest", story, *store)
    assert "story: read;" in ingest and "Traceback" not in ingest
    ask = shown("ask", "The code of the red fox is", *store)
    assert (
        "reading the memory" in ask and "\r\n\r\n1. story\r\n" in ask
    )  # below the streamed answer
    assert "searching" in shown("search", "the old mill", *store)


def test_control_characters_are_escaped_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x07\x9b1m\u202eb\udc80\r\x7f"
    console.say(hostile)
    console.note(hostile)
    console.emit({"name": hostile})
    source = {"weight": 1.0, "document": hostile, "span": (0, 1), "tiers": {}}
    console.print_answer(
        {
            "text": hostile,
            "sources": [{**source, "sentence": hostile, "place": hostile}],
            "lookups": {"done": 1, "skipped": 0},
            "tiers": {},
            "seconds": 0.0,
        },
        streamed=False,
    )
    print(console.columns([("name",), (hostile + "\n",)]))
    shown = "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter == "\n" for letter in shown), ascii(shown)
    assert r"\u001b[2J" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"name": hostile}
