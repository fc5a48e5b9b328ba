"""The learned selector: states of one layer, projected to a few dimensions, meet by late
interaction.

A projection that was trained beside a frozen model (memstore.training.selectors.learn).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.disk.format.index_spec import IndexSpec
from memstore.index.scope import Scope
from memstore.model.passages.selectors.captured_activations import Captured, Captures
from memstore.model.passages.selectors.selector import Found

_STEPS = 127  # a landmark is a unit vector times this, in int8
_LEAST_IDF = 0.05


@dataclass(frozen=True)
class Projection:
    """What was learned. hidden: the model's; width: of a landmark.

    projection: [hidden, width]. document_*, question_*: mean and deviation [hidden] of the states
    of documents and of questions. attend: [hidden], how much a question's token counts beside its
    idf. idf: float16 [vocabulary], ln of how rare a token is among blocks.
    """

    projection: Tensor
    document_mean: Tensor
    document_deviation: Tensor
    question_mean: Tensor
    question_deviation: Tensor
    attend: Tensor
    idf: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Learned:
    """score(B) = sum over the question's tokens i of w_i max over j in B of <q_i, d_j>.

    d_j and q_i: states that enter `layer`, divided by their root mean square, standardised (of
    documents and of questions apart), projected alike, unit vectors. w = softmax(attend . x_i +
    ln idf_i) over the question's own tokens.
    """

    def __init__(self, layer: int, projection: Projection) -> None:
        self.layer, self.projection = layer, projection
        self._form = IndexSpec(
            "learned", self._digest(), 1, projection.projection.shape[1], "int8", words=False
        )

    def _digest(self) -> str:
        """Of all that landmarks depend on."""
        digest = hashlib.blake2b(str(self.layer).encode(), digest_size=16)
        of = self.projection
        for tensor in (of.projection, of.document_mean, of.document_deviation):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def spec(self) -> IndexSpec:
        return self._form

    @property
    def captures(self) -> Captures:
        return Captures(states=(self.layer,))

    def landmarks(self, captured: Captured) -> Tensor:
        """int8 [T, 1, width]; where the tokens stand does not matter."""
        projection = self.projection
        x = rooted(captured.states[self.layer])
        x = (x - projection.document_mean) / projection.document_deviation
        units = F.normalize(x @ projection.projection, dim=-1)
        return (units * _STEPS).round().to(torch.int8)[:, None].cpu()

    def words(self, text_of_block: Sequence[str]) -> None:
        return None

    def scores(self, captured: Captured, question: str, store: Found, scope: Scope) -> Tensor:
        """float32 [blocks of the scope], between -1 and 1."""
        rows, weights = self.rows(captured)
        return weights @ store.token_maxima(rows, 0, scope)

    def beside(self, question: str) -> None:
        return None

    def adds(self, captured: Captured, store: Found, scope: Scope) -> Tensor:
        rows, weights = self.rows(captured)
        return (weights[:, None] * store.token_maxima(rows, 0, scope)).T

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor]:
        """The question's unit vectors [T, width] and their weights [T], which sum to 1."""
        projection = self.projection
        x = rooted(captured.states[self.layer])
        x = (x - projection.question_mean) / projection.question_deviation
        rare = projection.idf[torch.as_tensor(captured.ids)].float().clamp_min(_LEAST_IDF)
        weights = (x @ projection.attend + rare.log()).softmax(0)
        return F.normalize(x @ projection.projection, dim=-1), weights


def rooted(states: Tensor) -> Tensor:
    """States [..., hidden] with root mean square 1, float32 on the CPU."""
    states = states.float().cpu()
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5)
