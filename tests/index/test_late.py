"""Late interaction: maxima over the tokens of each block equal plain products, for any scope and
after any additions and removals.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.errors import DocumentNotFound
from memstore.index.late_interaction import INT8_STEPS, TokenIndex

WIDTH = 16


def landmarks(tokens: int, seed: int = 0) -> Tensor:
    """Unit vectors int8 [tokens, WIDTH], as an index holds them."""
    random = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(random, dim=-1)
    return (unit * INT8_STEPS).round().to(torch.int8)


def queries(rows: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(99))


def check(found: TokenIndex, scope: list[tuple[int, int, int]], blocks: list[Tensor]) -> None:
    """Compare the maxima of a scope with products in float64. blocks: landmarks of each block."""
    q, maxima = queries(), found.maxima(queries(), scope)
    assert maxima.shape == (len(q), len(blocks)) and maxima.dtype == torch.float32
    for best, own in zip(maxima.T, blocks):
        products = q.double() @ (own.double() / INT8_STEPS).T
        torch.testing.assert_close(best.double(), products.amax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 80_003])
def test_maxima_are_those_of_the_plain_product(tokens: int) -> None:
    held, found = landmarks(tokens), TokenIndex(WIDTH)
    each = list(held.split(16))
    found.add(3, held, [len(block) for block in each])
    check(found, [(3, 0, len(each))], each)


@settings(max_examples=60)
@given(data=st.data())
def test_maxima_are_right_after_any_additions_and_removals(data: st.DataObject) -> None:
    found, there = TokenIndex(WIDTH), dict[int, list[Tensor]]()
    for step in range(data.draw(st.integers(1, 20))):
        document = data.draw(st.integers(1, 5))
        if document in there and data.draw(st.booleans()):
            found.remove(document)
            del there[document]
            continue
        sizes = data.draw(st.lists(st.integers(1, 40), max_size=9))
        held = landmarks(sum(sizes), step)
        found.add(document, held, sizes)
        there[document] = list(held.split(sizes))
    scope, wanted = [], list[Tensor]()
    for document in data.draw(st.permutations(sorted(there))):
        blocks = there[document]
        first = data.draw(st.integers(0, len(blocks)))
        end = data.draw(st.integers(first, len(blocks)))
        scope.append((document, first, end))
        wanted += blocks[first:end]
        with pytest.raises(DocumentNotFound):
            found.maxima(queries(), [(document, first, len(blocks) + 1)])
    check(found, scope, wanted)
    with pytest.raises(DocumentNotFound):
        found.maxima(queries(), [(6, 0, 1)])


def test_removed_documents_free_their_space() -> None:
    found, held = TokenIndex(WIDTH), landmarks(64)
    for document in range(1, 30):
        found.add(document, held, [16] * 4)
        found.remove(document - 2)
    check(found, [(29, 0, 4)], list(held.split(16)))
    assert found.bytes < 29 * 64 * WIDTH
