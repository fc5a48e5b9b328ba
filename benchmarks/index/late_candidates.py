"""From how many tokens on would candidates by FAISS be worth it for late interaction?

The landmarks are those that `benchmarks.real.choice_at_1m` kept in --work, and the queries its
questions' rows. Beyond the tokens that are there, they are repeated with noise of --noise of their
length: a simulation of more text, and said to be one. Exact: products with every token
(memstore.index.late_interaction). Approximate: an inverted file over tokens (IVF, 8 bits a number),
the --nearest tokens of each row, their blocks scored again exactly. Recall: how many of the exact
best 1 and 8 blocks are among the candidates' best. Medians of milliseconds of the processor.

    python -m benchmarks.index.late_candidates --work real/ --model smollm2/ --tokens 1M 4M
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Plan
from benchmarks.real.prompting import DTYPES
from memstore.disk.format.token_parts import equal_lengths
from memstore.index.late_interaction import INT8_STEPS, TokenIndex
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.selectors.learned_selector import Learned
from memstore.model.passages.selectors.selector_sum import Sum

BLOCK, TRAINED = 64, 40  # tokens; of them for each list


def main() -> None:
    options = plain_parser(__doc__)
    options.add_argument("--work", type=Path, required=True, help="of benchmarks.real.choice_at_1m")
    options.add_argument("--model", required=True)
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    add(options, "--tokens", ["1M", "4M"])
    add(options, "--noise", 0.3, "added to what is repeated")
    add(options, "--lists", 4096)
    add(options, "--probes", [8, 32, 128], "lists that are searched")
    add(options, "--nearest", 256, "tokens of each row")
    add(options, "--questions", 60)
    given = options.parse_args()
    prepare(given.threads)
    faiss.omp_set_num_threads(given.threads)
    queries = rows_of(given)
    real = torch.cat([torch.load(file)[:, 0] for file in sorted(given.work.glob("landmarks-*.pt"))])
    found = {}
    for text in given.tokens:
        tokens = tokens_number(text)
        found[text] = measure(more(real, tokens, given.noise, given.seed), queries, given)
        kind = "" if tokens <= len(real) else f", repeated with noise beyond {len(real):,}"
        print(f"\n{tokens_text(tokens)} tokens{kind}; {report(found[text])}", flush=True)
    write_part(given, "late candidates", found)


def rows_of(given: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each question its unit vectors [T, width] and their weights [T]."""
    reader = passage_model(given.model, given.dtype)
    plan = Plan.load(next(iter(sorted(given.work.glob("choice-*.json")))))
    learned = reader.selector.parts[0][0] if isinstance(reader.selector, Sum) else reader.selector
    assert isinstance(learned, Learned)
    step, rows = (max(1, len(plan.questions) // given.questions), [])
    for question in plan.questions[::step][: given.questions]:
        ids, words = reader.turn_ids(question.text, first=True)
        rows.append(learned.rows(capture(reader, ids).part(words)))
    return rows


def more(real: Tensor, tokens: int, noise: float, seed: int) -> Tensor:
    """int8 landmarks [tokens, width]: the real ones, then the same with noise."""
    generator, parts = torch.Generator().manual_seed(seed), [real[:tokens]]
    while (missing := tokens - sum(map(len, parts))) > 0:
        some = normalize(real[:missing].float(), dim=-1)
        some += noise * normalize(torch.randn(some.shape, generator=generator), dim=-1)
        parts.append((normalize(some, dim=-1) * INT8_STEPS).round().to(torch.int8))
    return torch.cat(parts)


def measure(
    landmarks: Tensor, queries: Sequence[tuple[Tensor, Tensor]], given: Any
) -> dict[str, Any]:
    tokens, width = landmarks.shape
    index = TokenIndex(1, width, torch.int8)
    index.add(0, 0, landmarks[:, None], equal_lengths(tokens, BLOCK))
    blocks = -(-tokens // BLOCK)
    build, engine = busy(partial(built, landmarks, given))
    exact_ms, exact = [], []
    for rows, weights in queries:
        seconds, maxima = busy(partial(index.maxima, rows, 0, [(0, 0, blocks)]))
        exact_ms.append(1000 * seconds)
        exact.append((weights @ maxima).topk(8).indices.tolist())
    ways = {}
    for probes in given.probes:
        engine.nprobe = probes
        taken, first, eight, candidates = [], [], [], []
        for (rows, weights), best in zip(queries, exact):
            seconds, (chosen, count) = busy(
                partial(nearest, engine, landmarks, rows, weights, given.nearest)
            )
            taken.append(1000 * seconds)
            candidates.append(count)
            first.append(best[0] in chosen[:1])
            eight.append(len({*best} & {*chosen}) / 8)
        ways[probes] = {
            "ms": statistics.median(taken),
            "candidates": statistics.median(candidates),
            "best": float(np.mean(first)),
            "best 8": float(np.mean(eight)),
        }
    return {"exact_ms": statistics.median(exact_ms), "build_s": build, "ways": ways}


def busy(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process on the processor, and what the work returned."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def built(landmarks: Tensor, given: Any) -> Any:
    """An inverted file over all tokens."""
    width = landmarks.shape[1]
    quantizer = faiss.IndexFlatIP(width)
    engine = faiss.IndexIVFScalarQuantizer(
        quantizer,
        width,
        given.lists,
        faiss.ScalarQuantizer.QT_8bit_direct_signed,
        faiss.METRIC_INNER_PRODUCT,
        False,
    )
    chosen = torch.randperm(len(landmarks), generator=torch.Generator().manual_seed(given.seed))
    engine.train(landmarks[chosen[: TRAINED * given.lists]].float().numpy())
    for part in landmarks.split(1 << 17):
        engine.add(part.float().numpy())
    return engine


def nearest(
    engine: Any, landmarks: Tensor, rows: Tensor, weights: Tensor, count: int
) -> tuple[list[int], int]:
    """The best 8 blocks of those that have a token near to a row, and how many these are."""
    _, tokens = engine.search(rows.numpy(), count)
    blocks = torch.from_numpy(np.unique(tokens[tokens >= 0] // BLOCK))
    whole = landmarks[: len(landmarks) // BLOCK * BLOCK].view(-1, BLOCK, landmarks.shape[1])
    blocks = blocks[blocks < len(whole)]
    products = rows @ (whole[blocks].float() / INT8_STEPS).flatten(0, 1).T
    scores = weights @ products.view(len(rows), -1, BLOCK).amax(-1)
    best = scores.topk(min(8, len(scores))).indices
    return blocks[best].tolist(), len(blocks)


def report(found: dict[str, Any]) -> str:
    lines = [["exact", "", f"{found['exact_ms']:.0f}", "1", "1"]]
    for probes, way in found["ways"].items():
        numbers = [f"{way['candidates']:.0f}", f"{way['ms']:.0f}"]
        numbers += [f"{way['best']:.2f}", f"{way['best 8']:.2f}"]
        lines.append([f"{probes} lists", *numbers])
    head = ["searched", "blocks scored again", "ms", "finds the best", "of the best 8"]
    return f"the inverted file is built in {found['build_s']:.0f} s\n\n{table(head, lines)}"


if __name__ == "__main__":
    main()
