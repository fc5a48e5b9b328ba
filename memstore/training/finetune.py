"""Landmark fine-tuning of a Hugging Face decoder (arXiv 2305.16300, section 4.2): what of it
learns, and in which stages.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memstore.errors import InvalidConfig
from memstore.training.batches import RecallData
from memstore.training.curriculum import Stage, default_curriculum
from memstore.training.steps import Steps

_BLOCK_SIZE = 32
_MUON = 0.0  # no matrix learns by it here
_ROWS = 3.0  # times as fast as the other weights the two new embeddings learn


@dataclass(frozen=True)
class Finetune:
    """What is done to a model.

    rank: of the adapters (LoRA) that learn beside its linear layers; None: all of its weights do.
    """

    model: str  # as load_reader takes it: smollm2, a directory, a GGUF file, a hub name
    block_size: int | None = None  # None: 32, or that of a model trained with landmarks before
    rank: int | None = 16


def finetune_stages() -> tuple[Stage, ...]:
    """Windows, in which attention to earlier blocks has to pass by their landmarks; then fresh
    chunks that read windows as a memory, against other windows' landmarks. The gate takes part from
    the start.
    """
    data = replace(
        default_curriculum()[0].data, simple=0.6, plain_share=0.2, copy_share=0.2, repeats=0.1
    )
    windows = Stage(
        "windows",
        "windows",
        steps=200,
        lr=1e-3,
        muon_lr=_MUON,
        cmt=True,
        batch=4,
        blocks=5,
        warmup=10,
        data=data,
    )
    memory = replace(
        windows,
        name="memory",
        kind="memory",
        steps=250,
        memory_windows=4,
        memory_blocks=5,
        chunk_blocks=2,
        queue=200,
        negative_ramp=0.5,
        data=replace(data, plain=0.2, continuations=0.2, pass_key=0.7, updates=0.03),
    )
    return windows, memory


class HuggingFaceModel:
    """A Subject: a LandmarkDecoder, of whose model adapters learn, or all weights, and the two
    embeddings in any case.
    """

    def __init__(self, chosen: Finetune, seed: int, device: torch.device) -> None:
        """Raises InvalidInput, InvalidWeights, InvalidConfig for what cannot be loaded, or cannot
        attend by landmarks.
        """
        from memstore.hf.models_by_name import check_transformers

        check_transformers()
        from memstore.hf.landmark_decoder import FILE, LandmarkDecoder, LandmarkSpec, load_landmarks
        from memstore.hf.landmark_training import Saver, add_adapters
        from memstore.hf.load import load_stock
        from memstore.hf.tokenizer import LandmarkTokenizer
        from memstore.hf.weights import digest_of

        model, tokenizer, directory = load_stock(chosen.model)
        digest = digest_of(model)
        self._saver = Saver(model, tokenizer)
        model.float()
        form, rows = LandmarkSpec(block_size=chosen.block_size or _BLOCK_SIZE), None
        if (directory / FILE).is_file():
            form, rows = load_landmarks(directory, model.config.get_text_config().hidden_size)
            if chosen.block_size not in (None, form.block_size):
                raise InvalidConfig(
                    f"{chosen.model} is trained with blocks of {form.block_size} tokens; it cannot "
                    f"go on with {chosen.block_size}"
                )
        self.model = LandmarkDecoder(model, form, rows)
        if chosen.rank is not None:
            add_adapters(model, chosen.rank, seed)
        self.model.to(device)
        self.tokenizer = LandmarkTokenizer(tokenizer, self.model.landmark_id)
        self.identity: dict[str, Any] = {
            "weights": digest,
            "rank": chosen.rank,
            "block_size": form.block_size,
        }

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """AdamW; the embeddings learn faster."""
        learning = [p for p in self.model.model.parameters() if p.requires_grad]
        groups = [
            {"params": learning, "lr": stage.lr},
            {"params": list(self.model.rows.parameters()), "lr": stage.lr * _ROWS},
        ]
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]

    def steps(self, data: RecallData, device: torch.device, seed: int) -> Steps:
        """Windows, and chunks that read them by landmarks."""
        return Steps(self.model, data, device, seed)

    def state(self) -> dict[str, torch.Tensor]:
        """What learns."""
        return {name: p.data for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take it."""
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.copy_(state[name])

    def save(self, directory: Path) -> None:
        """A directory that load_reader takes: the model with its adapters merged in, its tokenizer,
        and the file of landmarks.
        """
        self._saver.save(self.model, directory)
