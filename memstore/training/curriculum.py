"""Stages of landmark training: contents of batches, lengths and learning rates
(docs/appendix/training.md).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from memstore.errors import InvalidConfig


@dataclass(frozen=True)
class RecallConfig:
    """Contents of batches, where stages differ. A share is a probability, 0 to 1."""

    # of an answer's first token: it has to be looked up, the others follow from those before
    first_weight: float = 3.0
    stop_weight: float = 0.9  # of the full stop that ends an answer
    # windows
    copy_share: float = 0.25  # windows of copied spans
    plain_share: float = 0.05  # windows of plain text
    # memories
    # mean tokens of filler after a fact, one drawn a memory
    gaps: tuple[int, ...] = (4, 12, 30, 80)
    own_questions: float = 0.15  # windows of a memory that ask for their own facts
    copies: float = 0.1  # windows of a memory that repeat their own spans
    plain: float = 0.2  # windows of a memory that are plain text
    # memories that are nothing but plain text: runs of windows from one place each
    readings: float = 0.0
    run: int = 4  # windows of such a run, which the chunks that continue one of them may all read
    pass_key: float = 1.0  # memories that state a pass key, in one window
    # questions
    unrelated: float = 0.5  # chunks that begin with unrelated text
    spans: float = 0.08  # chunks that begin with a span of a visible window
    continuations: float = 0.2  # chunks that are the text after a plain window
    text_follows: float = 0.7  # of those, chunks that directly follow their window
    question_follows: float = 0.25  # chunks of questions that directly follow a window
    # chunks that may read both windows of a fact updated in another window
    updates_asked: float = 0.2
    # the language
    updates: float = 0.08  # facts that give an earlier one a new value
    near: float = 0.12  # facts whose entity or attribute nearly is that of an earlier one
    hard: float = 0.5  # windows and memories that draw from few colours, nouns and attributes
    repeats: float = 0.3  # numbers of few different digits
    simple: float = 0.0  # windows and memories of plain sentences, short names, digits and words
    one_form: float = 0.4  # memories that state all facts in one form


@dataclass(frozen=True)
class Stage:
    """A part of training with its own learning rates, which warm up and decay linearly."""

    name: str
    kind: Literal["windows", "memory"]  # whole windows, or fresh chunks that read windows as memory
    steps: int
    lr: float  # AdamW: embeddings and gains
    muon_lr: float  # Muon: matrices of the layers
    data: RecallConfig = field(default_factory=RecallConfig)
    cmt: bool = False  # the context miss token takes part, landmarks under it with probability 0.5
    batch: int = 16  # windows of a step (kind windows), chunks of a step (kind memory)
    blocks: int = 8  # blocks of a window (kind windows)
    # filler tokens between fact and question, first to last step (kind windows)
    gap: tuple[float, float] = (6.0, 25.0)
    memory_windows: int = 12
    memory_blocks: int = 12
    chunk_blocks: int = 4
    long_chunks: float = 0.3  # share of steps with half as many chunks of twice the length
    negatives: float = 0.8  # share of steps with negative landmarks
    # share of the stage over which their log-mass rises from -8 to 0
    negative_ramp: float = 0.0
    queue: int = 1008  # landmarks of earlier windows kept as negatives
    warmup: int = 20


def default_curriculum() -> tuple[Stage, ...]:
    """Learn to retrieve inside a window, then train as inference runs; about two hours of one core
    for a million parameters.

    The first stages have plain sentences and numbers without repeated digits. With varied sentences
    and repeated digits from the start, the model learns those, and its lookup stays at the plateau.
    """
    # looking up, without the gate: inside a window, in varied sentences, then in fresh chunks
    data = RecallConfig()
    plain = replace(data, simple=1.0, repeats=0.0, hard=0.0, updates=0.0, near=0.05)
    windows = Stage("windows", "windows", steps=1200, lr=3e-3, muon_lr=0.02, warmup=50, data=plain)
    varied = replace(windows, name="varied", steps=1000, data=replace(plain, simple=0.7))
    memory = Stage(
        "memory",
        "memory",
        steps=500,
        lr=2e-3,
        muon_lr=0.01,
        negative_ramp=0.8,
        data=replace(
            data, simple=0.5, repeats=0.1, pass_key=0.5, plain=0.0, continuations=0.0, updates=0.03
        ),
    )
    # with the gate, among text that goes on: then the rarer questions, and every form
    text = replace(
        memory,
        name="text",
        steps=1000,
        cmt=True,
        negative_ramp=0.0,
        long_chunks=0.4,
        data=replace(RecallConfig(), simple=0.2, repeats=0.2, plain=0.2, continuations=0.15),
    )
    polish = replace(
        text, name="polish", steps=600, data=replace(text.data, repeats=0.3, hard=0.6, one_form=0.5)
    )
    finish = replace(
        polish,
        name="finish",
        steps=600,
        lr=1.5e-3,
        muon_lr=0.008,
        long_chunks=0.3,
        data=replace(
            polish.data,
            simple=0.6,
            stop_weight=2.0,
            one_form=0.6,
            updates=0.05,
            plain=0.15,
            continuations=0.12,
        ),
    )
    wide = replace(
        finish,
        name="wide",
        steps=700,
        lr=1e-3,
        muon_lr=0.006,
        warmup=15,
        queue=1512,
        data=replace(
            finish.data,
            stop_weight=1.5,
            first_weight=1.5,
            repeats=0.2,
            hard=0.7,
            one_form=0.7,
            gaps=(3, 5, 8, 12, 30),
            plain=0.12,
            continuations=0.1,
            updates=0.04,
            readings=0.1,
        ),
    )
    return windows, varied, memory, text, polish, finish, wide


def stages_from(name: str | None, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages from `name` on (None = all). Raises InvalidConfig, which lists the names."""
    if name is None:
        return stages
    names = [stage.name for stage in stages]
    if name not in names:
        raise InvalidConfig(f"no stage {name!r}; choose one of {', '.join(names)}")
    return stages[names.index(name) :]
