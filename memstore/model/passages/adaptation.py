"""An adaptation of a model: the selector and the calibration with which it chooses and reads
passages; and the file that holds them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memstore.decode import Amount, Layer, Positive, Share, from_json
from memstore.errors import InvalidWeights
from memstore.model.lookup_settings import Steps, at_caution
from memstore.model.passages.selector import Gate, Learned, Projection, Selector

SEPARATOR = "\n\nQuestion: "


_RARE, _MANY = 1e-6, 4  # what goes beyond tells no more


@dataclass(frozen=True)
class Evidence:
    """What is known of a question after it was read with its passages.

    unknown: the probability, 0 to 1, that the answer begins as a refusal. score: the selector's
    score of the best passage. near: number of passages that are read by default, because they score
    nearly as high. blocks: number of passages searched.
    """

    unknown: float
    score: float
    near: int
    blocks: int

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The features to which Doubt.weights belong."""
        unknown = min(max(self.unknown, _RARE), 1 - _RARE)
        logit = math.log(unknown / (1 - unknown))
        near, blocks = max(1, min(self.near, _MANY)), max(1, self.blocks)
        return logit, self.score, math.log2(near), math.log2(blocks)


@dataclass(frozen=True)
class Doubt:
    """Probability that the passages a model read do not hold the answer: a logistic regression with
    these weights for Evidence.numbers. above: for each of CAUTIONS, the probability above which the
    model refuses. adapter: digest of the reading adapter that it was fitted with.
    """

    weights: tuple[float, float, float, float]
    bias: float
    above: Steps
    adapter: str

    def probability(self, evidence: Evidence) -> float:
        """The probability, 0 to 1."""
        products = (w * x for w, x in zip(self.weights, evidence.numbers))
        return 0.5 + 0.5 * math.tanh(0.5 * (self.bias + sum(products)))


@dataclass(frozen=True)
class Refusal:
    """The token with which a model that was trained to refuse begins a refusal. above: for each of
    CAUTIONS, the probability of no answer above which the model refuses. doubt: computes this
    probability; None: it is the probability of the token.
    """

    token: int
    above: Steps
    doubt: Doubt | None = None

    def probability(self, evidence: Evidence) -> float:
        """The probability, 0 to 1, that no passage answers."""
        return evidence.unknown if self.doubt is None else self.doubt.probability(evidence)

    def threshold(self, caution: float) -> float:
        """The probability above which the model refuses; 1, never, for a caution of 0."""
        return at_caution(self.above, caution) if caution else 1.0


@dataclass(frozen=True)
class Adaptation:
    """A model's selector and reading settings, as `memstore adapt` writes them."""

    selector: Selector
    read_from: int = 0  # the first layer that reads blocks; those below are not stored whole
    top_k: int = 8  # blocks read of a question at most
    # of these, the best and those whose score is within so many standard deviations; None = all
    score_range: float | None = None
    score_bias: float = 0.0  # LookupSettings.score_bias
    separator: str = SEPARATOR  # between what is read and the words of a question
    passage_tokens: int = 64  # that a passage is filled up to; a longer sentence stays whole
    gate: Gate | None = None  # says whether anything in a memory answers; None = it always may
    doubt: Doubt | None = None  # says so of a model with a reading adapter, once it has read
    weights: str = ""  # digest of the model's; "" = of any
    scores: Mapping[str, float] = field(default_factory=dict)  # on held-out questions


UNADAPTED = Adaptation(Selector(), top_k=4, score_range=1.0)
"""For a model without an adaptation: passages are chosen by the words of a question."""
TAUGHT = replace(UNADAPTED, score_bias=3.0)
"""For a model with a reading adapter: more passages hardly distract it, because each is attended to
by how well it scores.
"""


_KEY = "memstore.selector"


@dataclass(frozen=True)
class MadeFor:
    """The model that a selector was made for. Other models have other states, and refuse it."""

    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    vocabulary: Positive
    weights: str = ""  # digest of the weights; "" = of any weights of these sizes


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[7]
    made_for: MadeFor
    layer: int | None  # whose states the learned part projects; None: there is none
    word_weight: Annotated[float, Meta(ge=0, le=0.5)]  # Selector.word_weight
    read_from: Layer
    top_k: Positive
    score_range: Amount | None
    answerable: Steps | None  # Gate.least
    scores: dict[str, Share]
    passage_tokens: Annotated[int, Meta(ge=16, le=128)] = 64
    growth: float = 0.0  # Gate.growth
    together: float | None = None  # Gate.together
    separator: Annotated[str, Meta(max_length=64)] = SEPARATOR
    score_bias: Amount = 0.0
    doubt: Doubt | None = None


_SAME = (
    "read_from", "top_k", "score_range", "score_bias", "passage_tokens", "separator", "doubt",
    "scores",
)  # fmt: skip
"""Fields of a header that are those of the adaptation."""


def save_selector(adaptation: Adaptation, made_for: MadeFor, path: Path) -> None:
    """Write a selector and its calibration; the file is replaced atomically."""
    learned = adaptation.selector.learned
    tensors = {} if learned is None else vars(learned.projection)
    gate = adaptation.gate
    header = {
        "version": 7,
        "made_for": asdict(replace(made_for, weights=adaptation.weights)),
        "layer": learned and learned.layer,
        "word_weight": adaptation.selector.word_weight,
        "answerable": gate and gate.least,
        "growth": gate.growth if gate else 0.0,
        "together": gate and gate.together,
        **{name: getattr(adaptation, name) for name in _SAME},
        "doubt": adaptation.doubt and asdict(adaptation.doubt),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial, {_KEY: json.dumps(header)})
    partial.chmod(0o644)  # safetensors makes it private, and a wheel keeps the mode
    partial.replace(path)


def load_selector(path: Path, model: MadeFor) -> Adaptation:
    """Read a selector for this model.

    Raises InvalidWeights for a file that is not a selector, was altered, or is for another model.
    """
    header, tensors = _read(path)
    for name, wanted in asdict(header.made_for).items():
        found = getattr(model, name)
        if wanted != found and not (name == "weights" and "" in (wanted, found)):
            raise InvalidWeights(
                f"the selector {path} was made for another model ({name} {wanted}, here {found}); "
                "make one for this model with `memstore adapt`"
            )
    learned = None if header.layer is None else _learned(path, header.layer, tensors, model)
    gate = None
    if header.answerable is not None:
        gate = Gate(header.answerable, header.growth, header.together)
    return Adaptation(
        Selector(learned, header.word_weight),
        gate=gate,
        weights=header.made_for.weights,
        **{name: getattr(header, name) for name in _SAME},
    )


def read_made_for(path: Path) -> MadeFor:
    """The model that a file's selector was made for. Raises InvalidWeights as load_selector."""
    return _read(path)[0].made_for


def _read(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            header = from_json((file.metadata() or {})[_KEY], _Header)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise InvalidWeights(f"cannot read the selector {path}: {error}") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidWeights(
            f"{path} is not a selector of this version ({error}); run `memstore adapt` again"
        ) from None
    return header, tensors


def _learned(path: Path, layer: int, tensors: Mapping[str, Tensor], model: MadeFor) -> Learned:
    projection, expected = tensors.get("projection"), dict[str, tuple[int, ...]]()
    width = 0 if projection is None or projection.dim() < 2 else projection.shape[1]
    expected |= dict.fromkeys(Projection.__dataclass_fields__, (model.hidden_size,))
    expected |= {"idf": (model.vocabulary,), "projection": (model.hidden_size, max(1, width))}
    for name, size in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != size or not tensor.isfinite().all():
            raise InvalidWeights(
                f"the selector {path} is damaged ({name}); make it again with `memstore adapt`"
            )
    if not 0 <= layer <= model.num_layers:
        raise InvalidWeights(f"the selector {path} names layer {layer}, which the model lacks")
    return Learned(layer, Projection(**{name: tensors[name] for name in expected}))
