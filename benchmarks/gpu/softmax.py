"""Grouped softmax of whole windows, forward and backward, beside causal attention by others.

The same shapes, bfloat16, 128 dimensions: torch's scaled_dot_product_attention by its flash kernels
and by cuDNN's, FlexAttention as torch.compile makes it, and the package flash-attn where it is
installed.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.tables import tokens_text
from benchmarks.gpu.part import Case, Row, Setting

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [("48", partial(measured, setting, 48, 2, 16, (7,)))]
    lengths = (8192, 32768, 2048)
    return [(tokens_text(n), partial(measured, setting, n, 16, 128, (63, 50))) for n in lengths]


def measured(
    setting: Setting, length: int, heads: int, dim: int, blocks: tuple[int, ...]
) -> Iterator[Row]:
    """Forward and backward at one length: ours by block size, then everybody else's."""
    from memstore.kernels.triton_grouped_softmax import grouped_softmax_attention

    if setting.cuda:
        torch._dynamo.reset()  # or one shape after the other would be one too many to compile
    device, shape = setting.meter, f"{tokens_text(length)}, {heads} heads x {dim}"
    forward, backward = f"forward, {shape}", f"backward, {shape}"
    kind = torch.bfloat16 if device.cuda else torch.float32
    q, k, v, do = torch.randn(4, 1, heads, length, dim, device=device.place, dtype=kind)
    q, k, v = ((x * dim**-0.25).requires_grad_() for x in (q, k, v))
    array = q.nbytes
    # of a causal product of rows with columns
    product = 2 * heads * length**2 / 2 * dim
    calls: dict[str, Attend | str] = {
        f"ours, {size} + 1": partial(grouped_softmax_attention, block_size=size) for size in blocks
    }
    for name, attend in (calls | baselines(length, device.place)).items():
        if isinstance(attend, str):
            yield Row(forward, name, note=attend)
            continue
        try:
            output = attend(q, k, v)
            taken = device.seconds(partial(attend, q, k, v))
            yield Row(forward, name, taken, 2 * product, 4 * array)
            if not output.requires_grad:
                yield Row(backward, name, note="is of CUDA only")
                continue
            again = partial(torch.autograd.grad, output, (q, k, v), do, retain_graph=True)
            # scores, dO.V, and a gradient each; some, as ours, make two of these products twice
            yield Row(backward, name, device.seconds(again), 5 * product, 8 * array)
        except Exception as error:  # another's that does not run here does not stop ours
            if name.startswith("ours"):
                raise
            yield Row(forward, name, note=str(error).strip().partition("\n")[0][:100])


def baselines(length: int, device: torch.device) -> dict[str, Attend | str]:
    """Causal attention by others, of rows that are scaled already; or why one is not here."""
    on_cuda = device.type == "cuda"

    def by_torch(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

        return attend

    found: dict[str, Attend | str] = {
        "torch, flash": by_torch(SDPBackend.FLASH_ATTENTION),
        "torch, cuDNN": by_torch(SDPBackend.CUDNN_ATTENTION) if on_cuda else "is of CUDA only",
        "flash-attn": "is not installed" if on_cuda else "is of CUDA only",
    }
    if on_cuda and find_spec("flash_attn") is not None:

        def by_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            from flash_attn import flash_attn_func

            rows = (x.transpose(1, 2) for x in (q, k, v))
            output: Tensor = flash_attn_func(*rows, softmax_scale=1.0, causal=True)
            return output.transpose(1, 2)

        found["flash-attn"] = by_package

    @cache
    def flex() -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(
            lambda b, h, row, key: row >= key, None, None, length, length, device=str(device)
        )
        # without compilation it writes every score, which is much slower
        attend = torch.compile(flex_attention, dynamic=False) if on_cuda else flex_attention
        return partial(attend, block_mask=mask, scale=1.0)

    def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex()(*((q, k, v) if on_cuda else (x.detach() for x in (q, k, v))))

    found["FlexAttention" if on_cuda else "FlexAttention, not compiled"] = by_flex
    return found
