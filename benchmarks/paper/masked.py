"""Does an encoder by landmarks learn to fill in what is masked (the paper's appendix F), and do a
few retrieved blocks do as well as all?

Trains on windows of 8 blocks of the texts of --books, 15% of whose tokens are masked, and says as
it goes how well masked tokens of --test are guessed: perplexity, and the share that is right, with
every token and head reading its own block and all others, or the best --top-k of them alone. The
same tokens are masked every time.

    python -m benchmarks.paper.masked --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst
"""

import argparse
import math
import time
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.common.text import Books
from benchmarks.paper.encoder import Encoder
from benchmarks.paper.runs import parser, shared_tokens
from memstore.errors import InvalidInput
from memstore.freed_memory import keep_freed_memory
from memstore.model.landmark.transformer import PRESETS
from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import TokenCorpus
from memstore.training.optimizer import make_optimizers
from memstore.training.train import update

BLOCKS = 8
SHARE = 0.15  # of tokens that are masked
LR, MUON_LR, WARMUP = 3e-3, 0.02, 50


def masked(model: Encoder, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The texts with tokens masked, and where [B, n] bool."""
    where = torch.rand(ids.shape, generator=generator) < SHARE
    return ids.masked_fill(where, model.mask_id), where


def loss_of(
    model: Encoder, ids: Tensor, given: Tensor, where: Tensor, top_k: int | None = None
) -> tuple[Tensor, float]:
    """Mean cross entropy of what is masked, and the share that is right."""
    logits = model.logits(model.encode(given, top_k)[where]).float()
    right = (logits.detach().argmax(-1) == ids[where]).float().mean()
    return F.cross_entropy(logits, ids[where]), float(right)


@torch.no_grad()
def test(model: Encoder, ids: Tensor, top_k: int | None) -> dict[str, float]:
    """Of texts [B, n], always masked alike."""
    given, where = masked(model, ids, torch.Generator().manual_seed(1))
    loss, right = loss_of(model, ids, given, where, top_k)
    return {"perplexity": math.exp(float(loss)), "right": right}


def train(options: argparse.Namespace, model: Encoder, corpus: TokenCorpus, held: Tensor) -> Any:
    """Rows of what was found while training, a row every --every steps."""
    rng, generator = Random(options.seed), torch.Generator().manual_seed(options.seed)
    optimizers = make_optimizers(model, LR, MUON_LR)
    groups = [(group, group["lr"]) for one in optimizers for group in one.param_groups]
    tokens, length = np.asarray(corpus.tokens), held.shape[1]
    rows: list[dict[str, Any]] = []
    losses: list[float] = []
    began = time.process_time()
    for step in range(options.steps + 1):
        if step % options.every == 0 or step == options.steps:
            row: dict[str, Any] = {"step": step, "loss": float(np.mean(losses)) if losses else None}
            row |= {str(k or "all"): test(model, held, k) for k in [None, *options.top_k]}
            rows.append(row | {"seconds": time.process_time() - began})
            losses = []
            whole = row["all"]
            print(
                f"  step {step}: perplexity of masked tokens {whole['perplexity']:.1f}, "
                f"{whole['right']:.3f} right",
                flush=True,
            )
        if step == options.steps:
            break
        places = [corpus.offset(rng, length) for _ in range(options.batch)]
        ids = torch.tensor(np.stack([tokens[at : at + length] for at in places]).astype(np.int64))
        given, where = masked(model, ids, generator)
        factor = min(1.0, (step + 1) / WARMUP) * max(0.03, 1 - step / options.steps)
        for group, rate in groups:
            group["lr"] = rate * factor
        loss, _ = loss_of(model, ids, given, where)
        update(model, optimizers, loss)
        losses.append(float(loss.detach()))
    return rows


def report(rows: list[dict[str, Any]], top_k: list[int]) -> str:
    """The table: a row a measuring."""
    names = ["all", *map(str, top_k)]
    lines = [
        [row["step"], "" if row["loss"] is None else f"{row['loss']:.3f}"]
        + [f"{row[name]['perplexity']:.2f} ({row[name]['right']:.3f})" for name in names]
        for row in rows
    ]
    return table(["step", "loss", *(f"{name} blocks (right)" for name in names)], lines)


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--batch", 16, "windows a step")
    add(arguments, "--every", 100, "steps between measurings")
    add(arguments, "--top-k", [1, 2, 4], "blocks retrieved, beside all")
    options = arguments.parse_args()
    if not options.books or not options.test:
        raise InvalidInput("name texts to train on (--books) and to measure with (--test)")
    prepare(options.threads)
    keep_freed_memory()
    config = PRESETS[options.preset]
    shared = shared_tokens(options.runs, "books", options.books, config.vocab_size)
    tokenizer = Tokenizer.load(shared / "tokenizer.json")
    corpus = TokenCorpus.build(options.books, tokenizer, shared)
    books = Books.read([str(path) for path in options.test], tokenizer, shared)
    rng = Random(f"masked {options.seed}")
    length = BLOCKS * config.block_size
    held = torch.tensor(np.stack([books.place(rng, length) for _ in range(options.texts)]))
    model = Encoder(config)
    model.initialise(torch.Generator().manual_seed(options.seed))
    rows = train(options, model, corpus, held)
    print("\n" + report(rows, options.top_k))
    write(options, {"rows": rows})


if __name__ == "__main__":
    start(main)
