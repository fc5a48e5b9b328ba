"""What a run is configured with, and what it trains: a model with its tokenizer, the weights that
learn, and how they are stored.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import InvalidConfig
from memstore.model.landmark.landmark_model import (
    load_checkpoint,
    read_configuration,
    save_checkpoint,
)
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import CorpusTokenizer, passages, read_documents
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.objectives import Trainee
from memstore.training.optimizer import make_optimizers
from memstore.training.steps import Steps

Precision = Literal["auto", "float32", "bfloat16"]
_BLOCK_SIZE = 32  # of a decoder that is fine-tuned
_ROWS = 3.0  # times as fast as its other weights the two new embeddings learn


@dataclass(frozen=True)
class Finetune:
    """Landmark fine-tuning of a Hugging Face decoder (arXiv 2305.16300, section 4.2).

    rank: of the adapters (LoRA) that learn beside its linear layers; None: all of its weights do.
    """

    model: str  # as load_reader takes it: smollm2, a directory, a GGUF file, a hub name
    block_size: int | None = None  # None: 32, or that of a model trained with landmarks before
    rank: int | None = 16


@dataclass(frozen=True)
class TrainConfig:
    """One training run. `minutes` bounds the wall clock: the learning rates then decay by whichever
    runs out first.
    """

    out: Path  # the directory of the checkpoint, its metrics and its state
    model: ModelConfig = field(default_factory=ModelConfig)
    stages: tuple[Stage, ...] = field(default_factory=default_curriculum)
    # shared among the stages in proportion to their steps times what a step costs
    minutes: float | None = None
    seed: int = 0
    threads: int = 1
    # where it computes, such as "cuda"; no part of a run: it is resumed on any device
    device: str = "cpu"
    # weights and tokenizer to start from: of this architecture
    init: Path | None = None
    tokenizer: Path | None = None  # a tokenizer.json, without init; None = one is made of the texts
    # a Hugging Face decoder that learns to attend by landmarks, in the place of `model`
    finetune: Finetune | None = None
    # of the forward pass, by autocast; weights and optimisers stay float32. "auto": what the device
    # is faster at; in a resumed run what that began with, so that it ends with the same bits
    precision: Precision = "auto"
    save_every: int = 100  # steps between checkpoints
    log_every: int = 20  # steps a line of metrics stands for


@dataclass(frozen=True)
class Subject:
    """What a run trains; the model is on the device of the run.

    optimizers: makes fresh ones for a stage. save: leaves a model that --model takes, raises
    OSError. identity: what a run must have in common with the one that it resumes, in plain values.
    steps: computes the losses of steps.
    """

    model: Trainee
    tokenizer: CorpusTokenizer
    optimizers: Callable[[Stage], list[torch.optim.Optimizer]]
    save: Callable[[Path], None]
    identity: dict[str, Any] = field(default_factory=dict)
    steps: type[Steps] = Steps

    @property
    def learning(self) -> dict[str, Tensor]:
        """The weights that learn, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


MakeSubject = Callable[[TrainConfig, Sequence[Path], torch.device, bool], Subject]
"""Takes the run, its texts, the device, and whether a run in `config.out` is resumed, whose weights
are then copied into the subject's.
"""


def by_landmarks(
    config: TrainConfig, texts: Sequence[Path], device: torch.device, resume: bool
) -> Subject:
    """A MakeSubject: a landmark model, or the Hugging Face decoder of `config.finetune`."""
    if config.finetune is not None:
        return _hugging_face_model(config.finetune, config.seed, device)
    model, tokenizer = begin_model(config, texts, resume)
    model.to(device)
    return Subject(
        model,
        tokenizer,
        lambda stage: make_optimizers(model, stage.lr, stage.muon_lr),
        partial(save_checkpoint, model, tokenizer),
    )


def begin_model(
    config: TrainConfig, texts: Sequence[Path], resume: bool
) -> tuple[Transformer, Tokenizer]:
    """A Transformer of a configuration, from nothing or from the weights of `config.init`, and its
    tokenizer. resume: of the configuration and with the tokenizer of the run in `config.out`.
    Raises InvalidConfig, InvalidWeights, InvalidInput.
    """
    form = _begun_with(config) if resume else config.model
    tokenizer = _tokenizer(config, texts, form, resume=resume)
    return new_model(form, None if resume else config.init, config.seed), tokenizer


def new_model(config: ModelConfig, init: Path | None, seed: int) -> Transformer:
    """The decoder of a configuration.

    init: a checkpoint of this architecture. Raises InvalidConfig for another, InvalidWeights.
    """
    model = Transformer(config)
    if init is None:
        model.initialise(torch.Generator().manual_seed(seed))
        return model
    first, _ = load_checkpoint(init)
    first.cmt_values = None  # measured of these weights, not of those that come of them
    if first.config.architecture() != config.architecture():
        raise InvalidConfig(
            f"{init} is a model of another architecture; leave --preset out, or train from nothing"
        )
    model.load_state_dict(first.state_dict())
    return model


def _begun_with(config: TrainConfig) -> ModelConfig:
    """The model of the run that is resumed. Raises InvalidConfig where another is asked for."""
    begun = read_configuration(config.out)
    asked = config.model.architecture()
    other = [f"{n} {x}" for n, x in begun.architecture().items() if x != asked[n]]
    if other:
        raise InvalidConfig(
            f"{config.out} was begun with another model ({', '.join(other)}); leave --preset out, "
            "or choose another directory"
        )
    return begun


def _tokenizer(
    config: TrainConfig, texts: Sequence[Path], model: ModelConfig, *, resume: bool
) -> Tokenizer:
    """The tokenizer of the resumed run, or a new one. Without `resume`, a tokenizer that an earlier
    run left in `config.out` is overwritten: it may come from other texts or weights.
    """
    path = config.out / "tokenizer.json"
    if resume:
        tokenizer = Tokenizer.load(path)
    elif config.init is not None:
        tokenizer = Tokenizer.load(config.init / "tokenizer.json")
    elif config.tokenizer is not None:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        tokenizer = Tokenizer.train(
            passages(read_documents(texts), random.Random(config.seed)), model.vocab_size
        )
    if tokenizer.vocab_size != model.vocab_size:
        raise InvalidConfig(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is "
            f"{model.vocab_size}; train on more text, or choose a --preset that fits"
        )
    if not resume:
        tokenizer.save(path)
    return tokenizer


def _hugging_face_model(chosen: Finetune, seed: int, device: torch.device) -> Subject:
    """A LandmarkDecoder, of whose model adapters learn, or all weights, and the two embeddings in
    any case. Raises InvalidInput, InvalidWeights, InvalidConfig for what cannot be loaded, or
    cannot attend by landmarks.
    """
    from memstore.hf.models_by_name import check_transformers

    check_transformers()
    from memstore.hf.landmark_decoder import (
        FILE,
        LandmarkDecoder,
        LandmarkSpec,
        Saver,
        add_adapters,
        load_landmarks,
    )
    from memstore.hf.load import load_stock
    from memstore.hf.tokenizer import LandmarkTokenizer
    from memstore.hf.weights import digest_of

    model, tokenizer, directory = load_stock(chosen.model)
    digest, saver = digest_of(model), Saver(model, tokenizer)
    model.float()
    form, rows = LandmarkSpec(block_size=chosen.block_size or _BLOCK_SIZE), None
    if (directory / FILE).is_file():
        form, rows = load_landmarks(directory, model.config.get_text_config().hidden_size)
        if chosen.block_size not in (None, form.block_size):
            raise InvalidConfig(
                f"{chosen.model} is trained with blocks of {form.block_size} tokens; it cannot "
                f"go on with {chosen.block_size}"
            )
    decoder = LandmarkDecoder(model, form, rows)
    if chosen.rank is not None:
        add_adapters(model, chosen.rank, seed)
    decoder.to(device)

    def optimizers(stage: Stage) -> list[torch.optim.Optimizer]:
        groups = [
            {"params": [p for p in model.parameters() if p.requires_grad], "lr": stage.lr},
            {"params": list(decoder.rows.parameters()), "lr": stage.lr * _ROWS},
        ]
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]

    return Subject(
        decoder,
        LandmarkTokenizer(tokenizer, decoder.landmark_id),
        optimizers,
        partial(saver.save, decoder),
        {"weights": digest, "rank": chosen.rank, "block_size": form.block_size},
    )
