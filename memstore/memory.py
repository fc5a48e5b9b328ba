"""The Python API: `memstore.open` gives a memory with its model, which reads documents (`add`) and
answers from them (`ask`, `stream`, `search`).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from memstore.closing import Closing
from memstore.compute import Compute
from memstore.disk.files import check_free
from memstore.disk.format.document import LABELS, Document
from memstore.errors import DocumentExists, InvalidInput, MemoryNotFound, MemstoreError
from memstore.hf.models_by_name import default_name, reader_named, reader_of
from memstore.model.answer import Answer, Matches
from memstore.model.lookup_settings import AskOptions
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import IngestProgress, Text
from memstore.paths import expanded
from memstore.share.manifest import MANIFESTS
from memstore.share.publication_options import is_url
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import OpenOptions, on_device

if TYPE_CHECKING:
    from memstore.share.publish import Report as Published

TOGETHER = 8  # questions that are decoded together

Labels = Mapping[str, Any]
"""A user's labels of a document: plain values by name."""
Progress = Callable[[IngestProgress], None]
OnError = Callable[[MemstoreError], None]


def open_memory(
    path: Path | str,
    model: ModelAPI | Path | str | None = None,
    *,
    device: str = "auto",
    dtype: str | None = None,
    weights: str = "auto",
    create: bool = True,
    codec: str | None = None,
    read_only: bool = False,
    options: OpenOptions | None = None,
) -> "Memory":
    """Open a memory with its model, or create one.

    path: its directory, or the URL of a published memory. model: what reads and asks it: a model's
    name ("smollm2"), directory, GGUF file or name on the Hugging Face hub, or a loaded model; None
    for the one that the memory was made with; for a new memory $MEMSTORE_MODEL, else a packaged
    model that is installed, else the landmark model that ships. device: "auto", "cpu", "cuda",
    "mps". dtype: "float32", "bfloat16", "float16", None for the fastest. weights: for generating
    tokens: "auto", "full", "int8", "int4". create: a memory if there is none. codec: of a new
    memory, see MemoryStore.create; None for the model's. read_only: neither create nor change one.
    options: see OpenOptions.

    Raises MemoryNotFound, WrongModel, InvalidInput, InvalidConfig, InvalidWeights, and what
    MemoryStore.open and MemoryStore.create raise.
    """
    loaded = None if model is None or isinstance(model, str | Path) else model
    if loaded is not None and not isinstance(loaded, ModelAPI):
        raise InvalidInput(f"{loaded!r:.40} is no model; memstore.wrap(model, tokenizer) makes one")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidInput(f"options is {options!r:.40}; give a dict, as {{'index': 'packed'}}")
    named = model if isinstance(model, str | Path) else None
    opening = on_device(options or {}, device if loaded is None else str(loaded.device))
    compute = Compute(device, dtype, weights)
    with ExitStack() as stack:
        try:
            store = stack.enter_context(MemoryStore.open(path, read_only=read_only, **opening))
        except MemoryNotFound:
            if not create or read_only or is_url(path):
                raise
            _check_free(expanded(path))  # before a model is loaded
            reader = loaded or reader_named(named or default_name(), compute=compute)
            codec = reader.codec if codec is None else codec
            new: dict[str, Any] = {"codec": codec, "selector": reader.keeps}
            store = MemoryStore.create(path, reader.signature, exist_ok=True, **new, **opening)
            stack.enter_context(store)
        else:
            if loaded is not None:
                advice = "open it with its own model, or make a new memory"
                loaded.signature.check_same(store.signature, str(path), advice)
            reader = loaded or reader_of(store.signature, str(path), named, compute=compute)
        reader.check(store)
        stack.pop_all()
        return Memory(reader, store)


class Memory(Closing):
    """Documents that a model has read, and the model; a context manager for one thread at a time.

    reader: the model. store: the MemoryStore, for all that this class does not do.
    """

    def __init__(self, reader: ModelAPI, store: MemoryStore) -> None:
        """Use `memstore.open`. The memory closes the store."""
        self.reader, self.store = reader, store

    def close(self) -> None:
        """Close the memory; idempotent."""
        self.store.close()

    def __repr__(self) -> str:
        model = self.reader.signature.model
        named = "a model" if model is None else model.title
        return f"<memstore.Memory {self.store.place} of {named}>"

    # Documents

    def add(
        self,
        paths: Path | str | Iterable[Path | str] = (),
        *,
        text: str | None = None,
        name: str | None = None,
        labels: Labels | None = None,
        replace: bool = False,
        progress: Progress | None = None,
        on_error: OnError | None = None,
    ) -> list[Document]:
        """Read documents: files, folders (with all files in them) or patterns, one or many in any
        iterable; or a text with a name. A document with the same content is left unchanged.

        name: of one document; by default the file's name, and in a folder its path there. labels:
        for `where`; None leaves those of the document. replace: a document of that name with other
        content. progress: called while a document is read. on_error: called with the error of a
        file, after which the others are read; None raises it. What could not be read of a file is
        in its document's `notes`.

        Raises InvalidInput, UnreadableDocument, DocumentExists, StorageFull, ReadOnlyMemory,
        MemoryLocked. Documents that were read before the one that fails stay.
        """
        if labels is not None:
            _check_labels(labels)
        mode: Mode = "replace" if replace else "new"
        added = []
        for one in self._texts(paths, text, name, on_error):
            one.labels = None if labels is None else dict(labels)
            try:
                added.append(self.reader.ingest(one, self.store, mode=mode, progress=progress))
            except (InvalidInput, DocumentExists) as error:  # of this text alone
                if on_error is None:
                    raise
                on_error(error)
        if self.store.update_index():
            self.reader.build_index(self.store)
        return added

    def label(self, name: str, labels: Labels) -> Document:
        """Replace a document's labels. Raises DocumentNotFound, InvalidInput (values that are not
        plain), ReadOnlyMemory, MemoryLocked.
        """
        _check_labels(labels)
        metadata = self.store.document(name).metadata
        return self.store.describe(name, metadata | {LABELS: dict(labels)})

    def documents(self, where: Labels | None = None) -> list[Document]:
        """The ready documents, in the order in which they were added; where: only those whose
        labels have these values.
        """
        if where is not None and not isinstance(where, Mapping):
            raise InvalidInput(f"where must be a dict of labels, not {where!r}")
        wanted, ready = _typed(where or {}), self.store.ready()
        return [row for row in ready if all(label in _typed(row.labels) for label in wanted)]

    def remove(self, *names: str, erase: bool = False) -> list[Document]:
        """Remove documents: see MemoryStore.forget. If a name is unknown, raises DocumentNotFound
        and removes none.
        """
        for name in names:
            self.store.document(name)
        return [self.store.forget(name, erase=erase) for name in dict.fromkeys(names)]

    def publish(self, url: str, names: Sequence[str] | None = None) -> "Published":
        """Publish documents to an object store: see store.transfer.publish_memory."""
        from memstore.store.transfer import publish_memory

        return publish_memory(self.store, url, names)

    # Questions

    def ask(
        self,
        question: str,
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        **options: Unpack[AskOptions],
    ) -> Answer:
        """Answer a question from the documents, or from some. options: see AskOptions.

        Raises InvalidInput (an empty question, a setting out of range, nothing to ask),
        DocumentNotFound.
        """
        scope = self._scope(documents, where)
        return self.reader.ask(question, self.store, documents=scope, **options)

    def ask_many(
        self,
        questions: Iterable[str],
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        together: int = TOGETHER,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """Answer questions independently, decoding `together` of them at once: each step reads the
        model's weights once for all. Otherwise as `ask`.
        """
        if isinstance(questions, str) or not isinstance(questions, Iterable):
            raise InvalidInput("ask_many takes several questions, as in a list; `ask` takes one")
        scope = self._scope(documents, where)
        return self.reader.ask_many(
            questions, self.store, documents=scope, together=together, **options
        )

    def stream(
        self,
        question: str,
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        **options: Unpack[AskOptions],
    ) -> "AnswerStream":
        """`ask` piece by piece: an iterator of text, never of part of a character, with the
        `answer` at its end.
        """
        scope = self._scope(documents, where)
        return AnswerStream(self.reader.asking(question, self.store, documents=scope, **options))

    def search(
        self,
        phrase: str,
        *,
        top_k: int = 5,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
    ) -> Matches:
        """The passages most similar to a phrase, best first: see ModelAPI.search."""
        scope = self._scope(documents, where)
        return self.reader.search(phrase, self.store, documents=scope, top_k=top_k)

    # Helpers

    def _scope(self, documents: Sequence[str] | None, where: Labels | None) -> Sequence[str] | None:
        """The names of the documents to ask; None for all."""
        if isinstance(documents, str):
            documents = [documents]
        named = None if documents is None else [row.name for row in self.store.ready(documents)]
        if named == []:
            raise InvalidInput("no document is named; None asks all of them")
        if where is None:
            return named
        labelled = {row.name: row for row in self.documents(where)}
        found = [name for name in labelled if named is None or name in named]
        if not found:
            known = sorted({name for row in self.documents() for name in row.labels})
            there = f"; labels of this memory: {', '.join(known)}" if known else ""
            raise InvalidInput(f"no document has labels equal to {dict(where)}{there}")
        return found

    def _texts(
        self,
        paths: Path | str | Iterable[Path | str] | None,
        text: str | None,
        name: str | None,
        on_error: OnError | None,
    ) -> list[Text]:
        if text is not None:
            if paths:
                raise InvalidInput("give paths or a text, not both")
            if not isinstance(text, str):
                raise InvalidInput(f"a text is a str, not {type(text).__name__}: decode it")
            return [Text(text, name)]
        given = _listed(paths)
        if not given:
            raise InvalidInput("give a path, or a text with a name")
        from memstore.documents.folder import find

        found = find(given, name=name, without=self.store.path)
        for error in found.refused:
            if on_error is None:
                raise error
            on_error(error)
        if name is not None and len(found.files) > 1 and not found.folders:
            raise InvalidInput("a name is for one document; several are named after their files")
        return [Text(file.path, file.name) for file in found.files]


class AnswerStream(Closing, Iterator[str]):
    """Pieces of an answer's text, never part of a character; a context manager, which ends an
    answer that was not read to its end.
    """

    def __init__(self, steps: Generator[str, None, Answer]) -> None:
        """steps: see ModelAPI.asking."""
        self._answer: Answer | None = None
        self._pieces = self._run(steps)

    @property
    def answer(self) -> Answer:
        """The answer with its sources. Raises InvalidInput before the last piece."""
        if self._answer is None:
            raise InvalidInput("the answer is complete after its last piece; read them all")
        return self._answer

    def __next__(self) -> str:
        return next(filter(None, self._pieces))

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()

    def _run(self, steps: Generator[str, None, Answer]) -> Generator[str, None, None]:
        self._answer = yield from steps


def _listed(paths: Path | str | Iterable[Path | str] | None) -> list[str]:
    """One path or several as a list of str. Raises InvalidInput for other objects."""
    if isinstance(paths, str | PathLike | bytes) or not isinstance(paths, Iterable):
        paths = [] if paths is None else [paths]
    listed = list(paths)
    for path in listed:
        if not isinstance(path, str | PathLike):
            raise InvalidInput(
                f"a path is a str or a Path, not {path!r:.50}; of bytes give text=data.decode()"
            )
    return [fspath(path) for path in listed]


def _check_labels(labels: object) -> None:
    """Raises InvalidInput for labels that are not plain values."""
    plain = isinstance(labels, Mapping) and all(
        isinstance(name, str) and isinstance(value, str | int | float | bool | None)
        for name, value in labels.items()
    )
    if not plain:
        raise InvalidInput(f"labels must map names to plain values, not {labels!r:.50}")


def _typed(labels: Labels) -> list[tuple[str, Any, bool]]:
    """Name, value and whether that is true or false: for Python, True equals 1."""
    return [(name, value, isinstance(value, bool)) for name, value in labels.items()]


def _check_free(path: Path) -> None:
    """Raises InvalidInput for a directory where no memory can be created."""
    if (path / MANIFESTS).exists():
        raise InvalidInput(f"{path} is a published memory: open it as file://{path.resolve()}")
    if path.is_dir():
        check_free(path)
