"""The first of two stages of a search over very many token landmarks: inverted lists of rounded
landmarks say which passages are worth an exact score.

A question's score of a passage is a sum over its tokens, weighted, of the greatest product with the
passage's landmarks, and few of its tokens weigh anything. Each of these looks at the lists nearest
to it. What it finds above a bound counts; a passage of which it finds nothing counts as much as
passages below the bound do in the mean, by a sample (lists and residuals: PLAID, arXiv
2205.09707; what is not found is imputed: XTR, arXiv 2304.01982; codes of 4 bits that are summed in
registers: FAISS's FastScan).

FAISS's inverted lists of codes of 4 bits (IndexIVFPQFastScan) are made from plain arrays, and each
list's content is bytes: so a list is there once it is asked for, and FAISS reads no file. A list's
bytes are the ids of its landmarks (uint32 each, up to a multiple of 8 bytes), then their codes as
FAISS has them: blocks of 32 landmarks.
"""

import threading
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.errors import CorruptMemory
from memstore.index.faiss.faiss_head import faiss
from memstore.index.index_file import StoredParts
from memstore.index.late_interaction import INT8_STEPS

CODE = 16  # bytes of a landmark's code
LEVELS = 16  # values of a number of a code: 4 bits

_BLOCK = 32  # landmarks whose codes lie together


class Trained(NamedTuple):
    """What codes mean."""

    centroids: np.ndarray  # float32 [lists, width]
    codebook: np.ndarray  # float32 [2 CODE, LEVELS, width / (2 CODE)]


def empty_index(trained: Trained) -> Any:
    """FAISS's index of these centroids, without landmarks. Raises InvalidInput where FAISS is
    missing.
    """
    index = untrained_index(trained.centroids)
    faiss().copy_array_to_vector(trained.codebook.ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def untrained_index(centroids: np.ndarray) -> Any:
    """The same, whose codebook is to be trained."""
    library, (count, width) = faiss(), centroids.shape
    quantizer = library.IndexFlatIP(width)
    quantizer.add(centroids)
    index = library.IndexIVFPQFastScan(
        quantizer, width, count, 2 * CODE, 4, library.METRIC_INNER_PRODUCT
    )
    index.by_residual = True
    index.own_fields = True  # the index frees the quantizer, not Python
    quantizer.this.disown()
    return index


def trained_of(index: Any) -> Trained:
    """What the codes of an index mean."""
    codebook = faiss().vector_to_array(index.pq.centroids)
    return Trained(
        index.quantizer.reconstruct_n(0, index.nlist), codebook.reshape(2 * CODE, LEVELS, -1)
    )


def sizes_of(index: Any) -> np.ndarray:
    """How many landmarks each list has, int64 [lists]."""
    lists = index.invlists
    return np.array([lists.list_size(number) for number in range(index.nlist)], np.int64)


def list_bytes(sizes: np.ndarray) -> np.ndarray:
    """Bytes of lists of so many landmarks."""
    return _id_bytes(sizes) + _code_bytes(sizes)


def list_content(index: Any, number: int) -> np.ndarray:
    """The bytes of a list, uint8."""
    library, lists = faiss(), _blocks(index)
    size = lists.list_size(number)
    content = np.zeros(list_bytes(size), np.uint8)
    if size:
        content[: 4 * size].view("<u4")[:] = library.rev_swig_ptr(lists.get_ids(number), size)
        codes = library.rev_swig_ptr(lists.get_codes(number), _code_bytes(size))
        content[_id_bytes(size) :] = codes
    return content


def put_list(index: Any, number: int, size: int, content: np.ndarray) -> None:
    """Have an index hold a list, which is empty in it, of these bytes."""
    if size:
        library, lists = faiss(), _blocks(index)
        lists.resize(number, size)
        library.rev_swig_ptr(lists.get_ids(number), size)[:] = content[: 4 * size].view("<u4")
        codes = library.rev_swig_ptr(lists.get_codes(number), _code_bytes(size))
        codes[:] = content[_id_bytes(size) :]


def _blocks(index: Any) -> Any:
    return faiss().downcast_InvertedLists(index.invlists)


def _id_bytes(sizes: Any) -> Any:
    return (4 * sizes + 7) // 8 * 8


def _code_bytes(sizes: Any) -> Any:
    return (sizes + _BLOCK - 1) // _BLOCK * (_BLOCK * CODE)


SAMPLED = 2048  # passages that bounds are estimated from
LEAST_SAMPLED = 256  # of them in a scope: fewer are too few

_TRAINED = 64  # landmarks a list that k-means sees
_ROUNDS = 8  # of k-means
_HEAVY = 0.95  # of a question's weight: the heaviest tokens that hold it are looked up
_MOST_HEAVY = 24  # of them; more are as dear as an exact search
# A passage is proposed that is not so many standard deviations of all scores below the eighth, as
# far as lists tell.
_AMONG, _RANGE = 8, 2.25
# The share of all passages that a token with all the weight looks for, and of all lists that it
# looks at; one with a quarter of it half as many.
_SOUGHT, _PROBED = 0.1, 0.1


class Sample(NamedTuple):
    """Some passages, evenly spread."""

    rows: np.ndarray  # int64 [m], ascending
    landmarks: np.ndarray  # int8 [tokens, width]
    lengths: np.ndarray  # int64 [m]: tokens of each


class ProposedRows(NamedTuple):
    """What is worth an exact score."""

    rows: np.ndarray  # int64 [n], ascending
    spread: tuple[float, float]  # mean and standard deviation of the scores of all, by the sample


class Added(NamedTuple):
    """What something else than landmarks adds to the scores of some passages."""

    rows: np.ndarray  # int64 [n], each once
    scores: np.ndarray  # float32 [n], in standard deviations of all scores by landmarks


class ListedTokens(NamedTuple):
    """Sizes and checksums of the token landmarks of passages 0, 1, .."""

    lengths: np.ndarray  # int64 [passages]: how many each has
    digests: np.ndarray  # uint64 [passages]: XXH3-64 of each passage's, int8 [tokens, width]


class TokenLists:
    """Lists of the token landmarks of passages 0, 1, .., in the order in which they were added.
    Safe for several threads.
    """

    def __init__(
        self,
        index: Any,
        sizes: np.ndarray,
        tokens: ListedTokens,
        sample: Sample,
        stored: StoredParts | None = None,
    ) -> None:
        """index: FAISS's, whose ids are passages; sizes: int64 [lists], landmarks of each; stored:
        where lists that the index does not hold yet are read (memstore.index.token_lists).
        """
        self.index, self.sizes, self.sample = index, sizes, sample
        self.lengths, self.digests = tokens
        self.ends = np.cumsum(self.lengths)  # where each passage's tokens end, counted over all
        self._near = sample.landmarks.astype(np.float32) / INT8_STEPS
        self._stored, self._lock = stored, threading.Lock()
        self._held = np.full(len(sizes), stored is None)

    @property
    def passages(self) -> int:
        """How many were added."""
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """Main memory that they take, those of the lists that were asked for."""
        held = int(self.sizes[self._held].sum()) * (CODE + 8)
        return held + self._near.nbytes + 2 * self.lengths.nbytes + self.digests.nbytes

    def propose(
        self,
        q: np.ndarray,
        weights: np.ndarray,
        most: tuple[int, int],
        inside: np.ndarray | None,
        added: Added | None = None,
    ) -> ProposedRows | None:
        """The passages that are probably best, so many at least, where lists tell them, and at
        most.

        q: float32 [T, width], a question's tokens; weights: float32 [T], which sum to 1; inside:
        bool [passages], which may be proposed (None: all). None where too few of these are in the
        sample to tell anything, or too many tokens weigh alike. Raises CorruptMemory,
        StoreUnavailable.
        """
        starts = np.cumsum(self.sample.lengths) - self.sample.lengths
        in_scope = slice(None) if inside is None else inside[self.sample.rows]
        heaviest = np.argsort(-weights)
        heavy = heaviest[: 1 + int((np.cumsum(weights[heaviest]) < _HEAVY).sum())]
        enough = len(self.sample.rows[in_scope]) >= LEAST_SAMPLED and np.isfinite(weights).all()
        if not enough or len(heavy) > _MOST_HEAVY:
            return None
        q, weights = q[heavy], weights[heavy]
        probed = np.maximum(1, (_PROBED * weights**0.5 * len(self.sizes)).round().astype(int))
        self._hold(q, probed)
        maxima = np.maximum.reduceat(q @ self._near.T, starts, axis=1)[:, in_scope]
        # beyond what is imputed: of one row, and of all by weight
        best, total = np.zeros((2, self.passages), np.float32)
        for row, of_sample, weight, lists in zip(q, maxima, weights, probed.tolist()):
            bound = np.quantile(of_sample, 1 - _SOUGHT * weight**0.5)
            imputed = float(of_sample[of_sample <= bound].mean())
            found, products = self._above(row, float(bound), lists)
            beyond = products - np.float32(imputed)
            np.maximum.at(best, found, beyond)
            found = found[beyond == best[found]]
            total[found] += weight * best[found]
            best[found] = 0
        scores = weights @ maxima
        if added is not None:
            total[added.rows] += added.scores * scores.std()
        if inside is not None:
            total[~inside] = 0
        rows = _best(total, most, _RANGE * float(scores.std()))
        scores /= weights.sum()
        return ProposedRows(np.sort(rows), (float(scores.mean()), float(scores.std())))

    def _hold(self, q: np.ndarray, probed: np.ndarray) -> None:
        """Have the lists nearest to rows [n, width], so many of each, read together where they are
        not here.
        """
        if self._stored is None:
            return
        # one by one, as FAISS does it: together, products may be rounded otherwise
        near = [self.index.quantizer.search(row[None], n)[1] for row, n in zip(q, probed.tolist())]
        wanted = np.unique(np.concatenate(near, axis=1))
        missing = wanted[(wanted >= 0) & ~self._held[wanted]].tolist()
        contents = self._stored.read(missing)
        with self._lock:
            for number, content in zip(missing, contents):
                size = int(self.sizes[number])
                if size and content[: 4 * size].view("<u4").max() >= self.passages:
                    raise CorruptMemory("lists name passages that there are not")
                if not self._held[number]:  # else another thread read it
                    put_list(self.index, number, size, content)
                    self._held[number] = True

    def _above(self, row: np.ndarray, bound: float, lists: int) -> tuple[np.ndarray, np.ndarray]:
        """Passages (repeated) of landmarks whose product with a row [width] is above a bound, in
        so many lists, the nearest, and the products.
        """
        nearest = faiss().SearchParametersIVF(nprobe=lists)
        _, products, found = self.index.range_search(row[None], bound, params=nearest)
        return found, products


class Building:
    """Lists that are being made: trained with some landmarks, then given all, passage by
    passage.
    """

    def __init__(self, some: np.ndarray, tokens: int, passages: int) -> None:
        """some: int8 [n, width], landmarks at random, `wanted` of them if there are; tokens,
        passages: how many there are in all. Raises InvalidInput where FAISS is missing.
        """
        vectors = some.astype(np.float32) / INT8_STEPS
        means = faiss().Kmeans(
            some.shape[1], lists_of(tokens), niter=_ROUNDS, spherical=True, seed=1234
        )
        means.train(vectors)
        self.index = untrained_index(means.centroids)
        self.index.train(vectors)
        self._stride = max(1, passages // SAMPLED)
        self._lengths: list[np.ndarray] = []
        self._digests: list[int] = []
        self._sampled: list[np.ndarray] = []
        self._passages = 0

    @staticmethod
    def wanted(tokens: int) -> int:
        """How many landmarks of so many to train with."""
        return min(tokens, lists_of(tokens) * _TRAINED)

    @staticmethod
    def least(tokens: int) -> int:
        """With how many it can be done."""
        return max(LEVELS, lists_of(tokens))

    def add(self, landmarks: np.ndarray, lengths: np.ndarray) -> None:
        """The next passages: landmarks int8 [tokens, width], lengths int64 [n] their tokens."""
        rows = np.arange(self._passages, self._passages + len(lengths))
        vectors = landmarks.astype(np.float32) / INT8_STEPS
        self.index.add_with_ids(vectors, np.repeat(rows, lengths))
        ends = np.cumsum(lengths)
        self._digests += [
            xxh3_64_intdigest(landmarks[end - n : end].data)
            for end, n in zip(ends.tolist(), lengths.tolist())
        ]
        for at in np.flatnonzero(rows % self._stride == 0):
            self._sampled.append(landmarks[ends[at] - lengths[at] : ends[at]].copy())
        self._lengths.append(lengths)
        self._passages += len(lengths)

    def end(self) -> TokenLists:
        """What was made."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        rows = np.arange(0, self._passages, self._stride)
        sample = Sample(rows, np.concatenate(self._sampled), lengths[rows])
        tokens = ListedTokens(lengths, np.array(self._digests, np.uint64))
        return TokenLists(self.index, sizes_of(self.index), tokens, sample)


def _best(total: np.ndarray, most: tuple[int, int], within: float) -> np.ndarray:
    """Rows of the greatest of totals [rows], so many at least and at most: those not further than
    `within` below the eighth, without rows of total 0.
    """
    rows = np.flatnonzero(total > 0)
    totals = total[rows]
    least, greatest = (min(each, len(rows)) for each in most)
    if greatest < len(rows):
        kept = np.argpartition(totals, len(rows) - greatest)[-greatest:]
        rows, totals = rows[kept], totals[kept]
    if least <= _AMONG:
        return rows
    order = np.argsort(-totals)
    near = int(np.searchsorted(-totals[order], within - totals[order[_AMONG - 1]], "right"))
    return rows[order[: max(least, near)]]


def lists_of(tokens: int) -> int:
    """How many lists so many landmarks are put into: up to the square root."""
    return min(1 << int(np.log2(max(1, tokens)) / 2), max(1, tokens // _TRAINED))
