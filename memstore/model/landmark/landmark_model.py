"""A landmark-attention transformer with its tokenizer: its directory (config.json,
model.safetensors, tokenizer.json) and its API.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from memstore.block import BlockKey
from memstore.decode import from_json
from memstore.devices import usable_device
from memstore.disk.files import replacement
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import BudgetExceeded, InvalidConfig, InvalidInput, InvalidWeights
from memstore.kernels import api
from memstore.kernels.api import LocalAttention
from memstore.model.answer import Found, Ranked
from memstore.model.landmark import SHIPPED_NAME
from memstore.model.landmark.landmark_session import LandmarkSession, read_chunks
from memstore.model.landmark.open_chunk import Prefix
from memstore.model.landmark.transformer import LandmarkReader, ModelConfig, Transformer
from memstore.model.lookup_settings import AnswerSettings
from memstore.model.model_api import ModelAPI
from memstore.model.session import OnRead, attached
from memstore.model.source_text import Ingesting, Text, ingest
from memstore.model.tokenizer import Tokenizer
from memstore.paths import expanded, read_file
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore, Names

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
        raise InvalidWeights(f"{directory} is not a model (config.json is missing); name another")
    try:
        values = from_json(read_file(path), dict[str, Any])
    except ValueError as error:
        raise InvalidConfig(f"model configuration is not a JSON object: {error}") from None
    return ModelConfig.from_dict(values)


def load_checkpoint(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    make: Callable[[ModelConfig], Transformer] = Transformer,
) -> tuple[Transformer, Tokenizer]:
    """Load a directory: the model that `make` makes of its configuration, in evaluation mode and
    this dtype, and its tokenizer. Raises InvalidWeights and InvalidConfig, which name the problem.
    """
    config = read_configuration(directory)
    for name in ("model.safetensors", "tokenizer.json"):
        if not (directory / name).is_file():
            raise InvalidWeights(f"{directory} is not a model ({name} is missing); name another")
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
                raise InvalidWeights(
                    f"{path}: {name} has type {tensor.dtype}; weights need a floating-point type"
                )
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
    """Signature that ties a memory to this model: hashes of weights and tokenizer, architecture,
    and geometry of blocks.

    LookupSettings and the context miss token's values do not change stored blocks and are left out.
    Equal numbers in half precision and float32 are the same model.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if name == CMT_VALUES:
            continue
        digest.update(name.encode())
        wide = torch.promote_types(tensor.dtype, torch.float32)
        digest.update(tensor.detach().to("cpu", wide).contiguous().numpy().tobytes())
    return model.config.signature(digest.hexdigest(), tokenizer.fingerprint)


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
        """called: the model's name in its memories."""
        super().__init__(transformer, tokenizer)
        self._called = called

    @cached_property
    def signature(self) -> Signature:
        """Signature of memories that this model can read: see `signature_of`.

        It has the model's name as well, which is not compared.
        """
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
            raise InvalidInput("a landmark model always stores keys and values; leave keep out")
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
        documents: Names = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        read_all_rows: bool = False,
        **lookup: Any,
    ) -> LandmarkSession:
        """As ModelAPI.session. read_all_rows: report the reads of every row to on_read."""
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        session = LandmarkSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)
        session.attention.read_all_rows = read_all_rows
        return session

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranked:
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        return search_blocks(self, store, scope, ids), True


# Search for a phrase: landmark keys choose a shortlist of blocks, and the blocks' own keys rank it
# (docs/appendix/method.md section 9). Which heads matter is read off the phrase.

_HITS = 64  # landmark keys taken a (token, head)
# of exp(sharpness * (cosine - 1)): how like two keys must be to count as the same word
_SHARPNESS = 16.0
_UNITS = 256  # leased at once
SHORTLIST = 1 << 16  # blocks of a memory that is ranked whole


@dataclass(frozen=True)
class _Looks:
    """Queries and keys of a phrase of T tokens in one layer.

    q: [H, T, D] scaled and rotated as towards old blocks; k: [Hkv, T, D] position-free; gate: [H,
    T] (ones without a context miss token).
    """

    q: Tensor
    k: Tensor
    gate: Tensor


@torch.no_grad()
def search_blocks(
    reader: LandmarkReader,
    store: MemoryStore,
    documents: Sequence[tuple[int, int]],
    ids: Sequence[int],
) -> Iterator[Found]:
    """Blocks of documents by similarity to a phrase, best first; equal ones in the order given.

    documents: (id, number of blocks) of each. If they have more than SHORTLIST blocks, only those
    that landmark keys find are compared. ids: content tokens of the phrase, at least one; those
    after the first chunk are ignored. Raises DocumentNotFound for a document that was forgotten,
    CorruptBlock.
    """
    blocks = [(document, block) for document, count in documents for block in range(count)]
    if not blocks or not reader.shape.memory_layers:
        return iter(())
    chunk = reader.lookup.chunk_blocks * reader.shape.block_size
    looks = _look(reader, ids[:chunk], len(blocks))
    scope = [(document, 0, count) for document, count in documents]
    (layer, head), listed = _sharpest(store, scope, looks, len(blocks))
    if len(blocks) > SHORTLIST:
        blocks = [blocks[n] for n in listed.tolist()]
    kv_head = head // reader.shape.group
    units = [BlockKey(document, layer, block, kv_head) for document, block in blocks]
    keys = F.normalize(looks[layer].k[kv_head].float(), dim=-1)
    cos, sin = reader.rope.angles(0, reader.shape.block_size, keys)
    # (block_size, T, D): as a key stands at each offset
    placed = reader.rope.rotate(keys, cos[:, None], sin[:, None])
    weights = _compare(store, units, placed)
    order = weights.sort(descending=True, stable=True).indices.tolist()
    return (Found(units[n].document, units[n].block, float(weights[n])) for n in order)


def _look(reader: LandmarkReader, ids: Sequence[int], blocks: int) -> dict[int, _Looks]:
    """Queries and keys of a phrase in every memory layer, read without memory."""
    shape, rope, cmt_keys, looks = reader.shape, reader.rope, reader.cmt_keys, {}
    sequence: list[int] = []
    rows = []
    for number, token in enumerate(ids, 1):
        rows.append(len(sequence))
        sequence.append(token)
        if number % shape.block_size == 0:
            sequence.append(reader.landmark_id)
    base, distance = 0, shape.old_block_distance
    if distance is None:
        base = Prefix.of(blocks, 0, reader.lookup.top_k, fixed=False).size * shape.stride

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = rope.angles(base, base + len(sequence), q)
        q = q * shape.head_dim**-0.5
        local: LocalAttention = api.local_attention(
            rope.rotate(q, cos, sin),
            rope.rotate(k, cos, sin),
            v,
            shape.block_size,
            k_cmt=None if cmt_keys is None else cmt_keys[layer],
        )
        if layer in shape.memory_layers:
            if distance is not None:
                cos, sin = rope.angles(distance, distance + 1, q)
            gate = torch.ones_like(local.gate) if cmt_keys is None else local.gate
            looks[layer] = _Looks(
                rope.rotate(q, cos, sin)[0][:, rows], k[0][:, rows], gate[0][:, rows]
            )
        return local.output

    given = torch.tensor([sequence], device=reader.device)
    reader.hidden(given, attend, layers=shape.memory_layers[-1] + 1)
    return looks


def _sharpest(
    store: MemoryStore, scope: Sequence[tuple[int, int, int]], looks: dict[int, _Looks], blocks: int
) -> tuple[tuple[int, int], Tensor]:
    """The (layer, head) of a memory layer that points most sharply to blocks of the scope, and the
    blocks [n], in order, that are among the _HITS best of any token and head.

    With p a token's landmark softmax and g its gate: sharpest is the sum of g p log(blocks p) over
    tokens and blocks, as far as p is above its mean.
    """
    sharpness: dict[tuple[int, int], float] = {}
    hit = list[Tensor]()
    for layer, look in looks.items():
        hits = store.retrieval.landmarks(scope).search(
            layer, look.q, scope, min(_HITS, blocks), return_lse=True
        )
        assert hits.lse is not None
        gain = (hits.scores - hits.lse[..., None] + math.log(blocks)).masked_fill(
            hits.candidates < 0, -math.inf
        )
        of_head = (look.gate[..., None] * (gain.exp() / blocks) * gain.clamp(min=0)).sum((1, 2))
        sharpness |= {(layer, head): value for head, value in enumerate(of_head.tolist())}
        hit.append(hits.candidates[hits.candidates >= 0])
    return max(sharpness, key=lambda key: sharpness[key]), torch.cat(hit).unique()


def _compare(store: MemoryStore, units: Sequence[BlockKey], placed: Tensor) -> Tensor:
    """How like the phrase each unit is, [n] in 0..1.

    placed: [block_size, T, D] the phrase's normalised keys at every offset of a block. Each token
    counts exp(sharpness * (cosine to the likest key of the block - 1)); the mean over tokens is
    returned.
    """
    weights: list[Tensor] = []
    at, step = 0, _UNITS
    while at < len(units):
        try:
            lease = store.lease(units[at : at + step])
        except BudgetExceeded:  # others hold the rest of the budget
            if step == 1:
                raise
            step //= 2
            continue
        with lease:
            # (block_size, n, D)
            keys = F.normalize(lease.k[lease.slots].to(placed), dim=-1).transpose(0, 1)
        likest = (keys @ placed.transpose(1, 2)).amax(0)  # (n, T)
        weights.append((_SHARPNESS * (likest - 1)).exp().mean(1))
        at += step
    return torch.cat(weights)


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LandmarkModel:
    """Load the model that ships (None or "books-1m"), or a directory written by `memstore train`.

    device: such as "cuda", or "auto"; open its memories with the same. dtype: of weights and
    activations; landmark scores, softmaxes and logits stay float32. Weights that lose digits by the
    dtype make another model, with its own memories.

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
