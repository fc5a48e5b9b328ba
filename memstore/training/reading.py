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
from torch.nn.utils.rnn import pad_sequence

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import Kind, ReadingAdapter, attach_adapter
from memstore.model.adapter import AttentionSpec
from memstore.model.passages.repositioned_attention import attention
from memstore.model.rotary import Positions
from memstore.training.reading_questions import (
    UNKNOWN,
    AskedContext,
    Composed,
    Examples,
    split_titles,
)

Report = Callable[[str], None]
Rotate = Callable[[Tensor, Positions], Tensor]

_CHECKED = 24  # validation passes
_UNANSWERABLE = 0.08  # of the questions: the gold passage is left out
_AS_TEXT, _TEXTS = 0.1, 5  # steps that read passages as text in the prompt; questions of a pass
_RANK = 16


@dataclass(frozen=True)
class ReadingOptions:
    """tokens: training budget; pool_tokens: passages of a forward pass; passes: forward passes of
    an optimizer step.
    """

    tokens: int = 4_000_000
    pool_tokens: int = 1024
    passes: int = 4
    learning_rate: float = 8e-4
    most_passages: int = 16
    seed: int = 0
    every: int = 600  # seconds between checkpoints


class Pack:
    """Examples packed into one forward pass; passages that several of them read are there once."""

    def __init__(
        self, model: HuggingFacePassageModel, examples: Sequence[Composed], *, as_text: bool
    ) -> None:
        """as_text: put the passages into the prompt as text."""
        self._model = model
        ids = list(model.prefix_ids)
        prefix = range(len(ids))
        passages: dict[int, range] = {}
        asked: list[list[range]] = []  # of each example: prefix, passages, question and answer
        targets: list[int] = []  # the next token of each answer token; -1 elsewhere
        for one in examples:
            turn, _ = model.turn_ids(one.question, first=True)
            own = [*model.separator_ids, *turn]
            answer = [*model.tokenizer.encode(one.answer), model.end_of_turn]
            before = [prefix]
            if as_text:
                own = [token for passage in one.passages for token in passage] + own
            else:
                for passage in one.passages:
                    if id(passage) not in passages:
                        passages[id(passage)] = range(len(ids), len(ids) + len(passage))
                        ids += passage
                    before.append(passages[id(passage)])
            targets += [-1] * (len(ids) + len(own) - 1 - len(targets)) + answer
            asked.append([*before, range(len(ids), len(ids) + len(own) + len(answer) - 1)])
            ids += [*own, *answer[:-1]]
        device = model.device
        self.ids = torch.tensor([ids], device=device)
        self.targets = torch.tensor([*targets, *[-1] * (len(ids) - len(targets))], device=device)
        self.answering = (self.targets >= 0).nonzero()[:, 0]
        self.counts = [int((self.targets[_at(own)] >= 0).sum()) for *_, own in asked]
        self.read = torch.zeros(1, len(ids), 1, dtype=model.dtype, device=device)
        for span in passages.values():
            self.read[0, span.start : span.stop] = 1  # tokens of passages
        self._rows = [
            _Rows([[prefix], *([prefix, span] for span in passages.values())], device),
            _Rows(asked, device),
        ]
        places = torch.cat([rows.tokens for rows in self._rows])
        self._back = torch.empty(len(ids) + 1, dtype=torch.int64, device=device)
        self._back[places] = torch.arange(len(places), device=device)  # -1, padding, comes last
        self._back = self._back[:-1]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention callback: unrotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D]."""
        model = self._model
        found = [
            rows.attended(
                lambda x, at: model.rotate(layer_idx, x, at), q, k, v, model.forms[layer_idx]
            )
            for rows in self._rows
        ]
        return torch.cat(found, 2)[:, :, self._back]


class _Rows:
    """Rows of a pack as a padded batch. The last span of a row attends to all of the row, causally,
    with queries and keys at consecutive positions.
    """

    def __init__(self, rows: Sequence[Sequence[range]], device: torch.device) -> None:
        """rows: of each row, the spans of its tokens."""
        columns = [torch.cat([_at(span) for span in row]) for row in rows]
        longest, self._widest = max(len(row[-1]) for row in rows), max(map(len, columns))
        self._columns = pad_sequence(columns, batch_first=True).to(device)
        own = pad_sequence([_at(row[-1]) for row in rows], batch_first=True, padding_value=-1)
        self.tokens = own.flatten().to(device)  # whose attention is computed; -1 for padding
        starts = torch.tensor([len(c) - len(row[-1]) for c, row in zip(columns, rows)])
        self._places = (starts[:, None] + torch.arange(longest)).to(device)  # of queries

    def attended(
        self, rotate: Rotate, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Unrotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, rows * longest, D]."""
        rows, longest = self._places.shape
        at = self._places.flatten()
        queries = rotate(q[:, :, self.tokens], Positions(at, int(at.max()) + 1))
        places = torch.arange(self._widest, device=q.device)
        keys = rotate(
            k[:, :, self._columns.flatten()], Positions(places.repeat(rows), self._widest)
        )
        distance = self._places[:, None, :, None] - places
        sees = distance >= 0
        if spec.window is not None:
            sees = sees & (distance < spec.window)
        queries = queries.view(q.shape[1], rows, longest, -1).transpose(0, 1)
        keys = keys.view(k.shape[1], rows, self._widest, -1).transpose(0, 1)
        values = v[0][:, self._columns].transpose(0, 1)
        found = attention(queries, keys, values, spec, sees)
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
        """Share of answers that greedy decoding gives verbatim ("right"). An adapter of kind "both"
        gets the threshold of doubt that refuses a tenth of the answerable questions here;
        "unanswerable refused" is the share of others that it refuses.
        """
        right: list[bool] = []
        doubts: dict[bool, list[float]] = {True: [], False: []}  # by whether there is an answer
        unknown = self.model.tokenizer.encode(UNKNOWN)[0]
        for examples in packs:
            pack = Pack(self.model, examples, as_text=False)
            logits, targets = self.logits(pack), pack.targets[pack.answering]
            parts = zip(examples, logits.split(pack.counts), targets.split(pack.counts))
            for one, scores, wanted in parts:
                doubts[one.answer != UNKNOWN].append(float(scores[0].softmax(-1)[unknown]))
                if one.answer != UNKNOWN:
                    scores[0, unknown] = -torch.inf
                    right.append(bool((scores.argmax(-1) == wanted).all()))
        found = {"right": _mean(right)}
        if self.adapter.kind == "both" and doubts[True]:
            above = float(torch.tensor(doubts[True]).quantile(0.9))
            self.adapter.refuse_above = above
            found["unanswerable refused"] = _mean([one > above for one in doubts[False]])
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tokens(examples: Sequence[Composed], *, as_text: bool = False) -> int:
    """Approximate tokens of a pass."""
    passages = [one for some in examples for one in some.passages]
    if not as_text:
        passages = list({id(one): one for one in passages}.values())
    asked = sum(24 + (len(one.question) + len(one.answer)) // 4 for one in examples)
    return asked + sum(map(len, passages))


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
    checkpoint of another adapter, and for texts that are all longer than a pass.
    """
    adapter = reading.adapter

    def pools(of: Examples, seed: int) -> Iterator[list[Composed]]:
        return of.pools(Random(seed), options.pool_tokens, options.most_passages, _UNANSWERABLE)

    optimizer = torch.optim.AdamW(reading.parameters, betas=(0.9, 0.98), weight_decay=0.0)
    check = list(islice(pools(held_out, 1), _CHECKED))
    path = work / f"{adapter.kind}.pt"
    step, seen, skip = _restore(path, reading, optimizer)
    rng = Random(f"{options.seed} {step}")
    drawn = pools(examples, 1000 * options.seed + skip)
    began, before, saved = time.monotonic(), seen, time.monotonic()
    recent: list[float] = []
    asked = 0
    while seen < options.tokens:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, seen / options.tokens)
        as_text = adapter.kind == "both" and rng.random() < _AS_TEXT
        total = 0.0
        passes = list(islice(drawn, options.passes))
        if as_text:  # where nothing is shared
            passes = [[o for o in some if len(o.passages) <= 4][:_TEXTS] for some in passes]
        for some in filter(None, passes):
            loss = reading.loss(some, as_text=as_text) * (len(some) / sum(map(len, passes)))
            loss.backward()
            total += float(loss.detach())
            seen += _tokens(some, as_text=as_text)
            asked += len(some)
        torch.nn.utils.clip_grad_norm_(reading.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        recent = [*recent[-39:], total]
        if step % 10 == 0:
            rate = (seen - before) / (time.monotonic() - began)
            report(
                f"step {step}: loss {_mean(recent):.3f}, {asked:,} questions, {seen:,} tokens, "
                f"{rate:,.0f} a second, "
                f"{(options.tokens - seen) / rate / 60:,.0f} minutes left"
            )
        if time.monotonic() - saved > options.every:
            _save(path, reading, optimizer, step, seen, skip)
            report(str(reading.validate(check)))
            saved = time.monotonic()
    _save(path, reading, optimizer, step, seen, skip)
    adapter.scores = reading.validate(check)
    if before < options.tokens:  # else this run had ended before, and was counted
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
    parts = split_titles(contexts, options.seed)
    report("splitting the texts into passages")
    learned, checked = (Examples(part, model) for part in parts)
    before = model.adapter
    if before is None or before.kind != kind:
        before = ReadingAdapter.untrained(model.model, _RANK, options.seed, kind)
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
