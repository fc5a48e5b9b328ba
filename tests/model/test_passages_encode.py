"""Encoding passages: the batch of a passage changes its keys and values by rounding alone."""

from contextlib import nullcontext
from itertools import islice

import pytest
import torch

from support.fake_device import FakeDevice
from support.tiny_decoder import decoder, learned_selector, tokenizer

pytest.importorskip("transformers")

from memstore.errors import InvalidWeights
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.repositioned_attention import RepositionedAttention
from support.rounding import TINY_MODEL, assert_same_to_rounding


def reader_of(dtype=torch.float32, device="cpu", **options):
    model = decoder("llama").to(device, dtype)
    made = HuggingFacePassageModel(model, tokenizer(), **options)
    adaptation = Adaptation(learned_selector(made), read_from=1)
    return HuggingFacePassageModel(made.model, tokenizer(), adaptation, **options)


def passages(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 129, (count,), generator=generator).tolist()
    return [torch.randint(300, 900, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "cuda")]
)
def test_a_passage_gets_the_same_keys_and_values_alone_and_in_a_batch(dtype, device):
    with nullcontext() if device == "cpu" else FakeDevice():
        reader, some = reader_of(dtype, device=device), passages(60)
        together = list(encode(reader, some))
        alone = {number: list(encode(reader, [some[number]])) for number in (0, 17, 59)}
    for number, (one,) in alone.items():
        assert one.captured.ids == some[number] == together[number].captured.ids
        # no layer reads what is below the last three
        for half, other in zip(one[:2], together[number][:2]):
            assert half.shape == (len(some[number]), 3, 2, 16)
            assert_same_to_rounding(half, other, products=TINY_MODEL, dtype=dtype)
        shown, other = one.captured.states[2], together[number].captured.states[2]
        assert_same_to_rounding(shown, other, products=TINY_MODEL)


def test_encoded_keys_and_values_equal_those_after_the_prefix():
    reader = reader_of(kv_dtype=torch.float32)
    for ids in passages(5, seed=3):
        (found,) = encode(reader, [ids])
        kept = {}
        context = RepositionedAttention(reader, reader.prefix())

        def attend(layer, q, k, v, context=context, kept=kept):
            kept[layer] = k[0], v[0]
            return context.attend(layer, q, k, v)

        with torch.no_grad():
            reader.hidden(torch.tensor([ids]), attend)
        for number, layer in enumerate(reader.shape.memory_layers):
            for half, expected in zip((found.k[:, number], found.v[:, number]), kept[layer]):
                half = half.transpose(0, 1)
                torch.testing.assert_close(half, expected, rtol=1e-4, atol=1e-4)


def test_encoding_for_the_selector_stops_at_its_layer():
    reader, some = reader_of(), passages(4)
    for whole, part in zip(encode(reader, some), encode(reader, some, layers=3)):
        assert not part.k.numel() and not part.v.numel()
        torch.testing.assert_close(part.captured.states[2], whole.captured.states[2])


def test_text_encoded_for_the_selector_can_be_longer_than_a_passage():
    ids = [token for one in passages(3) for token in one]
    assert 128 < len(ids) <= 256
    (here,) = encode(reader_of(), [ids], layers=3)
    with FakeDevice():
        (there,) = encode(reader_of(device="cuda"), [ids], layers=3)
    torch.testing.assert_close(here.captured.states[2], there.captured.states[2].cpu())


def test_values_beyond_the_stored_dtype_are_refused():
    reader = reader_of(kv_dtype=torch.float16)
    with torch.no_grad():
        reader.model.model.layers[2].self_attn.v_proj.weight.mul_(1e7)
    with pytest.raises(InvalidWeights, match="out of range"):
        list(encode(reader, passages(2)))


def test_encoding_a_stream_reads_at_most_one_batch_ahead_and_keeps_the_order():
    reader, some = reader_of(), passages(40, seed=1)
    taken = 0

    def endless():
        nonlocal taken
        while True:
            yield some[taken % len(some)]
            taken += 1

    held = 0
    for number, found in enumerate(islice(encode(reader, endless()), 200)):
        assert found.captured.ids == some[number % len(some)]
        held = max(held, sum(len(some[at % len(some)]) for at in range(number, taken)))
    assert 960 < held <= 1024
