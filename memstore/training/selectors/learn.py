"""Training of the learned selector: a projection beside a frozen model, from states that were
computed once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.errors import InvalidInput
from memstore.model.passages.selector import Learned, Projection
from memstore.training.selectors.states import Asked, States


@dataclass(frozen=True)
class LearnConfig:
    """How the projection is trained. shares: of a batch, by kind of question."""

    width: int = 64
    steps: int = 350
    batch: int = 40
    unanswered: int = 8  # plain text and absent questions of a batch, whose target is no passage
    like: int = 4  # passages easily taken for the right one, for every question of a batch
    others: int = 48  # passages of a batch beside those
    rate: float = 2e-3
    decay: float = 1e-3
    dropped: float = 0.1  # of a question's tokens
    blanked: float = 0.2  # of the dimensions of every state, so that no pair is learned by heart
    seed: int = 0
    shares: tuple[tuple[str, float], ...] = (
        ("literal", 0.2),
        ("key", 0.06),
        ("passage", 0.18),
        ("reworded", 0.24),
        ("synonyms", 0.32),
    )


class Trained(nn.Module):
    """What is learned, and the fixed statistics beside it. All states are float32."""

    document_mean: Tensor
    document_deviation: Tensor
    question_mean: Tensor
    question_deviation: Tensor
    idf: Tensor

    def __init__(self, states: States, layer: int, idf: Tensor, width: int, blanked: float) -> None:
        super().__init__()
        self.blanked = blanked
        documents = states.passages[layer][::7].float()
        rows = states.rows[layer].float()
        hidden = documents.shape[1]
        for name, values in (("document", documents), ("question", rows)):
            self.register_buffer(f"{name}_mean", values.mean(0))
            self.register_buffer(f"{name}_deviation", values.std(0) + 1e-3)
        self.register_buffer("idf", idf.half())
        start = torch.linalg.qr(torch.randn(hidden, hidden))[0][:, :width]
        self.projection = nn.Parameter(start.contiguous())
        self.attend = nn.Parameter(torch.zeros(hidden))
        self.scale = nn.Parameter(torch.tensor(3.0))  # ln of what scores are multiplied with
        self.null = nn.Parameter(torch.tensor(0.3))  # the score of "no passage"

    def landmarks(self, states: Tensor) -> Tensor:
        """[..., hidden] of documents -> unit vectors [..., width]."""
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
        """Rows [R, hidden] of questions of these lengths, keys [tokens, width] of passages of so
        many tokens, one after another -> [questions, passages].
        """
        x = (rows - self.question_mean) / self.question_deviation
        x = F.dropout(x, self.blanked, self.training)
        logits = x @ self.attend + self.idf[ids].float().clamp_min(0.05).log()
        weights = torch.cat([part.softmax(0) for part in logits.split(list(lengths))])
        q = F.normalize(x @ self.projection, dim=-1)
        products = keys @ q.T  # (tokens, R)
        best = torch.segment_reduce(products, "max", lengths=torch.tensor(passages)).T
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        scores = best.new_zeros(len(lengths), len(passages))
        return scores.index_add(0, owner, best * weights[:, None])

    def selector(self, layer: int) -> Learned:
        """What has been learned so far, as it is used."""
        names = Projection.__dataclass_fields__
        tensors = {name: getattr(self, name).detach().clone() for name in names}
        return Learned(layer, Projection(**tensors))


def rarity(passages: Iterable[Sequence[int]], vocabulary: int) -> Tensor:
    """idf of every token id, ln((passages + 1) / (passages that hold it + 1/2))."""
    held, count = torch.zeros(vocabulary), 0
    for ids in passages:
        held[list(set(ids))] += 1
        count += 1
    return ((count + 1) / (held + 0.5)).log()


def learn(
    states: States,
    layer: int,
    idf: Tensor,
    config: LearnConfig,
    report: Callable[[int, float, float], None] | None = None,
    hard: Mapping[int, Sequence[int]] | None = None,
) -> Learned:
    """Train a selector on states; the same one for the same seed. idf: as `rarity` tells.

    hard: by Asked.first, passages that are easily taken for the right one; of other questions,
    these are passages with facts of the same subject or relation. report: told (step, mean loss,
    share of questions whose passage came first) every 50 steps. Raises InvalidInput where a kind of
    question is missing.
    """
    with torch.enable_grad():
        return _Run(states, layer, idf, config, hard or {}).go(report)


class _Run:
    def __init__(
        self,
        states: States,
        layer: int,
        idf: Tensor,
        config: LearnConfig,
        hard: Mapping[int, Sequence[int]],
    ) -> None:
        self.states, self.layer, self.config, self.hard = states, layer, config, hard
        self.rng = Random(config.seed)
        torch.manual_seed(config.seed)
        self.model = Trained(states, layer, idf, config.width, config.blanked)
        self.kinds: dict[str, list[Asked]] = defaultdict(list)
        self.like: dict[str, list[int]] = defaultdict(list)  # passages of a subject, a relation
        for asked in states.asked:
            self.kinds[asked.kind].append(asked)
            if asked.right >= 0:
                for part in asked.key.split("|"):
                    self.like[part].append(asked.right)
        missing = [kind for kind, _ in config.shares if not self.kinds[kind]]
        if missing:
            raise InvalidInput(f"no {missing[0]} question among the windows; give more of them")

    def go(self, report: Callable[[int, float, float], None] | None) -> Learned:
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
            if report and (step + 1) % 50 == 0:
                report(step + 1, lost / 50, first / 50)
                lost = first = 0.0
        return self.model.selector(self.layer)

    def _step(self) -> tuple[Tensor, float]:
        config, rng = self.config, self.rng
        kinds, shares = zip(*config.shares, strict=True)
        asked = [
            rng.choice(self.kinds[kind]) for kind in rng.choices(kinds, shares, k=config.batch)
        ]
        nothing = [*self.kinds["plain"], *self.kinds["absent"]]
        unanswered = rng.sample(nothing, min(config.unanswered, len(nothing)))
        passages = self._competing([*asked, *unanswered])
        place = {passage: i for i, passage in enumerate(passages)}
        parts = [self.states.passage(self.layer, passage) for passage in passages]
        keys = self.model.landmarks(torch.cat(parts).float())
        rows = self._rows([*asked, *unanswered])
        scores = self.model.scores(*rows, keys, [len(part) for part in parts])
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        for row, one in enumerate(asked):
            same = (one.touched | one.others) - {one.right}
            hidden[row, [place[passage] for passage in same if passage in place]] = True
        null = self.model.null.expand(len(scores), 1)
        logits = torch.cat([scores.masked_fill(hidden, -1.0), null], 1) * self.model.scale.exp()
        logits = logits.masked_fill(F.pad(hidden, (0, 1)), -1e4)
        target = [place[one.right] for one in asked] + [len(passages)] * len(unanswered)
        targets = torch.tensor(target)
        right = (logits[: len(asked)].argmax(1) == targets[: len(asked)]).float().mean()
        return F.cross_entropy(logits, targets), float(right)

    def _competing(self, asked: Sequence[Asked]) -> list[int]:
        """The passages of a batch: the right ones, some that are easily taken for them, others."""
        rng, count = self.rng, len(self.states.ends)
        wanted = {one.right for one in asked if one.right >= 0}
        for one in asked:
            hard = self.hard.get(one.first)
            if hard:
                wanted |= set(rng.sample(hard, min(self.config.like, len(hard))))
                continue
            for _ in range(self.config.like):
                like = self.like.get(rng.choice(one.key.split("|")))
                wanted.add(rng.choice(like) if like else rng.randrange(count))
        return sorted(wanted | set(rng.sample(range(count), min(self.config.others, count))))

    def _rows(self, asked: Sequence[Asked]) -> tuple[Tensor, Tensor, list[int]]:
        """States, ids and lengths of questions, some of their tokens dropped."""
        chosen, lengths = [], []
        for one in asked:
            kept = [
                row for row in range(one.first, one.end) if self.rng.random() >= self.config.dropped
            ]
            chosen += kept or [one.first]
            lengths.append(len(kept) or 1)
        index = torch.tensor(chosen)
        return self.states.rows[self.layer][index].float(), self.states.row_ids[index], lengths
