"""Reading a text with a memory, token by token or in one go: what benchmarks score and ask, and
what can be left and taken up again in another process.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memstore.closing import Closing
from memstore.disk.document import Document
from memstore.disk.files import replacement
from memstore.disk.signature import Signature
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights
from memstore.kernels.api import NEG
from memstore.kernels.products import accumulate
from memstore.model.checkpoint import load_checkpoint, signature_of
from memstore.model.generate import Continuation
from memstore.model.ingest import OnProgress
from memstore.model.text import Text
from memstore.model.tokenizer import Tokenizer
from memstore.rivals.past import Past
from memstore.rivals.stored import SessionMemory, ingest_tokens, token_signature
from memstore.rivals.transformer import RivalTransformer, make
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore

_HOST_BUDGET = 1 << 28  # of the tokens that a reading remembers by itself


class RivalModel:
    """A RivalTransformer and its tokenizer."""

    def __init__(self, transformer: RivalTransformer, tokenizer: Tokenizer) -> None:
        self.transformer, self.tokenizer, self.config = transformer, tokenizer, transformer.config
        self.shape, self.lookup = transformer.shape, transformer.lookup

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.transformer.norm.weight.device

    @cached_property
    def weights(self) -> str:
        """A digest of the weights and of what the memory is, that ties saved states to them."""
        signature = signature_of(self.transformer, self.tokenizer)
        memory = sorted(self.transformer.memory_config.to_dict().items())
        said = f"{signature.digest.hex()} {memory}"
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    @cached_property
    def signature(self) -> Signature:
        """What ties a store of tokens to this model. Raises InvalidConfig for a memory without."""
        return token_signature(self.transformer, self.tokenizer)

    def ingest(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        progress: OnProgress | None = None,
    ) -> Document:
        """Read a document into a store of a memorizing model's tokens, as Verbs.ingest; one that
        was interrupted goes on. Raises InvalidConfig for another memory.
        """
        _ = self.signature
        text = source if isinstance(source, Text) else Text(source, name)
        return ingest_tokens(
            self.transformer, self.tokenizer, store, text, mode=mode, progress=progress
        )

    def session(
        self,
        store: MemoryStore | None = None,
        documents: Sequence[str] | None = None,
        *,
        cache: int | None = None,
    ) -> "Reading":
        """A reading of a text from its beginning.

        store: of a memorizing model's tokens; its documents (None = every ready one) are
        remembered beside what the reading itself reads. cache: tokens before the segment, instead
        of those it was trained with. Raises InvalidConfig for a store given to another memory.
        """
        return Reading(self, store, documents, cache)

    def score(self, session: "Reading", ids: Sequence[int]) -> np.ndarray:
        """Log probabilities [n - 1] of ids[1:], each after what stands before it in the session."""
        logits = session.logits(session.feed(list(ids[:-1]))).log_softmax(-1)
        following = torch.tensor(ids[1:], device=logits.device)
        return logits.gather(-1, following[:, None])[:, 0].double().cpu().numpy()


def load_rival(directory: Path | str, *, dtype: torch.dtype = torch.float32) -> RivalModel:
    """The model of a directory that `memstore train --memory` wrote. Raises InvalidWeights for one
    of landmarks too, InvalidConfig.
    """
    transformer, tokenizer = load_checkpoint(Path(directory), dtype, other=make)
    if not isinstance(transformer, RivalTransformer):
        raise InvalidWeights(
            f"{directory} is a landmark model: ask, ingest and search work with it; a memory to "
            "compare it with is trained by `memstore train --memory`"
        )
    return RivalModel(transformer, tokenizer)


class Reading(Closing):
    """One text being read: `feed` takes tokens, and states come out."""

    def __init__(
        self,
        model: RivalModel,
        store: MemoryStore | None,
        documents: Sequence[str] | None,
        cache: int | None,
    ) -> None:
        """Use RivalModel.session."""
        self.model, self.tokens = model, 0
        self._given = (store, documents, cache)
        transformer, chosen = model.transformer, model.transformer.memory_config
        self._own_store: MemoryStore | None = None
        memory, attached = None, []
        if chosen.kind == "memorizing":
            if store is None:
                store = MemoryStore.in_memory(model.signature, host_budget=_HOST_BUDGET)
                self._own_store = store
                documents = ()
            attached = store.ready(documents)
            memory = SessionMemory(transformer, store, [(one.id, one.blocks) for one in attached])
        elif store is not None:
            raise InvalidConfig(
                f"a {chosen.kind} model keeps no tokens in a store; leave the store out"
            )
        self.past: Past = transformer.begin(1, cache=cache, memory=memory)
        self._beside = json.dumps(
            {
                "documents": [[one.name, one.blocks, one.source_hash] for one in attached],
                "cache": chosen.cache if cache is None else cache,
            }
        )

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> states [n, hidden_size], row i being the one that predicts what follows
        ids[i].
        """
        self.tokens += len(ids)
        given = torch.tensor([list(ids)], dtype=torch.long, device=self.model.device)
        return self.model.transformer.read(given, self.past)[0]

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states; what is no text is never predicted."""
        logits = accumulate(self.model.transformer.logits(states))
        logits[..., self.model.transformer.landmark_id :] = NEG
        return logits

    def generate(self, state: Tensor, max_new_tokens: int, **settings: Any) -> Continuation:
        """The tokens that follow `state`: see memstore.model.generate."""
        return Continuation(self, state, max_new_tokens, **settings)

    def fork(self) -> "Reading":
        """Another reading that goes on from here by itself."""
        other = Reading(self.model, *self._given)
        other.past.restore(self.past.state())
        other.tokens = self.tokens
        return other

    def save(self, file: Path) -> None:
        """Write all that reading on depends on; a document of a store is named, not copied. Raises
        OSError.
        """
        state = {"tokens": torch.tensor(self.tokens), **self.past.state()}
        plain = {name: x.cpu().contiguous() for name, x in state.items()}
        about = {"weights": self.model.weights, "beside": self._beside, "digest": _digest(plain)}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacement(file, mode=0o644) as written:
            written.write(save(plain, about))

    def resume(self, file: Path) -> None:
        """Go on as the reading that was saved there, in whatever process, with the same bits.

        Raises InvalidInput for a file that is no reading of this model and memory, or was read
        beside other documents or with another cache.
        """
        try:
            with safe_open(file, "pt") as saved:
                about = saved.metadata() or {}
                state = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{file} is no saved reading: {error}") from None
        if about.get("weights") != self.model.weights:
            raise InvalidInput(
                f"{file} is no reading of this model and memory; resume it with the model that "
                "read it"
            )
        if about.get("beside") != self._beside:
            raise InvalidInput(
                f"{file} was read beside {about.get('beside')}, this session is {self._beside}; "
                "resume it in a session of the same documents and cache"
            )
        if about.get("digest") != _digest(state):
            raise InvalidInput(f"{file} is damaged; read the text again")
        self.past.restore({name: x.to(self.model.device) for name, x in state.items()})
        self.tokens = int(state["tokens"])

    def close(self) -> None:
        """Let go of what was read; more than once is the same as once."""
        self.past.close()
        if self._own_store is not None:
            self._own_store.close()


def _digest(state: Mapping[str, Tensor]) -> str:
    """Of names and numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(state.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
