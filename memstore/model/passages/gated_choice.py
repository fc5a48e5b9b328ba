"""Which passages a session's question reads, if any: what the selector scores best, where the gate
lets it through.
"""

from functools import partial

from memstore.index.scope import Scope
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.selectors.captured_activations import Captured
from memstore.model.passages.selectors.passage_choice import Candidates, Chosen, Content
from memstore.model.passages.selectors.selector import score_blocks
from memstore.store.memory_store import MemoryStore


class GatedChoice:
    """Chooses passages for one session."""

    def __init__(
        self, reader: PassageModel, store: MemoryStore, settings: LookupSettings, content: Content
    ) -> None:
        """The reader's selector and gate are those that it has when it is asked."""
        self._reader, self._store = reader, store
        self._settings, self._content = settings, content

    def __call__(
        self, captured: Captured, question: str, scope: Scope
    ) -> tuple[Candidates, list[Chosen] | None]:
        """The best passages of a scope, and those that are meant; None where nothing answers.
        Raises what MemoryStore's lookups raise.
        """
        selector, gate, caution = self._reader.selector, self._reader.gate, self._settings.caution
        scores, scope, where, deviation, blocks = score_blocks(
            selector, captured, question, self._store, scope
        )
        best = Candidates(
            scores,
            scope,
            self._settings.top_k,
            partial(selector.adds, captured, where),
            self._content,
            deviation=deviation,
            blocks=blocks,
        )
        alone = gate is None or gate.answers(scores, caution, blocks=blocks)
        answers = alone or (
            gate is not None and gate.answer_together(scores, best.together, caution, blocks=blocks)
        )
        return best, best.meant(self._settings, parts=not alone) if answers else None

    def needed(self, best: Candidates) -> float | None:
        """The score that the gate wants among these candidates; None without a gate."""
        gate = self._reader.gate
        return None if gate is None else gate.threshold(best.blocks, self._settings.caution)
