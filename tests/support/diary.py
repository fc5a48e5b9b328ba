"""A small memory for the model that ships: the README's diary and a letter."""

from pathlib import Path

from memstore.model.model_api import ModelAPI
from memstore.store.memory_store import MemoryStore

DIARY = """We reached the valley late in the evening, and the old man at the gate let us in without
a word. There was soup on the table and a fire in the hearth, and nobody asked where we came from.
The combination of the lime barn is 4467.
In the morning the wind had turned. We walked along the river until noon, and saw no one but a
shepherd, who waved at us from the other side.
The price of the brown mare is 310.
At the inn they told us that the bridge had been gone since the spring, and that the ferry would
not cross before the water fell.
"""
LETTER = """Dear sister, the roof is mended and the hay is in. The name of the new foal is Clover.
The miller asks after you every Sunday, and his wife has sent a jar of the plum jam that you like.
Straße, naïve, 東京 and 🙂 are written here so that letters beyond the first hundred are read too.
"""
QUESTION, ANSWER = "What is the combination of the lime barn?", "4467"
ASKED = {"model": "memstore", "messages": [{"role": "user", "content": QUESTION}]}  # over HTTP


def write_diary(path: Path, reader: ModelAPI) -> Path:
    """Make the memory of "diary" and "letter" in a directory that is not there yet."""
    with MemoryStore.create(path, reader.signature) as store:
        for name, text in (("diary", DIARY), ("letter", LETTER)):
            reader.ingest(text, store, name=name)
    return path
