"""Tables of the hand-written pages that are made from result files, or computed.

    python -m docs_build.tables

rewrites what lies between `<!-- table NAME -->` and `<!-- /table -->` in README.md and docs/;
`tests/docs` fails for a page whose tables differ from their files.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

from docs_build.markdown import table
from docs_build.sizes import sizes_table
from memstore.model.lookup_settings import CAUTION, CAUTIONS

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
_WAYS = {
    "memory": "memstore",
    "text": "its passages as text",
    "fused@1": "BM25 and MiniLM fused, the best as text",
    "fused@2": "the same, the best two",
    "fused@4": "the same, the best four",
    "gold": "the right passage as text",
}
_SETS = ("newwiki", "piaf", "2wiki", "fairytale", "office")
_KINDS = {
    "natural": "everyday questions",
    "pronoun": "he, she or it; the name a sentence before",
    "heading": "the subject in a heading",
    "table": "a row of a table",
    "neighbours": "in two neighbouring passages",
    "german": "German",
    "french": "French",
    "passkey": "pass key",
    "fact": "one fact",
    "of_20": "one of 20 facts",
    "reworded": "in other words",
    "synonyms": "by synonyms",
    "updated": "stated twice, the later counts",
    "absent": "unanswerable, in the text's words: refused",
    "absent_reworded": "unanswerable, in other words: refused",
}


def results(name: str) -> dict[str, Any]:
    """A file of docs/results."""
    text = (ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def readme_table() -> str:
    """The README's numbers: answers, first token and storage."""
    ways = results("questions-newwiki")["ways"]
    first = results("first-token-bfloat16")
    stored, kept = results("codecs-passages")["figures"]["int8"], results("stored-once")["rows"]
    text_bytes = kept["text alone"]["bytes"] / kept["text alone"]["tokens"]
    rows = [
        [title, *(f"{ways[way][key]:.2f}" for way in ("memory", "text", "fused@2"))]
        for title, key in (
            ("questions that the texts answer (209): right", "right"),
            ("the same: wrong", "wrong"),
            ("questions whose text was left out (91): refused", "unanswerable refused"),
        )
    ]
    for passages in ("1", "4", "32"):  # the default reads between 1 and 4
        ms = [f"{_first_ms(first, way, passages):,.0f} ms" for way in ("host tier", "text")]
        read = f"{passages} passage{'' if passages == '1' else 's'}"
        title = f"first token after {read} ({first['tokens'][passages]:,} tokens)"
        rows.append([title, *ms, ""])
    kilobytes = f"{stored['bytes'] / stored['tokens'] / 1000:.1f} kB"
    rows.append(["storage for a token", kilobytes, f"{text_bytes:.0f} bytes", ""])
    head = ["", "memstore", "its passages as text", "BM25 and MiniLM fused, best 2 as text"]
    return table(head, rows)


def questions_table(name: str) -> str:
    """Answers to people's questions by way of answering."""
    ways = results(f"questions-{name}")["ways"]
    rows = []
    for way, title in _WAYS.items():
        one = ways[way]
        marks = [f"{one[key]:.2f}" for key in ("right", "wrong", "refused", "f1")]
        unanswerable = "" if way == "gold" else f"{one['unanswerable refused']:.2f}"
        seconds = f"{one['first']:.2f}, {one['seconds']:.2f}"
        difference = one.get("memory minus this")
        apart = "" if difference is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*difference)
        rows.append([title, *marks, unanswerable, seconds, apart])
    head = ["", "right", "wrong", "refused", "F1 of words", "unanswerable refused"]
    return table([*head, "first token, end, s", "memstore minus this: right"], rows)


def doubt_table() -> str:
    """What memstore answers and refuses by the threshold of doubt."""
    shown = ("0.3", "0.5", "0.7", "0.8", "0.9", "1.0")
    rows = []
    for name, title in (("newwiki", "new Wikipedia articles"), ("piaf", "French Wikipedia")):
        curve = results(f"questions-{name}")["ways"]["memory"]["curve"]
        for key in ("right", "refused", "unanswerable refused"):
            rows.append([f"{title}: {key}", *(f"{curve[at][key]:.2f}" for at in shown)])
    return table(["threshold", *shown], rows)


def first_token_table(name: str) -> str:
    """Milliseconds to the first token by passages read, from a memory and from text."""
    found = results(name)
    titles = {
        "text": "as text",
        "found text": "text, no search",
        "llama.cpp": "llama.cpp, no search",
    }
    rivals = [way for way in titles if f"{way}, 1" in found["seconds"]]
    rows = []
    for passages, tokens in found["tokens"].items():
        memory = found["seconds"][f"host tier, {passages}"]
        row = [passages, f"{tokens:,}", f"{_first_ms(found, 'host tier', passages):,.0f}"]
        for way in rivals:
            pairs = zip(memory, found["seconds"][f"{way}, {passages}"])
            ratios = sorted(one / other for one, other in pairs)
            ratio = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            row += [f"{_first_ms(found, way, passages):,.0f}", ratio]
        rows.append(row)
    shown = [title for way in rivals for title in (f"{titles[way]}, ms", "memstore / this")]
    return table(["passages", "tokens", "memstore, ms", *shown], rows)


def gpu_table() -> str:
    """Milliseconds to the first token on a GPU, of random weights in two shapes."""
    found = [results(f"first-token-gpu-{shape}") for shape in ("1b", "8b")]
    rows = []
    for passages, tokens in found[0]["tokens"].items():
        row = [passages, f"{tokens:,}"]
        for one in found:
            ways = ("text", "device tier", "host tier")
            ms = [_first_ms(one, way, passages) for way in ways]
            ratio = f"{ms[1] / ms[0]:.2f}, {ms[2] / ms[0]:.2f}"
            row += [*(f"{each:.0f}" for each in ms), ratio]
        rows.append(row)
    shown = ("text, ms", "memory on the GPU", "in main memory", "ratios")
    return table(
        ["passages", "tokens", *(f"{size}: {x}" for size in ("1B", "8B") for x in shown)], rows
    )


def caution_table() -> str:
    """What SmolLM2 refuses by --caution, as its selector's file says."""
    path = ROOT / "memstore/hf/selectors/smollm2-135m-instruct.safetensors"
    with safe_open(path, "numpy") as file:
        selector = json.loads(file.metadata()["memstore.selector"])
    thresholds = ["1", *(f"{above:.2f}" for above in selector["doubt"]["above"])]
    shares = [
        selector["scores"][f"unanswerable refused, caution {caution}"] for caution in CAUTIONS
    ]
    cautions = ["0", *(f"{one}, the default" if one == CAUTION else f"{one}" for one in CAUTIONS)]
    refused = ["0", *(f"{share:.2f}" for share in shares)]
    head = ["`--caution`", *cautions]
    rows = [["unanswerable questions refused", *refused], ["threshold of doubt", *thresholds]]
    return table(head, rows)


def recall_table() -> str:
    """Right answers to planted questions, all read with the adapter: at 8K and at 32K tokens."""
    short, long = map(results, ("recall-8k", "recall-32k"))
    ways = ("memory", "memory-text", "bm25@1", "bm25@4", "right")
    shares = [_shares(short, way) for way in ways]
    shares += [_shares(long, way) for way in ("memory", "bm25@1")]
    rows = [
        [title, *(f"{one[kind]:.2f}" if kind in one else "" for one in shares)]
        for kind, title in _KINDS.items()
    ]
    head = ["", "8K: memstore", "its passages as text", "BM25's best passage", "BM25's best four"]
    return table([*head, "the right passages", "32K: memstore", "BM25's best passage"], rows)


def _shares(found: dict[str, Any], method: str) -> dict[str, float]:
    """By kind; of the unanswerable ones the memory's alone, since no other method refuses."""
    lengths = {one["length"] for one in found["answers"]} - {0}
    (length,) = lengths
    return {
        one["task"]: one["right"] / one["questions"]
        for one in found["answers"]
        if one["method"] == method and one["length"] == length
        if method == "memory" or not one["task"].startswith("absent")
    }


def _first_ms(found: dict[str, Any], way: str, passages: str) -> float:
    return 1000 * float(median(found["seconds"][f"{way}, {passages}"]))


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme_table,
    **{f"questions {one}": partial(questions_table, one) for one in _SETS},
    "caution": caution_table,
    "doubt": doubt_table,
    "first token": partial(first_token_table, "first-token"),
    "first token bfloat16": partial(first_token_table, "first-token-bfloat16"),
    "first token gpu": gpu_table,
    "recall": recall_table,
    "sizes": sizes_table,
}


def with_tables(page: str) -> str:
    """A page with its tables as their files have them. Raises KeyError for an unknown table."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


def stale_pages() -> Iterator[Path]:
    """Pages whose tables differ from their files."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if with_tables(text) != text:
            yield path


if __name__ == "__main__":
    for path in stale_pages():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))
