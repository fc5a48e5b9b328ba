"""Does a device give the results of the CPU? Compares copies of units and the answers of both kinds
of models, and runs the tests of this repository that use a device.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.part import Case, Row, Setting
from memstore.kernels.slab_copy import load_units
from memstore.model.session import StepReads
from memstore.store.open_options import OpenOptions

ROOT = Path(__file__).parents[2]
TESTS = {
    "memory kernels": ["tests/kernels/test_memory_kernels.py"],
    "grouped softmax": ["tests/kernels/test_grouped_softmax.py"],
    "training": ["tests/training/test_training.py", "-k", "gpu"],
}
TEXT = (
    "The combination of the lime barn is 4711. The harbour was quiet in the evening. "
    "An old man walked slowly along the river and spoke of the weather. "
)
QUESTION = " What is the combination of the lime barn? The combination of the lime barn is"


def cases(setting: Setting) -> list[Case]:
    found: list[Case] = [
        ("copies", partial(copies, setting)),
        ("answers", partial(answers, setting)),
    ]
    if not setting.tiny:
        found += [(f"passages, heads of {n}", partial(passages, setting, n)) for n in (64, 256)]
        found.append(("passages, adapted", partial(passages, setting, 64, adapted=True)))
        found += [(f"tests, {name}", partial(tested, name, args)) for name, args in TESTS.items()]
    return found


def tested(name: str, arguments: list[str]) -> Iterator[Row]:
    """One line of pytest's, and which failed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    running = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(running.stdout, flush=True)
    said = running.stdout.strip().splitlines() or ["nothing said"]
    failed = [line.removeprefix("FAILED ")[:120] for line in said if line.startswith("FAILED ")]
    note = "; ".join([said[-1].strip("= "), *failed[:6]])
    yield Row(f"tests: {name}", "pytest", right=running.returncode == 0, note=note)


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


def passages(setting: Setting, dim: int, *, adapted: bool = False) -> Iterator[Row]:
    """A Hugging Face decoder of random weights in float32: which passages it chooses, how much it
    attends to each, and the logits of an answer's tokens, on the device as on the CPU; and is a
    passage computed alike, to the rounding of float16, alone and with others?
    """
    from benchmarks.common.random_decoder import SHAPES, made_up_words, random_decoder
    from memstore import MemoryStore
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.hf.reading_adapter import ReadingAdapter
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.passage_encoding import encode
    from memstore.model.passages.selector import Selector

    shape = SHAPES["tiny"] | {"head_dim": dim}
    cpu = torch.device("cpu")
    model, tokenizer = random_decoder(shape, 8192, cpu, torch.float32, setting.seed)
    adapter = None
    if adapted:  # a GPU reads questions with weights that it is merged into
        adapter = ReadingAdapter.untrained(model, 8, setting.seed)
        for name, (a, b) in adapter.pairs.items():
            adapter.pairs[name] = a, 0.02 * torch.randn_like(b)
    text = made_up_words(60 if setting.tiny else 2000, setting.seed)
    question = " ".join(text.split()[20:28])
    told = []
    for device in ("cpu", setting.device):
        reader = HuggingFacePassageModel(
            model.to(device),
            tokenizer,
            Adaptation(Selector(), top_k=4),
            adapter=adapter,
            weights=f"random {dim}",
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
    what = f"{len(chosen)} passages read, heads of {dim}{', with an adapter' * adapted}"
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
