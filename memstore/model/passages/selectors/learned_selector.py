"""The learned part of a selector: states of one layer, projected to a few dimensions, meet by late
interaction.

The projection is trained beside a frozen model (memstore.training.selectors.learn).
"""

import hashlib
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.model.passages.selectors.captured_activations import Captured

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
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Learned:
    """score(B) = sum over the question's tokens i of w_i max over j in B of <q_i, d_j>.

    d_j and q_i: states that enter `layer`, divided by their root mean square, standardised (of
    documents and of questions apart), projected alike, unit vectors. w = softmax(attend . x_i +
    ln idf_i) over the question's own tokens.
    """

    def __init__(self, layer: int, projection: Projection) -> None:
        self.layer, self.projection = layer, projection
        self.width: int = projection.projection.shape[1]
        digest = hashlib.blake2b(str(layer).encode(), digest_size=16)
        for tensor in (
            projection.projection,
            projection.document_mean,
            projection.document_deviation,
        ):
            digest.update(tensor.contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()  # of all that landmarks depend on

    def landmarks(self, captured: Captured) -> Tensor:
        """int8 [T, 1, width]; where the tokens stand does not matter."""
        projection = self.projection
        x = rooted(captured.states[self.layer])
        x = (x - projection.document_mean) / projection.document_deviation
        units = F.normalize(x @ projection.projection, dim=-1)
        return (units * _STEPS).round().to(torch.int8)[:, None].cpu()

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
