"""Follow-ups: conversations of two or three turns. Is the passage that answers the last turn found?

30 are about an office's folder and the first two chapters of the demonstration's book; 270, by
which weights were chosen, about invented papers of the selector's training ("written").

ways: "memory" answers every turn in one session, as `memstore chat` does; "alone" asks it the last
turn without those before. "bm25" and "fused" (with MiniLM) search by the last turn alone, and with
"-all" by all turns as one text.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.common import options, results
from benchmarks.common.tables import table
from benchmarks.questions import TOKENS, Asked, Passages, mean, rank
from memstore.cli.demo import chapters
from memstore.hf.load import load_reader
from memstore.memory import Memory
from memstore.model.passages.passage_session import PassageSession
from memstore.training.reading_questions import read_questions

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
WRITTEN = Path(__file__).with_name("written.jsonl.zst")
CHAPTERS = 2
WAYS = ("memory", "alone", "bm25", "bm25-all", "fused", "fused-all")


def found_in(memory: Memory, passages: Passages, turns: list[str]) -> list[int]:
    """The passages that the memory finds for the last of these turns, best first."""
    place = {one: at for at, one in enumerate(passages.places)}
    names = {document.id: document.name for document in memory.documents()}
    with memory.reader.session(memory.store) as session:
        assert isinstance(session, PassageSession)
        for turn in turns:
            state = session.ask(turn, lambda: None)
            list(session.generate(state, TOKENS, logits=session.first_logits))
        # alone, "Violet?" asks nothing, and nothing is searched
        best = [] if session.candidates is None else session.candidates.best(16)
    return [place[names[one.document], one.block] for one in best if one.document > 0]


def add(memory: Memory, about: str, rows: list[dict[str, Any]], office: Path) -> None:
    """Add the documents that conversations are about."""
    if about == "office":
        memory.add([path for path in office.iterdir() if path.name != "questions.jsonl"])
    elif about == "book":
        for name, text in chapters()[:CHAPTERS]:
            memory.add(text=text, name=name)
    else:
        titles = {title for row in rows for title in row["documents"]}
        for at, one in enumerate(read_questions(WRITTEN)):
            if one.title in titles:
                memory.add(text=one.context, name=f"{at} {one.title}")


def shares(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each way, the shares of rows whose passage is first, and among four."""
    return {
        way: {
            f"found {k}": mean([row[way] is not None and row[way] < k for row in rows])
            for k in (1, 4)
        }
        for way in WAYS
    }


def main() -> None:
    parser = options.plain_parser(__doc__)
    parser.add_argument("--office", type=Path, required=True, help="the folder")
    options.add(parser, "--model", "smollm2")
    given = parser.parse_args()
    options.prepare(given.threads)
    reader = load_reader(given.model)
    asked: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, CONVERSATIONS.read_text(encoding="utf-8").splitlines()):
        asked[row["about"]].append(row)
    rows = []
    for about, some in asked.items():
        with tempfile.TemporaryDirectory() as work, memstore.open(f"{work}/m", reader) as memory:
            add(memory, about, some, given.office)
            passages = Passages(memory, Path(work))
            for row in some:
                turns = row["turns"]
                names = "|".join(row["documents"]) or "CHAPTER"
                right = set(passages.right(Asked(turns[-1], ((row["holds"],),), names, "")))
                assert right, f"no passage holds {row['holds']}"
                found = {
                    "memory": found_in(memory, passages, turns),
                    "alone": found_in(memory, passages, turns[-1:]),
                }
                for way in ("bm25", "fused"):
                    found[way] = passages.ranked(way, turns[-1])
                    found[f"{way}-all"] = passages.ranked(way, " ".join(turns))
                at = {way: rank(found[way][:16], right) for way in WAYS}
                rows.append({"about": about, "turns": turns, **at})
                print(turns, at, flush=True)
    written = [row for row in rows if row["about"] == "written"]
    others = [row for row in rows if row["about"] != "written"]
    for what, told in (("office and book", others), ("written", written)):
        print(what, len(told))
        print(
            table(["way", "first", "among 4"], [[w, *f.values()] for w, f in shares(told).items()])
        )
    counts = {"conversations": len(others), "ways": shares(others)}
    results.write(given, {**counts, "written": shares(written), "rows": rows})


if __name__ == "__main__":
    with torch.no_grad():
        main()
