"""Follow-ups: conversations of two or three turns about an office's folder and about the first two
chapters of the demonstration's book. Is the passage that answers the last turn found?

ways: "memory" answers every turn in one session, as `memstore chat` does; "alone" asks it the last
turn without those before. "bm25" and "fused" (with MiniLM) search by the last turn alone, and with
"-all" by all turns as one text.
"""

import json
import tempfile
from pathlib import Path

import torch

import memstore
from benchmarks.common import options, results
from benchmarks.common.tables import table
from benchmarks.questions import TOKENS, Asked, Passages, mean, rank
from memstore.cli.demo import chapters
from memstore.hf.load import load_reader
from memstore.memory import Memory
from memstore.model.passages.passage_session import PassageSession

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
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
        assert session.candidates is not None
        best = session.candidates.best(16)
    return [place[names[one.document], one.block] for one in best if one.document > 0]


def main() -> None:
    parser = options.plain_parser(__doc__)
    parser.add_argument("--office", type=Path, required=True, help="the folder")
    options.add(parser, "--model", "smollm2")
    given = parser.parse_args()
    options.prepare(given.threads)
    reader = load_reader(given.model)
    lines = CONVERSATIONS.read_text(encoding="utf-8").splitlines()
    ranks: dict[str, list[int | None]] = {way: [] for way in WAYS}
    rows = []
    for about in ("office", "book"):
        with tempfile.TemporaryDirectory() as work, memstore.open(f"{work}/m", reader) as memory:
            if about == "office":
                memory.add([p for p in given.office.iterdir() if p.name != "questions.jsonl"])
            else:
                for name, text in chapters()[:CHAPTERS]:
                    memory.add(text=text, name=name)
            passages = Passages(memory, Path(work))
            for row in map(json.loads, lines):
                if row["about"] != about:
                    continue
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
                for way in WAYS:
                    ranks[way].append(at[way])
                rows.append({"turns": turns, **at})
                print(turns, at, flush=True)
    shares = {
        way: {f"found {k}": mean([at is not None and at < k for at in some]) for k in (1, 4)}
        for way, some in ranks.items()
    }
    print(table(["way", "first", "among 4"], [[way, *of.values()] for way, of in shares.items()]))
    results.write(given, {"conversations": len(rows), "ways": shares, "rows": rows})


if __name__ == "__main__":
    with torch.no_grad():
        main()
