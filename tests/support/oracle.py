"""docs/appendix/method.md written out as loops in float64, a query row at a time: slow, literal,
independent of the package.

Keys are rotated to absolute positions here (the package rotates queries instead), softmaxes are
sums of exponentials, and every group is formed by hand.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np


def rotate(x: np.ndarray, position: int, interleaved: bool, base: float = 10_000.0) -> np.ndarray:
    """x [D] rotated to one position; frequencies are rounded to float32."""
    assert x.dtype == np.float64
    return _rotated(x.tobytes(), position, interleaved, base)


@lru_cache(1 << 14)
def _rotated(numbers: bytes, position: int, interleaved: bool, base: float) -> np.ndarray:
    x = np.frombuffer(numbers)
    d = len(x)
    out = np.empty(d)
    for i in range(d // 2):
        angle = position * float(np.float32(base ** (-2 * i / d)))
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    out.flags.writeable = False  # others are given the same
    return out


@dataclass
class Block:
    """Position-free keys [l + 1, D] (the landmark last) and values [l, D] of one KV head; n tokens
    are valid.
    """

    k: np.ndarray
    v: np.ndarray
    n: int


@dataclass
class Head:
    """Memory and open chunk of one KV head in one layer."""

    block_size: int
    top_k: int
    fixed: bool
    interleaved: bool
    distance: int = 0
    k_cmt: np.ndarray | None = None  # position-free; its position is -1
    cutoff: float = 0.0
    value: np.ndarray | None = None  # of the context miss token
    recency: float = 0.0
    supersede: float = 0.0
    documents: list[Block] = field(default_factory=list)
    own: list[Block] = field(default_factory=list)
    open_k: list[np.ndarray] = field(default_factory=list)
    open_v: list[np.ndarray] = field(default_factory=list)

    @property
    def b(self) -> int:
        return self.block_size + 1

    @property
    def memory(self) -> list[Block]:
        return self.documents + self.own

    @property
    def recent(self) -> int:
        return min(len(self.own), self.top_k)

    @property
    def prefix(self) -> int:
        return self.recent if self.fixed else min(len(self.memory), self.top_k + 1)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        self.open_k += list(k)
        self.open_v += list(v)

    def end_chunk(self) -> None:
        while len(self.open_k) >= self.b:
            k, v = np.array(self.open_k[: self.b]), np.array(self.open_v[: self.block_size])
            self.own.append(Block(k, v, self.block_size))
            del self.open_k[: self.b], self.open_v[: self.b]

    def score(self, q: np.ndarray, at: int, key: np.ndarray, key_at: int) -> float:
        scale = 1 / math.sqrt(len(q))
        return scale * float(
            rotate(q, at, self.interleaved) @ rotate(key, key_at, self.interleaved)
        )

    def landmark_score(self, q: np.ndarray, at: int, block: Block, slot: int | None) -> float:
        """slot None: an old block at the fixed distance."""
        faded = self.faded(block)
        if slot is None:
            return self.score(q, self.distance, block.k[-1], self.block_size) - faded
        return self.score(q, at, block.k[-1], slot * self.b + self.block_size) - faded

    def faded(self, block: Block) -> float:
        """What an own block has lost by its age; a document has none."""
        ages = [len(self.own) - i for i, own in enumerate(self.own) if own is block]
        return self.recency * math.log(max(1, ages[0] / self.top_k)) if ages else 0.0

    def superseded(self, chosen: list[int], scores: list[float]) -> list[float]:
        """Scores of the chosen blocks, each with its gain over the blocks of earlier documents."""
        total = sum(math.exp(s) for s in scores)
        share = [math.exp(s) / total for s in scores]
        gained = list(scores)
        for i, late in enumerate(chosen):
            for j, early in enumerate(chosen):
                if early < late < len(self.documents):
                    gained[i] += self.supersede * (2 * min(share[i], share[j])) ** 2
        return gained

    def candidate_scores(self, q: np.ndarray, index: int) -> list[float]:
        """What the search sees of every block: old ones in slot 0 or at the distance, recent ones
        at their own slot.
        """
        at = self.prefix * self.b + index
        old = len(self.memory) - self.recent
        return [
            self.landmark_score(
                q,
                at,
                block,
                (None if self.fixed else 0) if c < old else self.prefix - self.recent + (c - old),
            )
            for c, block in enumerate(self.memory)
        ]

    def gate(self, q: np.ndarray, index: int) -> tuple[dict[tuple[str, int], float], float, float]:
        """Weights of the open chunk's tokens, the CMT's share, and the logarithm of the
        denominator.
        """
        at, b = self.prefix * self.b + index, self.b
        mine = index // b
        logits: dict[tuple[str, int], float] = {}
        for j in range(index + 1):
            if j // b == mine and j % b < self.block_size:
                logits["token", j] = self.score(q, at, self.open_k[j], self.prefix * b + j)
        inner: dict[int, dict[int, float]] = {}
        for block in range(mine):
            content = {
                j: self.score(q, at, self.open_k[j], self.prefix * b + j)
                for j in range(block * b, block * b + self.block_size)
            }
            total = sum(math.exp(s) for s in content.values())
            inner[block] = {j: math.exp(s) / total for j, s in content.items()}
            landmark = block * b + self.block_size
            logits["block", block] = self.score(
                q, at, self.open_k[landmark], self.prefix * b + landmark
            )
        if self.k_cmt is not None:
            logits["cmt", 0] = self.score(q, at, self.k_cmt, -1)
        total = sum(math.exp(s) for s in logits.values())
        weights: dict[tuple[str, int], float] = {}
        for (kind, which), s in logits.items():
            share = math.exp(s) / total
            if kind == "token":
                weights["token", which] = share
            elif kind == "block":
                for j, p in inner[which].items():
                    weights["token", j] = share * p
        gate = math.exp(logits["cmt", 0]) / total if self.k_cmt is not None else 0.0
        return weights, gate, math.log(total)

    def attend(self, q: np.ndarray, index: int, chosen: list[int], candidates: int) -> np.ndarray:
        """Output [D] of the open chunk's row `index`, reading `chosen` (ascending) of so many
        candidates.
        """
        weights, gate, log_total = self.gate(q, index)
        at, old = self.prefix * self.b + index, len(self.memory) - self.recent
        out = sum((w * self.open_v[j] for (_, j), w in weights.items()), np.zeros_like(q))
        if self.k_cmt is not None and gate < self.cutoff and candidates:
            if self.value is not None:
                return out + gate * self.value
            return out / (1 - min(gate, 0.1))
        if not chosen:
            return out
        later = len([c for c in chosen if c >= old])
        landmarks, reads = [], []
        for rank, c in enumerate(chosen):
            block = self.memory[c]
            if c >= old:
                slot: int | None = self.prefix - later
                later -= 1
            else:
                slot = None if self.fixed else rank
            landmarks.append(self.landmark_score(q, at, block, slot))
            scores = [
                self.score(
                    q,
                    self.distance if slot is None else at,
                    block.k[j],
                    j + (0 if slot is None else slot * self.b),
                )
                for j in range(block.n)
            ]
            total = sum(math.exp(s) for s in scores)
            reads.append(
                sum(
                    (math.exp(s) / total * block.v[j] for j, s in enumerate(scores)),
                    np.zeros_like(q),
                )
            )
        mass = [math.exp(s) for s in self.superseded(chosen, landmarks)]
        if self.k_cmt is not None:
            memory = sum((m / sum(mass) * r for m, r in zip(mass, reads)), np.zeros_like(q))
            return out + gate * memory
        total = math.exp(log_total) + sum(mass)
        return out * (math.exp(log_total) / total) + sum(
            (m / total * r for m, r in zip(mass, reads)), np.zeros_like(q)
        )


def choose(
    scores: np.ndarray, granularity: str, top_k: int, open_rows: np.ndarray, group: int
) -> list[list[list[int]]]:
    """Blocks of every [head][row] from candidate scores [H, T, N], by section 5."""
    weights = scores
    if granularity != "per_token_per_head":
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = np.log(weights / weights.sum(-1, keepdims=True))
    return choose_by(weights, granularity, top_k, open_rows, group)


def choose_by(
    weights: np.ndarray, granularity: str, top_k: int, open_rows: np.ndarray, group: int
) -> list[list[list[int]]]:
    """The same from the values [H, T, N] that maxima are taken over; -inf = no candidate. Of equals
    the newer wins.
    """
    heads, rows, n = weights.shape
    weights = np.where(open_rows[..., None], weights, -math.inf)

    def best(values: np.ndarray) -> list[int]:
        order = sorted(
            (c for c in range(n) if values[c] > -math.inf), key=lambda c: (-values[c], -c)
        )[:top_k]
        return sorted(order)

    if granularity == "per_token_per_head":
        return [[best(weights[h, t]) for t in range(rows)] for h in range(heads)]
    if granularity == "per_token":
        shared = weights.max(0)
        return [[best(shared[t]) for t in range(rows)] for _ in range(heads)]
    if granularity == "per_head":
        per = weights.max(1)
        return [
            [best(per[h // group * group : h // group * group + group].max(0))] * rows
            for h in range(heads)
        ]
    return [[best(weights.max((0, 1)))] * rows for _ in range(heads)]
