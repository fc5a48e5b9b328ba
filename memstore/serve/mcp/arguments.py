"""The arguments of each MCP tool."""

from typing import Annotated, Literal

from pydantic import Field

from memstore.serve.strict import Strict, entries

MOST_PASSAGES = 100  # of a search
# a name is shown in lines: no control characters, and none that break or turn them
_PLAIN = "^[^\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]+$"
_LONGEST = 8192  # characters of what is asked: all of it is read at once


class Ingest(Strict):
    """What `ingest` takes."""

    name: str = Field(
        min_length=1, max_length=400, pattern=_PLAIN, description="The document's name."
    )
    text: str | None = Field(
        default=None, pattern=r"^[^\x00]*$", description="The text of the document."
    )
    path: str | None = Field(
        default=None, description="Or a UTF-8 file on the server, where it allows that directory."
    )
    mode: Literal["new", "append", "replace"] = Field(
        default="new", description="What to do where a document of that name is there."
    )


class Ask(Strict):
    """What `ask` takes."""

    question: str = Field(
        max_length=_LONGEST, description="Taken as typed; a few words of the answer are expected."
    )
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Ask these only."
    )
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest answer.")


class Search(Strict):
    """What `search` takes."""

    phrase: str = Field(max_length=_LONGEST, description="Words as they may stand in the text.")
    documents: Annotated[list[str], entries()] | None = Field(
        default=None, description="Search these only."
    )
    top_k: int = Field(default=5, ge=1, le=MOST_PASSAGES, description="How many passages.")


class Documents(Strict):
    """What `documents` takes: nothing."""


class Forget(Strict):
    """What `forget` takes."""

    name: str = Field(description="The document.")
