"""Are the kernels right on this device? Against their references in float64, on fresh random
inputs; and does a model there answer from a memory as one on the CPU does?

A kernel may err twice as much as the reference does in the kernel's own dtype; of few numbers that
may be luckily little, so eight units in the last place of the largest are never too much.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.gpu.windows import Gates, Windows
from memstore.kernels import (
    reference_grouped_softmax,
    reference_landmark_topk,
    reference_memory_attention,
)
from memstore.kernels.slab_copy import load_units
from memstore.kernels.types import LocalAttention
from memstore.model.session import StepReads
from memstore.store.open_options import OpenOptions

TEXT = (
    "The combination of the lime barn is 4711. The harbour was quiet in the evening. "
    "An old man walked slowly along the river and spoke of the weather. "
)
QUESTION = " What is the combination of the lime barn? The combination of the lime barn is"


def cases(setting: Setting) -> list[Case]:
    found: list[Case] = [("copies", partial(copies, setting))]
    dtypes = [torch.float32] if setting.tiny else [torch.bfloat16, torch.float16, torch.float32]
    for dtype in dtypes:
        for rows in (1, 3 if setting.tiny else 256):
            name = f"{rows} tokens, {str(dtype)[6:]}"
            found.append((f"search, {name}", partial(search, setting, dtype, rows)))
            found.append((f"attention, {name}", partial(attention, setting, dtype, rows)))
    found.append(("answers", partial(answers, setting)))
    for dim in () if setting.tiny else (64, 256):  # tests try them on a stand-in
        found.append((f"passages, heads of {dim}", partial(passages, setting, dim)))
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    windows = [(63, 128, bf16), (50, 128, bf16), (50, 64, fp16), (32, 64, bf16), (127, 96, bf16)]
    for size, dim, dtype in [(7, 16, fp32)] if setting.tiny else [*windows, (50, 64, fp32)]:
        name = f"grouped softmax, {size} + 1 x {dim}, {str(dtype)[6:]}"
        found.append((name, partial(grouped_softmax, setting, dtype, size, dim)))
    return found


def judged(
    what: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> Row:
    """The largest errors of several results, and whether all are as small as they may be."""
    right, told = True, []
    for name, result in found.items():
        error = float((result.double() - exact[name]).abs().max())
        its = float((own[name].double() - exact[name]).abs().max())
        least = 8 * torch.finfo(own[name].dtype).eps * float(exact[name].abs().max())
        right &= error <= max(2 * its, least)  # not of NaN
        told.append(f"{name} {error:.1e} ({its:.1e})")
    return Row(what, "ours", right=right, note=f"error (the reference's): {', '.join(told)}")


def grouped_softmax(setting: Setting, dtype: torch.dtype, size: int, dim: int) -> Iterator[Row]:
    """Output and gradients, with the gate and without."""
    from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention
    from memstore.kernels.triton_grouped_softmax_tile import supports

    length = 20 if setting.tiny else 2000
    for gated in (True,) if setting.tiny else (False, True):
        heads = (2, 1) if setting.tiny else (4, 2)
        windows = Windows(size, length, dim, *heads, setting.device, gated)
        tensors, options = windows.tensors(dtype)
        what = f"grouped softmax, {size} + 1 x {dim}, {str(dtype)[6:]}"
        what += ", gate" if gated else ""
        if not supports(tensors[0], tensors[1], size):
            yield Row(what, note="goes to torch")
            continue
        do = torch.randn_like(tensors[0])

        def learned(
            attend: Any,
            kind: torch.dtype,
            tensors: Sequence[Tensor] = tensors,
            options: Gates = options,
            do: Tensor = do,
        ) -> dict[str, Tensor]:
            given = [x.detach().to(kind).requires_grad_() for x in tensors]
            others = options.copy()
            if "k_cmt" in options:
                others["k_cmt"] = options["k_cmt"].to(kind)
            output = attend(*given, size, **others)
            gradients = torch.autograd.grad(output, given, do.to(kind))
            return {"out": output.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}

        reference = reference_grouped_softmax.grouped_softmax_attention
        yield judged(
            what,
            learned(grouped_softmax_attention, dtype),
            learned(reference, dtype),
            learned(reference, torch.float64),
        )


def search(setting: Setting, dtype: torch.dtype, rows: int) -> Iterator[Row]:
    """The best scores and the log-sum over all, by how many are wanted."""
    from memstore.kernels.triton_landmark_topk import landmark_topk

    n, heads, dim = (60, (2, 1), 16) if setting.tiny else (30_000, (8, 2), 128)
    for best in (4,) if setting.tiny else (4, 64):
        keys = torch.randn(heads[1], n, dim, device=setting.place).to(dtype)
        q = (torch.randn(heads[0], rows, dim, device=setting.place) * dim**-0.5).to(dtype)
        ranges = [(n // 2 + 3, n), (1, n // 3)]
        reference = reference_landmark_topk.landmark_topk
        named = []
        for by, kind in ((landmark_topk, dtype), (reference, dtype), (reference, torch.float64)):
            top = by(q.to(kind), keys.to(kind), ranges, best, return_lse=True)
            assert top.lse is not None
            named.append({"scores": top.scores, "lse": top.lse})
        yield judged(f"search, {rows} tokens, best {best} of {n}, {str(dtype)[6:]}", *named)


def attention(setting: Setting, dtype: torch.dtype, rows: int) -> Iterator[Row]:
    """By rows that choose for themselves and alike."""
    from memstore.kernels.triton_memory_attention import memory_attention

    slots, size, dim, heads = (9, 7, 16, 2) if setting.tiny else (512, 63, 128, 8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.place).to(dtype)

    slab = normal(slots, 2, size, dim)
    lengths = torch.randint(1, size + 1, (slots,), device=setting.place)
    slab.masked_fill_(
        (torch.arange(size, device=setting.place) >= lengths[:, None])[:, None, :, None], 0
    )
    for alike in (False, True) if rows > 1 else (False,):
        shape = (1, heads, 1 if alike else rows, 4)
        chosen = torch.randint(-1, slots, shape, device=setting.place)
        gate = torch.rand(1, heads, rows, device=setting.place)
        local = LocalAttention(normal(1, heads, rows, dim), gate, normal(1, heads, rows).float())
        q, marks = normal(1, 1, heads, rows, dim) * dim**-0.5, normal(1, heads, rows, 4)
        reference, named = reference_memory_attention.memory_attention, []
        for by, kind in ((memory_attention, dtype), (reference, dtype), (reference, torch.float64)):
            wide = (
                LocalAttention(local.output.double(), gate.double(), local.lse.double())
                if kind == torch.float64
                else replace(local)
            )
            keys, values = slab.to(kind).unbind(1)
            turns = torch.zeros_like(chosen)
            output, _ = by(
                q.to(kind), keys, values, lengths, chosen, turns, marks.to(kind), wide, gated=True
            )
            named.append({"out": output})
        what = f"attention, {rows} tokens{' alike' if alike else ''}, {str(dtype)[6:]}"
        yield judged(what, *named)


def copies(setting: Setting) -> Iterator[Row]:
    """Units from page-locked slots to a device's while it computes: the same bits, though the host
    writes over its slots as soon as they are said to be there.
    """
    room, unit = (16, (2, 7, 16)) if setting.tiny else (4096, (2, 63, 128))
    host = torch.empty(room, *unit, dtype=torch.float16, pin_memory=setting.cuda)
    product = torch.randn(64 if setting.tiny else 4096, 64, device=setting.place)
    for by, triton in (("the kernel", True), ("a copy a run", False)):
        there = torch.full_like(host.normal_(), float("nan"), device=setting.place)
        taken, given = (torch.randperm(room)[: room // 2].tolist() for _ in range(2))
        expected = host[taken]
        for _ in range(20):
            product = (product @ product.T @ product).clamp(-1, 1)
        loaded = load_units(host, there, taken, given, triton=triton)
        if loaded is not None:
            loaded.synchronize()
        host.zero_()
        untouched = sorted(set(range(room)) - set(given))
        same = torch.equal(there[given].cpu(), expected) and there[untouched].isnan().all()
        yield Row(f"{len(taken)} units copied up while the device computes", by, right=bool(same))


def answers(setting: Setting) -> Iterator[Row]:
    """The model that ships, its memory's blocks and its own on the device, as on the CPU."""
    from memstore import MemoryStore, load_model

    text = TEXT * (2 if setting.tiny else 60)
    said: dict[str, list[str]] = {}
    for device in ("cpu", setting.device):
        model = load_model(device=device)
        with tempfile.TemporaryDirectory() as directory:
            options: OpenOptions = {}
            if device != "cpu" or setting.tiny:
                options = {"device": device, "device_budget": 32 << 20, "prefetch": "speculative"}
            with MemoryStore.create(Path(directory) / "m", model.signature, **options) as store:
                model.ingest(text, store, name="book")
                given = [model.ask(QUESTION, store, max_new_tokens=6) for _ in range(2)]
                said[f"{device} {len(said)}"] = [answer.text for answer in given]
    here, there = said.values()
    yield Row("an answer from a memory", setting.device, right=here == there, note=repr(there[0]))


def passages(setting: Setting, dim: int) -> Iterator[Row]:
    """A Hugging Face decoder of random weights in float32: which passages it chooses, how much it
    attends to each, and the logits of an answer's tokens, on the device as on the CPU; and is a
    passage computed alike, to the rounding of float16, alone and with others?
    """
    from benchmarks.common.random_decoder import SHAPES, made_up_words, random_decoder
    from memstore import MemoryStore
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.passage_encoding import encode
    from memstore.model.passages.selector import Selector

    shape = SHAPES["tiny"] | {"head_dim": dim}
    cpu = torch.device("cpu")
    model, tokenizer = random_decoder(shape, 8192, cpu, torch.float32, setting.seed)
    text = made_up_words(60 if setting.tiny else 2000, setting.seed)
    question = " ".join(text.split()[20:28])
    told = []
    for device in ("cpu", setting.device):
        reader = HuggingFacePassageModel(
            model.to(device), tokenizer, Adaptation(Selector(), top_k=4), weights=f"random {dim}"
        )
        options: OpenOptions = {}
        if device != "cpu" or setting.tiny:
            options |= {"device": device, "device_budget": 32 << 20}
        masses: list[NDArray[np.float64]] = []
        with (
            tempfile.TemporaryDirectory() as directory,
            MemoryStore.create(
                Path(directory) / "m", reader.signature, selector=reader.keeps, **options
            ) as store,
        ):
            reader.ingest(text, store, name="book")

            def keep(reads: StepReads, kept: list[NDArray[np.float64]] = masses) -> None:
                kept.append(reads.masses)

            with reader.session(store, score_range=1e9, on_read=keep) as session:
                states = [session.ask(question, lambda: None)]
                states += [
                    session.read_token(token) for token in range(300, 312)
                ]  # some by a CUDA graph
                logits = session.logits(torch.stack(states)).cpu()
                told.append((session.chosen, torch.from_numpy(np.stack(masses)), logits))
    (chosen, weighed, logits), (also_chosen, also_weighed, also_logits) = told
    right, note = chosen == also_chosen and weighed.shape == also_weighed.shape, ""
    if right:
        apart = [
            float((here - there).abs().max() / here.abs().max())
            for here, there in ((weighed, also_weighed), (logits, also_logits))
        ]
        right = max(apart) < 2e-2  # stored in float16
        note = f"attention differs by {apart[0]:.1e}, logits by {apart[1]:.1e} at most"
    what = f"{len(chosen)} passages read, heads of {dim}"
    yield Row(what, setting.device, right=right and len(chosen) > 0, note=note)
    ids = tokenizer(text)["input_ids"]
    some = [ids[at : at + 90 + at % 39] for at in range(0, len(ids) - 128, 101)]
    apart = [
        float((half - other).abs().max() / half.abs().max())
        for number, one in enumerate(encode(reader, some))
        if number % 7 == 0
        for alone in encode(reader, [some[number]])
        for half, other in ((one.k, alone.k), (one.v, alone.v))
    ]
    what = f"{len(apart) // 2} passages, heads of {dim}, computed alone and with others"
    right = len(apart) > 0 and max(apart) <= 2 * torch.finfo(torch.float16).eps
    note = f"keys and values differ by {max(apart, default=0.0):.1e} at most"
    yield Row(what, setting.device, right=right, note=note)
