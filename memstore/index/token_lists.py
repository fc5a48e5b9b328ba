"""The first of two stages of a search over very many token landmarks: inverted lists of rounded
landmarks propose the passages that are worth an exact score.

A question's score of a passage is a sum over its tokens, weighted, of the greatest product with the
passage's landmarks, and few of its tokens weigh anything. Each of these searches the lists nearest
to it. A product above a bound counts; a passage without one counts as much as passages below the
bound do on average, by a sample (lists and residuals: PLAID, arXiv 2205.09707; imputed products:
XTR, arXiv 2304.01982; codes of 4 bits that are summed in registers: FAISS's FastScan).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.index.inverted_lists import empty_lists, faiss
from memstore.index.late_interaction import INT8_STEPS

CODE = 16  # bytes of a landmark's code
KIND = f"PQ{2 * CODE}x4fs"  # the codes, as FAISS calls them: two numbers of 4 bits a byte
TRAINED = 64  # landmarks a list that k-means sees
SAMPLED = 2048  # passages that bounds are estimated from
LEAST_SAMPLED = 256  # of them in a scope: fewer are too few

_ROUNDS = 8  # of k-means
_HEAVY = 0.95  # of a question's weight: the heaviest tokens that hold it are looked up
_MOST_HEAVY = 24  # of them; an exact search costs as much as more
# A passage is proposed if its estimated score is at most so many standard deviations of all scores
# below the eighth.
_AMONG, _RANGE = 8, 2.25
# The share of all passages that a token with all the weight looks for, and of all lists that it
# searches; one with a quarter of the weight half as many.
_SOUGHT, _PROBED = 0.1, 0.1


class TokenLists:
    """Lists of the token landmarks of passages 0, 1, .., in the order in which they were added.
    Safe for several threads.
    """

    def __init__(
        self, index: Any, lengths: np.ndarray, digests: np.ndarray, stride: int, sample: np.ndarray
    ) -> None:
        """index: FAISS's, whose ids are passages; lengths: int64 [passages], tokens of each;
        digests: uint64 [passages], XXH3-64 of each one's landmarks; sample: int8 [tokens, width],
        landmarks of passages 0, stride, 2 stride, ..
        """
        self.index, self.lengths, self.digests = index, lengths, digests
        self.stride, self.sample = stride, sample
        self.ends = np.cumsum(lengths)  # where each passage's tokens end, counted over all
        self._near = sample.astype(np.float32) / INT8_STEPS

    @property
    def bytes(self) -> int:
        """Main memory that they take."""
        held = self.index.ntotal * (CODE + 8) + 2 * self.lengths.nbytes + self.digests.nbytes
        return int(held + self._near.nbytes + self.sample.nbytes)

    def propose(
        self,
        q: np.ndarray,
        weights: np.ndarray,
        most: tuple[int, int],
        inside: np.ndarray | None,
        added: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, tuple[float, float]] | None:
        """The passages that are probably best, int64 [n], ascending: so many at least, where lists
        hold them, and at most; mean and standard deviation of the scores of all, by the sample.

        q: float32 [T, width], a question's tokens; weights: float32 [T], which sum to 1; inside:
        bool [passages], which may be proposed (None: all). added: passages int64 [n], each once,
        and what is added to their scores, float32 [n], in standard deviations of all scores. None
        where too few passages are in the sample, or too many tokens weigh alike.
        """
        rows, lengths = np.arange(0, len(self.lengths), self.stride), self.lengths[:: self.stride]
        in_scope = slice(None) if inside is None else inside[rows]
        heaviest = np.argsort(-weights)
        heavy = heaviest[: 1 + int((np.cumsum(weights[heaviest]) < _HEAVY).sum())]
        enough = len(rows[in_scope]) >= LEAST_SAMPLED and np.isfinite(weights).all()
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
            found, products = self._above(row, float(bound), lists)
            beyond = products - np.float32(imputed)
            np.maximum.at(best, found, beyond)
            found = found[beyond == best[found]]
            total[found] += weight * best[found]
            best[found] = 0
        scores = weights @ maxima
        if added is not None:
            total[added[0]] += added[1] * scores.std()
        if inside is not None:
            total[~inside] = 0
        rows = _best(total, most, _RANGE * float(scores.std()))
        scores /= weights.sum()
        return np.sort(rows), (float(scores.mean()), float(scores.std()))

    def _above(self, row: np.ndarray, bound: float, lists: int) -> tuple[np.ndarray, np.ndarray]:
        """Passages (repeated) of landmarks whose product with a row [width] is above a bound, in
        so many lists, the nearest, and the products.
        """
        nearest = faiss().SearchParametersIVF(nprobe=lists)
        _, products, found = self.index.range_search(row[None], bound, params=nearest)
        return found, products


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


def build(
    some: np.ndarray, tokens: int, stride: int, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> TokenLists:
    """Lists of passages. some: int8 [n, width], TRAINED landmarks a list, or as many as there are;
    tokens: how many there are in all; batches: landmarks int8 [tokens, width] of the next
    passages, and the tokens of each, int64 [n]. Raises InvalidInput where FAISS is missing.
    """
    index = empty_lists(KIND, some.shape[1], lists_of(tokens))
    index.cp.niter, index.cp.seed = _ROUNDS, 1234
    index.train(some.astype(np.float32) / INT8_STEPS)
    lengths, digests = [np.zeros(0, np.int64)], list[int]()
    sample = [some[:0]]
    for landmarks, sizes in batches:
        rows = np.arange(len(digests), len(digests) + len(sizes))
        index.add_with_ids(landmarks.astype(np.float32) / INT8_STEPS, np.repeat(rows, sizes))
        lengths.append(sizes)
        each = np.split(landmarks, np.cumsum(sizes)[:-1])
        digests += [xxh3_64_intdigest(one.data) for one in each]
        sample += [one.copy() for one, row in zip(each, rows.tolist()) if row % stride == 0]
    return TokenLists(
        index, np.concatenate(lengths), np.array(digests, np.uint64), stride, np.concatenate(sample)
    )


def lists_of(tokens: int) -> int:
    """How many lists so many landmarks are put into: up to the square root."""
    return min(1 << int(np.log2(max(1, tokens)) / 2), max(1, tokens // TRAINED))
