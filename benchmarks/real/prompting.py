"""A model that reads blocks as text in its prompt: what retrieval gives to models without a
memory.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.real.hay import Offsets
from benchmarks.real.plan import Question

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Prompted:
    """A Hugging Face decoder with its chat template. Raises OSError for a directory of no model."""

    def __init__(self, model: Path | str, dtype: str = "float32", device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        self.model.to(device).eval()
        self.device = device

    def answer(self, question: Question, texts: Sequence[str]) -> tuple[float, str]:
        """How right the answer is after reading `texts`, 0..1, and what was generated ("" where the
        answer was forced). A question that nothing answers has no right answer: 0.
        """
        ids = self.ids(self.prompt(question, texts))
        if question.rule == "forced":
            if not question.answers:
                return 0.0, ""
            return float(self.forced(ids, self.ids(question.following))), ""
        said = self.generate(ids, question.most)
        return question.marks(said), said

    def prompt(self, question: Question, texts: Sequence[str]) -> str:
        """The conversation up to where the answer goes on."""
        content = "\n\n".join([*(text.strip() for text in texts), question.text])
        turns = [{"role": "user", "content": content}]
        begun = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return begun + question.primed

    def ids(self, text: str) -> list[int]:
        """Tokens of a text that holds its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    @torch.no_grad()
    def forced(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Is greedy decoding of the prompt going on with `answer`?"""
        ids = torch.tensor([[*prompt, *answer]], device=self.device)
        states = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(states[:, -len(answer) :])
        return bool((logits.argmax(-1)[0] == ids[0, -len(answer) :]).all())

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], most: int) -> str:
        """What greedy decoding says, at most so many tokens."""
        ids = torch.tensor([prompt], device=self.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        said: str = self.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        return said

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Of a text's tokens, the characters."""
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spans: list[tuple[int, int]] = found.offset_mapping
        return spans


def counting(model: Path | str) -> Offsets:
    """The tokens of a text as `Prompted.offsets` has them, without the model's weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def offsets(text: str) -> list[tuple[int, int]]:
        found = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        spans: list[tuple[int, int]] = found.offset_mapping
        return spans

    return offsets
