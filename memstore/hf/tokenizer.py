"""A Hugging Face tokenizer that knows the characters of its ids, and the conversation format of a
model's chat template.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from memstore.errors import InvalidWeights
from memstore.hf.model_directory import first_line
from memstore.model.tokenizer import TokenText, byte_symbols

_SPACE = "▁"  # stands for a space in SentencePiece's vocabularies
_PROBE = "Zoë's 3 naïve cafés — 12,345 §; 記憶\n\n\tend  of   it. "


class OffsetTokenizer(TokenText):
    """A TokenText over a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: of transformers. Raises InvalidWeights if it changes the text, or if the text
        of its tokens is unknown.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidWeights(
                f"{type(tokenizer).__name__} gives no character offsets, so no source could be "
                "named; a fast tokenizer (tokenizer.json) is needed"
            )
        described = _plain(json.loads(backend.to_str()))
        text = json.dumps(described, sort_keys=True)
        self.fingerprint: str = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        plain = Backend.from_str(text)
        plain.encode_special_tokens = True  # "<|end|>" in a document is text
        super().__init__(plain, _token_bytes(described, len(tokenizer)))
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise InvalidWeights(
                f"{type(tokenizer).__name__} changes the text that it tokenizes, or hides the text "
                "of its tokens, so sources cannot be located; use another model"
            )

    def check_known(self, vocab_size: int, prefix: Sequence[int] = ()) -> None:
        """Raises InvalidWeights unless a vocabulary of this size holds all ids of texts and of the
        prefix.
        """
        last = max(token for token, data in enumerate(self._bytes) if data)
        needed = max(last, *prefix, 0) + 1
        if needed > vocab_size:
            raise InvalidWeights(
                f"the tokenizer has {needed:,} ids, the model knows {vocab_size:,}; use the "
                "tokenizer that it was trained with"
            )


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    """A copy of a description whose tokenizer adds nothing to a text and truncates nothing."""

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(inner) for inner in part if not _prepends(inner)]
        if not isinstance(part, dict):
            return part
        part = {name: plain(inner) for name, inner in part.items()}
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        return part

    changed = {name: plain(described[name]) for name in ("normalizer", "pre_tokenizer", "decoder")}
    if _prepends(described["normalizer"]):
        changed["normalizer"] = None
    return {**described, **changed, "truncation": None, "padding": None, "post_processor": None}


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def _token_bytes(described: dict[str, Any], size: int) -> list[bytes]:
    """The bytes of every token of a tokenizer's description; special ones have none."""
    model = described["model"]
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # of a Unigram model: [token, score]
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    by_byte = "ByteLevel" in json.dumps([described["pre_tokenizer"], described["decoder"]])
    symbols = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokens = [b""] * max(size, len(vocabulary), 1 + max(vocabulary.values(), default=0))
    for token, number in vocabulary.items():
        if by_byte:
            known = all(symbol in symbols for symbol in token)
            tokens[number] = bytes(symbols[symbol] for symbol in token) if known else token.encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            tokens[number] = bytes([int(token[3:5], 16)])
        else:
            tokens[number] = token.replace(_SPACE, " ").encode()
    for added in described.get("added_tokens", []):
        tokens[added["id"]] = b"" if added["special"] else added["content"].encode()
    return tokens


_log = logging.getLogger("memstore")
_FIRST, _SAID, _NEXT = "Qfirst0", "Qsaid0", "Qnext0"  # stand for texts in a template
# A memory depends on what the template begins with, so today's date would change it: this one
# instead, which Llama's templates write where they have no clock.
_SAME_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"
_QUESTIONS = ("Qfirst", "7", "(x", "é")  # texts that begin with different tokens


class Turns:
    """The ids before, between and after messages (`prefix`, `between`, `behind`), and the text that
    is tokenised together with a question (`lead`). Without a chat template a question is read as
    typed, after the tokenizer's BOS token; a template that cannot be used is logged.
    """

    def __init__(self, template: Any) -> None:
        """template: the transformers tokenizer."""
        self.end = template.eos_token_id  # what ends an answer
        self.ends = {self.end} - {None}  # what may
        begin = [] if template.bos_token_id is None else [template.bos_token_id]
        self.prefix, self.between, self.behind = begin, list[int](), list[int]()
        self.lead = ""
        parts = None
        if getattr(template, "chat_template", None) is not None:
            parts = _parts(template)
        self.templated = parts is not None
        if parts is None:
            return
        before, between, behind = parts
        # what stands before a question may share its first token with it, such as a space
        beginnings = [template(before + text, add_special_tokens=False) for text in _QUESTIONS]
        shared = 0
        for tokens in zip(*(beginning.input_ids for beginning in beginnings)):
            if len(set(tokens)) > 1:
                break
            shared += 1
        self.prefix = list(beginnings[0].input_ids[:shared])
        self.lead = before[beginnings[0].token_to_chars(shared - 1).end if shared else 0 :]
        asked = before + _FIRST
        self.behind = _ids_after(template, asked, behind)
        self.between = _ids_after(template, asked + behind + _SAID, between.removesuffix(self.lead))
        special = {token for token, one in template.added_tokens_decoder.items() if one.special}
        if special.issuperset(self.between[:1]):
            self.end = next(iter(self.between), self.end)
        # and a model may begin the next turn instead
        self.ends |= special.intersection([*self.between[:1], *self.prefix[:1]])


def _ids_after(template: Any, text: str, tail: str) -> list[int]:
    """Ids of a tail after a text. Alone it would begin with the space that some tokenizers add."""
    whole = template(text + tail, add_special_tokens=False)
    first = whole.char_to_token(len(text)) if tail else None
    if first is None or whole.token_to_chars(first).start < len(text):  # a token of both
        whole, first = template(tail, add_special_tokens=False), 0
    return list(whole.input_ids[first:])


def _parts(template: Any) -> tuple[str, str, str] | None:
    """The texts of a chat template before the first question, between an answer and the next
    question, and after a question. None for a template that cannot be rendered or taken apart; the
    reason, and what the model reads instead, are logged.
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
            enable_thinking=False,  # Qwen 3's: an answer has too few tokens to think in
        )
    except Exception as error:  # a template is a program, and raises what it likes
        reason = first_line(error)
    else:
        before, first, rest = whole.partition(_FIRST)
        _, second, rest = rest.partition(_SAID)
        between, third, behind = rest.partition(_NEXT)
        if first and second and third:
            return before, between, behind
        reason = "it does not write every message of a conversation"
    _log.warning(
        "%s: the chat template cannot be rendered (%s); instead, the model reads %sthe passages "
        "and the question as it was typed",
        template.name_or_path or type(template).__name__,
        reason,
        "" if template.bos_token is None else f"{template.bos_token!r}, ",
    )
    return None
