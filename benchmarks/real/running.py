"""What the benchmarks of real models share: their options, and a run over a plan's questions that
goes on where it was killed.
"""

import argparse
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.tables import tokens_number
from benchmarks.real import tuning
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.memory import Memory
from benchmarks.real.methods import BASELINES, METHODS, Baselines, ask_all
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.prompting import DTYPES, tokenizer_of
from benchmarks.real.results import Results, Row
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import SEPARATOR
from memstore.model.texts.passage_context import CONTEXTS

DEFAULT_METHODS = ["memory", "bm25@1", "bm25@4", "minilm@4", "rrf@4", "right", "full", "none"]


def parser(
    doc: str | None, lengths: Sequence[str], *, own_text: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options of these benchmarks; own_text: which texts are read is not to be
    chosen.
    """
    options = plain_parser(doc)
    if not own_text:
        options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    options.add_argument("--work", type=Path, help="keep texts, memory and results here")
    add(options, "--lengths", list(lengths), "tokens of memory, e.g. 32K")
    methods = "; ".join(f"{name}: {about}" for name, about in METHODS.items())
    add(options, "--methods", DEFAULT_METHODS, methods, metavar="METHOD")
    about = "what is read in front of passages; None: what the model's adaptation says"
    add(options, "--context", None, about, choices=CONTEXTS)
    add(options, "--tuned", None, "what --tune of a run of real.recall wrote", type=Path)
    add(options, "--caution", 1.0, "of the memory: see LookupSettings; the questions are planted")
    add(options, "--asked", None, "of each task's questions at a length at most", type=int)
    add(options, "--full-up-to", "2K", "longest text read whole", type=tokens_number)
    return options


def read(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The options given, with lengths as numbers."""
    given = options.parse_args()
    given.lengths = sorted(tokens_number(text) for text in given.lengths)
    return given


def run(
    kind: str,
    options: argparse.Namespace,
    build: Callable[[], Plan],
    *,
    decides: Sequence[Any] = (),
    plans: Sequence[Any] = (),
) -> list[Row]:
    """Ask the questions of a plan by --methods; the rows of --tasks and --lengths.

    build: makes the plan, if --work has none. decides: what, beside texts, model and seed, decides
    what a question or document of a name is; plans: what, beside lengths, decides which there are.
    """
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        texts = [f"{Path(text).name} {Path(text).stat().st_size}" for text in options.text]
        same = _digest(*texts, Path(options.model).name, options.seed, *decides)
        path = work / f"{kind}-{same}-{_digest(options.lengths, *plans)}.json"
        if not path.exists():
            build().save(path)
        plan = Plan.load(path)
        reader = cache(lambda: _reader(options))
        context = options.context or reader().context
        blocks = Blocks(passages(tokenizer_of(options.model), context=context), plan.documents)
        questions = plan.of(options.tasks, options.lengths, options.asked)
        # what was kept of passages that were cut in another way is not used
        cut = _digest(blocks.spans(questions[0].documents[0])) if questions else ""
        named = f"{kind}-{same}-{options.dtype}-{cut}"
        prompted = f"{named}-{_digest(SEPARATOR)}"

        def applies(question: Question, method: str) -> bool:
            if method in ("right", "memory-right") and not question.stated:
                return False
            if not question.answers and method in ("full", "none"):
                return False
            return method != "full" or question.length <= options.full_up_to

        tuned = {} if options.tuned is None else tuning.load(options.tuned)
        by_memory = [name for name in options.methods if name.startswith("memory")]
        by_rule = [name for name in options.methods if name.endswith("~")]
        by_tuning = [name for name in options.methods if name in BASELINES]
        lookup = reader().lookup if by_rule else None
        baselines = Baselines(
            options.model, options.dtype, blocks, work, tuned=tuned, lookup=lookup
        )
        others = [n for n in options.methods if n not in (*by_memory, *by_rule, *by_tuning)]
        rows: list[Row] = []
        for names, file in (
            (others, prompted),
            (by_rule, f"{prompted}-rule-{_digest(lookup)}"),
            (by_tuning, f"{prompted}-tuned-{_digest(tuned)}"),
        ):
            if names:
                results = Results(work / f"{file}.jsonl")
                methods = {name: partial(baselines.method, name) for name in names}
                ask_all(questions, methods, results, applies=applies)
                rows += [row for row in results if row["method"] in names]
        if by_memory:
            layers, form = reader().shape.memory_layers, reader().keeps.digest
            chooses = (form, reader().lookup, reader().gate, reader().separator_ids)
            results = Results(work / f"{named}-memory-{_digest(layers, *chooses)}.jsonl")
            directory = work / f"memory-{named}-{_digest(layers)}"
            with Memory(reader(), directory, blocks) as memory:
                memory.read_in(
                    dict.fromkeys(n for question in questions for n in question.documents)
                )
                methods = {
                    name: partial(memory.as_text, baselines.prompted())
                    if name == "memory-text"
                    else partial(memory.method, name)
                    for name in by_memory
                }
                ask_all(questions, methods, results, applies=applies)
            rows += [row for row in results if row["method"] in by_memory]
        asked = {question.name for question in questions}
        return [row for row in rows if row["question"] in asked]


def _reader(options: argparse.Namespace) -> HuggingFacePassageModel:
    """The model of a run, which puts in front of passages what --context says."""
    reader = passage_model(options.model, options.dtype, options.caution)
    reader.context = options.context or reader.context
    return reader


def _digest(*values: Any) -> str:
    return hashlib.blake2b("\n".join(map(str, values)).encode(), digest_size=4).hexdigest()
