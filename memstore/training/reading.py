"""Training of a reading adapter: LoRA weights with which a model answers from independently encoded
passages as well as from the same passages as text.

A forward pass packs many examples into one row: the prefix, then each example's passages,
question and answer. A passage attends to the prefix and itself. Question and answer attend to the
prefix, the example's passages and themselves, with keys rotated to their positions in a prompt, as
in a session.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import Kind, ReadingAdapter, attach_adapter
from memstore.model.passages.repositioned_attention import attention
from memstore.model.rotary import Positions
from memstore.training.reading_questions import (
    UNKNOWN,
    AskedContext,
    Composed,
    Examples,
    split_titles,
)

_CHECKED = 24  # validation passes
# bytes of a GPU for each token, layer and number of a state: twice what SmolLM2 takes; and into how
# many steps the budget of tokens is divided at least
_ACTIVATIONS, _STEPS = 150, 300
_AS_TEXT, _TEXTS = 0.1, 5  # steps that read passages as text in the prompt; questions of a pass
_RANK = 16


@dataclass(frozen=True)
class ReadingOptions:
    """tokens: training budget; pool_tokens: passages of a pool; pools: of an optimizer step;
    joined: pools of a forward pass; unanswerable: share of the questions whose gold passage is left
    out; workers: processes that draw examples, 0 for none; every: seconds between checkpoints.
    """

    tokens: int = 4_000_000
    pool_tokens: int = 1024
    pools: int = 4
    joined: int = 1
    learning_rate: float = 8e-4
    most_passages: int = 16
    unanswerable: float = 0.08
    workers: int = 0
    seed: int = 0
    every: int = 600

    def on(self, model: HuggingFacePassageModel) -> ReadingOptions:
        """For a GPU: forward passes of as many pools as its free memory and the budget allow."""
        if model.device.type != "cuda":
            return self
        shape, (free, _) = model.shape, torch.cuda.mem_get_info(model.device)
        fitting = free // (_ACTIVATIONS * shape.num_layers * shape.hidden_size)
        joined = max(1, min(fitting, self.tokens // _STEPS) // self.pool_tokens)
        pools, workers = max(self.pools, joined), min(8, os.cpu_count() or 1)
        return replace(self, joined=joined, pools=pools, workers=workers)


class Pack:
    """Examples packed into one forward pass; passages that several of them read are there once."""

    def __init__(
        self, model: HuggingFacePassageModel, examples: Sequence[Composed], *, as_text: bool
    ) -> None:
        """as_text: put the passages into the prompt as text. All tensors are on the CPU."""
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
        self.ids = torch.tensor([ids])
        self.targets = torch.tensor([*targets, *[-1] * (len(ids) - len(targets))])
        self.counts = [int((self.targets[_at(own)] >= 0).sum()) for *_, own in asked]
        self.answering = (self.targets >= 0).nonzero()[:, 0]
        self.targets = self.targets[self.answering]
        self.read = torch.zeros(1, len(ids), 1)
        for span in passages.values():
            self.read[0, span.start : span.stop] = 1  # tokens of passages
        by_width: dict[int, list[list[range]]] = {}  # at most half of a batch is padding
        for row in asked:
            by_width.setdefault(sum(map(len, row)).bit_length(), []).append(row)
        alone = [[prefix], *([prefix, span] for span in passages.values())]
        self._rows = [_Rows(some, len(ids)) for some in (alone, *by_width.values())]
        places = torch.cat([rows.tokens for rows in self._rows])
        back = torch.empty(len(ids) + 1, dtype=torch.int64)
        back[places] = torch.arange(len(places))  # -1, padding, comes last
        self._back = back[:-1]

    def to(self, device: torch.device, dtype: torch.dtype) -> Pack:
        """Move everything to a device. dtype: of the model's states."""
        for name in ("ids", "targets", "answering", "_back"):
            setattr(self, name, getattr(self, name).to(device))
        self.read = self.read.to(device, dtype)
        for rows in self._rows:
            rows.to(device)
        return self

    def attend(
        self, model: HuggingFacePassageModel, layer_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Unrotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, T, D]."""
        found = [rows.attended(model, layer_idx, q, k, v) for rows in self._rows]
        return torch.cat(found, 2)[:, :, self._back]


class _Rows:
    """Rows of a pack as a padded batch. The last span of a row attends to all of the row, causally,
    with queries and keys at consecutive positions.
    """

    def __init__(self, rows: Sequence[Sequence[range]], total: int) -> None:
        """rows: of each row, the spans of its tokens, of `total` in the pack."""
        columns = [torch.cat([_at(span) for span in row]) for row in rows]
        longest, widest = max(len(row[-1]) for row in rows), max(map(len, columns))
        # Padding is read from everywhere: the gradient of a token that is read very often is slow.
        self._columns = torch.arange(widest).repeat(len(rows), 1) % total
        for row, column in zip(self._columns, columns):
            row[: len(column)] = column
        own = pad_sequence([_at(row[-1]) for row in rows], batch_first=True, padding_value=-1)
        self.tokens = own.flatten()  # whose attention is computed; -1 for padding
        spread = torch.arange(len(self.tokens)) % total
        self._asking = torch.where(self.tokens < 0, spread, self.tokens)
        starts = torch.tensor([len(c) - len(row[-1]) for c, row in zip(columns, rows)])
        self._places = starts[:, None] + torch.arange(longest)  # of queries
        self._reach = int(self._places.max()) + 1
        self._masks: dict[int | None, Tensor] = {}  # by window

    def to(self, device: torch.device) -> None:
        for name in ("_columns", "_asking", "_places"):
            setattr(self, name, getattr(self, name).to(device))
        self._at = Positions(self._places.flatten(), self._reach)

    def attended(
        self, model: HuggingFacePassageModel, layer_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Unrotated q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, H, rows * longest, D]."""
        rows, longest = self._places.shape
        spec = model.forms[layer_idx]
        queries = model.rotate(layer_idx, q[:, :, self._asking], self._at)
        queries = queries.view(q.shape[1], rows, longest, -1).transpose(0, 1)
        keys = model.rotate(layer_idx, k[0][:, self._columns], range(self._columns.shape[1]))
        values = v[0][:, self._columns].transpose(0, 1)
        found = attention(queries, keys.transpose(0, 1), values, spec, self._mask(spec.window))
        return found.transpose(0, 1).flatten(1, 2)[None]

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            places = torch.arange(self._columns.shape[1], device=self._columns.device)
            distance = self._places[:, None, :, None] - places
            sees = distance >= 0
            self._masks[window] = sees if window is None else sees & (distance < window)
        return self._masks[window]


def _at(span: range) -> Tensor:
    return torch.arange(span.start, span.stop)


@dataclass(eq=False)
class Steps(IterableDataset[list[tuple[Pack, Pack | None]]]):
    """The forward passes of optimizer steps, drawn for ever; each worker process draws others. With
    each pack of a writer comes what its teacher reads: the same examples as text.
    """

    model: HuggingFacePassageModel
    kind: Kind
    examples: Examples
    options: ReadingOptions
    seed: int

    def __iter__(self) -> Iterator[list[tuple[Pack, Pack | None]]]:
        options, worker = self.options, get_worker_info()
        rng = Random(f"{self.seed} {0 if worker is None else worker.id}")
        drawn = self.examples.pools(
            rng, options.pool_tokens, options.most_passages, options.unanswerable
        )
        while True:
            as_text = self.kind == "both" and rng.random() < _AS_TEXT
            pools = list(islice(drawn, options.pools))
            if as_text:  # where nothing is shared
                pools = [[o for o in some if len(o.passages) <= 4][:_TEXTS] for some in pools]
            parts = [
                [one for some in pools[at : at + options.joined] for one in some]
                for at in range(0, len(pools), options.joined)
            ]
            yield [
                (
                    Pack(self.model, some, as_text=as_text),
                    Pack(self.model, some, as_text=True) if self.kind == "writer" else None,
                )
                for some in parts
                if some
            ]


class Reading:
    """A model with a trainable adapter, and its loss."""

    def __init__(self, model: HuggingFacePassageModel, adapter: ReadingAdapter) -> None:
        self.model, self.adapter = model, adapter
        model.model.requires_grad_(False)
        self.parameters = attach_adapter(model.model, adapter, torch.float32)

    def logits(self, pack: Pack, *, stock: bool = False) -> Tensor:
        """Logits [answer tokens, vocabulary] of a pack. stock: without the adapter."""
        pack.to(self.model.device, self.model.dtype)
        rows = pack.read if self.adapter.kind == "writer" and not stock else not stock
        attend = partial(pack.attend, self.model)
        states = self.model.hidden(pack.ids, attend, adapt=rows)
        return self.model.logits(states[0, pack.answering])

    def loss(self, pack: Pack, text: Pack | None = None) -> Tensor:
        """Mean loss over answer tokens: cross-entropy; for a writer, the KL divergence from the
        stock model that has the same passages as text.
        """
        if text is None:
            return cross_entropy(self.logits(pack), pack.targets)
        with torch.no_grad():
            told = self.logits(text, stock=True)
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
            logits, targets = (x.split(pack.counts) for x in (self.logits(pack), pack.targets))
            for one, scores, wanted in zip(examples, logits, targets):
                doubts[one.answer != UNKNOWN].append(float(scores[0].softmax(-1)[unknown]))
                if one.answer != UNKNOWN:
                    scores[0, unknown] = -torch.inf
                    right.append(bool((scores.argmax(-1) == wanted).all()))
        found = {"right": _mean(right)}
        if self.adapter.kind == "both" and doubts[True]:
            self.adapter.refuse_above = above = float(torch.tensor(doubts[True]).quantile(0.9))
            found["unanswerable refused"] = _mean([one > above for one in doubts[False]])
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def train_reading(
    reading: Reading,
    examples: Examples,
    held_out: Examples,
    work: Path,
    options: ReadingOptions,
    report: Callable[[str], None] = lambda line: None,
) -> ReadingAdapter:
    """Train an adapter and store its validation scores in it.

    work: directory of checkpoints; an interrupted run resumes there. Raises InvalidInput for a
    checkpoint of another adapter, and for texts that are all longer than a pass.
    """
    adapter = reading.adapter
    optimizer = torch.optim.AdamW(reading.parameters, betas=(0.9, 0.98), weight_decay=0.0)
    drawing = options.pool_tokens, options.most_passages, options.unanswerable
    next(examples.pools(Random(1), *drawing))  # raises its error here and not in a worker
    check = list(islice(held_out.pools(Random(1), *drawing), _CHECKED))
    path = work / f"{adapter.kind}.pt"
    step, seen, skip = _restore(path, reading, optimizer)
    steps = Steps(reading.model, adapter.kind, examples, options, 1000 * options.seed + skip)
    began, before, saved = time.monotonic(), seen, time.monotonic()
    recent, asked = list[float](), 0
    for passes in DataLoader(steps, batch_size=None, num_workers=options.workers):
        if seen >= options.tokens:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, seen / options.tokens)
        total, drawn = 0.0, sum(len(pack.counts) for pack, _ in passes)
        for pack, text in passes:
            loss = reading.loss(pack, text) * (len(pack.counts) / drawn)
            loss.backward()
            total += float(loss.detach())
            seen += pack.ids.numel()
        asked += drawn
        torch.nn.utils.clip_grad_norm_(reading.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        recent = [*recent[-39:], total]
        if step % 10 == 0:
            rate = (seen - before) / (time.monotonic() - began)
            report(
                f"step {step}: loss {_mean(recent):.3f}, {asked:,} questions, {seen:,} tokens, "
                f"{rate:,.0f} a second, {(options.tokens - seen) / rate / 60:,.0f} minutes left"
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
    report: Callable[[str], None] = lambda line: None,
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
    reading = Reading(model, before)
    return train_reading(reading, learned, checked, work, options.on(model), report)


def _schedule(step: int, share: float) -> float:
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))


def _save(
    path: Path, reading: Reading, optimizer: torch.optim.Optimizer, step: int, seen: int, skip: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    weights = [one.detach().cpu() for one in reading.parameters]
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
