"""The passage model under test, by the directory of a Hugging Face decoder, its answers to planted
questions, and the options that benchmarks of one share.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.options import add, plain_parser
from benchmarks.real.plan import Plan, Question
from memstore import MemoryStore
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.lookup_settings import CAUTION
from memstore.model.passages.passage_session import PassageSession

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST = 24  # tokens of an answer


def passage_model(
    directory: Path | str,
    dtype: str = "float32",
    caution: float = CAUTION,
    weights: str = "auto",
    device: str = "cpu",
) -> HuggingFacePassageModel:
    """The model, its weights in this dtype; ends the command for one that is trained with
    landmarks. caution: of its lookups. weights: that tokens are generated with. Raises as
    `load_reader` does.
    """
    reader = load_reader(directory, device=device, dtype=DTYPES[dtype], weights=weights)
    if not isinstance(reader, HuggingFacePassageModel):
        raise SystemExit(f"{directory} is trained with landmarks: it chooses no passages")
    reader.lookup = replace(reader.lookup, caution=caution)
    return reader


def parser(doc: str | None, dtype: str = "float32") -> argparse.ArgumentParser:
    """A parser with --text, --model and --dtype. dtype: of the weights, where none is given."""
    options = plain_parser(doc)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--dtype", dtype, "of the weights", choices=DTYPES)
    return options


def memory_of(
    reader: HuggingFacePassageModel,
    path: Path,
    plan: Plan,
    questions: Sequence[Question],
    codec: str = "zstd",
) -> MemoryStore:
    """The memory of all documents that are asked about; those missing in it are ingested now.
    codec: of a new memory.
    """
    if path.exists():
        store = MemoryStore.open(path, reader.signature)
    else:
        store = MemoryStore.create(path, reader.signature, selector=reader.keeps, codec=codec)
    known = {document.name for document in store.ready()}
    for name in dict.fromkeys(name for one in questions for name in one.documents):
        if name not in known:
            reader.ingest(plan.documents[name], store, name=name, keep="kv")
    return store


def answer(
    reader: HuggingFacePassageModel, session: PassageSession, question: Question, most: int = MOST
) -> tuple[float, str]:
    """How right a session's answer is, 0..1, and what was generated ("" where it was forced);
    nothing is said where nothing in the memory answers.
    """
    encode = reader.tokenizer.encode
    state = session.ask(question.text, lambda: None)
    if not session.answered:
        return 0.0, ""
    if question.primed:
        state = session.feed(encode(question.primed))[-1]
    if question.rule != "forced":
        said = reader.tokenizer.decode(list(session.generate(state, most)))
        return question.marks(said), said
    if not question.answers:
        return 0.0, ""
    ids = encode(question.following)
    states = torch.cat([state[None], session.feed(ids[:-1])])
    return float(session.logits(states).argmax(-1).tolist() == ids), ""
