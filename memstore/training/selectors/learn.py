"""Train the learned selector: a projection of a frozen model's states, which are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.model.passages.selector import Learned, Projection
from memstore.training.selectors.states import Asked, States, best_wrong

_TOGETHER = 16  # questions whose scores of all passages are computed at once


@dataclass(frozen=True)
class LearnConfig:
    """Hyperparameters of the projection's training."""

    width: int = 64
    steps: int = 1500
    batch: int = 48  # questions
    like: int = 3  # passages easily taken for the right one, for every question of a batch
    others: int = 48  # passages of a batch besides those
    rate: float = 2e-3
    decay: float = 1e-3
    dropped: float = 0.1  # of a question's tokens
    blanked: float = 0.2  # of the dimensions of every state, so that no pair is learned by heart
    seed: int = 0


def untrained(states: States, vocabulary: int, config: LearnConfig) -> Projection:
    """A random projection with the statistics of these states. vocabulary: number of token ids."""
    documents, rows = states.passages[::7].float(), states.rows.float()
    hidden, draw = documents.shape[1], torch.Generator().manual_seed(config.seed)
    start = torch.linalg.qr(torch.randn(hidden, hidden, generator=draw))[0][:, : config.width]
    a, b, c, d = (x for one in (documents, rows) for x in (one.mean(0), one.std(0) + 1e-3))
    idf = _rarity(states, vocabulary).half()
    return Projection(start.contiguous(), a, b, c, d, torch.zeros(hidden), idf)


class Trained(nn.Module):
    """Learned weights, and fixed statistics of the states, float32."""

    document_mean: Tensor
    document_deviation: Tensor
    question_mean: Tensor
    question_deviation: Tensor
    idf: Tensor

    def __init__(self, begin: Projection, blanked: float) -> None:
        super().__init__()
        self.blanked = blanked
        for name in vars(begin).keys() - {"projection", "attend"}:
            self.register_buffer(name, getattr(begin, name))
        self.projection = nn.Parameter(begin.projection.clone())
        self.attend = nn.Parameter(begin.attend.clone())
        self.scale = nn.Parameter(torch.tensor(3.0))  # ln of what scores are multiplied with

    def landmarks(self, states: Tensor) -> Tensor:
        """States [..., hidden] of documents -> unit vectors [..., width]."""
        x = (states - self.document_mean) / self.document_deviation
        x = F.dropout(x, self.blanked, self.training)
        return F.normalize(x @ self.projection, dim=-1)

    def scores(
        self,
        rows: Tensor,
        ids: Tensor,
        lengths: Sequence[int],
        keys: Tensor,
        passages: Sequence[int],
    ) -> Tensor:
        """Scores [questions, passages]. rows: [R, hidden], states of all questions' tokens;
        lengths: tokens of each question; keys: [tokens, width]; passages: tokens of each passage.
        """
        x = (rows - self.question_mean) / self.question_deviation
        x = F.dropout(x, self.blanked, self.training)
        logits = x @ self.attend + self.idf[ids].float().clamp_min(0.05).log()
        weights = torch.cat([part.softmax(0) for part in logits.split(list(lengths))])
        q = F.normalize(x @ self.projection, dim=-1)
        products = keys @ q.T  # (tokens, R)
        of_passages, of_questions = (
            torch.tensor(some, device=q.device) for some in (passages, lengths)
        )
        best = torch.segment_reduce(products, "max", lengths=of_passages).T
        owner = torch.arange(len(lengths), device=q.device).repeat_interleave(of_questions)
        scores = best.new_zeros(len(lengths), len(passages))
        return scores.index_add(0, owner, best * weights[:, None])

    def selector(self, layer: int) -> Learned:
        """The learned part of a Selector, from the current weights."""
        names = Projection.__dataclass_fields__
        tensors = {name: getattr(self, name).detach().cpu().clone() for name in names}
        return Learned(layer, Projection(**tensors))

    @torch.no_grad()
    def wrong(self, states: States, most: int) -> dict[int, list[int]]:
        """For each question, by Asked.first: the `most` best-scored passages of the same collection
        that do not answer it.
        """
        self.eval()
        device, found = self.projection.device, dict[int, list[int]]()
        for passages, asked in states.collections():
            parts = [states.passage(at) for at in passages]
            keys = torch.cat([self.landmarks(one.to(device).float()) for one in parts])
            sizes = [len(one) for one in parts]
            for at in range(0, len(asked), _TOGETHER):
                some = asked[at : at + _TOGETHER]
                rows = torch.cat([states.rows[one.first : one.end] for one in some])
                ids = torch.cat([states.row_ids[one.first : one.end] for one in some])
                lengths = [one.end - one.first for one in some]
                scores = self.scores(
                    rows.to(device).float(), ids.to(device), lengths, keys, sizes
                ).cpu()
                for one, of_one in zip(some, scores):
                    found[one.first] = best_wrong(of_one, one, passages.start, most)
        return found


def _rarity(states: States, vocabulary: int) -> Tensor:
    """idf of every token id, ln((passages + 1) / (passages that hold it + 1/2))."""
    held, count = torch.zeros(vocabulary), len(states.ends)
    for ids in states.ids.tensor_split(states.ends[:-1]):
        held[ids.unique()] += 1
    return ((count + 1) / (held + 0.5)).log()


def learn(
    states: States,
    begin: Projection,
    config: LearnConfig,
    hard: Mapping[int, Sequence[int]],
    device: torch.device,
    report: Callable[[str], None] = lambda line: None,
) -> Trained:
    """Train a projection on states; equal seeds give equal bits on a CPU.

    hard: by Asked.first, hard negatives. report: called with a line of progress every 50 steps.
    """
    torch.manual_seed(config.seed)
    model = Trained(begin, config.blanked).to(device)
    with torch.enable_grad():
        _Run(states, model, config, hard, Random(config.seed)).go(report)
    return model


@dataclass
class _Run:
    states: States
    model: Trained
    config: LearnConfig
    hard: Mapping[int, Sequence[int]]
    rng: Random

    def go(self, report: Callable[[str], None]) -> None:
        config = self.config
        optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=config.rate, weight_decay=config.decay
        )
        lost = first = 0.0
        for step in range(config.steps):
            for group in optimiser.param_groups:
                cosine = 0.5 + 0.5 * math.cos(math.pi * step / config.steps)
                group["lr"] = config.rate * min(1.0, (step + 1) / 20) * cosine + 1e-5
            loss, right = self._step()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            lost, first = lost + float(loss.detach()), first + right
            if (step + 1) % 50 == 0:
                report(
                    f"step {step + 1}: loss {lost / 50:.3f}, right passage first {first / 50:.0%}"
                )
                lost = first = 0.0

    def _step(self) -> tuple[Tensor, float]:
        asked = self.rng.choices(self.states.asked, k=self.config.batch)
        passages = self._competing(asked)
        place = {passage: at for at, passage in enumerate(passages)}
        parts = [self.states.passage(passage) for passage in passages]
        device = self.model.projection.device
        keys = self.model.landmarks(torch.cat(parts).to(device).float())
        scores = self.model.scores(*self._rows(asked), keys, [len(part) for part in parts])
        hidden = torch.zeros(scores.shape, dtype=torch.bool)  # others that answer count neither way
        for row, one in enumerate(asked):
            same = one.touched - {one.right}
            hidden[row, [place[passage] for passage in same if passage in place]] = True
        logits = (scores * self.model.scale.exp()).masked_fill(hidden.to(device), -1e4)
        targets = torch.tensor([place[one.right] for one in asked], device=device)
        right = (logits.argmax(1) == targets).float().mean()
        return F.cross_entropy(logits, targets), float(right)

    def _competing(self, asked: Sequence[Asked]) -> list[int]:
        """The passages of a batch: right ones, hard negatives, and random ones."""
        rng, every = self.rng, range(len(self.states.ends))
        wanted = {one.right for one in asked}
        for one in asked:
            hard: Sequence[int] = self.hard[one.first] or every
            wanted |= set(rng.sample(hard, min(self.config.like, len(hard))))
        return sorted(wanted | set(rng.sample(every, min(self.config.others, len(every)))))

    def _rows(self, asked: Sequence[Asked]) -> tuple[Tensor, Tensor, list[int]]:
        """States, ids and lengths of questions; some of their tokens are dropped."""
        chosen, lengths = [], []
        for one in asked:
            kept = [
                row for row in range(one.first, one.end) if self.rng.random() >= self.config.dropped
            ]
            chosen += kept or [one.first]
            lengths.append(len(kept) or 1)
        index = torch.tensor(chosen)
        device = self.model.projection.device
        rows = self.states.rows[index].to(device).float()
        return rows, self.states.row_ids[index].to(device), lengths
