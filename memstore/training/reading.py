"""Training of a reading adapter: LoRA weights with which a model answers from independently encoded
passages as well as from the same passages as text.

A forward pass packs many examples into one row: the prefix, then each example's passages,
question and answer. A passage attends to the prefix and itself. Question and answer attend to the
prefix, the example's passages and themselves, with keys rotated to their positions in a prompt, as
in a session.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import Kind, ReadingAdapter, attach_adapter
from memstore.model.adapter import AttentionSpec
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.repositioned_attention import attention
from memstore.model.rotary import Positions
from memstore.training.reading_questions import UNKNOWN, AskedContext, Composed, Examples, drawn

Report = Callable[[str], None]

_CHECKED = 32  # validation passes


@dataclass(frozen=True)
class ReadingOptions:
    """tokens: training budget; pass_tokens: tokens of a forward pass; passes: forward passes of an
    optimizer step. unanswerable: share of questions whose gold passage is left out. as_text: share
    of steps that read the passages as text in the prompt.
    """

    tokens: int = 4_000_000
    pass_tokens: int = 1024
    passes: int = 8
    learning_rate: float = 8e-4
    unanswerable: float = 0.08
    as_text: float = 0.2
    most_passages: int = 8
    rank: int = 16
    seed: int = 0
    every: int = 600  # seconds between checkpoints


class Pack:
    """Examples packed into one forward pass."""

    def __init__(
        self, model: HuggingFacePassageModel, examples: Sequence[Composed], *, as_text: bool
    ) -> None:
        """as_text: put the passages into the prompt as text."""
        self._model = model
        prefix, encode = model.prefix_ids, model.tokenizer.encode
        self.first = first = len(prefix)
        ids, positions = list(prefix), list(range(first))
        passages: list[range] = []
        asked: list[tuple[list[range], range]] = []  # of each example: passages, question
        targets: list[int] = []  # the next token of each answer token; -1 elsewhere
        for one in examples:
            turn, _ = model.turn_ids(one.question, first=True)
            behind = [*model.separator_ids, *turn]
            answer = [*encode(one.answer), model.end_of_turn]
            own: list[range] = []
            if as_text:
                behind = [token for passage in one.passages for token in passage] + behind
            else:
                for passage in one.passages:
                    own.append(range(len(ids), len(ids) + len(passage)))
                    positions += range(first, first + len(passage))
                    ids += passage
            start = len(ids)
            ids += [*behind, *answer[:-1]]
            at = first + sum(map(len, own))
            positions += range(at, at + len(ids) - start)
            passages += own
            asked.append((own, range(start, len(ids))))
            targets += [-1] * (start + len(behind) - 1 - len(targets)) + answer
        device = model.device
        targets += [-1] * (len(ids) - len(targets))
        self.ids = torch.tensor([ids], device=device)
        self.targets = torch.tensor(targets, device=device)
        self.answering = (self.targets >= 0).nonzero()[:, 0]
        self.counts = [int((self.targets[q.start : q.stop] >= 0).sum()) for _, q in asked]
        read = torch.zeros(1, len(ids), 1, dtype=model.dtype)
        for span in passages:
            read[0, span.start : span.stop] = 1
        self.read = read.to(device)  # 1 for tokens of passages
        self._positions = Positions(torch.tensor(positions, device=device), max(positions) + 1)
        self._passages = _Rows(first, [([], span) for span in passages], device)
        self._asked = _Rows(first, asked, device)
        spans = [range(first), *self._passages.spans, *self._asked.spans]
        back = torch.empty(len(ids), dtype=torch.int64)
        at = 0
        for rows, span in [(first, range(first)), *self._passages.padded, *self._asked.padded]:
            back[span.start : span.stop] = torch.arange(at, at + len(span))
            at += rows
        assert sum(map(len, spans)) == len(ids)
        self._back = back.to(device)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention callback: unrotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D]."""
        model, spec = self._model, self._model.forms[layer_idx]
        turned = model.rotate(layer_idx, torch.cat((q, k), 1), self._positions)
        queries, keys = turned.split((q.shape[1], k.shape[1]), 1)
        first = slice(0, self.first)
        causal = torch.ones(self.first, self.first, dtype=torch.bool, device=q.device).tril()
        found = [attention(queries[:, :, first], keys[:, :, first], v[:, :, first], spec, causal)]
        if self._passages.spans:
            found.append(self._passages.attended(queries, keys, v, spec))
        again = self._asked.turned(lambda x, at: model.rotate(layer_idx, x, at), k)
        found.append(self._asked.attended(queries, again, v, spec, gathered=True))
        return torch.cat(found, 2)[:, :, self._back]


class _Rows:
    """Token spans of a pack as a padded batch; each attends to the prefix, to given spans, and
    causally to itself.
    """

    def __init__(
        self, first: int, rows: Sequence[tuple[Sequence[range], range]], device: torch.device
    ) -> None:
        """first: tokens of the prefix. rows: of each span, the spans before it and itself."""
        self.spans = [own for _, own in rows]
        if not rows:
            self.padded: list[tuple[int, range]] = []
            return
        seen = [
            torch.cat([torch.arange(first), *(_at(one) for one in others), _at(own)])
            for others, own in rows
        ]
        longest, widest = max(map(len, self.spans)), max(map(len, seen))
        self.padded = [(longest, span) for span in self.spans]
        take = torch.zeros(len(rows), longest, dtype=torch.int64)
        keys = torch.zeros(len(rows), widest, dtype=torch.int64)
        sees = torch.zeros(len(rows), 1, longest, widest, dtype=torch.bool)
        sees[..., 0] = True  # padding attends to one token, which avoids NaN
        for at, (own, columns) in enumerate(zip(self.spans, seen)):
            take[at, : len(own)] = _at(own)
            keys[at, : len(columns)] = columns
            before = len(columns) - len(own)
            sees[at, 0, : len(own), :before] = True
            sees[at, 0, : len(own), before : len(columns)] = torch.ones(len(own), len(own)).tril()
        columns_at = torch.arange(widest)
        self._distance = torch.zeros(len(rows), 1, longest, widest, dtype=torch.int64)
        for number, (own, columns) in enumerate(zip(self.spans, seen)):
            before = len(columns) - len(own)
            self._distance[number, 0] = torch.arange(before, before + longest)[:, None] - columns_at
        self._take, self._keys, self._sees = take.to(device), keys.to(device), sees.to(device)
        self._distance = self._distance.to(device)
        places = columns_at.repeat(len(rows)).to(device)
        self._places = Positions(places, widest)

    def turned(self, rotate: Callable[[Tensor, Positions], Tensor], k: Tensor) -> Tensor:
        """Unrotated keys [1, Hkv, T, D] -> [rows, Hkv, widest, D], each row's keys rotated to
        consecutive positions.
        """
        rows, widest = self._keys.shape
        given = rotate(k[:, :, self._keys.flatten()], self._places)
        return given.view(k.shape[1], rows, widest, -1).transpose(0, 1)

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, gathered: bool = False
    ) -> Tensor:
        """Rotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, rows * longest, D]. gathered: k
        is the output of `turned`.
        """
        sees = self._sees
        if spec.window is not None:
            sees = sees & (self._distance < spec.window)
        rows = q[0][:, self._take].transpose(0, 1)
        keys = k if gathered else k[0][:, self._keys].transpose(0, 1)
        values = v[0][:, self._keys].transpose(0, 1)
        found = attention(rows, keys, values, spec, sees)
        return found.transpose(0, 1).flatten(1, 2)[None]


def _at(span: range) -> Tensor:
    return torch.arange(span.start, span.stop)


class Reading:
    """A model with a trainable adapter, and its loss."""

    def __init__(self, model: HuggingFacePassageModel, adapter: ReadingAdapter) -> None:
        self.model, self.adapter = model, adapter
        model.model.requires_grad_(False)
        self.parameters = attach_adapter(model.model, adapter, torch.float32)

    def logits(self, pack: Pack, *, stock: bool = False) -> Tensor:
        """Logits [answer tokens, vocabulary] of a pack. stock: without the adapter."""
        rows: bool | Tensor = not stock
        if not stock and self.adapter.kind == "writer":
            rows = pack.read
        states = self.model.hidden(pack.ids, pack.attend, adapt=rows)[0, pack.answering]
        return self.model.logits(states)

    def loss(self, examples: Sequence[Composed], *, as_text: bool = False) -> Tensor:
        """Mean loss over answer tokens: cross-entropy; for a writer, the KL divergence from the
        stock model that has the same passages as text.
        """
        if self.adapter.kind == "both":
            pack = Pack(self.model, examples, as_text=as_text)
            return cross_entropy(self.logits(pack), pack.targets[pack.answering])
        pack = Pack(self.model, examples, as_text=False)
        with torch.no_grad():
            told = self.logits(Pack(self.model, examples, as_text=True), stock=True)
        found = log_softmax(self.logits(pack), -1)
        return kl_div(found, log_softmax(told, -1), log_target=True, reduction="batchmean")

    @torch.no_grad()
    def validate(self, packs: Sequence[Sequence[Composed]]) -> dict[str, float]:
        """Loss; share of answers, and of refusals of unanswerable questions, that greedy decoding
        gives verbatim; share of answerable questions refused.
        """
        losses: list[float] = []
        right: dict[bool, list[bool]] = {True: [], False: []}
        refused: list[bool] = []
        unknown = self.model.tokenizer.encode(UNKNOWN)[0]
        for examples in packs:
            pack = Pack(self.model, examples, as_text=False)
            logits, targets = self.logits(pack), pack.targets[pack.answering]
            losses.append(float(cross_entropy(logits, targets)))
            best, at = logits.argmax(-1), 0
            for one, count in zip(examples, pack.counts):
                answerable = one.answer != UNKNOWN
                right[answerable].append(bool((best == targets)[at : at + count].all()))
                if answerable:
                    refused.append(int(best[at]) == unknown != int(targets[at]))
                at += count
        return {
            "loss": _mean(losses),
            "right": _mean(right[True]),
            "refused": _mean(refused),
            "unanswerable refused": _mean(right[False]),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def packs_of(
    examples: Iterator[Composed], model: HuggingFacePassageModel, tokens: int
) -> Iterator[list[Composed]]:
    """Group examples into passes of about `tokens` tokens."""
    pack: list[Composed] = []
    filled = len(model.prefix_ids)
    for one in examples:
        size = sum(map(len, one.passages)) + 24 + (len(one.question) + len(one.answer)) // 4
        if pack and filled + size > tokens:
            yield pack
            pack, filled = [], len(model.prefix_ids)
        pack.append(one)
        filled += size
    if pack:
        yield pack


def composed(examples: Examples, options: ReadingOptions, seed: int) -> Iterator[Composed]:
    rng = Random(seed)
    for one in drawn(examples.examples, rng):
        most = rng.choice((1, 2, 4, options.most_passages, options.most_passages))
        yield examples.compose(one, most, rng, options.unanswerable)


def train_reading(
    reading: Reading,
    examples: Examples,
    held_out: Examples,
    work: Path,
    options: ReadingOptions,
    report: Report = lambda line: None,
) -> ReadingAdapter:
    """Train an adapter and store its validation scores in it.

    work: directory of checkpoints; an interrupted run resumes there. Raises InvalidInput for a
    checkpoint of another adapter.
    """
    model, adapter = reading.model, reading.adapter
    optimizer = torch.optim.AdamW(reading.parameters, betas=(0.9, 0.98), weight_decay=0.0)
    once = islice(composed(held_out, options, seed=1), len(held_out.examples))
    check = list(islice(packs_of(once, model, options.pass_tokens), _CHECKED))
    path = work / "reading.pt"
    step, seen, skip = _restore(path, reading, optimizer)
    rng = Random(f"{options.seed} {step}")
    packs = packs_of(composed(examples, options, options.seed + skip), model, options.pass_tokens)
    began, before, saved = time.monotonic(), seen, time.monotonic()
    recent: list[float] = []
    while seen < options.tokens:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, seen / options.tokens)
        as_text = adapter.kind == "both" and rng.random() < options.as_text
        total = 0.0
        for some in islice(packs, options.passes):
            loss = reading.loss(some, as_text=as_text) / options.passes
            loss.backward()
            total += float(loss.detach())
            seen += sum(sum(map(len, one.passages)) + 60 for one in some)
        torch.nn.utils.clip_grad_norm_(reading.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        recent = [*recent[-39:], total]
        if step % 10 == 0:
            rate = (seen - before) / (time.monotonic() - began)
            report(
                f"step {step}: loss {_mean(recent):.3f}, {seen:,} tokens, {rate:,.0f} a second, "
                f"{(options.tokens - seen) / rate / 60:,.0f} minutes left"
            )
        if time.monotonic() - saved > options.every:
            _save(path, reading, optimizer, step, seen, skip)
            report(str(reading.validate(check)))
            saved = time.monotonic()
    adapter.scores = {k: v for k, v in reading.validate(check).items() if k != "loss"}
    adapter.tokens += seen
    return adapter


def adapt_reading(
    model: HuggingFacePassageModel,
    contexts: Sequence[AskedContext],
    kind: Kind,
    work: Path,
    options: ReadingOptions,
    report: Report = lambda line: None,
) -> ReadingAdapter:
    """Train a reading adapter for a model on questions; a twentieth of the titles is held out. An
    adapter of this kind that the model has is trained further.

    work: directory of checkpoints. Raises InvalidInput for questions of fewer than two titles.
    """
    titles = sorted({one.title for one in contexts})
    Random(options.seed).shuffle(titles)
    held = set(titles[: max(1, len(titles) // 20)])
    parts = [[c for c in contexts if (c.title in held) is out] for out in (False, True)]
    if not all(any(one.questions for one in part) for part in parts):
        raise InvalidInput("the questions are about fewer than two titles; give more texts")

    def cut(text: str) -> list[list[int]]:
        return [passage.ids.tolist() for passage in passages_of(model, [text])]

    report("splitting the texts into passages")
    learned, checked = (Examples(part, cut, model.tokenizer.decode) for part in parts)
    before = model.adapter
    if before is None or before.kind != kind:
        before = ReadingAdapter.untrained(model.model, kind, options.rank, options.seed)
        before.separator = model.tokenizer.decode(model.separator_ids)
    before.weights = (model.signature.weights,)
    return train_reading(Reading(model, before), learned, checked, work, options, report)


def _schedule(step: int, share: float) -> float:
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))


def _save(
    path: Path, reading: Reading, optimizer: torch.optim.Optimizer, step: int, seen: int, skip: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    weights = [parameter.detach().cpu() for parameter in reading.parameters]
    state = {"weights": weights, "optimizer": optimizer.state_dict()}
    torch.save(state | {"step": step, "seen": seen, "skip": skip}, temporary)
    temporary.replace(path)


def _restore(
    path: Path, reading: Reading, optimizer: torch.optim.Optimizer
) -> tuple[int, int, int]:
    """Load a checkpoint, if there is one -> (steps done, tokens seen, times resumed). A resumed run
    draws new examples.
    """
    if not path.is_file():
        return 0, 0, 0
    state = torch.load(path, weights_only=True)
    weights = state["weights"]
    if [one.shape for one in weights] != [one.shape for one in reading.parameters]:
        raise InvalidInput(f"{path} is of another adapter; remove it to begin anew")
    with torch.no_grad():
        for parameter, weight in zip(reading.parameters, weights):
            parameter.copy_(weight)
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seen"], state["skip"] + 1
