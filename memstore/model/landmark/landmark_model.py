"""The model that ships: a landmark-attention transformer with its tokenizer, and its directory:
config.json, model.safetensors and tokenizer.json.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from memstore.decode import from_json
from memstore.devices import usable_device
from memstore.disk.files import replacement
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights
from memstore.model.answer import Ranking
from memstore.model.landmark import SHIPPED_NAME
from memstore.model.landmark.landmark_search import search_blocks
from memstore.model.landmark.landmark_session import LandmarkSession, read_chunks
from memstore.model.landmark.transformer import LandmarkReader, ModelConfig, Transformer
from memstore.model.lookup_settings import AnswerSettings
from memstore.model.model_api import ModelAPI
from memstore.model.session import OnRead, attached
from memstore.model.source_text import Ingesting, Text, ingest
from memstore.model.tokenizer import Tokenizer
from memstore.paths import expanded, read_file
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode

SHIPPED = Path(__file__).parent / "weights"
"""The directory of the weights that ship with the package."""
CMT_VALUES = "cmt_values"  # as it is called in model.safetensors, which need not have it


def save_checkpoint(
    model: Transformer, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write config, weights (as `dtype`) and tokenizer; each file is replaced whole, so an
    interrupted save leaves the old one. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    with replacement(directory / "model.safetensors", mode=0o644) as file:
        file.write(save(weights))
    with replacement(directory / "config.json", mode=0o644) as file:
        file.write(json.dumps(model.config.to_dict(), indent=2).encode() + b"\n")
    tokenizer.save(directory / "tokenizer.json")


def read_configuration(directory: Path) -> ModelConfig:
    """The configuration of a directory. Raises InvalidWeights, InvalidConfig."""
    path = directory / "config.json"
    if not path.exists():
        raise InvalidWeights(f"{directory} is not a model: config.json is missing")
    try:
        values = from_json(read_file(path), dict[str, Any])
    except ValueError as error:
        raise InvalidConfig(f"model configuration is no JSON object: {error}") from None
    return ModelConfig.from_dict(values)


def load_checkpoint(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    make: Callable[[ModelConfig], Transformer] = Transformer,
) -> tuple[Transformer, Tokenizer]:
    """The model that `make` makes of its configuration, with weights of a dtype and in evaluation
    mode, and the tokenizer of a directory; InvalidWeights names what is wrong.
    """
    config = read_configuration(directory)
    for name in ("model.safetensors", "tokenizer.json"):
        if not (directory / name).is_file():
            raise InvalidWeights(f"{directory} is not a model: {name} is missing")
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise InvalidWeights(
            f"{directory}: tokenizer.json has {tokenizer.vocab_size} ids but config.json says "
            f"vocab_size {config.vocab_size}"
        )
    path = directory / "model.safetensors"
    try:
        weights = load_file(path)
        model = make(config)
        if CMT_VALUES in weights:
            model.cmt_values = torch.empty(config.num_layers, config.num_heads, config.head_dim)
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                raise InvalidWeights(f"{path}: {name} holds numbers of type {tensor.dtype}")
            weights[name] = tensor = tensor.to(dtype)
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise InvalidWeights(
                    f"{path}: {name} holds numbers that are not finite, or not in {dtype}; get the "
                    "weights again, or load them in another type"
                )
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} is truncated or not a safetensors file: {error}") from None
    except RuntimeError as error:  # torch names the weights that differ
        raise InvalidWeights(
            f"{path} is of another architecture than its config.json: "
            f"{' '.join(str(error).split())}"
        ) from None
    return model.requires_grad_(False).eval(), tokenizer


def signature_of(model: Transformer, tokenizer: Tokenizer) -> Signature:
    """What ties a memory to this model: hashes of weights and tokenizer, the architecture and the
    geometry of what is stored.

    LookupSettings do not change what is stored, so they are no part of it, nor are the context miss
    token's values. Weights count as the numbers they are: the same in half precision and in float32
    are the same model.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if name == CMT_VALUES:
            continue
        digest.update(name.encode())
        wide = torch.promote_types(tensor.dtype, torch.float32)
        digest.update(tensor.detach().to("cpu", wide).contiguous().numpy().tobytes())
    config = model.config
    return Signature(
        weights=digest.hexdigest(),
        tokenizer=tokenizer.fingerprint,
        architecture=config.architecture(),
        kv_dtype=config.kv_dtype,
        num_layers=config.num_layers,
        memory_layers=tuple(config.memory_layers or ()),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
    )


# Queries are sampled to build an index
_STRETCHES = 8  # stretches of stored text, each read in its own session
_TOKENS = 192  # tokens of a stretch
_QUESTIONS = 6  # questions after each stretch
_BLOCKS = 32_768  # most blocks that these sessions attend to: queries depend little on the others
_ASKED = ("price", "name", "colour", "age", "number", "owner", "weight", "key")
_OF = ("red fox", "old bridge", "silver lamp", "north gate", "small ship", "stone table")


class LandmarkModel(LandmarkReader, ModelAPI):
    """The API of a landmark model."""

    answering = AnswerSettings()
    codec = "zstd"
    keeps = None

    def __init__(
        self, transformer: Transformer, tokenizer: Tokenizer, called: ModelName | None = None
    ) -> None:
        """called: what its memories say that they were made with."""
        super().__init__(transformer, tokenizer)
        self._called = called

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model."""
        return replace(signature_of(self.transformer, self.tokenizer), model=self._called)

    def ingesting(
        self,
        text: Text,
        store: MemoryStore,
        *,
        mode: Mode = "new",
        keep: str | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting. keep: "kv"; blocks depend on each other, and are computed once,
        one after the other.
        """
        if keep not in (None, "kv"):
            raise InvalidInput(
                "this model's blocks are computed one after the other, and kept: leave keep out"
            )
        settings = self.lookup.changed(**lookup)
        stored = IngestSettings(settings.chunk_blocks, settings.top_k, settings.cmt_cutoff)
        read = partial(read_chunks, self, settings, store, text)
        return ingest(store, text, stored, mode, read)

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Sample queries, then build and save the store's index; returns what was built (see
        MemoryStore.build_index).

        Sessions read stretches of the memory's own text and questions in the plain form, and every
        lookup that the gate lets through is a sample: a head whose gate opens at questions only is
        sampled there.

        Raises InvalidInput for a memory without a finished document or an index that builds
        nothing, ReadOnlyMemory, StorageFull.
        """
        ready = [document for document in store.ready(to="index") if document.blocks]
        rng = Random(0)
        attached: list[tuple[int, int]] = []
        blocks = 0
        for document in rng.sample(ready, len(ready)):
            if not attached or blocks + document.blocks <= _BLOCKS:
                attached.append((document.id, document.blocks))
                blocks += document.blocks
        with store.retrieval.sampled_queries():
            for _ in range(_STRETCHES):
                document = rng.choices(ready, [document.tokens for document in ready])[0]
                first = rng.randrange(max(1, document.tokens - _TOKENS))
                with LandmarkSession(self, self.lookup, store, attached) as session:
                    session.feed(store.tokens(document.id, first, first + _TOKENS).ids.tolist())
                    for _ in range(_QUESTIONS):
                        what = f"the {rng.choice(_ASKED)} of the {rng.choice(_OF)}"
                        question = f" What is {what}? {what.capitalize()} is"
                        session.feed(self.tokenizer.encode(question))
        return store.build_index(self.lookup.top_k, progress)

    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        read_all_rows: bool = False,
        **lookup: Any,
    ) -> LandmarkSession:
        """As ModelAPI.session. read_all_rows: on_read is told what every row reads."""
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        session = LandmarkSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)
        session.attention.read_all_rows = read_all_rows
        return session

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranking:
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        return Ranking(search_blocks(self, store, scope, ids))


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LandmarkModel:
    """The model that ships (None or its name, "books-1m"), or one from a directory written by
    `memstore train`.

    device: where it computes, such as "cuda", or "auto"; its memories have to be opened with the
    same. dtype: of its weights and of what it computes; landmark scores, softmaxes and logits are
    float32 in half precision, too. Weights that lose digits by it make another model, with its own
    memories.

    Raises InvalidWeights for a directory that is no model, or whose weights do not fit its
    configuration, and InvalidConfig for a device that this machine does not have.
    """
    directory = SHIPPED if name_or_path in (None, SHIPPED_NAME) else expanded(str(name_or_path))
    if not directory.is_dir():
        raise InvalidWeights(
            f"{directory} is not a directory; name one written by `memstore train`, or leave the "
            "model out"
        )
    place = usable_device(device)
    transformer, tokenizer = load_checkpoint(directory, dtype)
    shipped = directory == SHIPPED
    called = ModelName(
        SHIPPED_NAME if shipped else directory.resolve().name,
        SHIPPED_NAME if shipped else str(directory.resolve()),
    )
    return LandmarkModel(transformer.to(place), tokenizer, called)
