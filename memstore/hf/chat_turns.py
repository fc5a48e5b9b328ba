"""A conversation as a model's chat template writes it, in the parts that a session reads one by
one.
"""

import logging
from typing import Any

from memstore.hf.checks import first_line
from memstore.hf.tokenizer import OffsetTokenizer

_log = logging.getLogger("memstore")
_FIRST, _SAID, _NEXT = "Qfirst0", "Qsaid0", "Qnext0"  # stand for texts in a template
# A memory depends on what the template begins with, so today's date would change it: this one
# instead, which Llama's templates write where they have no clock.
_SAME_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"
_QUESTIONS = ("Qfirst", "7", "(x", "é")  # texts that begin with different tokens


class Turns:
    """The ids before, between and behind what is said. Without a chat template a question is read
    as typed, behind the tokenizer's own beginning; a template that cannot be used is reported.
    """

    def __init__(self, template: Any, tokenizer: OffsetTokenizer) -> None:
        """template: the transformers tokenizer; tokenizer: what cuts what people type."""
        self._tokenizer = tokenizer
        self.ends = {token for token in (template.eos_token_id,) if token is not None}
        begin = [] if template.bos_token_id is None else [template.bos_token_id]
        self.prefix, self._between, self._behind = begin, list[int](), list[int]()
        self._lead = ""  # of the template, cut together with a question
        self.templated = False
        if getattr(template, "chat_template", None) is None:
            return
        try:
            before, between, behind = _parts(template)
        except ValueError as error:
            _report(template, str(error))
            return
        self.templated = True
        # what stands before a question may share its first token with it, such as a space
        beginnings = [template(before + text, add_special_tokens=False) for text in _QUESTIONS]
        shared = 0
        for tokens in zip(*(beginning.input_ids for beginning in beginnings)):
            if len(set(tokens)) > 1:
                break
            shared += 1
        self.prefix = list(beginnings[0].input_ids[:shared])
        self._lead = before[beginnings[0].token_to_chars(shared - 1).end if shared else 0 :]
        self._between, self._behind = (
            list(template(text, add_special_tokens=False).input_ids)
            for text in (between.removesuffix(self._lead), behind)
        )
        # what ends an answer in the template
        self.ends |= set(self._between[:1]) & set(template.all_special_ids)

    def of(self, question: str, *, first: bool) -> tuple[list[int], range]:
        """The ids of a question as the first or as a later turn, behind the prefix, and which of
        them are its own words.
        """
        typed = question.strip() if self.templated else question.rstrip()
        words = self._tokenizer.encode(self._lead + typed)
        before = [] if first else self._between
        place = range(len(before), len(before) + len(words))
        return [*before, *words, *self._behind], place


def _report(template: Any, reason: str) -> None:
    """Log why a chat template cannot be used, and what the model reads instead."""
    begin = "" if template.bos_token is None else f"{template.bos_token!r}, "
    _log.warning(
        "%s: the chat template cannot be rendered (%s); instead, the model reads %sthe passages "
        "and the question as it was typed",
        template.name_or_path or type(template).__name__,
        reason,
        begin,
    )


def _parts(template: Any) -> tuple[str, str, str]:
    """What a chat template writes before the first question, between an answer and the next
    question, and behind a question. Raises ValueError for a template that cannot be rendered or
    taken apart.
    """
    said = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _SAID},
        {"role": "user", "content": _NEXT},
    ]
    try:
        whole = template.apply_chat_template(
            said,
            chat_template=_SAME_DATE + template.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise ValueError(first_line(error)) from error
    before, first, rest = whole.partition(_FIRST)
    _, second, rest = rest.partition(_SAID)
    between, third, behind = rest.partition(_NEXT)
    if not (first and second and third):
        raise ValueError("it does not write every message of a conversation")
    return before, between, behind
