"""Files to ingest, of folders, patterns or named one by one; names of their documents, and changes
since they were ingested.

A folder stands for all its regular files that are not hidden; links are not followed.
"""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unicodedata import normalize

import msgspec

from memstore.decode import Line, typed
from memstore.disk.format.document import SOURCE, Document
from memstore.errors import InvalidInput, MemstoreError, UnreadableDocument

STDIN = "-"


class Source(msgspec.Struct, frozen=True):
    """Origin of a document, stored in its row: a file of a folder."""

    folder: Line  # a digest of its path
    file: Line  # its path in the folder
    hash: Line  # of its bytes

    @classmethod
    def of(cls, document: Document) -> "Source | None":
        """Origin of a document; None for one that came from no folder."""
        try:
            return typed(document.metadata[SOURCE], cls)
        except (KeyError, ValueError):
            return None

    def is_of(self, other: "Source") -> bool:
        """Is this the same file, possibly with other content?"""
        return (self.folder, self.file) == (other.folder, other.file)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return msgspec.structs.asdict(self)


@dataclass(frozen=True)
class Folder:
    """A folder to ingest, or the fixed part of a pattern."""

    path: Path
    digest: str  # of where it lies

    @classmethod
    def at(cls, path: Path) -> "Folder":
        """The folder of this path."""
        where = os.fsencode(path.resolve())
        return cls(path, hashlib.blake2b(where, digest_size=16).hexdigest())

    def has_lost(self, source: Source) -> bool:
        """Did a document of this folder lose its file? A file that cannot be looked for counts as
        present.
        """
        if source.folder != self.digest:
            return False
        try:
            lost = not stat.S_ISREG((self.path / source.file).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            lost = True
        except (OSError, ValueError):
            lost = False
        return lost and "\ufffd" not in source.file  # whose bytes are not known


@dataclass(frozen=True)
class File:
    """A file to ingest. folder: None for one that was named alone."""

    path: Path
    name: str  # of its document
    folder: Folder | None = None
    file: str = ""  # its path in the folder

    def look(self) -> Source | None:
        """Origin with a digest of the file's bytes; None for a file that was named alone. Raises
        InvalidInput.
        """
        if self.folder is None:
            return None
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20))
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}") from None
        return Source(self.folder.digest, self.file, digest.hexdigest())


@dataclass
class Files:
    """What was found."""

    files: list[File] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    refused: list[MemstoreError] = field(default_factory=list)  # what cannot be read, and why


def find(
    paths: Iterable[str],
    *,
    name: str | None = None,
    without: Path | None = None,
    exclude: Iterable[str] = (),
) -> Files:
    """Find the files of paths, folders and patterns such as "notes/**/*.md"; "-" is standard input.

    name: of a single file's document, or prefix for those of a folder; by default a file named
    alone keeps its name, one of a folder its path there. without: a folder to leave out. exclude:
    patterns of the ends of paths in a folder to leave out, such as "*.log" and "drafts/*". Errors
    are returned in Files.refused.
    """
    found, excluded = Files(), [end for end in exclude if Path(end).parts]
    named = dict[str, Path]()
    for path in paths:
        try:
            files = _of_path(os.path.expanduser(path), found, name, without)
        except InvalidInput as error:
            found.refused.append(error)
            continue
        except OSError as error:  # such as a text that was given as a path
            found.refused.append(InvalidInput(f"cannot read {path:.200}: {error.strerror}"))
            continue
        for file in files:
            inside = Path(file.file or file.path.name)
            if any(one.match(end) for one in (inside, *inside.parents) for end in excluded):
                continue
            first = named.setdefault(file.name, file.path)
            if first is file.path:
                found.files.append(file)
            elif first != file.path:
                message = f"{file.path} would be called {file.name!r}, as {first} is"
                found.refused.append(InvalidInput(f"{message}; ingest it with a --name of its own"))
    return found


def _of_path(given: str, found: Files, name: str | None, without: Path | None) -> list[File]:
    path = Path(given)
    if not given:
        raise InvalidInput("a path is empty; name a file or a folder")
    if given == STDIN:
        return [File(path, name or "stdin")]
    pattern = glob.has_magic(given) and not os.path.lexists(path)
    if pattern:
        fixed = next(at for at, part in enumerate(path.parts) if glob.has_magic(part))
        folder, parts = Folder.at(Path(*path.parts[:fixed])), path.parts[fixed:]
    elif path.is_dir():
        folder, parts = Folder.at(path), ("**",)
    elif not path.exists():
        raise InvalidInput(f"{path} does not exist; check the path")
    elif not path.is_file():
        raise UnreadableDocument(f"{path} is not a regular file; save its text in one")
    else:
        return [File(path, name or normalize("NFC", _printable(path.name)))]
    found.folders.append(folder)
    meant = folder.path.is_dir() and not (pattern and given.endswith(os.sep))  # only folders are
    files = list[File]()
    for match in sorted(set(_matching(folder.path, parts, found))) if meant else ():
        if without is None or not match.resolve().is_relative_to(without.resolve()):
            inside = _printable(match.relative_to(folder.path).as_posix())
            called = normalize("NFC", inside)  # composed, as keyboards write it
            files.append(File(match, f"{name}/{called}" if name else called, folder, inside))
    if pattern and not files:
        found.refused.append(InvalidInput(f"{given} matches no file"))
    return files


def _matching(where: Path, parts: tuple[str, ...], found: Files) -> Iterator[Path]:
    """Files below a folder that match a pattern of `glob`, some more than once; links, which may
    form loops, are not followed.
    """
    while parts[:2] == ("**", "**"):
        parts = parts[1:]
    part, rest = parts[0], parts[1:]
    inside = [where / part]  # if nothing is to be matched it need not be possible to list them
    if part == "**":
        yield from _matching(where, rest or ("*",), found)
    if glob.has_magic(part):
        try:
            inside = [*where.iterdir()]
        except OSError as error:
            if part != "**":  # which looks into it once more
                message = f"cannot read the directory {error.filename}: {error.strerror}"
                found.refused.append(InvalidInput(message))
            return
    for path in inside:
        hidden = path.name.startswith(".") and not part.startswith(".")
        same = part in ("**", path.name) or fnmatch(path.name, part)
        if hidden or not same:
            continue
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError as error:  # of a directory whose files may be listed only
            if part != "**":
                found.refused.append(InvalidInput(f"cannot read {path}: {error.strerror}"))
            continue
        if stat.S_ISDIR(mode) and (part == "**" or rest):
            yield from _matching(path, parts if part == "**" else rest, found)
        elif not rest and part != "**" and stat.S_ISREG(mode):
            yield path


def _printable(name: str) -> str:
    """A file's name as text: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")
