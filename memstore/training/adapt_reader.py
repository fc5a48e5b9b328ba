"""A reader as what selectors are made for: it walks rows of ids after its prefix, and shows what
was asked for.
"""

from collections.abc import Sequence

import torch

from memstore.model.compact import CompactAttention, read_prefix
from memstore.model.reader import ChoosingReader
from memstore.model.selector_file import MadeFor
from memstore.model.tap import tapping
from memstore.model.tapped import Tapped, Taps
from memstore.training.adapt import Subject


def subject_of(reader: ChoosingReader, made_for: MadeFor) -> Subject:
    """The reader, ready to be adapted; its prefix is read once. made_for: its sizes."""
    prefix = read_prefix(reader)

    @torch.no_grad()
    def walk(rows: Sequence[Sequence[int]], taps: Taps) -> list[Tapped]:
        shown = []
        for ids in rows:
            context = CompactAttention(reader, prefix)
            tapped, attend, enter = tapping(ids, taps, context.attend)
            given = torch.tensor([list(ids)], device=reader.device)
            states = reader.hidden(given, attend, layers=taps.layers, enter=enter)
            enter(taps.layers, states)
            shown.append(tapped)
        return shown

    return Subject(made_for, reader.tokenizer, walk, reader.rotate)
