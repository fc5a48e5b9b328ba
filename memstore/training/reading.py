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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby, islice
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import UNKNOWN, Kind, ReadingAdapter, attach_adapter
from memstore.model.passages.repositioned_attention import attention
from memstore.training.reading_examples import Composed, Examples
from memstore.training.reading_questions import AskedContext, split_titles
from memstore.training.train import read_state, write_state

_CHECKED = 24  # validation passes
_EVERY = 600  # seconds between checkpoints
_ENOUGH = 50  # held-out questions; the standard error of a share is 0.07 then
# bytes of a GPU for each token, layer and number of a state: twice what SmolLM2 takes; and into how
# many steps the budget of tokens is divided at least
_ACTIVATIONS, _STEPS = 150, 300
_AS_TEXT, _TEXTS = 0.1, 5  # steps that read passages as text in the prompt; questions of a pass
_RANK = 16


@dataclass(frozen=True)
class ReadingOptions:
    """tokens: training budget; pool_tokens: tokens of a pool's passages; pools: number in an
    optimizer step; joined: number in a forward pass; most_passages: of an example; workers:
    processes that draw examples, 0 for none.
    """

    tokens: int = 4_000_000
    pool_tokens: int = 1024
    pools: int = 4
    joined: int = 1
    learning_rate: float = 8e-4
    most_passages: int = 16
    workers: int = 0
    seed: int = 0

    def on(self, model: HuggingFacePassageModel) -> ReadingOptions:
        """Options for a GPU: its free memory and the budget limit a forward pass's pools."""
        if model.device.type != "cuda":
            return self
        shape, (free, _) = model.shape, torch.cuda.mem_get_info(model.device)
        fitting = free // (_ACTIVATIONS * shape.num_layers * shape.hidden_size)
        joined = max(1, min(fitting, self.tokens // _STEPS) // self.pool_tokens)
        pools, workers = max(self.pools, joined), min(8, os.cpu_count() or 1)
        return replace(self, joined=joined, pools=pools, workers=workers)


class Pack:
    """Examples packed into one forward pass; a passage that several of them read is in it once."""

    def __init__(
        self, model: HuggingFacePassageModel, examples: Sequence[Composed], *, as_text: bool
    ) -> None:
        """as_text: put the passages into the prompt as text. All tensors are on the CPU."""
        ids = list[int]()

        def put(tokens: Sequence[int]) -> range:
            ids.extend(tokens)
            return range(len(ids) - len(tokens), len(ids))

        prefix, passages = put(model.prefix_ids), dict[int, range]()
        rows: list[list[range]] = []  # of each example: prefix, passages, question and answer
        targets, answering = list[int](), list[int]()
        self.counts: list[int] = []  # tokens of each answer
        for one in examples:
            turn, _ = model.turn_ids(one.question, first=True)
            answer = [*model.tokenizer.encode(one.answer), model.end_of_turn]
            apart, before = ((), one.passages) if as_text else (one.passages, ())
            for passage in apart:
                if id(passage) not in passages:
                    passages[id(passage)] = put(passage)
            own = put([*chain(*before), *model.separator_ids, *turn, *answer[:-1]])
            rows.append([prefix, *(passages[id(passage)] for passage in apart), own])
            targets += answer
            self.counts.append(len(answer))
            answering += own[-len(answer) :]  # whose next token is a target
        self.ids, self.targets = torch.tensor([ids]), torch.tensor(targets)
        self.answering = torch.tensor(answering)
        self.of_passages = torch.zeros(1, len(ids), 1)
        self.of_passages[:, [*chain(*passages.values())]] = 1
        alone = [[prefix], *([prefix, span] for span in passages.values())]
        by_width = groupby(sorted(rows, key=_width), _width)  # at most half of a batch is padding
        self._rows = [_Rows(some, len(ids)) for some in (alone, *(list(g) for _, g in by_width))]
        computed = torch.cat([rows.tokens.flatten() for rows in self._rows])
        self._place = torch.empty(len(ids) + 1, dtype=torch.int64)
        self._place[computed] = torch.arange(len(computed))  # the last one is of -1, padding

    def to(self, device: torch.device) -> None:
        for part in (self, *self._rows):
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(device))

    def attend(
        self, model: HuggingFacePassageModel, layer_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], not rotated -> [1, H, T, D]."""
        found = [rows.attended(model, layer_idx, q, k, v) for rows in self._rows]
        return torch.cat(found, 1)[None, :, self._place[:-1]]


def _width(row: Sequence[range]) -> int:
    return sum(map(len, row)).bit_length()


class _Rows:
    """Rows of a pack as a batch with padding on the left. The last span of a row attends causally
    to the whole row, with queries and keys at consecutive positions.
    """

    def __init__(self, rows: Sequence[Sequence[range]], total: int) -> None:
        """rows: of each row, the spans of its tokens, of `total` in the pack."""
        parts = [[torch.arange(span.start, span.stop) for span in row] for row in rows]
        # whose attention is computed, and what they attend to; -1 for padding
        self.tokens = pad_sequence([row[-1] for row in parts], True, -1, "left")
        columns = pad_sequence([torch.cat(row) for row in parts], True, -1, "left")
        self._seen = columns >= 0
        # Padding is read from everywhere: the gradient of a token that is read very often is slow.
        spread = torch.arange(columns.numel()).view_as(columns) % total
        self._columns = torch.where(self._seen, columns, spread)
        self._masks: dict[int | None, Tensor] = {}  # by window, [rows, 1, longest, width]

    def attended(
        self, model: HuggingFacePassageModel, layer_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D], not rotated -> [H, rows * longest, D]."""
        longest, width = self.tokens.shape[1], self._columns.shape[1]
        spec = model.forms[layer_idx]
        queries = q[0][:, self._columns[:, -longest:]].transpose(0, 1)  # [rows, H, longest, D]
        keys, values = (x[0][:, self._columns].transpose(0, 1) for x in (k, v))
        queries = model.rotate(layer_idx, queries, range(width - longest, width))
        keys = model.rotate(layer_idx, keys, range(width))
        if spec.window not in self._masks:
            at = torch.arange(width, device=q.device)
            distance = at[-longest:, None] - at
            near = (distance >= 0) & (distance < (spec.window or width))
            # padding sees itself, since a softmax needs something
            self._masks[spec.window] = near & self._seen[:, None, None] | (distance == 0)
        found = attention(queries, keys, values, spec, self._masks[spec.window])
        return found.transpose(0, 1).flatten(1, 2)


@dataclass(eq=False)
class Steps(Dataset[list[list[Pack]]]):
    """The forward passes of optimizer steps by number, without end: a resumed run draws what an
    uninterrupted one would. A writer's pack comes with its teacher's: the same examples as text.
    """

    model: HuggingFacePassageModel
    kind: Kind
    examples: Examples
    options: ReadingOptions

    def __getitem__(self, step: int) -> list[list[Pack]]:
        options, rng = self.options, Random(f"{self.options.seed} {step}")
        drawn = self.examples.pools(rng, options.pool_tokens, options.most_passages)
        as_text = self.kind == "both" and rng.random() < _AS_TEXT
        forms = (False, True) if self.kind == "writer" else (as_text,)
        pools = list(islice(drawn, options.pools))
        if as_text:  # where nothing is shared
            pools = [[o for o in some if len(o.passages) <= 4][:_TEXTS] for some in pools]
        starts = range(0, len(pools), options.joined)
        joined = (list(chain(*pools[at : at + options.joined])) for at in starts)
        parts = [part for part in joined if part]
        return [[Pack(self.model, part, as_text=form) for form in forms] for part in parts]


class Reading:
    """A model with a trainable adapter: its loss, optimizer and checkpoint."""

    def __init__(self, model: HuggingFacePassageModel, adapter: ReadingAdapter) -> None:
        self.model, self.adapter = model, adapter
        model.model.requires_grad_(False)
        self.weights = torch.nn.ParameterList(attach_adapter(model.model, adapter, torch.float32))
        self.optimizer = torch.optim.AdamW(self.weights, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = self.seen = self.asked = 0  # optimizer steps, tokens; questions of this run

    def logits(self, pack: Pack, *, stock: bool = False) -> Tensor:
        """Logits [answer tokens, vocabulary] of a pack. stock: without the adapter."""
        pack.to(self.model.device)
        adapt: bool | Tensor = not stock
        if adapt and self.adapter.kind == "writer":
            adapt = pack.of_passages.to(self.model.dtype)
        states = self.model.hidden(pack.ids, partial(pack.attend, self.model), adapt=adapt)
        return self.model.logits(states[0, pack.answering])

    def loss(self, pack: Pack, text: Pack | None = None) -> Tensor:
        """Mean loss over answer tokens: cross-entropy; for a writer, the KL divergence from the
        stock model, which reads the same passages as text.
        """
        if text is None:
            return cross_entropy(self.logits(pack), pack.targets)
        with torch.no_grad():
            told = self.logits(text, stock=True)
        found = log_softmax(self.logits(pack), -1)
        return kl_div(found, log_softmax(told, -1), log_target=True, reduction="batchmean")

    @torch.no_grad()
    def validate(self, packs: Sequence[Sequence[Composed]]) -> dict[str, float]:
        """Share of answers that greedy decoding reproduces exactly ("right"). An adapter of kind
        "both" gets the threshold of doubt that refuses a tenth of the answerable questions here;
        "unanswerable refused" is the share of unanswerable ones that it refuses.
        """
        right = list[bool]()
        doubts: dict[bool, list[float]] = {True: [], False: []}  # by whether there is an answer
        unknown = self.model.tokenizer.encode(UNKNOWN)[0]
        for examples in packs:
            pack = Pack(self.model, examples, as_text=False)
            logits, targets = (x.split(pack.counts) for x in (self.logits(pack), pack.targets))
            for one, scores, wanted in zip(examples, logits, targets):
                answered = one.answer != UNKNOWN
                doubts[answered].append(float(scores[0].softmax(-1)[unknown]))
                if answered:
                    scores[0, unknown] = -torch.inf
                    right.append(bool((scores.argmax(-1) == wanted).all()))
        found = {"right": sum(right) / max(1, len(right))}
        if self.adapter.kind == "both" and doubts[True]:
            self.adapter.refuse_above = above = float(torch.tensor(doubts[True]).quantile(0.9))
            refused = sum(one > above for one in doubts[False])
            found["unanswerable refused"] = refused / max(1, len(doubts[False]))
        return found

    def learn(self, passes: Sequence[Sequence[Pack]], rate: float) -> float:
        """Take an optimizer step; return its loss. rate: learning rate after 20 warm-up steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / 20)
        total, drawn = 0.0, sum(len(pack.counts) for pack, *_ in passes)
        self.asked += drawn
        for packs in passes:
            loss = self.loss(*packs) * (len(packs[0].counts) / drawn)
            loss.backward()
            total += float(loss.detach())
            self.seen += packs[0].ids.numel()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def save(self, path: Path) -> None:
        """Write a checkpoint. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"weights": self.weights.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_state(path, state | {"step": self.step, "seen": self.seen})

    def restore(self, path: Path) -> None:
        """Load a checkpoint. Raises InvalidInput if it is damaged or of another adapter."""
        state = read_state(path)
        try:
            self.weights.load_state_dict(state["weights"])
        except (KeyError, RuntimeError):
            raise InvalidInput(f"{path} is of another adapter; remove it") from None
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen = state["step"], state["seen"]


def adapt_reading(
    model: HuggingFacePassageModel,
    contexts: Sequence[AskedContext],
    kind: Kind,
    work: Path,
    options: ReadingOptions,
    report: Callable[[str], None] = lambda line: None,
) -> ReadingAdapter:
    """Train a reading adapter for a model on questions; continues with the model's adapter of this
    kind, if it has one. A twentieth of the titles is held out, and the scores of their questions
    are stored in the adapter.

    work: directory of checkpoints; an interrupted run resumes there. Raises InvalidInput for
    questions of fewer than two titles or without answers, for texts that are all longer than a
    pool, and for a checkpoint of another adapter.
    """
    parts = split_titles(contexts, options.seed)
    asking, checking = (sum(len(one.questions) for one in part) for part in parts)
    few = "" if checking >= _ENOUGH else " (few, so the scores are rough)"
    report(f"{asking:,} questions to train on, {checking:,} held out{few}; splitting their texts")
    options, (learned, held_out) = options.on(model), [Examples(part, model) for part in parts]
    long = sum(text.tokens > options.pool_tokens for text in learned.texts)
    if long:
        report(f"{long:,} texts of over {options.pool_tokens:,} tokens are left out; split them")
    limits = options.pool_tokens, options.most_passages
    next(learned.pools(Random(1), *limits))  # raises its error here and not in a worker
    check = list(islice(held_out.pools(Random(1), *limits), _CHECKED))
    adapter = model.adapter
    if adapter is None or adapter.kind != kind:
        adapter = ReadingAdapter.untrained(model.model, _RANK, options.seed, kind)
        adapter.separator = model.tokenizer.decode(model.separator_ids)
    adapter.weights = (model.signature.weights,)
    reading, path = Reading(model, adapter), work / f"{kind}.pt"
    if path.is_file():
        reading.restore(path)
        done = f"{reading.seen:,} of {options.tokens:,} tokens are done"
        report(f"resuming at step {reading.step}: {done}; remove {path} to begin again")
    steps = DataLoader(
        Steps(model, kind, learned, options),
        batch_size=None,
        sampler=count(reading.step),
        num_workers=options.workers,
    )
    before, losses = reading.seen, deque[float](maxlen=40)
    began = saved = time.monotonic()
    try:
        for passes in steps:
            if reading.seen >= options.tokens:
                break
            share = reading.seen / options.tokens
            cosine = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share))
            losses.append(reading.learn(passes, options.learning_rate * cosine))
            if reading.step % 10 == 0:
                rate = (reading.seen - before) / (time.monotonic() - began)
                report(
                    f"step {reading.step}: loss {fmean(losses):.3f}, {reading.asked:,} questions, "
                    f"{reading.seen:,} tokens, {rate:,.0f} a second, "
                    f"{(options.tokens - reading.seen) / rate / 60:,.0f} minutes left"
                )
            if time.monotonic() - saved > _EVERY:
                reading.save(path)
                report(str(reading.validate(check)))
                saved = time.monotonic()
    finally:  # also on Ctrl-C
        reading.save(path)
    adapter.scores = reading.validate(check)
    if before < options.tokens:  # else this run had ended before, and was counted
        adapter.tokens += reading.seen
    return adapter
