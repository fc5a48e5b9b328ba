"""FAISS compared with the exact search on the device: landmark keys of one layer, one query row for
each head, as in a decoding step.
"""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.common.tables import tokens_text
from benchmarks.common.timing import timed
from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.index.engines import TOP_K, fill
from memstore.index import LandmarkIndex, Scope


def cases(setting: Setting) -> list[Case]:
    shapes = [(3000, 2, 16)] if setting.tiny else [(1 << 16, 8, 128), (1 << 18, 8, 128)]
    return [(f"{tokens_text(n)} keys", partial(searches, setting, n, h, d)) for n, h, d in shapes]


def searches(setting: Setting, n: int, heads: int, dim: int) -> Iterator[Row]:
    """The best 4 of keys in a hundred directions, which lists can tell apart."""
    centres = torch.randn(100, heads, dim)
    keys = centres[torch.randint(100, (n,))] + 0.5 * torch.randn(n, heads, dim)
    size = heads * n * dim * 4
    what = f"best {TOP_K} of {tokens_text(n)} keys x {heads} heads x {dim}"

    def asked(index: LandmarkIndex, scope: Scope) -> tuple[float, float, torch.Tensor]:
        """Seconds on the device and from Python, and what is found."""
        q = (centres[:heads].diagonal(dim1=0, dim2=1).T[:, None] * dim**-0.5).to(index.device)

        def search() -> object:
            return index.search(0, q, scope, TOP_K)

        found = index.search(0, q, scope, TOP_K).candidates.cpu()
        called = setting.meter.called(search, 2 if setting.tiny else 20)
        return setting.meter.seconds(search), called, found

    exact = None
    index: Any
    for device in dict.fromkeys((setting.device, "cpu")):
        index = LandmarkIndex(heads, dim, device=device)
        seconds, called, found = asked(index, fill(index, 0, keys.to(device), [n]))
        note = f"{1e6 * called:,.0f} µs a call from Python"
        if device == "cpu":
            yield Row(what, "exact, cpu", called, note=f"{size / called / 1e9:.3g} GB/s")
        else:
            yield Row(what, f"exact, {device}", seconds, 0, size, note=note)
        exact = found if exact is None else exact
    assert exact is not None
    if find_spec("faiss") is None:
        yield Row(what, "FAISS", note="is not installed")
        return
    import faiss

    on_gpu = setting.cuda and hasattr(faiss, "StandardGpuResources")
    for device in ("cpu", *([setting.device] if on_gpu else [])):
        index = LandmarkIndex(heads, dim, kind="auto", device=device)
        scope = fill(index, 0, keys.to(device), [n])
        index.samples = {(0, head): [keys[torch.randint(n, (64,)), head]] for head in range(heads)}
        building, _ = timed(partial(index.build, [0], TOP_K))
        _, called, found = asked(index, scope)
        among = (found[..., None] == exact[..., None, :]).any(-1).float().mean()
        note = f"recall {float(among):.2f}, built in {building:.1f} s"
        yield Row(what, f"FAISS, {device}", called, note=note)
    if not on_gpu:
        why = "faiss-gpu is not installed" if setting.cuda else "is of CUDA only"
        yield Row(what, "FAISS on a GPU", note=why)
