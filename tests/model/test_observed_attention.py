"""Reported attention: how much the last row of a step attends to each passage."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from memstore.model.passages.repositioned_attention import RepositionedAttention
from support.tiny_decoder import of_kind, word_reader


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("parts", [[3, 1, 9], [2] * 19])  # of these more than heads are wide
@pytest.mark.parametrize("biased", [False, True])
def test_masses_are_those_of_the_softmax(kind: str, parts: list[int], biased: bool) -> None:
    """Compares masses with a float64 softmax over the held keys, with a window, a cap or biases.

    The output is the same as without observing.
    """
    reader = word_reader(of_kind(kind))
    told: list[tuple[int, Tensor, Tensor]] = []
    attention = RepositionedAttention(
        reader, reader.prefix(), lambda layer, masses: told.append((layer, masses, now[0]))
    )
    untold = RepositionedAttention(reader, reader.prefix())
    now: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now[:] = [q[:, :, -1:]]
        output = attention.attend(layer, q, k, v)
        torch.testing.assert_close(output, untold.attend(layer, q, k, v))
        return output

    shape, first = reader.shape, len(reader.prefix_ids)
    torch.manual_seed(0)
    tokens = sum(parts) + 2  # with a separator of two tokens after them
    with torch.no_grad():
        biases = [-0.5 * at for at in range(len(parts))] if biased else [0.0] * len(parts)
        bias = torch.tensor(biases).double().repeat_interleave(torch.tensor(parts))
        for one in (attention, untold):
            one.divide(parts, biases)
        for layer in range(shape.num_layers):
            size = (2, shape.num_kv_heads, tokens, shape.head_dim)
            keys_values = torch.randn(size)
            for one in (attention, untold):
                one.remember([layer], *keys_values[:, None])
        for ids in ([5, 6, 7], [8], [9] * 60, [3]):
            told.clear()
            reader.hidden(torch.tensor([ids]), attend)
            assert [layer for layer, _, _ in told] == [*range(shape.num_layers)]
            for layer, masses, q in told:
                held, spec = attention.layers[layer], reader.forms[layer]
                at = held.length
                q = reader.rotate(layer, q, range(at - 1, at)).double()
                keys = held.k[:, :, :at, : q.shape[3]].double().repeat_interleave(shape.group, 1)
                scores = (q @ keys.transpose(-1, -2))[0, :, 0] * spec.scale
                if spec.softcap is not None:
                    scores = spec.softcap * (scores / spec.softcap).tanh()
                scores[:, first : first + len(bias)] += bias
                if spec.window is not None:
                    scores[:, : max(0, at - spec.window)] = -torch.inf
                weights = scores.softmax(-1)
                ends = accumulate(parts, initial=first)
                expected = [weights[:, start:end].sum(-1) for start, end in pairwise(ends)]
                torch.testing.assert_close(
                    masses.double(), torch.stack(expected, 1), atol=1e-6, rtol=1e-5
                )
