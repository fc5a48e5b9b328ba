"""Which cheap first stage keeps what an exact search over every token landmark would choose?

The documents and questions of real.choice_at_1m, whose --work holds the landmarks. For every
question all passages are scored exactly, by the reader's own selector; a first stage ranks them by
less, and told is the share of the exact best --best that stand among its first --kept. Stages:

- words: BM25, as the selector adds it;
- pooled m: the means of m equal parts of a passage's landmarks, scored as its tokens would be;
- centroids p: every landmark stands for the nearest of --centroids (k-means); a question's token
  looks at its p nearest ones alone, and a passage without these gets the least of them;
- centroids + b bits: the nearest centroid and what is left of each number in b bits (buckets of
  equal counts, as PLAID's, arXiv 2205.09707), over all tokens;
- a stage + words: what it scores and BM25's scores, added as the selector adds them.

Bytes a token are of what the stage keeps, vectors in int8.

    python -m benchmarks.real.first_stage --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.choice_at_1m import Chosen, planned, read_options
from benchmarks.real.passage_model import passage_model
from benchmarks.real.prompting import tokenizer_of
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.selector import Selector

_SEARCHED = 200_000  # landmarks that centroids are made of

Rank = Callable[["Asked"], np.ndarray]
"""The scores of all passages for a question."""


class Asked(NamedTuple):
    """A question. rows [T, width] and weights [T] of its own tokens; words: scores of BM25, which
    count words_weight deviations beside one of the rest; exact: of the whole selector.
    """

    rows: Tensor
    weights: Tensor
    words: np.ndarray
    words_weight: float
    exact: np.ndarray


class Stage(NamedTuple):
    """A way to rank, and what it keeps."""

    rank: Rank
    bytes_a_token: float


def main() -> None:
    options = read_options(__doc__, first_stage_options)
    torch.set_num_threads(options.threads)
    plan = planned(options, options.work)
    blocks = Blocks(passages(tokenizer_of(options.model)), plan.documents)
    reader = passage_model(options.model, options.dtype)
    chosen = Chosen(reader, blocks, options.work, f"{options.dtype}-{options.seed}")
    found: dict[str, dict[str, list[float]]] = {}
    stages: dict[str, Stage] = {}
    scope: tuple[str, ...] = ()
    asked = 0
    for task in options.tasks:
        for question in [q for q in plan.questions if q.task == task][: options.asked]:
            if question.documents != scope:
                scope = question.documents
                landmarks, lengths = joined(chosen, scope)
                stages = made(landmarks, lengths, options)
            one = asking(chosen, question)
            best = np.argsort(-one.exact)[: options.best]
            asked += 1
            for name, stage in stages.items():
                seconds, scores = timed(lambda: stage.rank(one))  # noqa: B023 (runs now)
                place = np.empty(len(scores), np.int64)
                place[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
                for kept in options.kept:
                    row = found.setdefault(name, {})
                    share = float((place[best] < kept).mean())
                    row.setdefault(f"of the first {kept}", []).append(share)
                row.setdefault("ms", []).append(1000 * seconds)
    print(f"{asked} questions, {len(lengths):,} passages, {int(lengths.sum()):,} tokens\n")
    print(report(found, stages))
    sizes = {name: stage.bytes_a_token for name, stage in stages.items()}
    write(options, {"found": found, "bytes": sizes, "passages": len(lengths)})


def first_stage_options(options: argparse.ArgumentParser) -> None:
    """What is asked beside choice_at_1m's."""
    add(options, "--best", 8, "of the exact search")
    add(options, "--kept", [100, 250, 500, 1000, 2000], "by the first stage")
    add(options, "--centroids", [1024, 4096], "of all landmarks")
    add(options, "--bits", [1, 2], "of what is left of a landmark")


def joined(chosen: Chosen, names: Sequence[str]) -> tuple[Tensor, np.ndarray]:
    """Unit vectors [tokens, width] of documents, and how many tokens their passages have."""
    parts = [part for name in names if (part := chosen.landmarks(name)) is not None]
    landmarks = torch.cat([part[0][:, 0] for part in parts]).float()
    return normalize(landmarks, dim=-1), np.concatenate([part[1] for part in parts])


def asking(chosen: Chosen, question: Any) -> Asked:
    """What a question shows of itself, and every exact score."""
    exact = chosen.scores(question)
    reader, found = chosen.reader, chosen.found
    ids, words = reader.turn_ids(question.text, first=True)
    captured = capture(reader, ids).part(words)
    selector = reader.selector
    assert selector.learned is not None
    scope = [
        (chosen.numbers[name], 0, len(chosen.blocks.spans(name))) for name in question.documents
    ]
    rows, weights = selector.learned.rows(captured)
    by_words = Selector().scores(captured, question.text, found, scope).numpy()
    return Asked(rows, weights, by_words, selector.word_weight, exact)


def made(landmarks: Tensor, lengths: np.ndarray, options: argparse.Namespace) -> dict[str, Stage]:
    """Every stage over these passages."""
    tokens = int(lengths.sum())
    stages = {"words": Stage(lambda asked: asked.words, 0.0)}
    for parts in (1, 2, 4, 8):
        means = pooled(landmarks, lengths, parts)
        size = means.shape[0] * means.shape[1] / tokens
        stages[f"pooled {parts}"] = Stage(partial(by_means, means=means, parts=parts), size)
    for count in options.centroids:
        codes, centroids = clustered(landmarks, count, options.seed)
        for probed in (4, 16):
            stages[f"{count} centroids, {probed}"] = Stage(
                partial(
                    by_centroids, codes=codes, centroids=centroids, lengths=lengths, probed=probed
                ),
                2.0,
            )
        for bits in options.bits:
            near = with_residuals(landmarks, codes, centroids, bits)
            rank = partial(by_tokens, vectors=near, lengths=lengths)
            size = 2 + landmarks.shape[1] * bits / 8
            stages[f"{count} centroids + {bits} bits"] = Stage(rank, size)
    for name in [name for name in stages if name != "words"]:
        rank = partial(with_words, stage=stages[name].rank)
        stages[f"{name} + words"] = Stage(rank, stages[name].bytes_a_token)
    return stages


def pooled(landmarks: Tensor, lengths: np.ndarray, parts: int) -> Tensor:
    """Unit vectors [passages * parts, width]: the means of equal parts of each passage."""
    ends = np.cumsum(lengths)
    edges = (ends - lengths)[:, None] + lengths[:, None] * np.arange(parts + 1) // parts
    sums = torch.cat((torch.zeros(1, landmarks.shape[1]), landmarks)).double().cumsum(0)
    first, last = edges[:, :-1].ravel(), edges[:, 1:].ravel()
    last = np.maximum(last, first + 1).clip(max=len(landmarks))
    return normalize((sums[last] - sums[first]).float(), dim=-1)


def by_means(asked: Asked, means: Tensor, parts: int) -> np.ndarray:
    near = (asked.rows @ means.T).view(len(asked.rows), -1, parts).amax(-1)
    return (asked.weights @ near).numpy()


def clustered(landmarks: Tensor, count: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """The nearest of so many centroids [count, width] of every landmark."""
    vectors = landmarks.numpy()
    some = np.random.default_rng(seed).permutation(len(vectors))[:_SEARCHED]
    kmeans = faiss.Kmeans(vectors.shape[1], count, niter=8, spherical=True, seed=seed)
    kmeans.train(vectors[some])
    _, nearest = kmeans.index.search(vectors, 1)
    return nearest[:, 0], torch.from_numpy(kmeans.centroids)


def by_centroids(
    asked: Asked, codes: np.ndarray, centroids: Tensor, lengths: np.ndarray, probed: int
) -> np.ndarray:
    near = asked.rows @ centroids.T
    least = near.topk(probed, -1).values[:, -1:]
    seen = torch.maximum(near, least)[:, torch.from_numpy(codes)].numpy()
    starts = np.cumsum(lengths) - lengths
    return asked.weights.numpy() @ np.maximum.reduceat(seen, starts, axis=1)


def with_residuals(landmarks: Tensor, codes: np.ndarray, centroids: Tensor, bits: int) -> Tensor:
    """Landmarks [tokens, width] as centroids and residuals of so many bits say them."""
    base = centroids[torch.from_numpy(codes)]
    left = landmarks - base
    some = left[:: max(1, len(left) // 5_000)]
    edges = torch.quantile(some.flatten(), torch.linspace(0, 1, (1 << bits) + 1)[1:-1])
    middles = torch.quantile(some.flatten(), (torch.arange(1 << bits) + 0.5) / (1 << bits))
    return normalize(base + middles[torch.bucketize(left, edges)], dim=-1)


def by_tokens(asked: Asked, vectors: Tensor, lengths: np.ndarray) -> np.ndarray:
    near = (asked.rows @ vectors.T).numpy()
    starts = np.cumsum(lengths) - lengths
    return asked.weights.numpy() @ np.maximum.reduceat(near, starts, axis=1)


def with_words(asked: Asked, stage: Rank) -> np.ndarray:
    scores = stage(asked)
    words = asked.words - asked.words.mean()
    return scores + asked.words_weight * scores.std() * words / max(float(words.std()), 1e-9)


def report(found: dict[str, dict[str, list[float]]], stages: dict[str, Stage]) -> str:
    """A stage a line."""
    columns = [name for name in next(iter(found.values())) if name != "ms"]
    lines = []
    for name, row in found.items():
        shares = [f"{np.mean(row[column]):.3f}" for column in columns]
        ms = f"{np.median(row['ms']):.1f}"
        lines.append([name, f"{stages[name].bytes_a_token:.1f}", *shares, ms])
    return table(["stage", "bytes a token", *columns, "ms"], lines)


if __name__ == "__main__":
    main()
