"""The first stage of a search over very many token landmarks: inverted lists of rounded landmarks
propose passages for exact scoring; and the file that holds the lists.

The score of a passage is a weighted sum over the question's tokens, each with its greatest product
with the passage's landmarks. Few tokens have much weight; each of these searches its nearest lists.
A product above a bound counts; a passage without one gets the mean of the products below the bound,
estimated from a sample (lists and residuals: PLAID, arXiv 2205.09707; imputed products: XTR, arXiv
2304.01982; codes of 4 bits that are summed in registers: FAISS's FastScan).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from memstore.decode import Block, Positive
from memstore.disk.format.document import Document
from memstore.disk.tables.runs import BlockWords, IndexSpec, Run
from memstore.index.index_file import (
    Parts,
    Pieces,
    Unusable,
    arrays_of,
    decode_file,
    decode_header,
    empty_lists,
    encode_file,
    faiss,
    index_of,
    understood,
)
from memstore.index.late_interaction import INT8_STEPS
from memstore.index.word_index import HeldPostings, by_row

CODE = 16  # bytes of a landmark's code
FILE = "passages.idx"
TRAINED = 64  # landmarks a list that k-means sees
SAMPLED = 2048  # passages that bounds are estimated from

_KIND = f"PQ{2 * CODE}x4fs"  # the codes, as FAISS calls them: two numbers of 4 bits a byte
_LEAST_SAMPLED = 256  # passages of the sample in a scope: fewer are too few
_ROUNDS = 8  # of k-means
_HEAVY = 0.95  # of a question's weight: the heaviest tokens that hold it are looked up
_MOST_HEAVY = 24  # of them; an exact search costs as much as more
# A passage is proposed if its estimated score is at most so many standard deviations of all scores
# below the eighth.
_AMONG, _RANGE = 8, 2.25
# The share of all passages that a token with all the weight looks for, and of all lists that it
# searches; one with a quarter of the weight half as many.
_SOUGHT, _PROBED = 0.1, 0.1
# The arrays of a file before those of the lists: digests, keys and counts of words, words of each
# passage, tokens of each, sample.
_KINDS = "<u8", "<u8", "<u2", "<f4", "<u2", "i1"


class Covered(NamedTuple):
    """A document in lists, as of their building: its blocks are consecutive passages."""

    name: Annotated[str, Meta(max_length=4096)]
    blocks: Block
    state: bytes  # changes with the document

    @classmethod
    def of(cls, row: Document) -> "Covered":
        """The current state of a document; the value changes whenever its text changes."""
        return cls(row.name, row.blocks, xxh3_64_digest(row.write))


Read = Callable[[bool], Iterable[tuple[Covered, Run, BlockWords | None]]]
"""Documents with their token landmarks and, if asked for, their words."""


class _Header(Parts):
    digest: str  # of the selector
    covered: list[Covered]
    stride: Positive  # of the sample


@dataclass
class PassageLists:
    """Inverted lists of the token landmarks of passages, which are numbered 0, 1, .. in the order
    of their addition. Safe for several threads.
    """

    index: Any  # FAISS's, whose ids are passages
    lengths: np.ndarray  # int64 [passages]: tokens of each
    digests: np.ndarray  # uint64 [passages]: XXH3-64 of each one's landmarks
    stride: int
    sample: np.ndarray  # int8 [tokens, width]: landmarks of passages 0, stride, 2 stride, ..
    # float32 [passages], words of each, and all words; None: the selector stores none
    words: tuple[np.ndarray, HeldPostings] | None
    covered: list[Covered]
    digest: str  # of the selector

    def __post_init__(self) -> None:
        self._near = self.sample.astype(np.float32) / INT8_STEPS

    @property
    def bytes(self) -> int:
        """Main memory of the lists, without words."""
        held = self.index.ntotal * (CODE + 8) + 2 * self.lengths.nbytes + self.digests.nbytes
        return int(held + self._near.nbytes + self.sample.nbytes)

    def propose(
        self,
        q: np.ndarray,
        weights: np.ndarray,
        most: tuple[int, int],
        inside: np.ndarray,
        added: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, float] | None:
        """Passages that are probably the best, int64 [n], ascending; and the standard deviation of
        the scores of all, estimated from the sample. None if the sample has too few passages, or
        too many tokens have equal weights.

        q: float32 [T, width], a question's tokens; weights: float32 [T], which sum to 1. most:
        (least, greatest) number of passages to propose. inside: bool [passages], those that may be
        proposed. added: passages int64 [n], each once, and what is added to their scores, float32
        [n].
        """
        lengths, in_scope = self.lengths[:: self.stride], inside[:: self.stride]
        heaviest = np.argsort(-weights)
        heavy = heaviest[: 1 + int((np.cumsum(weights[heaviest]) < _HEAVY).sum())]
        enough = in_scope.sum() >= _LEAST_SAMPLED and np.isfinite(weights).all()
        if not enough or len(heavy) > _MOST_HEAVY:
            return None
        q, weights = q[heavy], weights[heavy]
        probed = np.maximum(1, (_PROBED * weights**0.5 * self.index.nlist).round().astype(int))
        starts = np.cumsum(lengths) - lengths
        maxima = np.maximum.reduceat(q @ self._near.T, starts, axis=1)[:, in_scope]
        # beyond what is imputed: of one row, and of all by weight
        best, total = np.zeros((2, len(self.lengths)), np.float32)
        for row, of_sample, weight, lists in zip(q, maxima, weights, probed.tolist()):
            bound = np.quantile(of_sample, 1 - _SOUGHT * weight**0.5)
            imputed = float(of_sample[of_sample <= bound].mean())
            nearest = faiss().SearchParametersIVF(nprobe=lists)
            # a passage is found once for each of its landmarks above the bound
            _, products, found = self.index.range_search(row[None], float(bound), params=nearest)
            beyond = products - np.float32(imputed)
            np.maximum.at(best, found, beyond)
            found = found[beyond == best[found]]
            total[found] += weight * best[found]
            best[found] = 0
        scores = weights @ maxima
        if added is not None:
            total[added[0]] += added[1]
        total *= inside
        rows = _best(total, most, _RANGE * float(scores.std()))
        return np.sort(rows), float(scores.std() / weights.sum())

    def encode(self) -> Pieces:
        """The lists as the content of a file, the header first."""
        header = {"digest": self.digest, "covered": self.covered, "stride": self.stride}
        none = np.zeros(0)
        of_words, (keys, counts) = self.words or (none, (none, none))
        arrays = self.digests, keys, counts, of_words, self.lengths, self.sample
        typed = [array.astype(kind, copy=False) for array, kind in zip(arrays, _KINDS)]
        return encode_file(header, [*typed, *arrays_of(self.index)])


def _best(total: np.ndarray, most: tuple[int, int], within: float) -> np.ndarray:
    """Rows of the greatest of totals [rows], between the two numbers of `most`: those at most
    `within` below the eighth, without rows of total 0.
    """
    least, greatest = most
    rows = np.flatnonzero(total > 0)
    if greatest < len(rows):
        rows = rows[np.argpartition(total[rows], -greatest)[-greatest:]]
    if len(rows) <= least:
        return rows
    rows = rows[np.argsort(-total[rows])]
    near = total[rows] >= total[rows[_AMONG - 1]] - within
    return rows[: max(least, int(near.sum()))]


def covered_by(content: np.ndarray, digest: str) -> list[Covered]:
    """The documents in the lists of a selector, by their file's header. Raises Unusable."""
    header, _ = decode_header(FILE, content, _Header)
    if header.digest != digest:
        raise Unusable(f"{FILE} is of another selector")
    return header.covered


def decode(content: np.ndarray, digest: str, width: int) -> PassageLists:
    """The lists of a selector whose landmarks have this width. Raises Unusable, InvalidInput (FAISS
    is missing).
    """
    covered = covered_by(content, digest)
    header, parts = decode_file(FILE, content, _Header)
    with understood(FILE):
        passages, rest = sum(one.blocks for one in covered), iter(parts)
        # copies: the file may be changed or removed, and a copy is aligned
        digests, keys, counts, of_words, lengths, sample = (
            np.array(next(rest)).view(kind) for kind in _KINDS
        )
        lengths, sample = lengths.astype(np.int64), sample.reshape(-1, width)
        index, ids = index_of(_KIND, width, rest)
        right = (
            0 < passages == len(lengths) == len(digests)
            and lengths.all()
            and len(ids) == lengths.sum()
            and ids.max() < passages
            and len(sample) == lengths[:: header.stride].sum()
            and len(of_words) in (0, passages)
            and len(keys) == len(counts)
            and (not len(keys) or keys.astype(np.uint32).max() < len(of_words))
            and np.isfinite(of_words).all()
            and (of_words >= 0).all()
            and next(rest, None) is None
        )
        if not right:
            raise ValueError("its numbers contradict each other")
    words = (of_words, HeldPostings(keys, counts)) if len(of_words) else None
    return PassageLists(index, lengths, digests, header.stride, sample, words, covered, digest)


def build(
    read: Read,
    blocks: int,
    tokens: int,
    spec: IndexSpec,
    report: Callable[[int, int], None] = lambda done, tokens: None,
) -> PassageLists | None:
    """Build lists of documents, which are read twice; None if too few documents remain.

    blocks, tokens: of all documents; spec: of the selector; report: called with (tokens done,
    tokens). Raises InvalidInput if FAISS is missing.
    """
    lists = min(1 << int(np.log2(max(1, tokens)) / 2), max(1, tokens // TRAINED))
    step, stride = max(1, tokens // (TRAINED * lists)), max(1, blocks // SAMPLED)
    some = [run.landmarks[::step].copy() for _, run, _ in read(False)]
    if sum(map(len, some)) < lists:
        return None
    index = empty_lists(_KIND, spec.width, lists)
    index.cp.niter, index.cp.seed = _ROUNDS, 1234
    index.train(np.concatenate(some).astype(np.float32) / INT8_STEPS)
    covered, digests, lengths, sample = [], list[int](), [], [some[0][:0]]
    words: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # keys, counts, words of passages
    report(0, tokens)
    for document, run, of_document in read(True):
        first = len(digests)
        rows = np.arange(first, first + document.blocks)
        vectors = run.landmarks.astype(np.float32) / INT8_STEPS
        index.add_with_ids(vectors, np.repeat(rows, run.sizes))
        each = np.split(run.landmarks, np.cumsum(run.sizes)[:-1])
        digests += [xxh3_64_intdigest(one.data) for one in each]
        sample += [one.copy() for one in each[-first % stride :: stride]]
        covered.append(document)
        lengths.append(run.sizes)
        if of_document is not None:
            words.append(by_row(of_document, first))
        report(index.ntotal, tokens)
    if not covered:
        return None
    of_words = None
    if words:
        keys, counts, in_each = map(np.concatenate, zip(*words))
        of_words = in_each, HeldPostings.of(keys, counts)
    return PassageLists(
        index, np.concatenate(lengths), np.array(digests, np.uint64), stride,
        np.concatenate(sample), of_words, covered, spec.digest,
    )  # fmt: skip
