"""A model that reads blocks as text in its prompt: what retrieval gives to models without a
memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.real.hay import Offsets
from benchmarks.real.plan import Question
from memstore.hf.tokenizer import OffsetTokenizer
from memstore.model.passages.adaptation import SEPARATOR

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH_TOKENS = 4096  # of prompts that are read side by side


class Answered(NamedTuple):
    """How right an answer is, 0..1, and what was generated ("" where the answer was forced)."""

    right: float
    said: str


class _Task(NamedTuple):
    """A prompt's tokens, and those of the answer that is to follow."""

    place: int
    question: Question
    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class Prompted:
    """A Hugging Face decoder with its chat template. Raises OSError for a directory of no model."""

    def __init__(self, model: Path | str, dtype: str = "float32", device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        # Any: transformers' decorators hide what the methods of a model take
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        self.model = loaded.to(device).eval()
        self.device = device
        self._known: dict[tuple[str, Question], Answered] = {}

    def answers(self, asked: Sequence[tuple[Question, Sequence[str]]]) -> list[Answered]:
        """What comes of questions after reading texts, several side by side. A question that
        nothing answers has no right answer.
        """
        found: dict[int, Answered] = {}
        tasks: list[_Task] = []
        # what is read decides, not where it comes from: samples share questions and texts
        keys = [
            (self.prompt(question, texts), replace(question, name="", length=0, documents=()))
            for question, texts in asked
        ]
        for place, ((question, _), (prompt, _)) in enumerate(zip(asked, keys)):
            if keys[place] in self._known:
                found[place] = self._known[keys[place]]
            elif question.rule == "forced" and not question.answers:
                found[place] = Answered(0.0, "")
            else:
                forced = self.ids(question.following) if question.rule == "forced" else []
                tasks.append(_Task(place, question, self.ids(prompt), forced))
        for batch in _batches(tasks):
            for task, answered in zip(batch, self._read(batch)):
                found[task.place] = self._known[keys[task.place]] = answered
        return [found[place] for place in range(len(asked))]

    def prompt(self, question: Question, texts: Sequence[str]) -> str:
        """The conversation up to where the answer goes on."""
        texts = [text.strip() for text in texts]
        # the words that a memory puts between what is read and a question
        content = "\n\n".join(texts) + SEPARATOR + question.text if texts else question.text
        turns = [{"role": "user", "content": content}]
        begun = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(begun, str)
        return begun + question.primed

    def ids(self, text: str) -> list[int]:
        """Tokens of a text that holds its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _read(self, batch: Sequence[_Task]) -> list[Answered]:
        if batch[0].question.rule != "forced":
            said = self.generate([task.prompt for task in batch], batch[0].question.most)
            return [Answered(task.question.marks(s), s) for task, s in zip(batch, said)]
        right = self.forced([task.prompt for task in batch], [task.answer for task in batch])
        return [Answered(float(one), "") for one in right]

    @torch.no_grad()
    def forced(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[bool]:
        """Is greedy decoding of each prompt going on with its answer?"""
        inputs = self._padded([[*p, *a[:-1]] for p, a in zip(prompts, answers)])
        states = self.model.model(**inputs, use_cache=False).last_hidden_state
        most = max(map(len, answers))
        best: Tensor = self.model.lm_head(states[:, -most:]).argmax(-1)
        return [row[-len(a) :].tolist() == list(a) for row, a in zip(best, answers)]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], most: int) -> list[str]:
        """What greedy decoding says after each prompt, at most so many tokens."""
        inputs = self._padded(prompts)
        inputs.pop("position_ids")
        out = self.model.generate(
            **inputs, max_new_tokens=most, do_sample=False, pad_token_id=self.tokenizer.eos_token_id
        )
        new = out[:, inputs["input_ids"].shape[1] :]
        said: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return said

    def _padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Rows of ids side by side, what is missing before them."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, longest - len(row) :] = torch.tensor(row)
            mask[at, longest - len(row) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {name: value.to(self.device) for name, value in named.items()}


def _batches(tasks: Sequence[_Task]) -> list[list[_Task]]:
    """Tasks that are read alike and of like length together."""
    ordered = sorted(tasks, key=lambda t: (t.question.rule, t.question.most, t.length))
    batches: list[list[_Task]] = []
    for task in ordered:
        last = batches[-1] if batches else []
        alike = last and (last[0].question.rule == "forced") == (task.question.rule == "forced")
        if (
            alike
            and last[0].question.most == task.question.most
            and (len(last) + 1) * task.length <= BATCH_TOKENS
        ):
            last.append(task)
        else:
            batches.append([task])
    return batches


def tokenizer_of(model: Path | str) -> OffsetTokenizer:
    """A model's tokenizer, as a memory cuts texts with it."""
    from transformers import AutoTokenizer

    return OffsetTokenizer(AutoTokenizer.from_pretrained(model))


def counting(model: Path | str) -> Offsets:
    """The characters of each token of a text, as a model's tokenizer tells them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def offsets(text: str) -> list[tuple[int, int]]:
        found = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spans: list[tuple[int, int]] = found.offset_mapping
        return spans

    return offsets
