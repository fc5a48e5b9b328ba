"""A memory with its model: filled by `add`, asked by `ask`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from memstore.api.answer_stream import AnswerStream
from memstore.closing import Closing
from memstore.disk.format.document import LABELS, Document, is_of_prompt
from memstore.errors import DocumentExists, InvalidInput, MemstoreError
from memstore.model.answer import Answer, Matches, Source
from memstore.model.document_ingest import IngestProgress
from memstore.model.lookup_settings import AskOptions
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode

if TYPE_CHECKING:
    from memstore.share.publish.publish import Report as Published

TOGETHER = 8  # questions that are answered side by side

_BYTES = bytes | bytearray
_DECODE = "give bytes of a text as text=data.decode(), and write those of a document to a file"

Labels = Mapping[str, Any]
"""What a user says of a document: plain values by name."""
Progress = Callable[[IngestProgress], None]
OnError = Callable[[MemstoreError], None]


class Memory(Closing):
    """Documents that a model has read, and the model; a context manager. Usable from one thread at
    a time.

    reader: the model; store: what is stored, with all that this object does not do.
    """

    def __init__(self, reader: ModelAPI, store: MemoryStore) -> None:
        """Takes both, and closes the store; `open_memory` finds them."""
        self.reader, self.store = reader, store

    def close(self) -> None:
        """Close the memory; more than once is the same as once."""
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
        """Read documents: files, folders (with all that is in them) or patterns, one or many in any
        iterable; or a text with a name. What is there already with the same content is left as it
        is.

        name: of the one document; otherwise a file's own, without its ending, and in a folder its
        path there, with it. labels: what `where` can ask for later; None leaves those that a
        document has. replace: in place of a document of that name with other content. progress:
        called while one is read. on_error: called with what is wrong with a file, and the others
        are read; None raises it.

        Raises InvalidInput, UnreadableDocument, DocumentExists, StorageFull, ReadOnlyMemory,
        MemoryLocked. Documents that were read before the one that fails stay.
        """
        if labels is not None:
            _check_labels(labels)
        added = []
        for one in self._texts(paths, text, name, on_error):
            try:
                one.check()
                added.append(self._read(one, labels, replace, progress))
            except (InvalidInput, DocumentExists) as error:  # of this text alone
                if on_error is None:
                    raise
                on_error(error)
        if self.store.update_index():
            self.reader.build_index(self.store)
        return added

    def label(self, name: str, labels: Labels) -> Document:
        """Say something else of a document. Raises DocumentNotFound, InvalidInput (no plain
        values), ReadOnlyMemory, MemoryLocked.
        """
        _check_labels(labels)
        metadata = self.store.document(name).metadata
        return self.store.describe(name, {**metadata, LABELS: dict(labels)})

    def documents(self, where: Labels | None = None) -> list[Document]:
        """The documents that are ready, in the order in which they were added; where: those whose
        labels have these values.
        """
        rows = (row for row in self.store.documents() if row.state == "ready")
        return [row for row in rows if not is_of_prompt(row.name) and _matches(row, where)]

    def remove(self, *names: str, erase: bool = False) -> list[Document]:
        """Forget documents: see MemoryStore.forget. Raises DocumentNotFound before any is."""
        for name in names:
            self.store.document(name)
        return [self.store.forget(name, erase=erase) for name in names]

    def publish(self, url: str, names: Sequence[str] | None = None) -> "Published":
        """Publish documents to an object store: see MemoryStore.publish."""
        return self.store.publish(url, names)

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
        return self.reader.ask(
            question, self.store, documents=self._scope(documents, where), **options
        )

    def ask_many(
        self,
        questions: Iterable[str],
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        together: int = TOGETHER,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """Answer questions, each by itself, `together` of them side by side: the model's weights
        are read once a step for all. Otherwise as `ask`.
        """
        if isinstance(questions, str):
            raise InvalidInput("ask_many takes several questions, as in a list; `ask` takes one")
        return self.reader.ask_many(
            questions,
            self.store,
            documents=self._scope(documents, where),
            together=together,
            **options,
        )

    def stream(
        self,
        question: str,
        *,
        documents: Sequence[str] | None = None,
        where: Labels | None = None,
        **options: Unpack[AskOptions],
    ) -> AnswerStream:
        """`ask` piece by piece: an iterator of whole characters, whose `answer` is there at the
        end.
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
    ) -> Matches[Source]:
        """The passages where most of a phrase is found, best first: see ModelAPI.search."""
        scope = self._scope(documents, where)
        return self.reader.search(phrase, self.store, documents=scope, top_k=top_k)

    # Helpers

    def _read(
        self, text: Text, labels: Labels | None, replace: bool, progress: Progress | None
    ) -> Document:
        """One text; its document keeps the labels that it had, unless it gets others."""
        there = self.store.document(text.name) if self.store.has(text.name) else None
        mode: Mode = "replace" if replace and there is not None else "new"
        document = self.reader.ingest(text, self.store, mode=mode, progress=progress)
        if labels is None:
            labels = {} if there is None else there.labels
        return document if document.labels == labels else self.label(document.name, labels)

    def _scope(self, documents: Sequence[str] | None, where: Labels | None) -> Sequence[str] | None:
        """Names of the documents that are asked; None for all."""
        if isinstance(documents, str):
            documents = [documents]
        if documents is not None and not documents:
            raise InvalidInput("no document is named; None asks all of them")
        if where is None:
            return documents
        if not isinstance(where, Mapping):
            raise InvalidInput(f"where is labels and their values, not {where!r}")
        found = [row.name for row in self.documents(where)]
        if documents is not None:
            found = [name for name in documents if name in set(found)]
        if not found:
            known = sorted({name for row in self.documents() for name in row.labels})
            there = f"; those that there are: {', '.join(known)}" if known else ""
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
                raise InvalidInput(f"a text is a str, not {type(text).__name__}: {_DECODE}")
            return [Text(text, name)]
        given = _listed(paths)
        if not given:
            raise InvalidInput("give a path, or a text with a name")
        from memstore.documents.folder import find

        found = find(given, recursive=True, name=name, without=self.store.path)
        for error in found.refused:
            if on_error is None:
                raise error
            on_error(error)
        if name is not None and len(found.files) > 1 and not found.folders:
            raise InvalidInput("a name is for one document; several are named after their files")
        return [Text(file.path, file.name) for file in found.files]


def _listed(paths: Path | str | Iterable[Path | str] | None) -> list[str]:
    """One path or several as a list of str. Raises InvalidInput for what is no path."""
    if paths is None:
        return []
    if isinstance(paths, str | PathLike | _BYTES) or not isinstance(paths, Iterable):
        paths = [paths]
    listed = list[str]()
    for path in paths:
        if not isinstance(path, str | PathLike):
            said = f"a path is a str or a pathlib.Path, not {path!r:.50}"
            raise InvalidInput(f"{said}; {_DECODE}" if isinstance(path, _BYTES) else said)
        listed.append(fspath(path))
    return listed


def _check_labels(labels: object) -> None:
    """Raises InvalidInput for what no document can be labelled with."""
    plain = isinstance(labels, Mapping) and all(
        isinstance(name, str) and isinstance(value, str | int | float | bool | None)
        for name, value in labels.items()
    )
    if not plain:
        raise InvalidInput(
            f"labels are names with a text, a number, true, false or None, not {labels!r}"
        )


def _matches(document: Document, where: Labels | None) -> bool:
    labels = document.labels
    return all(name in labels and labels[name] == value for name, value in (where or {}).items())
