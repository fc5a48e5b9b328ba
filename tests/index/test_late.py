"""Late interaction: the maxima over each block's tokens are those of the plain product, whatever
the scope, and the documents that came and went.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.disk.format.text_parts import equal_lengths
from memstore.errors import DocumentNotFound
from memstore.index.late_interaction import INT8_STEPS, TokenIndex

WIDTH, BLOCK = 16, 16


def landmarks(tokens: int, seed: int = 0) -> Tensor:
    """Unit vectors int8 [tokens, WIDTH], as an index holds them."""
    random = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(random, dim=-1)
    return (unit * INT8_STEPS).round().to(torch.int8)


def add(found: TokenIndex, document: int, first: int, held: Tensor) -> None:
    """Blocks of BLOCK tokens, the last of which may be short."""
    found.add(document, first, held, equal_lengths(len(held), BLOCK))


def queries(rows: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(99))


def direct(q: Tensor, held: Tensor) -> Tensor:
    """The maxima in float64, block by block."""
    products = q.double() @ (held.double() / INT8_STEPS).T
    return torch.stack([part.amax(-1) for part in products.split(BLOCK, dim=1)], dim=1)


@pytest.mark.parametrize("tokens", [1, 5000 * BLOCK + 3])
def test_maxima_are_those_of_the_plain_product(tokens: int) -> None:
    held, q, found = landmarks(tokens), queries(), TokenIndex(WIDTH)
    add(found, 3, 0, held)
    blocks = -(-tokens // BLOCK)
    maxima = found.maxima(q, [(3, 0, blocks)])
    assert maxima.dtype == torch.float32
    torch.testing.assert_close(maxima.double(), direct(q, held), atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), max_size=9), min_size=1, max_size=6),
    data=st.data(),
)
def test_blocks_of_any_lengths_are_judged_by_their_own_tokens(
    lengths: list[list[int]], data: st.DataObject
) -> None:
    found, q, each = TokenIndex(WIDTH), queries(), []
    for number, some in enumerate(lengths):
        held = landmarks(sum(some), number)
        found.add(1, len(each), held, some)
        found.add(2 + number, 0, held, some)
        each += held.split(some)
    first = data.draw(st.integers(0, len(each)))
    end = data.draw(st.integers(first, len(each)))
    wanted = each[first:end]
    maxima = found.maxima(q, [(1, first, end)])
    assert maxima.shape == (len(q), len(wanted))
    for best, own in zip(maxima.T, wanted):
        torch.testing.assert_close(
            best, (q @ (own.float() / INT8_STEPS).T).amax(-1), atol=1e-5, rtol=1e-5
        )


def test_what_was_dropped_is_not_found_and_the_rest_stays_right() -> None:
    found, q = TokenIndex(WIDTH), queries()
    for document in range(1, 30):
        add(found, document, 0, landmarks(4 * BLOCK, document))
        if document > 2:
            found.remove(document - 1)
    assert found.span(1) == (0, 4) and found.span(28) == (0, 0) and found.span(29) == (0, 4)
    for gone in ([(28, 0, 1)], [(1, 1, 5)], [(77, 0, 1)]):
        with pytest.raises(DocumentNotFound):
            found.maxima(q, gone)
    again = landmarks(3 * BLOCK, 50)
    add(found, 1, 4, again)
    expected = torch.cat([direct(q, landmarks(4 * BLOCK, 1)), direct(q, again)], dim=1)
    torch.testing.assert_close(
        found.maxima(q, [(1, 0, 7)]).double(), expected, atol=1e-5, rtol=1e-5
    )
    assert found.bytes < 29 * 4 * BLOCK * WIDTH, "what is gone takes room for ever"


def test_threads_search_while_documents_come_and_go() -> None:
    found, q, held = TokenIndex(WIDTH), queries(), landmarks(50 * BLOCK)
    add(found, 1, 0, held)
    expected, wrong, done = direct(q, held), [], threading.Event()

    def search() -> None:
        while not done.is_set():
            if not torch.allclose(found.maxima(q, [(1, 0, 50)]).double(), expected, atol=1e-4):
                wrong.append("a maximum")

    thread = threading.Thread(target=search)
    thread.start()
    for number in range(2, 200):
        add(found, number, 0, held)
        found.remove(number - 1 if number > 2 else 77)
    done.set()
    thread.join()
    assert not wrong
