"""Asking the questions of a plan by several methods: the options, and a run that continues where it
was interrupted.
"""

import argparse
import hashlib
import tempfile
from collections.abc import Callable
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
from benchmarks.real.planted import TUNED
from benchmarks.real.prompting import DTYPES, tokenizer_of
from benchmarks.real.results import Results, Row
from memstore.model.lookup_settings import CAUTION
from memstore.model.passages.adaptation import SEPARATOR

DEFAULT_METHODS = ["memory", "bm25@1", "bm25@4", "minilm@4", "rrf@4", "right", "full", "none"]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of a run but --text, --lengths and --tasks."""
    options = plain_parser(doc)
    options.add_argument("--model", required=True, help="a Hugging Face model's directory")
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    options.add_argument("--work", type=Path, help="store texts, memory and answers here")
    methods = "; ".join(f"{name}: {about}" for name, about in METHODS.items())
    add(options, "--methods", DEFAULT_METHODS, methods, metavar="METHOD")
    add(options, "--tuned", TUNED, "K and thresholds, as written by recall --tune", type=Path)
    add(options, "--caution", CAUTION, "of the memory: see LookupSettings")
    add(options, "--asked", None, "at most so many questions of a task and length", type=int)
    add(options, "--full-up-to", "2K", "longest text read whole", type=tokens_number)
    return options


def run(
    kind: str, options: argparse.Namespace, build: Callable[[], Plan], *identity: Any
) -> list[Row]:
    """Ask a plan's questions of --tasks and --lengths by --methods, and return a row an answer.

    build: makes the plan. identity: what decides the plan, in addition to texts, lengths and model.
    """
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        texts = [f"{Path(text).name} {Path(text).stat().st_size}" for text in options.text]
        same = _digest(*texts, Path(options.model).name, *identity)
        path = work / f"{kind}-{same}-{_digest(options.lengths)}.json"
        if not path.exists():
            build().save(path)
        plan = Plan.load(path)
        reader = cache(lambda: passage_model(options.model, options.dtype, options.caution))
        cut = passages(tokenizer_of(options.model))
        blocks = Blocks(cut, plan.documents)
        questions = plan.of(options.tasks, options.lengths, options.asked)
        # answers about passages that were cut differently do not count
        spans = _digest(blocks.spans(questions[0].documents[0])) if questions else ""
        named = f"{kind}-{same}-{options.dtype}-{spans}"
        prompted = f"{named}-{_digest(SEPARATOR)}"

        def applies(question: Question, method: str) -> bool:
            if method in ("right", "memory-right") and not question.stated:
                return False
            if not question.answers and method in ("full", "none"):
                return False
            return method != "full" or question.length <= options.full_up_to

        tuned = tuning.load(options.tuned)
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


def _digest(*values: Any) -> str:
    return hashlib.blake2b("\n".join(map(str, values)).encode(), digest_size=4).hexdigest()
