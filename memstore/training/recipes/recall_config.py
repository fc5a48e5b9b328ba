"""What the batches of recall training are made of."""

from dataclasses import dataclass

from memstore.errors import InvalidConfig
from memstore.training.recipes import facts as language
from memstore.training.recipes.sentence_forms import Split


@dataclass(frozen=True)
class RecallConfig:
    """What the batches are made of. A share is a probability between 0 and 1."""

    block_size: int = 32  # content tokens in a block; a landmark follows each
    # "held_out" draws entities, sentence forms and value formats training never sees
    split: Split = "train"
    # of an answer's first token: it has to be looked up, the others follow from those before
    first_weight: float = 3.0
    # loss weights; answers have weight 1, random values and landmarks 0
    filler_weight: float = 0.1  # text between facts, and what sentences say besides values
    plain_weight: float = 0.3  # windows of plain text, and chunks that continue them
    copy_weight: float = 0.5  # spans repeated from earlier in the window
    span_weight: float = 0.3  # spans repeated from a visible window of the memory
    repeat_weight: float = 0.3  # second statement of a pass key
    stop_weight: float = 0.9  # the full stop that ends an answer
    # windows
    copy_share: float = 0.25  # windows of copied spans
    pass_key_share: float = 0.15  # windows with a pass key
    plain_share: float = 0.05  # windows of plain text
    # memories
    # mean tokens of filler after a fact, one drawn a memory
    gaps: tuple[int, ...] = (4, 12, 30, 80)
    own_questions: float = 0.15  # windows of a memory that ask for their own facts
    own_gap: int = 20  # the gap in those
    copies: float = 0.1  # windows of a memory that repeat their own spans
    plain: float = 0.2  # windows of a memory that are plain text
    # memories that are nothing but plain text: runs of windows from one place each
    readings: float = 0.0
    run: int = 4  # windows of such a run, which the chunks that continue one of them may all read
    pass_key: float = 1.0  # memories that state a pass key, in one window
    across_blocks: float = 0.2  # statements moved so that their value falls across two blocks
    # questions
    unrelated: float = 0.5  # chunks that begin with unrelated text
    spans: float = 0.08  # chunks that begin with a span of a visible window
    continuations: float = 0.2  # chunks that are the text after a plain window
    text_follows: float = 0.7  # of those, chunks that directly follow their window
    question_follows: float = 0.25  # chunks of questions that directly follow a window
    pass_key_asked: float = 0.2  # chunks that may read the window of the pass key, and ask for it
    # chunks that may read both windows of a fact updated in another window
    updates_asked: float = 0.2
    # the language
    updates: float = 0.08  # facts that give an earlier one a new value
    near: float = 0.12  # facts whose entity or attribute nearly is that of an earlier one
    hard: float = 0.5  # windows and memories that draw from few colours, nouns and attributes
    repeats: float = 0.3  # numbers of few different digits
    simple: float = 0.0  # windows and memories of plain sentences, short names, digits and words
    one_form: float = 0.4  # memories that state all facts in one form
    grass: float = 0.12  # filler that is the paper's repeated sentences
    # windows whose filler is one passage, interrupted; else each piece is from elsewhere
    flowing: float = 0.5

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise InvalidConfig(f"block_size is {self.block_size}; a block needs at least 2 tokens")
        if self.split not in language.SPLITS:
            raise InvalidConfig(
                f"split is {self.split!r}; choose one of {', '.join(language.SPLITS)}"
            )
